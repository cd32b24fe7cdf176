"""Which writes of a transfer a block stands for, as bits of one number.

Bit ``page * num_layers + layer`` stands for one unit: one layer of one page.
"""

from __future__ import annotations


def block_bits(num_layers: int, page: int, layer: int, pages: int, layers: int) -> int:
    """The bits of ``layers`` layers from ``layer`` on, of ``pages`` pages from ``page`` on."""
    start = page * num_layers + layer
    if layers == num_layers or pages == 1:
        return ((1 << pages * layers) - 1) << start
    first_layers = ((1 << pages * num_layers) - 1) // ((1 << num_layers) - 1)
    return first_layers * ((1 << layers) - 1) << start

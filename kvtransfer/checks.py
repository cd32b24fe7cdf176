"""Checksums of units (one layer of one page): how they are computed, and which are.

CRC-32 with zlib's polynomial, computed by ISA-L where it is installed and else by zlib: the same
numbers, so either side may have either. ISA-L takes 9 us for the 74 kB of a DeepSeek-V3 unit where
zlib takes 38 us; both let other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd

from pdmesh.kvtransfer.transport import Destination, Write


def _fastest() -> Callable[[bytes | memoryview], int]:
    try:
        from isal.isal_zlib import crc32 as isal_crc32
    except ImportError:
        from zlib import crc32 as zlib_crc32

        return zlib_crc32
    return isal_crc32


checksum: Callable[[bytes | memoryview], int] = _fastest()
"""CRC-32 of bytes."""

EVERY_UNIT = 1
SAMPLED = 64


def checked_units(write: Write, place: Destination, every: int) -> Iterator[tuple[int, int]]:
    """The (page of the block, layer of the block) of each unit that carries a checksum.

    Both sides compute it: every unit with ``every`` = 1, else one unit in ``every``, counted over
    the lease, and all of its last page.
    """
    first, layers = place.index(write.page), write.layers
    last = len(place.page_ids) - 1 - first
    sampled = write.pages if every != EVERY_UNIT else 0
    whole = range(sampled, write.pages)
    if 0 <= last < sampled:
        sampled, whole = last, range(last, last + 1)
    unit = first * place.num_layers + write.layer
    # What is counted in layers of ``every`` comes again after so many pages.
    period = every // gcd(place.num_layers, every)
    begins = [
        (page, start)
        for page in range(min(period, sampled))
        if (start := -(unit + page * place.num_layers) % every) < layers
    ]
    for turn in range(0, sampled, period):
        for page, start in begins:
            if turn + page < sampled:
                for layer in range(start, layers, every):
                    yield turn + page, layer
    for page in whole:
        for layer in range(layers):
            yield page, layer

"""Checksums of units (one layer of one page): how they are computed, and which are.

CRC-32 with zlib's polynomial, computed by ISA-L where it is installed and else by zlib: the same
numbers, so either side may have either. ISA-L takes 9 us for the 74 kB of a DeepSeek-V3 unit where
zlib takes 38 us; both let other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    first = place.index(write.page)
    for page in range(write.pages):
        if every == EVERY_UNIT or first + page == len(place.page_ids) - 1:
            for layer in range(write.layers):
                yield page, layer
            continue
        unit = (first + page) * place.num_layers + write.layer
        for layer in range(-unit % every, write.layers, every):
            yield page, layer

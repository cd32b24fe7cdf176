"""Cached pages of a prefix: what they hold, and how they are kept while somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from pdmesh.kvcache.manager import KvManager, Reservation
from pdmesh.kvcache.store import LatentStore
from pdmesh.wire.handoff import PageChecksums
from pdmesh.wire.hashes import PageHash


def pin_leading(kv: KvManager, hashes: Sequence[PageHash]) -> Reservation | None:
    """Keeps the cached leading pages of ``hashes`` as they are, until the reservation is released.

    Fewer than are cached where promises need the others; None if that leaves none. From any thread.
    """
    count = kv.match(hashes)
    while count:
        held = kv.reserve(hashes[:count], count, count)
        if held is not None:
            held.shrink(held.remaining)
            if held.matched:
                return held
            held.release()
        count //= 2
    return None


def page_checksums(
    kv: KvManager, store: LatentStore, hashes: Sequence[PageHash], *, mtp_layers: int = 0
) -> PageChecksums:
    """CRC-32 and stamp of each leading page of ``hashes`` that is cached here.

    Reads every byte of the pages: call it on a thread of its own, not on an event loop.

    Args:
        mtp_layers: last layers of a page that keep latents of the MTP module. Slot 0 of a
            sequence's first page is empty in them, so what it happens to hold is left out.
    """
    held = pin_leading(kv, hashes)
    if held is None:
        return PageChecksums(checksums=(), stamps=())
    try:
        checksums = checksums_of(store, held.pages, mtp_layers=mtp_layers)
        return PageChecksums(checksums=checksums, stamps=tuple(kv.stamps(held.pages)))
    finally:
        held.release()


def checksums_of(
    store: LatentStore, pages: Sequence[int], *, mtp_layers: int = 0
) -> tuple[int, ...]:
    """CRC-32 of each of a sequence's leading pages, which somebody holds; see above."""
    return tuple(
        _page_checksum(store, page, mtp_layers if index == 0 else 0)
        for index, page in enumerate(pages)
    )


def _page_checksum(store: LatentStore, page: int, with_empty_slot: int) -> int:
    """CRC-32 of a page; without slot 0 in the last ``with_empty_slot`` layers."""
    slot_bytes = store.page_layer_bytes // store.tensor.shape[2]
    value = 0
    for layer in range(store.num_layers):
        skipped = slot_bytes if layer >= store.num_layers - with_empty_slot else 0
        value = crc32(store.read(page, layer)[skipped:], value)
    return value

"""Checksums of cached pages."""

from zlib import crc32

import torch
from pull_rig import chain, contents, pair

from pdmesh.kvcache.checksums import page_checksums


async def test_checksums_are_of_whole_pages_and_come_with_their_stamps():
    hashes = chain(4)
    async with pair() as mesh:
        owner = mesh.owner
        owner.compute(hashes[:3])
        found = page_checksums(owner.kv, owner.store, hashes)
        expected = [crc32(contents(page_hash).numpy().tobytes()) for page_hash in hashes[:3]]
        assert list(found.checksums) == expected
        assert owner.kv.unchanged(hashes, found.stamps) == 3
        assert not page_checksums(owner.kv, owner.store, chain(2, b"q")).checksums


async def test_the_empty_slot_of_a_first_page_counts_in_no_checksum():
    """Slot 0 of the MTP layer holds whatever the page held before."""
    hashes = chain(2)
    async with pair() as mesh:
        owner = mesh.owner
        owner.compute(hashes)
        sums = []
        for index, slot in ((0, 0), (0, 1), (1, 0)):
            before = page_checksums(owner.kv, owner.store, hashes, mtp_layers=1).checksums
            page = owner.kv._cache.match(hashes)[index]
            owner.store.tensor[page, -1, slot] = torch.pi
            after = page_checksums(owner.kv, owner.store, hashes, mtp_layers=1).checksums
            sums.append(after == before)
        assert sums == [True, False, False]

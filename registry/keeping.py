"""Keeping the partitions clean: fences for workers that left, and the removal of dead records."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pdmesh.registry.feed import read_position
from pdmesh.registry.layout import Layout
from pdmesh.registry.store import PageCall, Store, StoreUnavailable

_BUCKETS = 64
_CALLS = 8
_PAUSE_S = 0.005


async def bury(store: Store, layout: Layout, dead: Mapping[int, int]) -> None:
    """Fences the slots (-> last epoch) of workers that left, in every partition.

    Idempotent; any number of routers may do it. What does not answer is left for another time.
    """
    for slot, epoch in dead.items():
        calls = [PageCall("fence", p, (), (slot, epoch + 1)) for p in range(layout.partitions)]
        answers = await store.many(calls)
        if not any(isinstance(answer, StoreUnavailable) for answer in answers):
            await store.call("buried", None, slot, epoch)


async def sweep(store: Store, layout: Layout, partitions: Sequence[int] | None = None) -> int:
    """Removes the records of dead epochs, a little at a time; returns how many.

    Raises:
        StoreUnavailable: a partition does not answer.
    """
    removed = 0
    for number in range(layout.partitions) if partitions is None else partitions:
        position = read_position(await store.one(PageCall("position", number)))
        buckets = layout.buckets(position.bitmap)
        calls = [
            PageCall("sweep", number, chunk, chunk)
            for at in range(0, len(buckets), _BUCKETS)
            if (chunk := tuple(buckets[at : at + _BUCKETS]))
        ]
        for at in range(0, len(calls), _CALLS):
            for answer in await store.many(calls[at : at + _CALLS]):
                if isinstance(answer, StoreUnavailable):
                    raise answer
                removed += int(answer)
            await asyncio.sleep(_PAUSE_S)
    return removed

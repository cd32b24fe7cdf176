"""Waiting for pages: whoever goes first gets them, and nobody is overtaken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pdmesh.decode.queue import Rank, WaitQueue
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.messages import Lease


@dataclass(eq=False)
class Waiter:
    """Something that waits for pages. ``attempt`` takes them; True where it waits no longer."""

    rank: Rank
    attempt: Callable[[], bool]


@dataclass(eq=False)
class Room:
    """The queue for pages. ``serve`` is to be called whenever pages have become free."""

    _queue: WaitQueue[Waiter] = field(default_factory=WaitQueue)

    def __len__(self) -> int:
        return len(self._queue)

    def must_wait(self, rank: Rank) -> bool:
        """Whether somebody waits who goes before ``rank``."""
        return self._queue.goes_before(rank)

    def add(self, waiter: Waiter) -> None:
        self._queue.add(waiter.rank, waiter)

    def remove(self, waiter: Waiter) -> None:
        """Takes a waiter out; those behind it may then have room. Idempotent."""
        if self._queue.remove(waiter.rank):
            self.serve()

    def serve(self) -> None:
        """Gives room to the first in line while there is any."""
        while True:
            head = self._queue.head()
            if head is None or not head.attempt():
                return
            self._queue.remove(head.rank)


async def wait_for_lease(
    room: Room,
    rank: Rank,
    granted: asyncio.Future[Lease],
    grant: Callable[[], Lease | None],
    wait_s: float,
) -> Lease | None:
    """What ``grant`` gives once it is this one's turn and there is room; None when it is too late.

    Args:
        granted: gets the lease; an error set from outside ends the wait.

    Raises:
        PdmeshError: what ``grant`` raised, or was set from outside.
        asyncio.CancelledError: the caller was cut; CutWithLease if a lease had just been granted.
    """
    waiter = Waiter(rank, lambda: _attempt(granted, grant))
    room.add(waiter)
    try:
        async with asyncio.timeout(wait_s):
            return await asyncio.shield(granted)
    except TimeoutError:
        return granted.result() if granted.done() else None
    except asyncio.CancelledError as error:
        if granted.done() and granted.exception() is None:
            raise CutWithLease(granted.result()) from error
        raise
    finally:
        granted.cancel()
        room.remove(waiter)


class CutWithLease(asyncio.CancelledError):
    """The caller was cut just after it had been given a lease, which nobody knows of."""

    def __init__(self, lease: Lease) -> None:
        super().__init__()
        self.lease = lease


def _attempt(granted: asyncio.Future[Lease], grant: Callable[[], Lease | None]) -> bool:
    if granted.done():
        return True
    try:
        lease = grant()
    except PdmeshError as error:
        granted.set_exception(error)
        return True
    if lease is not None:
        granted.set_result(lease)
    return lease is not None

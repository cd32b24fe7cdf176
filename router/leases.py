"""Leases that this router holds. Each is given back once, whatever happens to its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from pdmesh.router.failure import AttemptFailed
from pdmesh.wire.messages import Lease

RELEASE_WAIT = 1.0
"""Seconds that the end of an answer waits for a release, which then goes on by itself."""

Releaser = Callable[[str, str], "asyncio.Task[None]"]
"""Starts the release of a lease id for a reason."""


@dataclass
class HeldLease:
    """The pages of one answer, released on leaving.

    Args:
        instance: of the decode worker.
    """

    lease_id: str
    generation: int
    instance: str
    releaser: Releaser
    _released: bool = field(default=False, init=False)

    async def __aenter__(self) -> HeldLease:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await release_all([self], kind, error, traceback)

    def start_release(self, reason: str) -> asyncio.Task[None] | None:
        """Begins the release; None if it has been begun before."""
        if self._released:
            return None
        self._released = True
        return self.releaser(self.lease_id, reason)

    async def release(self, reason: str, wait: float) -> None:
        """Begins the release and waits for it, but not for long."""
        task = self.start_release(reason)
        if task is not None:
            await asyncio.wait({task}, timeout=wait)


@dataclass(frozen=True)
class Reserved:
    """A reservation: what prefill is told of it, and the lease of each answer."""

    lease: Lease
    held: tuple[HeldLease, ...]


async def release_all(
    held: Sequence[HeldLease],
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    """The end of a block that held leases: releases those it still holds, all at once."""
    reason, wait = "finished", RELEASE_WAIT
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        reason = "cancelled"
    elif error is not None:
        reason = "failed"
        if isinstance(error, AttemptFailed) and error.lost(held[0].instance):
            wait = 0.0  # nobody may be there to answer
    tasks = {task for lease in held if (task := lease.start_release(reason)) is not None}
    if tasks:
        await asyncio.wait(tasks, timeout=wait)

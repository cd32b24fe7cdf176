"""A worker that takes nothing new and finishes what it has: a pure gate, and the wait for the end.

Routers read in the registry, and in the worker's status, that it drains. New work that reaches it
all the same is refused by name, and what it had accepted but not begun is handed back with the same
error, so that routers place it elsewhere. A draining worker can still be asked for its pages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.store import end_task
from pdmesh.wire.errors import Draining, PdmeshError
from pdmesh.wire.logs import event
from pdmesh.wire.rpc import Method

log = logging.getLogger(__name__)

NEW_WORK = ("Prefill", "Reserve", "Adopt")
"""Methods that a draining worker refuses."""
TELL_S = 2.0
"""Longest wait for the store to be told."""
_LOOK_S = 0.05
_REPORT_S = 1.0


@dataclass
class Life:
    """How far a worker is, as it says about itself."""

    state: Literal["starting", "ready", "draining"] = "starting"


@dataclass(frozen=True)
class Workload:
    """What a worker still has to do.

    ``left`` says it in words, e.g. "3 answers"; empty: nothing. ``hand_back`` ends what is accepted
    but not begun with an error; it is called again and again.
    """

    left: Callable[[], str] = str
    hand_back: Callable[[PdmeshError], None] = lambda _: None


def counted(number: int, what: str) -> str:
    """``number`` of something, e.g. "1 answer", "3 answers"; empty for none."""
    return f"{number} {what}{'' if number == 1 else 's'}" if number else ""


class Drain:
    """Whether a worker drains, and how far it is.

    Args:
        worker_id: for the errors.
        life: its state is changed here.
        work: what has to end.
        lease: tells the routers.
    """

    def __init__(self, worker_id: str, life: Life, work: Workload, lease: WorkerLease) -> None:
        self._worker_id = worker_id
        self._life = life
        self._work = work
        self._lease = lease
        self._calls = 0
        self._emptying: asyncio.Task[None] | None = None

    def guard(self, method: Method) -> Method:
        """The method, refused with ``Draining`` while the worker drains if it brings new work."""
        handler = method.unary
        if method.name not in NEW_WORK or handler is None:
            return method

        async def call(request: Any) -> msgspec.Struct:
            if self._life.state == "draining":
                raise self._refusal()
            self._calls += 1
            try:
                return await handler(request)
            finally:
                self._calls -= 1

        return replace(method, unary=call)

    def left(self) -> str:
        """What is not over yet, in words; empty: nothing."""
        return self._work.left() or counted(self._calls, "request")

    def begin(self, reason: str) -> asyncio.Task[None]:
        """Takes nothing new from now on; the task ends when nothing is left. Idempotent."""
        if self._emptying is None or self._life.state != "draining":
            self._life.state = "draining"
            event(log, "draining", worker=self._worker_id, reason=reason, left=self.left() or 0)
            self._emptying = asyncio.get_running_loop().create_task(self._empty())
        return self._emptying

    async def undo(self) -> None:
        """Takes new work again."""
        await self.close()
        self._life.state = "ready"
        await self._lease.ready()
        event(log, "ready", worker=self._worker_id)

    async def tell(self) -> None:
        """Tells the routers, if the store answers within ``TELL_S``."""
        self._life.state = "draining"
        with suppress(TimeoutError):
            async with asyncio.timeout(TELL_S):
                await self._lease.drain()

    async def close(self) -> None:
        """Stops looking."""
        if self._emptying is not None:
            await end_task(self._emptying)
            self._emptying = None

    async def _empty(self) -> None:
        loop = asyncio.get_running_loop()
        self._work.hand_back(self._refusal())
        await self.tell()
        told, told_at = "", loop.time()
        while left := self.left():
            self._work.hand_back(self._refusal())
            if left != told and loop.time() >= told_at + _REPORT_S:
                told, told_at = left, loop.time()
                event(log, "draining", worker=self._worker_id, left=left)
            await asyncio.sleep(_LOOK_S)
        event(log, "drained", worker=self._worker_id)

    def _refusal(self) -> Draining:
        return Draining(f"{self._worker_id} is draining")

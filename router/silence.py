"""A stream from a worker that may stop without ending: silence of it and of the worker is loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

from pdmesh.wire.errors import WorkerLost

T = TypeVar("T")

Alive = Callable[[float], Awaitable[bool]]
"""Asks whether the worker answers anything at all within so many seconds."""


class Watched(Generic[T]):
    """The items of a stream, as long as the worker behind it gives a sign of life.

    When an item has been waited for during half of ``silence_s`` the worker is asked. One that
    answers may be busy: the time begins anew. One that does not answer for the other half either is
    lost. An item costs no task and no timer: one timer a stream looks now and then.

    Args:
        name: of the worker, for the error.
        items: closed by ``aclose``.
        silence_s: seconds.
        alive: see ``Alive``.
    """

    def __init__(
        self, name: str, items: AsyncGenerator[T, None], silence_s: float, alive: Alive
    ) -> None:
        self._name = name
        self._items = items
        self._silence_s = silence_s
        self._alive = alive
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Task[T] | None = None
        self._wait: asyncio.Timeout | None = None
        """The wait for an item, which the watch can end."""
        self._since = 0.0
        """When that wait began, or the worker last said that it is there."""
        self._timer = self._loop.call_later(silence_s / 2, self._look)
        self._asking: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Asks for the first item at once; ``next`` then waits for it."""
        self._first = self._loop.create_task(self._one())

    async def next(self) -> T:
        """The next item.

        Raises:
            WorkerLost: nothing came from the worker, or the stream has ended.
        """
        first, self._first = self._first, None
        self._since = self._loop.time()
        try:
            async with asyncio.timeout(None) as self._wait:
                return await (first or self._one())
        except TimeoutError:
            raise WorkerLost(
                f"{self._name} has sent nothing for {self._silence_s:g} s and does not answer"
            ) from None
        finally:
            self._wait = None

    async def aclose(self) -> None:
        """Ends the stream at the worker."""
        self._timer.cancel()
        for task in (self._first, self._asking):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.exception()  # looked at; nobody wants it any more
        self._timer.cancel()  # which an answer that came meanwhile has set again
        await self._items.aclose()

    async def _one(self) -> T:
        try:
            return await anext(self._items)
        except StopAsyncIteration:
            raise WorkerLost(f"{self._name} ended the stream before the answer") from None

    def _look(self) -> None:
        """Asks the worker if it is time; looks again when it may be."""
        half, due = self._silence_s / 2, self._since + self._silence_s / 2
        if self._wait is None:
            self._timer = self._loop.call_later(half, self._look)
        elif self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._look)
        else:
            self._asking = self._loop.create_task(self._ask(self._wait))

    async def _ask(self, wait: asyncio.Timeout) -> None:
        half = self._silence_s / 2
        alive = await self._alive(half)
        if alive or self._wait is not wait:
            if self._wait is wait:
                self._since = self._loop.time()
            self._timer = self._loop.call_later(half, self._look)
        else:
            wait.reschedule(self._loop.time())

"""Several streams as one, none faster than its reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")


class _End:
    """What a stream leaves behind it: nothing, or the error it ended with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all streams as they come; each stream's own are in order.

    No more items than streams are held, so a reader that stops stops them all. The first error of
    one ends the others and is raised. On closing, every stream has ended.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    merger = _Merger[T](len(streams))
    tasks = [asyncio.create_task(merger.pump(stream)) for stream in streams]
    try:
        running = len(streams)
        while running:
            got = await merger.queue.get()
            if not isinstance(got, _End):
                merger.room.release()
                yield got
            elif got.error is not None:
                raise got.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Merger(Generic[T]):
    def __init__(self, size: int) -> None:
        self.room = asyncio.Semaphore(size)
        self.queue: asyncio.Queue[T | _End] = asyncio.Queue()

    async def pump(self, stream: AsyncGenerator[T, None]) -> None:
        end = _End()
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    await self.room.acquire()
                    self.queue.put_nowait(item)
        except Exception as error:  # noqa: BLE001 - raised by the reader
            end = _End(error)
        self.queue.put_nowait(end)

"""How many steps of a sequence go into one message: as many as its reader has let pile up.

A reader that keeps up gets a message a step. One that is behind finds the chunks that wait for it
merged: what a message costs is shared by the more tokens, the later it is. No token is ever held
back for another one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from pdmesh.wire.messages import TokenChunk

MOST_TOKENS = 64
"""In a merged chunk; one step's chunk may hold more. So a message stays small, and what a client
that does not read has been sent stays bounded."""

T = TypeVar("T")


class Framer(Generic[T]):
    """Takes items out of a stream's queue, chunks that continue each other as one.

    Args:
        queue: chunks of tokens, and whatever else is sent between them, which keeps its place.
    """

    def __init__(self, queue: asyncio.Queue[TokenChunk | T]) -> None:
        self._queue = queue
        self._held: deque[TokenChunk | T] = deque()
        """At most one: taken out of the queue, but not part of the last chunk."""

    async def next(self) -> tuple[TokenChunk | T, tuple[TokenChunk, ...]]:
        """The next item, and the chunks that it was merged from: itself if it was alone, none if it
        is no chunk."""
        item = self._held.popleft() if self._held else await self._queue.get()
        if not isinstance(item, TokenChunk):
            return item, ()
        if self._queue.empty() or self._held:
            return item, (item,)
        parts = [item]
        count = len(item.token_ids)
        while count and not self._queue.empty():
            following = self._queue.get_nowait()
            if not (isinstance(following, TokenChunk) and _continues(following, parts, count)):
                self._held.append(following)
                break
            parts.append(following)
            count += len(following.token_ids)
        return merged(parts), tuple(parts)


def _continues(chunk: TokenChunk, parts: list[TokenChunk], count: int) -> bool:
    """Whether a chunk goes on where ``parts``, with ``count`` tokens, end."""
    first = parts[0]
    return (
        chunk.attempt == first.attempt
        and chunk.position == first.position + count
        and count + len(chunk.token_ids) <= MOST_TOKENS
        and parts[-1].finish is None
        and len(first.logprobs) in (0, len(first.token_ids))
        and len(chunk.logprobs) == (len(chunk.token_ids) if first.logprobs else 0)
    )


def merged(parts: list[TokenChunk]) -> TokenChunk:
    """One chunk for several that continue each other.

    Counters are those of the last one, which count from the beginning; ``step_ms`` is of all steps.
    """
    first, last = parts[0], parts[-1]
    if first is last:
        return first
    return TokenChunk(
        attempt=first.attempt,
        position=first.position,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        finish=last.finish,
        stop_token=last.stop_token,
        drafted=last.drafted,
        accepted=last.accepted,
        transfer_ms=last.transfer_ms,
        step_ms=sum(part.step_ms for part in parts),
    )

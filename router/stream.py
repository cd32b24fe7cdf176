"""The gateway's side of an answer: each output position exactly once, whatever workers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.text.output import OutputText
from pdmesh.wire.errors import Unavailable
from pdmesh.wire.messages import FinishReason, TokenChunk, TokenLogprobs


class StreamBroken(Unavailable):
    """A worker's tokens do not continue the answer; another worker has to."""


@dataclass(frozen=True)
class Delta:
    """What one chunk adds to the answer."""

    index: int = 0
    """Which of the request's answers."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Limits:
    """When an answer ends, and which ids it may hold."""

    max_tokens: int
    stop_ids: frozenset[int]
    """End-of-text and stop tokens; they end the answer and are not part of it."""
    vocab_size: int


class GatewayStream:
    """Accepts tokens of the current attempt at the next position only, and finds the end.

    Positions count from 0 at the first token of the answer, through all attempts. Tokens that
    were seen before are dropped, tokens of an earlier attempt too; a gap is an error.
    """

    def __init__(self, output: OutputText, limits: Limits, index: int = 0) -> None:
        self._index = index
        self._output = output
        self._limits = limits
        self.attempt = 0
        """The attempt that may write; 0 before the first."""
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None

    def begin_attempt(self) -> int:
        """Gives the stream to a new attempt and returns its number, from 1."""
        return self.join_attempt(self.attempt + 1)

    def join_attempt(self, attempt: int) -> int:
        """Gives the stream to an attempt that other answers share."""
        self.attempt = attempt
        return attempt

    def take(self, chunk: TokenChunk) -> Delta:
        """The new part of a chunk, up to the end of the answer.

        Raises:
            StreamBroken: the chunk starts after the next position, or holds an impossible id.
        """
        if chunk.attempt != self.attempt or self.finish is not None:
            return Delta(self._index)
        seen = len(self.tokens) - chunk.position
        if seen < 0:
            raise StreamBroken(
                f"tokens {len(self.tokens)} to {chunk.position - 1} of the answer are missing"
            )
        taken, text = self._append(chunk.token_ids[seen:])
        if self.finish is None:
            self.finish = chunk.finish
        return Delta(self._index, text, taken, chunk.logprobs[seen : seen + len(taken)])

    def _append(self, ids: Sequence[int]) -> tuple[tuple[int, ...], str]:
        """Tokens up to the end of the answer, and their text.

        Raises:
            StreamBroken: one of ``ids`` is impossible; none is taken, as all that is has to reach
                the client.
        """
        if not ids:
            return (), ""
        least, most = min(ids), max(ids)
        if least < 0 or most >= self._limits.vocab_size:
            bad = least if least < 0 else most
            raise StreamBroken(f"token id {bad} is outside the vocabulary")
        room = self._limits.max_tokens - len(self.tokens)
        wanted, end = tuple(ids[:room]), self._limits.stop_ids
        ended = not end.isdisjoint(wanted)
        if ended:
            wanted = wanted[: next(i for i, token in enumerate(wanted) if token in end)]
        text, count = self._output.add_up_to_stop(wanted)
        self.tokens += wanted[:count]
        if ended or self._output.stopped:
            self.finish = "stop"
        elif len(self.tokens) == self._limits.max_tokens:
            self.finish = "length"
        return wanted[:count], text

    def tail(self) -> str:
        """Text that was held back for a stop string or a character that did not come."""
        return self._output.finish()

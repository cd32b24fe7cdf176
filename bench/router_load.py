"""What is asked of a router under measurement, and what it came to."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

TOKENS = range(300, 1300)
"""Of an answer, in this order and over again; each is whole characters."""
_WORDS = (
    *("the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "went", "to", "see", "how"),
    *("many", "birds", "were", "in", "that", "old", "tree", "by", "our", "small", "house", "near"),
    *("great", "blue", "river", "where", "some", "people", "live", "their", "quiet", "lives"),
)
_GROUPS = 8


@dataclass(frozen=True)
class Load:
    """Streams at a time, tokens in each, and how fast the workers make them."""

    streams: int
    tokens: int
    step_ms: float
    """Milliseconds from token to token of every stream; 0: as fast as they are taken."""
    answers: int = 1
    """Of each stream, one after another."""
    words: int = 0
    """Of a prompt; 0: two, always the same."""
    first: int = 0
    """Number of the first prompt."""

    def prompt(self, stream: int, answer: int) -> str:
        """Of one answer. The first half of its words is that of every eighth prompt."""
        if not self.words:
            return "Hi there"
        number = self.first + answer * self.streams + stream
        shared = random.Random(f"shared {number % _GROUPS}").choices(_WORDS, k=self.words // 2)
        own = random.Random(number).choices(_WORDS, k=self.words - self.words // 2)
        return " ".join(shared + own)

    def warm_up(self, streams: int) -> Load:
        """Some answers of the same length, to other prompts."""
        return replace(self, streams=streams, answers=1, first=10**9)


@dataclass(frozen=True)
class Streamed:
    """What a load came to."""

    tokens: int
    messages: int
    """That the client got."""
    wall_s: float
    router_s: float
    """Processor time of the router's process, all threads."""
    gap_ms: float = 0.0
    """Between messages of a stream, p50, as the client saw them."""
    text: str = ""
    """Of one answer."""

    @property
    def tokens_per_core(self) -> float:
        """Tokens for each second of the router's processor time."""
        return self.tokens / self.router_s

    @property
    def per_message(self) -> float:
        return self.tokens / self.messages

    @property
    def busy(self) -> float:
        """Of one core."""
        return self.router_s / self.wall_s

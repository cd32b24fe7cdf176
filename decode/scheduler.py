"""Which sequences the next decode step runs. Pure: no clock, no tensors, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")


@dataclass
class DecodeScheduler(Generic[S]):
    """Continuous batching: sequences join and leave between steps, first come first served.

    A sequence's pages were promised when it was reserved, so admission needs no more than a place
    in the batch, and a running sequence never has to give pages back.
    """

    max_batch: int
    _waiting: deque[S] = field(default_factory=deque)
    _running: list[S] = field(default_factory=list)

    def add(self, sequence: S) -> None:
        self._waiting.append(sequence)

    def next_batch(self) -> list[S]:
        """The sequences of the next step, in a stable order."""
        while self._waiting and len(self._running) < self.max_batch:
            self._running.append(self._waiting.popleft())
        return list(self._running)

    def take(self, leaving: Callable[[S], bool]) -> list[S]:
        """Removes and returns the sequences that leave, those still waiting too."""
        gone = [s for s in (*self._running, *self._waiting) if leaving(s)]
        for sequence in gone:
            self.remove(sequence)
        return gone

    def remove(self, sequence: S) -> None:
        """Takes out a sequence that ended or was cancelled. Call between steps; idempotent."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

"""Which sequences the next decode step runs. Pure: no clock, no tensors, no I/O."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

S = TypeVar("S")


def _equal(_: Any) -> int:
    return 0


@dataclass
class DecodeScheduler(Generic[S]):
    """Continuous batching: sequences join and leave between steps.

    Those that wait for a place in the batch join in order of ``rank``, the smallest first, and
    first come first served among equals. Pages are none of its business.
    """

    max_batch: int
    rank: Callable[[S], Any] = _equal
    _waiting: list[S] = field(default_factory=list)
    _running: list[S] = field(default_factory=list)

    def add(self, sequence: S) -> None:
        insort(self._waiting, sequence, key=self.rank)

    def next_batch(self, without: Collection[S] = ()) -> list[S]:
        """The sequences of the next step, in a stable order; none of ``without`` joins now."""
        free = self.max_batch - len(self._running)
        if free > 0 and self._waiting:
            joining = [s for s in self._waiting if s not in without][:free]
            for sequence in joining:
                self._waiting.remove(sequence)
            self._running += joining
        return list(self._running)

    def put_back(self, sequence: S) -> None:
        """Makes a sequence of the batch wait for a place again; others may take the one it had."""
        if sequence in self._running:
            self._running.remove(sequence)
            self.add(sequence)

    def take(self, leaving: Callable[[S], bool]) -> list[S]:
        """Removes and returns the sequences that leave, those still waiting too."""
        gone = [s for s in self.members() if leaving(s)]
        for sequence in gone:
            self.remove(sequence)
        return gone

    def members(self) -> list[S]:
        """All sequences: those in the batch and those that wait for a place."""
        return [*self._running, *self._waiting]

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

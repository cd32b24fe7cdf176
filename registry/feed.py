"""What a router knows of one partition, fed with its events: pure state.

A reader begins at a *position*: the id of the last event with the rows of all slots, read at one
moment. It then reads the records, which may be newer, and after them every event behind the
position. Events say who owns a page from then on, so the last one about it wins, and the end is
right whichever of them the records held already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdmesh.registry.index import PrefixIndex
from pdmesh.registry.layout import PageEvent, Row, split, unpack_row


class EventsMissing(Exception):
    """An event was not seen: the state must be read afresh."""


@dataclass(frozen=True)
class Position:
    """A partition at one moment."""

    last: str
    """Id of the last event."""
    rows: dict[int, Row]
    bitmap: bytes


def read_position(answer: list[Any]) -> Position:
    """Of the answer of the function ``position``."""
    last, flat, bitmap = answer
    rows = {int(s): unpack_row(row) for s, row in zip(flat[::2], flat[1::2], strict=True)}
    return Position(last.decode(), rows, bitmap)


def order_of(entry_id: str) -> tuple[int, int]:
    """What entry ids are ordered by."""
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number)


class PartitionFeed:
    """The view of one partition.

    Args:
        position: where it begins.
        index: an empty one; filled by ``load`` and ``apply``.
    """

    def __init__(self, position: Position, index: PrefixIndex) -> None:
        self.cursor = position.last
        self._seen = {slot: (row.epoch, row.seq) for slot, row in position.rows.items()}
        self._index = index
        self._expected: Position | None = None

    def epoch_of(self, slot: int) -> int:
        """Under which epoch the slot's pages here are published; 0 if it has none."""
        return self._seen.get(slot, (0, 0))[0]

    def load(self, answer: list[Any]) -> None:
        """Of an answer of the function ``dump``."""
        for slot, marks in zip(answer[::2], answer[1::2], strict=True):
            self._index.apply(int(slot), self.epoch_of(int(slot)), True, split(marks))

    def apply(self, entry_id: str, event: PageEvent) -> None:
        """One event.

        Raises:
            EventsMissing: one before it was not seen.
        """
        epoch, seq = self._seen.get(event.slot, (0, 0))
        if event.op == "fence":
            if event.epoch > epoch:
                self._seen[event.slot] = (event.epoch, 0)
                self._index.drop(event.slot)
        elif event.epoch > epoch or (event.epoch == epoch and event.seq > seq + 1):
            raise EventsMissing(f"event {event.seq} of epoch {event.epoch} after {seq} of {epoch}")
        elif event.epoch == epoch and event.seq == seq + 1:
            self._seen[event.slot] = (epoch, event.seq)
            self._index.apply(event.slot, epoch, event.op == "publish", split(event.marks))
        self.cursor = entry_id
        self._settle()

    def expect(self, position: Position) -> None:
        """Compares with the store, now or when the events up to there have been applied.

        Raises:
            EventsMissing: the store's history is another one (data lost, or a replica promoted).
        """
        if order_of(position.last) < order_of(self.cursor):
            raise EventsMissing(f"the last event is {position.last}, {self.cursor} was seen")
        self._expected = position
        self._settle()

    def match(self, marks: Sequence[bytes]) -> list[tuple[int, int, int]]:
        """Slot, its epoch and how many of the leading pages it owns, for those that own the
        first."""
        seen, none = self._seen, (0, 0)
        found = self._index.match(marks).items()
        return [(slot, seen.get(slot, none)[0], depth) for slot, depth in found]

    def tidy(self, pages: int) -> int:
        """Clears up to ``pages`` pages of what fenced slots owned; returns 0, or ``pages`` where
        nothing was left of them. What is not cleared yet takes memory and nothing else."""
        if not self._index.unswept:
            return pages
        self._index.sweep(pages)
        return 0

    def _settle(self) -> None:
        expected = self._expected
        if expected is None or order_of(self.cursor) < order_of(expected.last):
            return
        self._expected = None
        if self.cursor != expected.last:
            return
        if self._seen != {slot: (row.epoch, row.seq) for slot, row in expected.rows.items()}:
            raise EventsMissing("the rows are not those that the events explain")

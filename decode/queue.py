"""Who goes first: one order for all who want pages, waiting or running. Pure.

A step of priority is worth ``ageing_s`` seconds of waiting. So an entry of priority p is overtaken
by later ones of priority q > p only while these come less than ``(q - p) * ageing_s`` seconds after
it: nobody waits for ever, whatever comes in. Within a priority it is first come, first served.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Rank:
    """A place in the order; the smaller one goes first. Made by ``rank``.

    Attributes:
        since: seconds; the arrival, moved earlier by the priority.
        fresh: has had no pages yet; who had to give them up goes first among equals.
        number: no two are the same.
    """

    since: float
    fresh: bool = True
    number: int = 0

    def returning(self) -> Rank:
        """The same for one that had pages already."""
        return replace(self, fresh=False)


def rank(priority: int, arrived_s: float, ageing_s: float, number: int) -> Rank:
    """The rank of what arrived in the mesh at ``arrived_s``, on any clock that only grows."""
    return Rank(arrived_s - priority * ageing_s, True, number)


class WaitQueue(Generic[T]):
    """What waits, in order of rank."""

    def __init__(self) -> None:
        self._items: list[tuple[Rank, T]] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, place: Rank, item: T) -> None:
        insort(self._items, (place, item), key=_place)

    def head(self) -> T | None:
        """Who goes first; all others wait behind it."""
        return self._items[0][1] if self._items else None

    def goes_before(self, place: Rank) -> bool:
        """Whether something waits that goes before ``place``."""
        return bool(self._items) and self._items[0][0] < place

    def remove(self, place: Rank) -> bool:
        """Takes out what waits at ``place``; False where nothing does."""
        at = bisect_left(self._items, place, key=_place)
        if at == len(self._items) or self._items[at][0] != place:
            return False
        del self._items[at]
        return True


def _place(entry: tuple[Rank, T]) -> Rank:
    return entry[0]

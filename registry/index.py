"""Which slots own which pages of one partition: the interface of the router's local index."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol


class PageIndex(Protocol):
    """Pages are known by their marks (7 bytes), owners by their slots (0 to 65535).

    There is one index for each partition, so all that a partition holds can be replaced at once.
    """

    def apply(self, slot: int, owned: bool, hashes: Iterable[bytes]) -> None:
        """The slot owns these pages from now on, or no longer."""

    def match(self, hashes: Sequence[bytes]) -> Sequence[Collection[int]]:
        """For each leading page, as far as any slot goes: who owns it and all before it."""

    def drop(self, slot: int) -> None:
        """The slot owns nothing."""


IndexFactory = Callable[[], PageIndex]


class SetIndex:
    """The plain one: a set of pages for each slot."""

    def __init__(self) -> None:
        self._pages: dict[int, set[bytes]] = {}

    def apply(self, slot: int, owned: bool, hashes: Iterable[bytes]) -> None:
        pages = self._pages.setdefault(slot, set())
        (pages.update if owned else pages.difference_update)(hashes)
        if not pages:
            del self._pages[slot]

    def match(self, hashes: Sequence[bytes]) -> list[set[int]]:
        found: list[set[int]] = []
        owners = set(self._pages)
        for mark in hashes:
            owners = {slot for slot in owners if mark in self._pages[slot]}
            if not owners:
                break
            found.append(owners)
        return found

    def drop(self, slot: int) -> None:
        self._pages.pop(slot, None)

"""Accounting of the pages of one rank: which state each page is in, and how many are promised.

No tensors here. A page is free, used (pinned by at least one sequence), cached (pinned by none,
kept for its contents, may be evicted) or quarantined (a write may still land in it). Reserved pages
are a count, not pages: a reservation is backed by free pages and by cached ones, which are evicted
only when the page is really needed. The pool keeps ``reserved <= free + cached`` at all times, so a
reservation can always be turned into pages.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from pdmesh.wire.errors import InternalError
from pdmesh.wire.messages import PoolStatus


class PageState(Enum):
    """What a page is in; a page is in exactly one state."""

    FREE = "free"
    USED = "used"
    CACHED = "cached"
    QUARANTINED = "quarantined"


class PagePool:
    """States and pin counts of ``num_pages`` pages, numbered from 0. Deterministic.

    Every method raises InternalError, and changes nothing, when asked for a transition that the
    page's state does not allow.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise InternalError(f"a page pool needs at least one page, not {num_pages}")
        self.num_pages = num_pages
        self._state = [PageState.FREE] * num_pages
        self._pins = [0] * num_pages
        self._births = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._count = Counter({PageState.FREE: num_pages})
        self._reserved = 0

    @property
    def available(self) -> int:
        """Pages that may still be promised: free and cached ones, less those promised already."""
        return self._count[PageState.FREE] + self._count[PageState.CACHED] - self._reserved

    @property
    def num_free(self) -> int:
        """Pages that hold nothing, promised by count or not."""
        return self._count[PageState.FREE]

    @property
    def reserved(self) -> int:
        """Pages promised by count and not yet taken."""
        return self._reserved

    def state(self, page: int) -> PageState:
        return self._state[page]

    def pins(self, page: int) -> int:
        """How many holders the page has; 0 unless it is used."""
        return self._pins[page]

    def birth(self, page: int) -> int:
        """How often the page has been taken: while it stays the same, so do the page's contents."""
        return self._births[page]

    def reserve(self, count: int) -> bool:
        """Promises ``count`` pages; False, and nothing changed, where there is no room."""
        if count < 0:
            raise InternalError(f"cannot reserve {count} pages")
        if count > self.available:
            return False
        self._reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Takes back a promise of ``count`` pages."""
        if not 0 <= count <= self._reserved:
            raise InternalError(f"cannot return {count} of {self._reserved} reserved pages")
        self._reserved -= count

    def take(self) -> int:
        """Turns one promised page into a used one; a free page has to be there."""
        if self._reserved < 1 or not self._free:
            raise InternalError(
                f"no page to take: {self._reserved} reserved, {len(self._free)} free"
            )
        page = self._free.pop()
        self._reserved -= 1
        self._move(page, PageState.FREE, PageState.USED)
        self._pins[page] = 1
        self._births[page] += 1
        return page

    def pin(self, page: int) -> None:
        """Adds a holder to a used page, or makes a cached page used.

        Pinning a cached page takes it away from what backs the promises, so the caller checks
        ``available`` first.
        """
        if self._state[page] is PageState.CACHED:
            if self.available < 1:
                raise InternalError(f"page {page} is needed for a promise and cannot be pinned")
            self._move(page, PageState.CACHED, PageState.USED)
        elif self._state[page] is not PageState.USED:
            raise InternalError(f"page {page} is {self._state[page].value} and cannot be pinned")
        self._pins[page] += 1

    def unpin(self, page: int, *, keep: bool) -> PageState:
        """Drops one holder; the last one leaves the page cached (``keep``) or free."""
        self._require(page, PageState.USED)
        self._pins[page] -= 1
        if self._pins[page] > 0:
            return PageState.USED
        if keep:
            self._move(page, PageState.USED, PageState.CACHED)
        else:
            self._move(page, PageState.USED, PageState.FREE)
            self._free.append(page)
        return self._state[page]

    def evict(self, page: int) -> None:
        """Makes a cached page free."""
        self._move(page, PageState.CACHED, PageState.FREE)
        self._free.append(page)

    def quarantine(self, page: int) -> None:
        """Sets aside a used page whose only holder lets go while a write may still land."""
        self._require(page, PageState.USED)
        if self._pins[page] != 1:
            raise InternalError(f"page {page} has {self._pins[page]} holders; not set aside")
        self._pins[page] = 0
        self._move(page, PageState.USED, PageState.QUARANTINED)

    def end_quarantine(self, page: int) -> None:
        """Frees a page in which no write can land any more."""
        self._move(page, PageState.QUARANTINED, PageState.FREE)
        self._free.append(page)

    def status(self) -> PoolStatus:
        """Pages by state; the numbers add up to the total.

        Promised pages count as reserved; free pages back them first, cached ones after that.
        """
        free = self._count[PageState.FREE]
        cached_behind_promises = max(0, self._reserved - free)
        return PoolStatus(
            total=self.num_pages,
            free=max(0, free - self._reserved),
            reserved=self._reserved,
            used=self._count[PageState.USED],
            cached=self._count[PageState.CACHED] - cached_behind_promises,
            quarantined=self._count[PageState.QUARANTINED],
        )

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each; an empty list when the books are right."""
        problems: list[str] = []
        for state, count in Counter(self._state).items():
            if self._count[state] != count:
                problems.append(f"{count} pages are {state.value}, the count says {self._count}")
        if len(set(self._free)) != len(self._free):
            problems.append("a page is on the free list twice")
        if {p for p, s in enumerate(self._state) if s is PageState.FREE} != set(self._free):
            problems.append("the free list and the page states disagree")
        for page, (state, pins) in enumerate(zip(self._state, self._pins, strict=True)):
            if (pins > 0) != (state is PageState.USED) or pins < 0:
                problems.append(f"page {page} is {state.value} with {pins} holders")
        if self._reserved < 0 or self.available < 0:
            problems.append(f"{self._reserved} pages are promised, {self.available} over")
        status = self.status()
        parts = (status.free, status.reserved, status.used, status.cached, status.quarantined)
        if min(parts) < 0 or sum(parts) != self.num_pages:
            problems.append(f"the states {parts} do not add up to {self.num_pages} pages")
        return problems

    def _require(self, page: int, state: PageState) -> None:
        if self._state[page] is not state:
            raise InternalError(f"page {page} is {self._state[page].value}, not {state.value}")

    def _move(self, page: int, old: PageState, new: PageState) -> None:
        self._require(page, old)
        self._state[page] = new
        self._count[old] -= 1
        self._count[new] += 1

"""Which cached page is given up: pure bookkeeping beside the prefix cache, without pages or memory.

The cache says what happens to page hashes and which of them could go now: leaves that nobody uses.
A policy says which of these goes. So pages leave leaf first under any policy.

``Lru`` takes the leaf used longest ago, but rather one of the oldest few that other workers have
too, where it was told so: what has to be computed again is what nobody has. ``Returns`` takes the
one that is least likely to be worth its memory. A prompt and what was generated behind it is a
*chain*; a chat comes back for its chain after a while, or never. The policy learns, from the chains
that came back,

- how long they were away, in pages inserted meanwhile (a clock that needs no clock),
- how often chains of that turn of a chat and of that length come back at all.

Of a chain that has been away for some time it then knows the largest share of hits that waiting on
could bring for the memory it takes: the maximum over t of P(back within t) / E[time held until
then] (Gittins' index of the bandit that may be stopped at any time). The chain with the smallest
index goes. A chain seen once gives way sooner than the fifth turn of a chat, and both stay longer
while they are about to come back than when they are overdue. What was learnt of a chain outlives
its pages for a while, as does the turn it was in, so a chat is known again after its eviction.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Literal, Protocol

from pdmesh.kvcache.returns import ReturnRecord
from pdmesh.wire.errors import InternalError
from pdmesh.wire.hashes import PageHash

EvictionName = Literal["lru", "returns"]
Evictable = Callable[[PageHash], bool]
"""Whether a page is cached, unused and without children."""
Replicated = Callable[[], Set[PageHash]]
"""Pages that other workers had too when it was last asked. A hint: it may be old, or empty."""
WINDOW = 64
"""Most leaves that are as good as the oldest one, where others have them too."""
_WINDOW_SHARE = 32
"""In a small cache it is one leaf for so many pages: the oldest of a few are not old."""


def no_replicas() -> frozenset[PageHash]:
    """Where nothing is known of other workers."""
    return frozenset()


class Eviction(Protocol):
    """What the prefix cache tells and asks. Parents are inserted before their children."""

    def inserted(self, page: PageHash, parent: PageHash | None) -> None:
        """A page is owned from now on."""

    def start_release(self) -> None:
        """A sequence lets go of its pages; they follow, the deepest first."""

    def released(self, page: PageHash) -> None:
        """A page of that sequence is used by nobody now."""

    def leaf(self, page: PageHash) -> None:
        """A page could be evicted from now on."""

    def victim(self, evictable: Evictable) -> PageHash:
        """The page to evict.

        Raises:
            InternalError: none can be.
        """
        ...

    def coming(self, count: int) -> list[PageHash]:
        """Up to ``count`` pages of which it matters now whether others have them too."""
        ...

    def removed(self, page: PageHash) -> None:
        """A page is owned no longer."""

    def clear(self) -> None:
        """All pages are gone."""


def make_eviction(
    name: EvictionName, num_pages: int, replicated: Replicated = no_replicas
) -> Eviction:
    """The policy of that name for a cache of up to ``num_pages`` pages."""
    if name == "lru":
        return Lru(replicated, max(1, min(WINDOW, num_pages // _WINDOW_SHARE)))
    return Returns(num_pages)


class Lru:
    """The least recently used leaf; pages of one release count as used at once.

    Of the ``window`` oldest leaves the oldest with a copy elsewhere goes, if there is one.
    """

    def __init__(self, replicated: Replicated = no_replicas, window: int = WINDOW) -> None:
        self._replicated = replicated
        self._window = window
        self._now = 0
        self._last: dict[PageHash, int] = {}
        self._leaves: list[tuple[int, PageHash]] = []
        self._oldest: list[tuple[int, PageHash]] = []
        """In order, and taken out of the heap ``_leaves``."""

    def inserted(self, page: PageHash, parent: PageHash | None) -> None:
        self._last[page] = 0

    def start_release(self) -> None:
        self._now += 1

    def released(self, page: PageHash) -> None:
        self._last[page] = self._now

    def leaf(self, page: PageHash) -> None:
        heapq.heappush(self._leaves, (self._last[page], page))
        if len(self._leaves) > 2 * len(self._last) + 64:
            self._leaves = [
                leaf for leaf in set(self._leaves) if self._last.get(leaf[1]) == leaf[0]
            ]
            heapq.heapify(self._leaves)

    def victim(self, evictable: Evictable) -> PageHash:
        replicated = self._replicated()
        while True:
            self._sort_oldest(self._window if replicated else 1)
            if not self._oldest:
                raise InternalError("no cached page can be evicted")
            copies = (at for at, (_, page) in enumerate(self._oldest) if page in replicated)
            page = self._oldest.pop(next(copies, 0))[1]
            if evictable(page):
                return page

    def coming(self, count: int) -> list[PageHash]:
        leaves = heapq.nsmallest(count, (*self._oldest, *self._leaves))
        return [page for last, page in leaves if self._last.get(page) == last]

    def removed(self, page: PageHash) -> None:
        del self._last[page]

    def clear(self) -> None:
        self._last.clear()
        self._leaves.clear()
        self._oldest.clear()

    def _sort_oldest(self, count: int) -> None:
        """Takes at least ``count`` of the oldest leaves out of the heap, if there are so many."""
        last = self._last
        found = [leaf for leaf in self._oldest if last.get(leaf[1]) == leaf[0]]
        while self._leaves and (len(found) < count or self._leaves[0] < found[-1]):
            leaf = heapq.heappop(self._leaves)
            if last.get(leaf[1]) == leaf[0]:
                insort(found, leaf)
            if len(found) > count:
                heapq.heappush(self._leaves, found.pop())
        self._oldest = found


_PER_CACHE = 16
"""Buckets of time to a full turnover of the cache."""
_TURNS = 4
_LENGTHS = (3, 48, 96)
"""Chains of up to so many pages are told apart."""
_GHOSTS = 8
"""Evicted pages that are remembered, in caches."""


@dataclass(slots=True, eq=False)
class _Chain:
    """One release."""

    turn: int
    length: int
    at: int
    tip: PageHash
    back: bool = False

    @property
    def kind(self) -> tuple[int, int]:
        return min(self.turn, _TURNS), sum(self.length > most for most in _LENGTHS)


@dataclass(slots=True)
class _Page:
    depth: int
    turn: int
    parent: PageHash | None
    chain: _Chain | None = None
    end: _Chain | None = None
    """The chain that it ends, or all but ends: a partial last page is not found again."""


_Heap = list[tuple[int, int, PageHash]]
"""Time of the release, or its negative; minus the depth; page."""


class _Leaves:
    """Leaves of one kind, from both ends: the index of a kind is lowest at one of them."""

    def __init__(self) -> None:
        self.oldest: _Heap = []
        self.newest: _Heap = []

    def push(self, at: int, depth: int, page: PageHash) -> None:
        heapq.heappush(self.oldest, (at, -depth, page))
        heapq.heappush(self.newest, (-at, -depth, page))

    def keep(self, valid: Callable[[int, PageHash], bool]) -> None:
        """Drops what is no leaf any more."""
        self.oldest = [e for e in set(self.oldest) if valid(e[0], e[2])]
        heapq.heapify(self.oldest)
        self.newest = [(-at, depth, page) for at, depth, page in self.oldest]
        heapq.heapify(self.newest)


class Returns:
    """Chains that are least likely to come back in time; see the module.

    Args:
        num_pages: of the cache.
    """

    def __init__(self, num_pages: int) -> None:
        self._width = max(1, num_pages // _PER_CACHE)
        self._most_ghosts = _GHOSTS * num_pages
        self._pages: dict[PageHash, _Page] = {}
        self._ghosts: OrderedDict[PageHash, _Page] = OrderedDict()
        self._leaves: dict[tuple[int, int, bool], _Leaves] = {}
        self._going: tuple[_Heap, int] | None = None
        self._entries = 0
        self._now = 0
        self._first = True
        self._chain: _Chain | None = None
        self._record = ReturnRecord()

    def inserted(self, page: PageHash, parent: PageHash | None) -> None:
        self._now += 1
        known = self._ghosts.pop(page, None)
        above = None if parent is None else self._pages[parent]
        if known is not None:
            known.parent = parent
            self._pages[page] = known
        elif above is None:
            self._pages[page] = _Page(0, 1, parent)
        else:
            turn = above.turn + (1 if self._came_back(above) else 0)
            self._pages[page] = _Page(above.depth + 1, turn, parent)

    def start_release(self) -> None:
        self._first = True

    def released(self, page: PageHash) -> None:
        state = self._pages[page]
        if self._first:
            self._first = False
            self._came_back(state)  # the same prompt again, or less of it
            chain = self._chain = _Chain(state.turn, state.depth + 1, self._now, page)
            state.end = chain
            above = None if state.parent is None else self._pages.get(state.parent)
            if above is not None and above.depth > 0 and above.end is None:
                above.end = chain
            self._record.released(chain.kind)
        state.chain = self._chain

    def leaf(self, page: PageHash) -> None:
        state = self._pages[page]
        chain = state.chain
        if chain is None:
            return
        key = (*chain.kind, chain.tip == page)
        self._leaves.setdefault(key, _Leaves()).push(chain.at, state.depth, page)
        self._entries += 1
        if self._entries > 2 * len(self._pages) + 64:
            self._going = None
            for leaves in self._leaves.values():
                leaves.keep(self._current)
            self._entries = sum(len(leaves.oldest) for leaves in self._leaves.values())

    def victim(self, evictable: Evictable) -> PageHash:
        # The rest of the chain that was begun goes before kinds are compared again.
        if self._going is not None:
            heap, at = self._going
            while heap and heap[0][0] == at:
                if self._current(abs(at), heap[0][2]) and evictable(heap[0][2]):
                    return heap[0][2]
                heapq.heappop(heap)
        lowest: float | None = None
        found: _Heap = []
        for (turn, length, tip), leaves in self._leaves.items():
            share = self._record.tip_share if tip else 1.0
            for heap, sign in ((leaves.oldest, 1), (leaves.newest, -1)):
                while heap and not (
                    self._current(sign * heap[0][0], heap[0][2]) and evictable(heap[0][2])
                ):
                    heapq.heappop(heap)
                if not heap:
                    break
                age = (self._now - sign * heap[0][0]) // self._width
                index = share * self._record.index((turn, length), age)
                if lowest is None or index < lowest:
                    lowest, found = index, heap
        if not found:
            raise InternalError("no cached page can be evicted")
        self._going = found, found[0][0]
        return found[0][2]

    def coming(self, count: int) -> list[PageHash]:
        return []  # its order knows no copies

    def removed(self, page: PageHash) -> None:
        self._ghosts[page] = self._pages.pop(page)
        if len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)

    def clear(self) -> None:
        self._pages.clear()
        self._ghosts.clear()
        self._leaves.clear()
        self._going = None
        self._entries = 0

    def _current(self, at: int, page: PageHash) -> bool:
        state = self._pages.get(page)
        return state is not None and state.chain is not None and state.chain.at == at

    def _came_back(self, state: _Page) -> bool:
        """Whether a page that is used again ends a chain that had not come back yet."""
        chain = state.end
        if chain is None or chain.back:
            return False
        chain.back = True
        age = (self._now - chain.at) // self._width
        tip = self._pages.get(chain.tip)
        self._record.returned(chain.kind, age, tip is state)
        return True

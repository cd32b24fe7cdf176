"""The page manager of one worker: reservations over a pool with a prefix cache.

A reservation is taken at once, for what the caller says, or not at all. A caller that asks for all
that a sequence may need never waits for another's pages; one that asks for less and extends the
promise later has to decide who gives way where there is no room. Methods may be called from any
thread; one lock makes each of them atomic. The callbacks run under that lock, in the order of the
changes they tell of, and must return quickly; they must not raise.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from pdmesh.kvcache.eviction import WINDOW, EvictionName, Replicated, make_eviction, no_replicas
from pdmesh.kvcache.pool import PagePool, PageState
from pdmesh.kvcache.prefix_cache import PrefixCache
from pdmesh.kvcache.reservation import Reservation as Reservation
from pdmesh.wire.errors import InvalidRequest
from pdmesh.wire.hashes import OwnedPage, PageHash
from pdmesh.wire.messages import PoolStatus

PagesCallback = Callable[[list[OwnedPage]], None]
Stamp = tuple[int, int]
"""A page, and how often it had been taken."""
_ROOMY = 8
"""With a part of so many of the pages free nothing has to go soon."""
_MOST_COMING = 4096


class KvManager:
    """All page accounting of one worker.

    Args:
        num_pages: pages of the store.
        page_size: tokens per page.
        on_publish: told of pages that this worker now owns, parents first.
        on_evict: told of pages that it owns no longer, children first.
        eviction: which cached pages go first.
        replicated: pages that other workers have too, which ``lru`` gives up before others of about
            the same age. Asked under the lock, so it only looks up what is known.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        on_publish: PagesCallback,
        on_evict: PagesCallback,
        eviction: EvictionName = "lru",
        replicated: Replicated = no_replicas,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._on_publish = on_publish
        self._on_evict = on_evict
        self._lock = threading.RLock()
        self._pool = PagePool(num_pages)
        self._cache = PrefixCache(self._pool, make_eviction(eviction, num_pages, replicated))
        self._live: set[Reservation] = set()
        self._quarantines: dict[int, frozenset[int]] = {}
        self._held_by_quarantine: Counter[int] = Counter()
        self._next_token = 1
        self._cache_epoch = 0

    def match(self, hashes: Sequence[PageHash]) -> int:
        """How many leading pages of ``hashes`` are cached here. Pins nothing."""
        with self._lock:
            return len(self._cache.match(hashes))

    def reserve(
        self, hashes: Sequence[PageHash], num_prompt_pages: int, total_pages: int
    ) -> Reservation | None:
        """Pins the cached leading pages of a prompt and promises the rest by count.

        Args:
            hashes: hashes of the prompt's full pages that may be shared, in order.
            num_prompt_pages: pages of the whole prompt; at most so many are matched.
            total_pages: pages for the prompt and all that it may generate.

        Returns:
            The reservation, or None where there is no room now.

        Raises:
            InvalidRequest: it can never fit, or the numbers make no sense.
        """
        if not 0 <= num_prompt_pages <= total_pages:
            raise InvalidRequest(
                f"{num_prompt_pages} prompt pages do not fit in {total_pages} pages in all"
            )
        if total_pages > self.num_pages:
            raise InvalidRequest(
                f"the request needs {total_pages} pages of {self.page_size} tokens,"
                f" this worker has {self.num_pages}"
            )
        with self._lock:
            matched = self._cache.match(hashes[:num_prompt_pages])
            to_pin = sum(self._pool.state(page) is PageState.CACHED for page in matched)
            missing = total_pages - len(matched)
            if self._pool.available < to_pin + missing:
                return None
            for page in matched:
                self._pool.pin(page)
            self._pool.reserve(missing)
            known = list(hashes[: len(matched)])
            return Reservation(self, matched, known, missing, self._cache_epoch)

    def stamps(self, pages: Sequence[int]) -> list[Stamp]:
        """What tells whether full pages still hold what they hold now; see ``unchanged``."""
        with self._lock:
            return [(page, self._pool.birth(page)) for page in pages]

    def unchanged(self, hashes: Sequence[PageHash], stamps: Sequence[Stamp]) -> int:
        """How many leading ``hashes`` are cached in the very pages of ``stamps``, bit for bit.

        The same hash may be owned by a page that was computed in another way, so a hash alone
        does not say that.
        """
        with self._lock:
            count = 0
            for page_hash, (page, birth) in zip(hashes, stamps, strict=False):
                if self._cache.page_of(page_hash) != page or self._pool.birth(page) != birth:
                    break
                count += 1
            return count

    def releasable(self, reservations: Collection[Reservation]) -> int:
        """How many pages could be promised anew if all of ``reservations`` were released."""
        with self._lock:
            holders: Counter[int] = Counter()
            for reservation in reservations:
                holders.update(reservation._pages)
            twins = Counter(twin for other in self._live for twin in other._twins.values())
            whole = sum(
                count == self._pool.pins(page) - twins[page] and not self._held_by_quarantine[page]
                for page, count in holders.items()
            )
            return whole + sum(reservation.remaining for reservation in reservations)

    def end_quarantine(self, token: int) -> int:
        """Ends a quarantine: no write can land in its pages any more. Idempotent.

        Returns:
            How many pages became free.
        """
        with self._lock:
            freed = 0
            for page in sorted(self._quarantines.pop(token, frozenset())):
                self._held_by_quarantine[page] -= 1
                if self._held_by_quarantine[page] > 0:
                    continue
                del self._held_by_quarantine[page]
                if self._pool.state(page) is PageState.QUARANTINED:
                    self._pool.end_quarantine(page)
                    freed += 1
            return freed

    def owned_hashes(self) -> list[PageHash]:
        """Hashes of all pages that this worker can share, a parent before its children."""
        with self._lock:
            return self._cache.owned()

    def owned_pages(self) -> list[OwnedPage]:
        """The same, with the anchors by which the registry finds them."""
        with self._lock:
            return self._cache.placed()

    def coming(self) -> list[OwnedPage]:
        """The cached pages that may have to go soon, 4,096 at most; none while there is room.

        Their order is about that in which they go.
        """
        with self._lock:
            if self._pool.num_free * _ROOMY >= self.num_pages:
                return []
            return self._cache.coming(4 * WINDOW, _MOST_COMING)

    def clear(self) -> None:
        """Forgets all cached prefixes; pages in use stay with their reservations, unshared."""
        with self._lock:
            pages = self._cache.clear()
            self._cache_epoch += 1
            if pages:
                self._on_evict(pages)

    def status(self) -> PoolStatus:
        """Pages by state."""
        with self._lock:
            return self._pool.status()

    @property
    def available(self) -> int:
        """Pages that may still be promised."""
        with self._lock:
            return self._pool.available

    @property
    def num_reservations(self) -> int:
        """Reservations not yet released; 0 when the worker is idle."""
        with self._lock:
            return len(self._live)

    def check_integrity(self) -> list[str]:
        """What is wrong in the books, one sentence each; empty when all is well."""
        with self._lock:
            problems = self._pool.check_integrity() + self._cache.check_integrity()
            holders: Counter[int] = Counter()
            for reservation in self._live:
                holders.update(reservation._held())
            for page in range(self.num_pages):
                if holders[page] != self._pool.pins(page):
                    problems.append(
                        f"page {page} has {self._pool.pins(page)} pins, {holders[page]} holders"
                    )
            promised = sum(reservation.remaining for reservation in self._live)
            if promised != self._pool.reserved:
                problems.append(f"{self._pool.reserved} pages reserved, {promised} accounted for")
            held = Counter(page for pages in self._quarantines.values() for page in pages)
            if held != self._held_by_quarantine:
                problems.append("quarantine tokens and quarantined pages disagree")
            return problems

    def _grow(self, count: int) -> list[int]:
        evicted: list[OwnedPage] = []
        pages: list[int] = []
        for _ in range(count):
            if self._pool.num_free == 0:
                evicted.append(self._cache.evict_one())
            pages.append(self._pool.take())
        if evicted:
            self._on_evict(evicted)
        return pages

    def _own(self, page_hash: PageHash, parent: PageHash | None, page: int) -> int | None:
        """Owns one page under a hash that may be owned already; returns the page it has to share.

        The owned ancestors of a used page are kept used: leaf-first eviction then reaches every
        cached page, and all of them can back promises. So a used page of the same hash is pinned
        (and returned), and a cached one gives way to the page at hand.
        """
        other = self._cache.page_of(page_hash)
        if other is None:
            self._cache.insert(page_hash, parent, page)
        if other is None or other == page:
            return None
        if self._pool.state(other) is PageState.CACHED:
            self._pool.evict(self._cache.replace(page_hash, page))
            return None
        self._pool.pin(other)
        return other

    def _settle_twins(self, pages: Sequence[int]) -> None:
        """Frees those of ``pages`` that are held as twins only, now that their holder is gone.

        A page computed twice takes their place under the hash; it holds the same contents. So a
        reservation never keeps more pages from others than those it and they compute with, and one
        that is alone fits wherever it fitted.
        """
        for page in pages:
            if self._pool.state(page) is not PageState.USED:
                continue
            found = [(r, i) for r in self._live if (i := r._twin_of(page)) is not None]
            if len(found) < self._pool.pins(page):
                continue
            page_hash = self._cache.hash_of(page)
            heir = found[0][0]._pages[found[0][1]]
            if page_hash is not None:
                self._cache.replace(page_hash, heir)
            for reservation, index in found:
                del reservation._twins[index]
                if page_hash is not None and reservation._pages[index] != heir:
                    reservation._twins[index] = heir
                    self._pool.pin(heir)
                self._pool.unpin(page, keep=False)

    def _let_go(self, page: int) -> None:
        if self._held_by_quarantine[page] > 0 and self._pool.pins(page) == 1:
            self._pool.quarantine(page)
            return
        keep = self._cache.hash_of(page) is not None
        if self._pool.unpin(page, keep=keep) is PageState.CACHED:
            self._cache.released(page)

"""The page manager of one worker: reservations over a pool with a prefix cache.

A reservation is taken at once for all a sequence may need, growth included, or not at all, so two
sequences never wait for each other's pages. Methods may be called from any thread; one lock makes
each of them atomic. The callbacks run under that lock, in the order of the changes they tell of,
and must return quickly; they must not raise.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from pdmesh.kvcache.pool import PagePool, PageState
from pdmesh.kvcache.prefix_cache import PrefixCache
from pdmesh.wire.errors import InternalError, InvalidRequest, LeaseGone
from pdmesh.wire.hashes import PageHash
from pdmesh.wire.messages import PoolStatus

HashesCallback = Callable[[list[PageHash]], None]


class KvManager:
    """All page accounting of one worker.

    Args:
        num_pages: pages of the store.
        page_size: tokens per page.
        on_publish: told of hashes that this worker now owns, parents first.
        on_evict: told of hashes that it owns no longer, children first.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        on_publish: HashesCallback,
        on_evict: HashesCallback,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._on_publish = on_publish
        self._on_evict = on_evict
        self._lock = threading.RLock()
        self._pool = PagePool(num_pages)
        self._cache = PrefixCache(self._pool)
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
            reservation = Reservation(
                self, matched, list(hashes[: len(matched)]), missing, self._cache_epoch
            )
            self._live.add(reservation)
            return reservation

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

    def clear(self) -> None:
        """Forgets all cached prefixes; pages in use stay with their reservations, unshared."""
        with self._lock:
            hashes = self._cache.clear()
            self._cache_epoch += 1
            if hashes:
                self._on_evict(hashes)

    def status(self) -> PoolStatus:
        """Pages by state."""
        with self._lock:
            return self._pool.status()

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
        evicted: list[PageHash] = []
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
            return None
        if self._pool.state(other) is PageState.CACHED:
            self._pool.evict(self._cache.replace(page_hash, page))
            return None
        self._pool.pin(other)
        return other

    def _let_go(self, page: int) -> None:
        if self._held_by_quarantine[page] > 0:
            self._pool.quarantine(page)
            return
        keep = self._cache.hash_of(page) is not None
        if self._pool.unpin(page, keep=keep) is PageState.CACHED:
            self._cache.released(page)


class Reservation:
    """Pages of one sequence: some physical, the rest promised by count.

    After ``release`` every other method raises LeaseGone.
    """

    def __init__(
        self,
        manager: KvManager,
        matched: list[int],
        hashes: list[PageHash],
        remaining: int,
        cache_epoch: int,
    ) -> None:
        self._manager = manager
        self._pages = matched
        self._hashes = hashes
        self._twins: list[int] = []
        self._cache_epoch = cache_epoch
        self._released = False
        self.matched = len(matched)
        """Leading pages that were cached when the reservation was made."""
        self.remaining = remaining
        """Pages promised and not yet physical."""

    @property
    def pages(self) -> list[int]:
        """Physical pages in sequence order, the matched ones first: the page table."""
        return list(self._pages)

    @property
    def released(self) -> bool:
        return self._released

    @property
    def published(self) -> int:
        """Leading pages whose contents are known valid under a hash, matched ones included."""
        return len(self._hashes)

    def grow(self, count: int = 1) -> list[int]:
        """Makes ``count`` promised pages physical and appends them to the page table.

        Never fails for lack of room within the reservation.

        Raises:
            InternalError: more pages than were reserved.
        """
        with self._manager._lock:
            self._check_live()
            if not 0 <= count <= self.remaining:
                raise InternalError(f"cannot grow by {count} pages: {self.remaining} are reserved")
            pages = self._manager._grow(count)
            self.remaining -= count
            self._pages.extend(pages)
            return pages

    def publish(self, index_from: int, hashes: Sequence[PageHash]) -> None:
        """Marks full pages, from position ``index_from`` of the page table, as valid.

        Idempotent. Where another page is shared under the same hash already, the own page stays
        private to this reservation. After ``KvManager.clear`` it does nothing: an ancestor is gone.

        Raises:
            InternalError: a page before ``index_from`` is not published (parents come first), a
                page does not exist or is in quarantine, or a hash is not the one given before.
        """
        with self._manager._lock:
            self._check_live()
            if self._cache_epoch != self._manager._cache_epoch:
                return
            if index_from < 0:
                raise InternalError(f"pages are published from 0, not from {index_from}")
            known = self._hashes[index_from : index_from + len(hashes)]
            if list(hashes[: len(known)]) != known:
                raise InternalError("a page was published under another hash before")
            fresh = list(hashes[len(known) :])
            if fresh:
                self._publish_fresh(index_from + len(known), fresh)

    def _publish_fresh(self, start: int, hashes: list[PageHash]) -> None:
        manager = self._manager
        pages = self._pages[start : start + len(hashes)]
        if start != len(self._hashes) or len(pages) != len(hashes):
            raise InternalError(
                f"cannot publish pages {start} to {start + len(hashes)}:"
                f" {len(self._hashes)} of {len(self._pages)} pages are published"
            )
        if any(manager._held_by_quarantine[page] > 0 for page in pages):
            raise InternalError("a page that may still be written cannot be published")
        new: list[PageHash] = []
        for page, page_hash in zip(pages, hashes, strict=True):
            parent = self._hashes[-1] if self._hashes else None
            if manager._cache.page_of(page_hash) is None:
                new.append(page_hash)
            twin = manager._own(page_hash, parent, page)
            if twin is not None:
                self._twins.append(twin)
            self._hashes.append(page_hash)
        if new:
            manager._on_publish(new)

    def quarantine(self, pages: Sequence[int]) -> int:
        """Marks pages in which a write may still land; release sets them aside, not free.

        Returns:
            A token for ``KvManager.end_quarantine``.

        Raises:
            InternalError: a page is not of this reservation, or is published.
        """
        manager = self._manager
        with manager._lock:
            self._check_live()
            unpublished = set(self._pages[len(self._hashes) :])
            if not set(pages) <= unpublished:
                raise InternalError("only unpublished pages of a reservation go into quarantine")
            token = manager._next_token
            manager._next_token += 1
            manager._quarantines[token] = frozenset(pages)
            manager._held_by_quarantine.update(set(pages))
            return token

    def release(self) -> None:
        """Lets go of everything: published pages become cached, others free. Idempotent."""
        manager = self._manager
        with manager._lock:
            if self._released:
                return
            self._released = True
            manager._live.discard(self)
            manager._cache.start_release()
            for page in reversed(self._held()):
                manager._let_go(page)
            manager._pool.unreserve(self.remaining)
            self.remaining = 0

    def _held(self) -> list[int]:
        return self._twins + self._pages

    def _check_live(self) -> None:
        if self._released:
            raise LeaseGone("the reservation was released")

"""The pages of one sequence: some physical, the rest promised by count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdmesh.wire.errors import InternalError, LeaseGone
from pdmesh.wire.hashes import OwnedPage, PageHash

if TYPE_CHECKING:
    from pdmesh.kvcache.manager import KvManager


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
        self._table: tuple[int, ...] = tuple(matched)
        self._hashes = hashes
        self._twins: dict[int, int] = {}
        self._cache_epoch = cache_epoch
        self._released = False
        manager._live.add(self)
        self.matched = len(matched)
        """Leading pages that it began with: cached ones, or those shared by a fork."""
        self.remaining = remaining
        """Pages promised and not yet physical."""

    @property
    def pages(self) -> list[int]:
        """Physical pages in sequence order, the matched ones first: the page table."""
        return list(self._pages)

    @property
    def page_table(self) -> tuple[int, ...]:
        """The same as ``pages``; made once each time that it grows."""
        if len(self._table) != len(self._pages):
            self._table = tuple(self._pages)
        return self._table

    @property
    def num_pages(self) -> int:
        """Physical pages."""
        return len(self._pages)

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
            self._check_promised(count)
            pages = self._manager._grow(count)
            self.remaining -= count
            self._pages.extend(pages)
            return pages

    def extend(self, count: int) -> bool:
        """Promises ``count`` pages more; False, and nothing changed, where there is no room."""
        with self._manager._lock:
            self._check_live()
            granted = self._manager._pool.reserve(count)
            self.remaining += count if granted else 0
            return granted

    def shrink(self, count: int) -> None:
        """Gives ``count`` promised pages back.

        Raises:
            InternalError: so many are not promised.
        """
        with self._manager._lock:
            self._check_live()
            self._check_promised(count)
            self._manager._pool.unreserve(count)
            self.remaining -= count

    def fork(self, shared: int, promise: int) -> Reservation:
        """A reservation for another continuation: shares pages and takes part of the promise.

        The shared pages have to be published, so that both holders know what they hang on; after
        ``KvManager.clear``, which ends publishing, any may be shared.

        Args:
            shared: leading pages of the page table that both hold from now on.
            promise: promised pages that pass to the new reservation.

        Raises:
            InternalError: there are not so many, one is not published, or a write may still land.
        """
        manager = self._manager
        with manager._lock:
            self._check_live()
            self._check_promised(promise)
            pages = self._pages[:shared]
            if not 0 <= shared == len(pages):
                raise InternalError(f"cannot share {shared} of {len(self._pages)} pages")
            if shared > len(self._hashes) and self._cache_epoch == manager._cache_epoch:
                raise InternalError("only published pages are shared by a fork")
            if any(manager._held_by_quarantine[page] > 0 for page in pages):
                raise InternalError("a page that may still be written cannot be shared")
            child = Reservation(manager, pages, self._hashes[:shared], promise, self._cache_epoch)
            child._twins = {i: page for i, page in self._twins.items() if i < shared}
            for page in child._held():
                manager._pool.pin(page)
            self.remaining -= promise
            return child

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
        new: list[OwnedPage] = []
        for page, page_hash in zip(pages, hashes, strict=True):
            parent = self._hashes[-1] if self._hashes else None
            fresh = manager._cache.page_of(page_hash) is None
            twin = manager._own(page_hash, parent, page)
            if fresh:
                new.append(OwnedPage(page_hash, manager._cache.anchor_of(page_hash)))
            if twin is not None:
                self._twins[len(self._hashes)] = twin
            self._hashes.append(page_hash)
        if new:
            manager._on_publish(new)

    def quarantine(self, pages: Sequence[int]) -> int:
        """Marks pages in which a write may still land; release sets them aside, not free.

        Returns:
            A token for ``KvManager.end_quarantine``.

        Raises:
            InternalError: a page is not of this reservation alone, or is published.
        """
        manager = self._manager
        with manager._lock:
            self._check_live()
            unpublished = set(self._pages[len(self._hashes) :])
            shared = any(
                manager._pool.pins(page) != 1 or manager._cache.hash_of(page) is not None
                for page in pages
            )
            if shared or not set(pages) <= unpublished:
                raise InternalError("only unpublished, unshared pages go into quarantine")
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
            manager._settle_twins(self._pages)
            manager._pool.unreserve(self.remaining)
            self.remaining = 0

    def _twin_of(self, page: int) -> int | None:
        """Where ``page`` is the twin of a page of this reservation; None if it is not."""
        return next((index for index, twin in self._twins.items() if twin == page), None)

    def _held(self) -> list[int]:
        return [*self._twins.values(), *self._pages]

    def _check_promised(self, count: int) -> None:
        if not 0 <= count <= self.remaining:
            raise InternalError(f"cannot grow by {count} pages: {self.remaining} are reserved")

    def _check_live(self) -> None:
        if self._released:
            raise LeaseGone("the reservation was released")

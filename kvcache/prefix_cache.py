"""Which page holds the latents of which prefix: a flat map from page hash to page.

The hash of a page is chained over its ancestors, so no tree is needed to find a prefix; each entry
keeps its parent's hash and the number of its children for one purpose: pages leave leaf first, in
an order that an ``Eviction`` decides. With parents published first, the owned set is prefix-closed:
the parent of an owned page is owned. It also keeps the page's depth in its chain and the anchor of
its segment, by which the registry finds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdmesh.kvcache.eviction import Eviction, Lru
from pdmesh.kvcache.pool import PagePool, PageState
from pdmesh.wire.errors import InternalError
from pdmesh.wire.hashes import SEGMENT_PAGES, OwnedPage, PageHash


@dataclass(slots=True)
class _Entry:
    page: int
    parent: PageHash | None
    depth: int
    anchor: PageHash
    children: int = 0


class PrefixCache:
    """Hash to page over a pool. Deterministic: no clock decides what is evicted.

    Args:
        pool: the pages.
        eviction: decides which leaf goes; the least recently used one by default.
    """

    def __init__(self, pool: PagePool, eviction: Eviction | None = None) -> None:
        self._pool = pool
        self._eviction = eviction or Lru()
        self._entries: dict[PageHash, _Entry] = {}
        self._hash_of: dict[int, PageHash] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, hashes: Iterable[PageHash]) -> list[int]:
        """Pages of the longest owned prefix of ``hashes``. Pins nothing, counts as no use."""
        pages: list[int] = []
        for page_hash in hashes:
            entry = self._entries.get(page_hash)
            if entry is None:
                break
            pages.append(entry.page)
        return pages

    def page_of(self, page_hash: PageHash) -> int | None:
        entry = self._entries.get(page_hash)
        return None if entry is None else entry.page

    def hash_of(self, page: int) -> PageHash | None:
        return self._hash_of.get(page)

    def owned(self) -> list[PageHash]:
        """All owned hashes, a parent always before its children."""
        return list(self._entries)

    def placed(self) -> list[OwnedPage]:
        """The same, with their anchors."""
        return [OwnedPage(page_hash, entry.anchor) for page_hash, entry in self._entries.items()]

    def anchor_of(self, page_hash: PageHash) -> PageHash:
        """The anchor of an owned page's segment."""
        return self._entries[page_hash].anchor

    def insert(self, page_hash: PageHash, parent: PageHash | None, page: int) -> None:
        """Owns ``page`` under ``page_hash``; the parent has to be owned already.

        Raises:
            InternalError: the hash or the page is owned already, or the parent is not.
        """
        if page_hash in self._entries or page in self._hash_of:
            raise InternalError(f"page {page} or its hash {page_hash.hex()} is owned already")
        depth, anchor = 0, page_hash
        if parent is not None:
            holder = self._entries.get(parent)
            if holder is None:
                raise InternalError(f"the parent {parent.hex()} of page {page} is not owned")
            holder.children += 1
            depth = holder.depth + 1
            anchor = holder.anchor if depth % SEGMENT_PAGES else page_hash
        self._entries[page_hash] = _Entry(page, parent, depth, anchor)
        self._hash_of[page] = page_hash
        self._eviction.inserted(page_hash, parent)

    def replace(self, page_hash: PageHash, page: int) -> int:
        """Owns ``page`` in place of another page of the same contents; returns the other."""
        entry = self._entries[page_hash]
        old, entry.page = entry.page, page
        del self._hash_of[old]
        self._hash_of[page] = page_hash
        return old

    def start_release(self) -> None:
        """A sequence lets go of its pages; those that become cached follow, the deepest first."""
        self._eviction.start_release()

    def released(self, page: int) -> None:
        """Notes that an owned page has just become cached."""
        page_hash = self._hash_of[page]
        self._eviction.released(page_hash)
        self._note_leaf(page_hash)

    def evict_one(self) -> OwnedPage:
        """Disowns and frees the cached leaf that the policy names; returns which it was.

        Raises:
            InternalError: no page is cached.
        """
        page_hash = self._eviction.victim(self._is_leaf)
        evicted = OwnedPage(page_hash, self.anchor_of(page_hash))
        self._pool.evict(self._remove(page_hash))
        return evicted

    def coming(self, leaves: int, most: int) -> list[OwnedPage]:
        """Up to ``most`` cached pages of which it matters soon whether others have them too.

        Of the ``leaves`` that go first, each with all ancestors that would follow it.
        """
        found: list[OwnedPage] = []
        for leaf in self._eviction.coming(leaves):
            page_hash: PageHash | None = leaf
            children = 0
            while page_hash is not None and len(found) < most:
                entry = self._entries.get(page_hash)
                if entry is None or entry.children > children:
                    break
                if self._pool.state(entry.page) is not PageState.CACHED:
                    break
                found.append(OwnedPage(page_hash, entry.anchor))
                page_hash, children = entry.parent, 1
        return found

    def clear(self) -> list[OwnedPage]:
        """Disowns everything and frees the cached pages; returns what it was, children first."""
        pages = self.placed()[::-1]
        for entry in reversed(self._entries.values()):
            if self._pool.state(entry.page) is PageState.CACHED:
                self._pool.evict(entry.page)
        self._entries.clear()
        self._hash_of.clear()
        self._eviction.clear()
        return pages

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each; an empty list when the map is right."""
        problems: list[str] = []
        children = dict.fromkeys(self._entries, 0)
        for page_hash, entry in self._entries.items():
            name = f"page {entry.page} ({page_hash.hex()[:8]})"
            if self._hash_of.get(entry.page) != page_hash:
                problems.append(f"{name} is not known by its page number")
            state = self._pool.state(entry.page)
            if state not in (PageState.USED, PageState.CACHED):
                problems.append(f"{name} is owned and {state.value}")
            if entry.parent is None:
                continue
            if entry.parent not in self._entries:
                problems.append(f"{name} is owned without its parent")
                continue
            children[entry.parent] += 1
            parent_page = self._entries[entry.parent].page
            if state is PageState.USED and self._pool.state(parent_page) is PageState.CACHED:
                problems.append(f"{name} is used while its parent may be evicted")
        for page_hash, count in children.items():
            if self._entries[page_hash].children != count:
                problems.append(f"page {self._entries[page_hash].page} miscounts its children")
        for page in range(self._pool.num_pages):
            if self._pool.state(page) is PageState.CACHED and page not in self._hash_of:
                problems.append(f"page {page} is cached under no hash")
        return problems

    def _remove(self, page_hash: PageHash) -> int:
        entry = self._entries.pop(page_hash)
        del self._hash_of[entry.page]
        self._eviction.removed(page_hash)
        if entry.parent is not None:
            self._entries[entry.parent].children -= 1
            self._note_leaf(entry.parent)
        return entry.page

    def _note_leaf(self, page_hash: PageHash) -> None:
        if self._is_leaf(page_hash):
            self._eviction.leaf(page_hash)

    def _is_leaf(self, page_hash: PageHash) -> bool:
        entry = self._entries.get(page_hash)
        return (
            entry is not None
            and entry.children == 0
            and self._pool.state(entry.page) is PageState.CACHED
        )

"""Who owns which leading pages of a prompt: a flat map from page to the set of owners.

A page is known by its hash or the part of it that the store keeps. The hash is chained over the
ancestors and workers evict leaf first, so the pages that a worker owns are prefix-closed: if it
owns a page of a prompt it owns all before it. So no tree is needed. The owners of a prompt's pages
only become fewer from page to page, and a search that halves the prompt finds each owner's depth
with O(owners * log pages) look-ups instead of one a page.

A set of owners is a bit mask; equal masks are one object. A worker that leaves or comes back is
fenced by clearing one bit of the mask of the living: O(1) whatever it owned. What it left behind
is cleared bit by bit with ``sweep``.

Everything here is a hint. A hash map that is wrong, late or empty changes what a choice costs, and
never what an answer says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_ALLOCATION = 16
"""Objects take multiples of so many bytes."""

_SCANNED = 64
"""Pages of a prompt in which several owners stop are looked at one by one; more are halved."""
_NAMES = 4096
"""Sets of owners whose slots are kept spelled out."""
_KNOWN = 4096
"""Sets of owners that may be remembered beyond twice those in use."""


@dataclass
class _Owner:
    bit: int
    epoch: int
    pages: int = 0


@dataclass(frozen=True)
class IndexSize:
    """What the index holds now."""

    pages: int
    """Pages with an owner, living or not yet swept."""
    owners: int
    bytes_per_page: float
    """Map, keys and masks over ``pages``; the keys are counted as if nobody else held them."""


class PrefixIndex:
    """An index of pages that may be compared with each other. Not thread-safe; no I/O, no clock.

    A *slot* is the small number of a worker, an *epoch* the number of its incarnation: a larger
    one replaces what a smaller one owned, and what comes late from a smaller one is ignored.
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._known: dict[int, int] = {}
        self._owners: dict[int, _Owner] = {}
        self._slot_of: dict[int, int] = {}
        self._slots: dict[int, tuple[int, ...]] = {}
        self._live = 0
        self._stale = 0
        self._free_bits: list[int] = []
        self._next_bit = 0
        self._fenced: dict[int, int] = {}
        self._sweep: Iterator[bytes] | None = None
        self._sweeping = 0
        self._room = _KNOWN

    # ---- what workers tell ----------------------------------------------------------------

    def apply(self, slot: int, epoch: int, owned: bool, hashes: Iterable[bytes]) -> bool:
        """Notes that a worker owns pages, or no longer does. Idempotent; absent pages are skipped.

        Returns:
            False, and nothing changed, where the epoch is older than the slot's.
        """
        owner = self._owner(slot, epoch)
        if owner is None:
            return False
        masks, bit, share = self._masks, 1 << owner.bit, self._known.setdefault
        if owned:
            for page in hashes:
                old = masks.get(page, 0)
                if not old & bit:
                    new = old | bit
                    masks[page] = share(new, new)
                    owner.pages += 1
        else:
            for page in hashes:
                old = masks.get(page, 0)
                if old & bit:
                    owner.pages -= 1
                    new = old & ~bit
                    if new:
                        masks[page] = share(new, new)
                    else:
                        del masks[page]
        if len(self._known) > self._room:
            self._forget_sets()
        return True

    def drop(self, slot: int) -> None:
        """Forgets all that a worker owns, at once; its epoch stays fenced."""
        owner = self._owners.pop(slot, None)
        if owner is None:
            return
        self._fenced[slot] = owner.epoch
        bit = 1 << owner.bit
        self._live &= ~bit
        self._stale |= bit
        self._slots.clear()

    def sweep(self, pages: int) -> bool:
        """Clears what dropped workers left in up to ``pages`` pages; True when nothing is left."""
        if not self._stale:
            return True
        if self._sweep is None:
            self._sweeping = self._stale
            self._sweep = iter(list(self._masks))
        masks, gone, share = self._masks, self._sweeping, self._known.setdefault
        for page in self._next(pages):
            old = masks.get(page, 0)
            if old & gone:
                new = old & ~gone
                if new:
                    masks[page] = share(new, new)
                else:
                    del masks[page]
        if self._sweep is not None:
            return False
        self._free_bits.extend(_bits(gone))
        for number in _bits(gone):
            del self._slot_of[number]
        self._stale &= ~gone
        self._forget_sets()
        return not self._stale

    # ---- what is asked -------------------------------------------------------------

    def match(self, hashes: Sequence[bytes]) -> dict[int, int]:
        """Slot -> how many leading pages of ``hashes`` it owns; those that own none are left out.

        Args:
            hashes: a prompt's pages, or some that follow each other in it, in order.
        """
        depths: dict[int, int] = {}
        count = len(hashes)
        if count == 0:
            return depths
        get, live = self._masks.get, self._live
        owners = get(hashes[0], 0) & live
        if not owners:
            return depths
        slots = self._slots
        # Segments (page, owners there, page, owners there), the last one first; owners that are
        # missing at the end of a segment stopped somewhere inside it.
        last = get(hashes[count - 1], 0) & owners
        if last:
            for slot in slots.get(last) or self._names(last):
                depths[slot] = count
        if last == owners:
            return depths
        stack = [(0, owners, count - 1, last)]
        while stack:
            low, there, high, still = stack.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                found = get(hashes[middle], 0) & there
                if found == still:
                    high = middle
                elif found == there:
                    low = middle
                elif high - low > _SCANNED:
                    stack.append((low, there, middle, found))
                    low, there = middle, found
                else:  # several owners stop in here: look at each page
                    for page in range(low + 1, high):
                        found = get(hashes[page], 0) & there
                        if found != there:
                            gone = there & ~found
                            for slot in slots.get(gone) or self._names(gone):
                                depths[slot] = page
                            there = found
                            if found == still:
                                break
                    low = high - 1
            gone = there & ~still
            if gone:
                for slot in slots.get(gone) or self._names(gone):
                    depths[slot] = low + 1
        return depths

    def size(self) -> IndexSize:
        """How large it is; walks over all masks, so not for every request."""
        pages = len(self._masks)
        key = sys.getsizeof(next(iter(self._masks), b""))
        total = sys.getsizeof(self._masks) + pages * _rounded(key)
        total += sum(_rounded(sys.getsizeof(mask)) for mask in self._known)
        total += sys.getsizeof(self._known)
        return IndexSize(pages, len(self._owners), total / max(1, pages))

    @property
    def unswept(self) -> bool:
        """Whether dropped workers have left something that ``sweep`` has to clear."""
        return bool(self._stale)

    def owned(self, slot: int) -> int:
        """Pages that a worker has said it owns."""
        owner = self._owners.get(slot)
        return 0 if owner is None else owner.pages

    # ---- inside ---------------------------------------------------------------------------

    def _owner(self, slot: int, epoch: int) -> _Owner | None:
        owner = self._owners.get(slot)
        if owner is not None and owner.epoch == epoch:
            return owner
        if epoch < (self._fenced.get(slot, epoch) if owner is None else owner.epoch):
            return None
        if owner is None and self._fenced.get(slot) == epoch:
            return None  # dropped: only a new incarnation comes back
        self.drop(slot)
        return self._join(slot, epoch)

    def _join(self, slot: int, epoch: int) -> _Owner:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit, self._next_bit = self._next_bit, self._next_bit + 1
        owner = self._owners[slot] = _Owner(bit, epoch)
        self._slot_of[bit] = slot
        self._live |= 1 << bit
        self._slots.clear()
        return owner

    def _names(self, mask: int) -> tuple[int, ...]:
        if len(self._slots) >= _NAMES:
            self._slots.clear()
        names = self._slots[mask] = tuple(self._slot_of[bit] for bit in _bits(mask))
        return names

    def _next(self, count: int) -> Iterator[bytes]:
        assert self._sweep is not None
        for _ in range(count):
            page = next(self._sweep, None)
            if page is None:
                self._sweep = None
                return
            yield page

    def _forget_sets(self) -> None:
        """Forgets sets of owners that no page has any more."""
        self._known = {mask: mask for mask in self._masks.values()}
        self._room = 2 * len(self._known) + _KNOWN


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _rounded(size: int) -> int:
    return -(-size // _ALLOCATION) * _ALLOCATION

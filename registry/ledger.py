"""What a worker has told each partition of the store about its pages, and still has to: no I/O.

Changes come in from any thread as *words*, of which only the last about each page counts. They are
sorted by partition and leave as numbered batches, one under way for each partition; a batch whose
answer did not come is sent again under its number, so it is applied once. What the store has
confirmed is kept with its digest, to be compared with the store's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pdmesh.registry.layout import Layout, Row, mark_of, pack_group, xor_of
from pdmesh.registry.store import PageCall
from pdmesh.wire.hashes import OwnedPage, PageHash

BATCH_PAGES = 512

Verdict = Literal["ok", "repair"]


class Fenced(Exception):
    """The store knows another epoch of this worker, or none, or other records than were sent.

    ``epoch`` is the one that the store knows, 0 if it did not say.
    """

    def __init__(self, reason: str, epoch: int = 0) -> None:
        super().__init__(reason)
        self.epoch = epoch


class Words:
    """The last word about each page, filled from any thread.

    The size is bounded by the distinct pages. Beyond ``limit`` (more than the last snapshot held)
    all is dropped and ``overflowed`` set; the owner then sends everything afresh.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._room = limit
        self._lock = threading.Lock()
        self._owned: dict[PageHash, tuple[bool, PageHash]] = {}
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._owned)

    def add(self, pages: Iterable[OwnedPage], owned: bool, waiting: int = 0) -> None:
        """``waiting`` more words are on their way already and need room too."""
        with self._lock:
            for page_hash, anchor in pages:
                self._owned.pop(page_hash, None)
                self._owned[page_hash] = (owned, anchor)
            if len(self._owned) + waiting > self._room:
                self._owned.clear()
                self.overflowed = True

    def take(self) -> list[tuple[OwnedPage, bool]]:
        """All words, in order; leaves nothing."""
        with self._lock:
            words, self._owned = self._owned, {}
        return [(OwnedPage(page, anchor), owned) for page, (owned, anchor) in words.items()]

    def begin(self, snapshot: Callable[[], Sequence[OwnedPage]]) -> bool:
        """Forgets all but ``snapshot()``, which needs no room. Whether words had been dropped.

        What is added between the two is in the snapshot or kept, so nothing is missed.
        """
        with self._lock:
            self._owned.clear()
            before, self.overflowed = self.overflowed, False
        pages = snapshot()
        with self._lock:
            later, self._owned = self._owned, {page: (True, anchor) for page, anchor in pages}
            self._owned.update(later)
            self._room = self._limit + len(pages)
        return before


@dataclass(frozen=True)
class _Batch:
    """Pages that are published, or evicted, by one call: bucket -> marks."""

    owned: bool
    pages: dict[int, list[bytes]]


@dataclass
class _Part:
    """One partition: what it was told, and what waits."""

    fenced: bool = False
    seq: int = 0
    told: dict[bytes, int] = field(default_factory=dict)
    xor: int = 0
    sent: _Batch | None = None
    new: dict[bytes, int] = field(default_factory=dict)
    gone: dict[bytes, int] = field(default_factory=dict)

    def word(self, mark: bytes, bucket: int, owned: bool) -> None:
        (self.gone if owned else self.new).pop(mark, None)
        (self.new if owned else self.gone)[mark] = bucket

    def take(self) -> _Batch | None:
        """The batch to send: the one without an answer, else evictions, else new pages."""
        if self.sent is None and (source := self.gone or self.new):
            owned = source is self.new
            pages: dict[int, list[bytes]] = {}
            for mark in list(source)[:BATCH_PAGES]:
                pages.setdefault(source.pop(mark), []).append(mark)
            self.sent = _Batch(owned, pages)
        return self.sent

    def confirm(self) -> None:
        assert self.sent is not None
        for bucket, marks in self.sent.pages.items():
            changed = [mark for mark in marks if (mark in self.told) != self.sent.owned]
            self.xor ^= xor_of(changed)
            if self.sent.owned:
                self.told.update(dict.fromkeys(changed, bucket))
            else:
                for mark in changed:
                    del self.told[mark]
        self.seq += 1
        self.sent = None


class Ledger:
    """The books of one worker under one epoch.

    Args:
        layout: of the mesh.
        slot: the worker's.
        epoch: under which it is registered.
    """

    def __init__(self, layout: Layout, slot: int, epoch: int) -> None:
        self.layout = layout
        self.slot = slot
        self.epoch = epoch
        self._parts = [_Part() for _ in range(layout.partitions)]

    @property
    def waiting(self) -> int:
        """Pages that are not confirmed."""
        return sum(len(part.new) + len(part.gone) + (part.sent is not None) for part in self._parts)

    @property
    def settled(self) -> bool:
        """Whether the store has confirmed everything."""
        return self.waiting == 0 and all(part.fenced for part in self._parts)

    def add(self, words: Iterable[tuple[OwnedPage, bool]]) -> None:
        """Sorts words by partition."""
        for (page_hash, anchor), owned in words:
            partition, bucket = self.layout.place(anchor)
            self._parts[partition].word(mark_of(page_hash), bucket, owned)

    def retire(self) -> None:
        """From now on the worker owns nothing."""
        for part in self._parts:
            part.new.clear()
            part.gone.update(part.told)
            if part.sent is not None and part.sent.owned:
                for bucket, marks in part.sent.pages.items():
                    part.gone.update(dict.fromkeys(marks, bucket))

    def calls(self, besides: Iterable[int] = ()) -> list[PageCall]:
        """The next call for each partition that needs one, but for those named."""
        left_out = set(besides)
        found: list[PageCall] = []
        for number, part in enumerate(self._parts):
            if number in left_out:
                continue
            if not part.fenced:
                found.append(PageCall("fence", number, (), (self.slot, self.epoch)))
            elif (batch := part.take()) is not None:
                groups = tuple(pack_group(bucket, marks) for bucket, marks in batch.pages.items())
                found.append(
                    PageCall(
                        "publish" if batch.owned else "evict",
                        number,
                        tuple(batch.pages),
                        (self.slot, self.epoch, part.seq + 1, *groups),
                    )
                )
        return found

    def answered(self, call: PageCall, answer: list[Any]) -> None:
        """Takes the answer of a call of ``calls``.

        Raises:
            Fenced: everything has to be told afresh, under a later epoch.
        """
        part, word = self._parts[call.partition], answer[0]
        if call.name == "fence" and word in (b"OK", b"SAME"):
            part.fenced = True
        elif call.name != "fence" and word in (b"OK", b"DUP"):
            part.confirm()
        else:
            value = answer[1].decode() if len(answer) > 1 else ""
            known = int(value) if word in (b"FENCED", b"FUTURE") else 0
            reason = f"{word.decode()} {value}".strip()
            raise Fenced(f"{reason} in partition {call.partition}", known)

    def audit_calls(self) -> list[PageCall]:
        """Asks for the row of each partition that nothing is under way to."""
        return [
            PageCall("digest", number, (), (self.slot,))
            for number, part in enumerate(self._parts)
            if part.fenced and part.sent is None
        ]

    def differs(self, call: PageCall, row: Row | None) -> str:
        """How the store's row differs from what it was told, in words; empty if it does not."""
        part = self._parts[call.partition]
        if row is None:
            return f"partition {call.partition} has forgotten the worker"
        here = (self.epoch, part.seq, len(part.told), part.xor)
        there = (row.epoch, row.seq, row.pages, row.xor)
        if here == there:
            return ""
        return f"partition {call.partition} has {there[2]} pages, not {here[2]}, or others"


def digests(layout: Layout, pages: Iterable[OwnedPage]) -> list[tuple[int, int]]:
    """(count, xor) of the pages in each partition."""
    marks: list[set[bytes]] = [set() for _ in range(layout.partitions)]
    for page_hash, anchor in pages:
        marks[layout.place(anchor).partition].add(mark_of(page_hash))
    return [(len(own), xor_of(own)) for own in marks]

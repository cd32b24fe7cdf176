"""The router's view of all partitions: loads them, follows them, and checks them now and then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdmesh.registry.feed import EventsMissing, PartitionFeed, Position, read_position
from pdmesh.registry.index import PrefixIndex
from pdmesh.registry.layout import Layout, Place, Segment, pack_group, unpack_event, unpack_hits
from pdmesh.registry.store import Entries, PageCall, Store, StoreUnavailable
from pdmesh.wire.hashes import PageHash
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

DUMP_BUCKETS = 64
"""Buckets read in one call."""
_DUMPS_AT_A_TIME = 64
"""Calls in one step of loading, so that events are read in between."""

_NOBODY = ("", -1)
Owners = Mapping[int, tuple[str, int]]
"""Slot -> worker and the epoch under which its records count."""


@dataclass
class _Loading:
    feed: PartitionFeed
    left: list[int]


@dataclass
class _Part:
    """A partition: what is known, and what is being read to take its place."""

    feed: PartitionFeed | None = None
    loading: _Loading | None = None
    stale: bool = True
    silent: bool = False
    """It did not answer when it was checked."""


@dataclass
class Partitions:
    """The feeds of a mesh's partitions.

    A partition that missed events is read afresh, it alone, while what was known of it stays in
    use; its stream holds what happens meanwhile.
    """

    store: Store
    layout: Layout
    make_index: Callable[[], PrefixIndex] = PrefixIndex
    _parts: list[_Part] = field(init=False)
    _turn: int = 0

    def __post_init__(self) -> None:
        self._parts = [_Part() for _ in range(self.layout.partitions)]

    @property
    def cold(self) -> int:
        """Partitions that are not loaded, or have to be read afresh."""
        return sum(part.stale for part in self._parts)

    @property
    def behind(self) -> int:
        """The same, and those whose events cannot be read now."""
        return sum(part.stale or part.silent for part in self._parts)

    def forget(self) -> None:
        """All have to be read afresh."""
        for part in self._parts:
            part.stale, part.loading = True, None

    def cursors(self) -> dict[str, str]:
        """Key of a stream -> id of the last event applied."""
        return {
            self.store.keys.page_events(number): part.feed.cursor
            for number, part in enumerate(self._parts)
            if part.feed is not None and not part.stale
        }

    def take(self, found: Mapping[str, Entries]) -> None:
        """Applies events that were read behind the cursors."""
        for number, part in enumerate(self._parts):
            entries = found.get(self.store.keys.page_events(number))
            if not entries or part.feed is None or part.stale:
                continue
            try:
                for entry_id, fields in entries:
                    part.feed.apply(entry_id, unpack_event(fields[b"b"]))
            except EventsMissing as error:
                self._refresh(number, error)

    async def load(self) -> bool:
        """One step of loading what is stale; whether it came on.

        A partition that does not answer stays stale. Raises ConfigError as the store does.
        """
        fresh = [n for n, p in enumerate(self._parts) if p.stale and p.loading is None]
        for number, answer in await self._ask([PageCall("position", number) for number in fresh]):
            position = read_position(answer)
            feed = PartitionFeed(position, self.make_index())
            self._parts[number].loading = _Loading(feed, self.layout.buckets(position.bitmap))
        calls = [
            PageCall("dump", number, tuple(part.loading.left[at : at + DUMP_BUCKETS]))
            for number, part in enumerate(self._parts)
            if part.loading is not None
            for at in range(0, len(part.loading.left), DUMP_BUCKETS)
        ][:_DUMPS_AT_A_TIME]
        done: dict[int, set[int]] = {}
        answers = await self.store.many(calls)
        for call, answer in zip(calls, answers, strict=True):
            loading = self._parts[call.partition].loading
            if loading is not None and not isinstance(answer, StoreUnavailable):
                loading.feed.load(answer)
                done.setdefault(call.partition, set()).update(call.buckets)
        before = self.cold
        for number, part in enumerate(self._parts):
            if part.loading is not None:
                read = done.get(number, set())
                part.loading.left = [b for b in part.loading.left if b not in read]
                if not part.loading.left:
                    part.feed, part.loading = part.loading.feed, None
                    part.stale = part.silent = False
        return self.cold < before or bool(done)

    async def check(self, count: int) -> None:
        """Compares the next ``count`` partitions, in turn, with the store."""
        numbers = {(self._turn + i) % len(self._parts) for i in range(count)}
        self._turn = (self._turn + count) % len(self._parts)
        known = [n for n in sorted(numbers) if not self._parts[n].stale]
        answers = await self._ask([PageCall("position", n) for n in known])
        for number in known:
            self._parts[number].silent = True
        for number, answer in answers:
            self._parts[number].silent = False
            feed = self._parts[number].feed
            assert feed is not None
            try:
                feed.expect(read_position(answer))
            except EventsMissing as error:
                self._refresh(number, error)

    def tidy(self, pages: int) -> None:
        """Clears up to ``pages`` pages of what fenced slots owned, all partitions together."""
        for part in self._parts:
            if part.feed is not None and pages > 0:
                pages = part.feed.tidy(pages)

    def prefixes(self, hashes: Sequence[PageHash], owners: Owners) -> dict[str, int]:
        """Worker -> how many leading pages of a prompt it owns, if any."""
        walk = _Walk(owners)
        for segment in self.layout.segments(hashes):
            feed = self._parts[segment.place.partition].feed
            if feed is None:
                break
            if not walk.step(feed.match(segment.marks), len(segment.marks)):
                break
        return walk.pages

    async def lookup(self, hashes: Sequence[PageHash], owners: Owners) -> dict[str, int]:
        """The same, asked of the store in one round trip."""
        segments = list(self.layout.segments(hashes))
        walk = _Walk(owners)
        answers = await self.store.many([lookup_call(segment) for segment in segments])
        for segment, answer in zip(segments, answers, strict=True):
            hits = () if isinstance(answer, StoreUnavailable) else unpack_hits(answer)
            if not walk.step(hits, len(segment.marks)):
                break
        return walk.pages

    async def _ask(self, calls: Sequence[PageCall]) -> list[tuple[int, Any]]:
        answers = await self.store.many(calls)
        return [
            (call.partition, answer)
            for call, answer in zip(calls, answers, strict=True)
            if not isinstance(answer, StoreUnavailable)
        ]

    def _refresh(self, number: int, error: EventsMissing) -> None:
        event(log, "partition_behind", partition=number, reason=error)
        self._parts[number].stale, self._parts[number].loading = True, None


class _Walk:
    """Adds up segments from the first on: who owns all so far goes on."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._going: set[int] | None = None
        self._before = 0
        self.pages: dict[str, int] = {}

    def step(self, hits: Iterable[tuple[int, int, int]], size: int) -> bool:
        """(slot, epoch, leading pages) of the next segment. Whether anybody owns all of it."""
        owners, going, pages, before = self._owners, self._going, self.pages, self._before
        whole: set[int] = set()
        for slot, epoch, count in hits:
            if going is not None and slot not in going:
                continue
            worker, current = owners.get(slot, _NOBODY)
            if epoch != current:
                continue
            pages[worker] = before + count
            if count == size:
                whole.add(slot)
        self._going = whole
        self._before += size
        return bool(whole)


def lookup_call(segment: Segment) -> PageCall:
    """Asks the store who owns the leading pages of a segment."""
    place: Place = segment.place
    return PageCall(
        "lookup", place.partition, (place.bucket,), (pack_group(place.bucket, segment.marks),)
    )


def dump_calls(number: int, position: Position, layout: Layout) -> list[PageCall]:
    """Reads all live records of a partition."""
    buckets = layout.buckets(position.bitmap)
    return [
        PageCall("dump", number, tuple(buckets[at : at + DUMP_BUCKETS]))
        for at in range(0, len(buckets), DUMP_BUCKETS)
    ]

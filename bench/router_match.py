"""Pages and their owners for a measurement of indexes, and the index to compare with."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from router_mesh import FORMAT, LARGE, Listed

from pdmesh.registry.feed import PartitionFeed, Position
from pdmesh.registry.index import PrefixIndex
from pdmesh.registry.layout import Layout, Row, joined
from pdmesh.registry.partitions import Partitions
from pdmesh.registry.store import Store
from pdmesh.wire.messages import PoolStatus, Role, WorkerRecord, WorkerStatus

PARTITIONS = 16
"""Of a mesh, unless its store's URL says otherwise."""
WORKERS = 64
"""Of each role."""
PROMPT_PAGES = 64


@dataclass(frozen=True)
class Chain:
    """A prompt's pages, and how many of them each worker owns."""

    pages: list[bytes]
    depths: dict[int, int]

    def cut(self, rng: random.Random) -> Chain:
        """A prompt that begins like this one; from a random page on it is new."""
        known = rng.randrange(len(self.pages))
        new = [rng.randbytes(16) for _ in self.pages[known:]]
        depths = {slot: min(depth, known) for slot, depth in self.depths.items()}
        return Chain([*self.pages[:known], *new], {s: d for s, d in depths.items() if d})


def chains(pages: int, rng: random.Random) -> Iterator[Chain]:
    """Prompts until ``pages`` different pages are owned by somebody."""
    made = 0
    for number in range(pages):
        if made >= pages:
            return
        count = rng.randint(1, WORKERS) if number % 8 == 0 else 1
        owners = rng.sample(range(WORKERS), count)
        depths = {slot: rng.randint(1, PROMPT_PAGES) for slot in owners}
        made += max(depths.values())
        yield Chain([rng.randbytes(16) for _ in range(PROMPT_PAGES)], depths)


class Followed:
    """What a running router knows of a mesh: a feed with an index for each partition."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        """Of the workers, by their slots."""
        rows = {slot: Row(1, 1, 0, 0, 0) for slot in range(len(names))}
        self._layout = Layout(PARTITIONS)
        self._feeds = [
            PartitionFeed(Position("0-0", rows, b""), PrefixIndex()) for _ in range(PARTITIONS)
        ]
        self._partitions = Partitions(cast("Store", None), self._layout)
        for part, feed in zip(self._partitions._parts, self._feeds, strict=True):
            part.feed, part.stale = feed, False
        self._owners = {slot: (name, 1) for slot, name in enumerate(names)}

    def apply(self, slot: int, pages: Sequence[bytes]) -> None:
        for segment in self._layout.segments(pages):
            self._feeds[segment.place.partition].load([slot, joined(segment.marks)])

    def match(self, pages: Sequence[bytes]) -> dict[str, int]:
        return self._partitions.prefixes(pages, self._owners)


class Registered(Listed):
    """A registry over the partitions of a running router."""

    def __init__(self, records: Sequence[WorkerRecord], followed: Followed) -> None:
        super().__init__(records)
        self._followed = followed

    def owned_prefixes(self, hashes: Sequence[bytes]) -> dict[str, int]:
        return self._followed.match(hashes)


class Learnt(Registered):
    """A registry in which the pages of a prompt are owned, from when they are asked for, by a
    prefill worker and a decode worker in turn."""

    def __init__(self, records: Sequence[WorkerRecord]) -> None:
        super().__init__(records, Followed([record.worker_id for record in records]))
        slots = range(len(records))
        self._roles = [
            [slot for slot in slots if records[slot].role == role] for role in ("prefill", "decode")
        ]
        self._asked = 0

    def owned_prefixes(self, hashes: Sequence[bytes]) -> dict[str, int]:
        found = super().owned_prefixes(hashes)
        self._asked += 1
        for slots in self._roles:
            self._followed.apply(slots[self._asked % len(slots)], hashes)
        return found


def radix_tree(directory: Path | None) -> Callable[[], Any] | None:
    """Dynamo's, or None where it cannot be imported."""
    if directory is not None:
        sys.path.append(str(directory))
    try:
        tree: Callable[[], Any] = importlib.import_module("dynamo._core").RadixTree
    except (ImportError, AttributeError):
        return None
    return tree


class Beside:
    """Dynamo's tree of prefixes, told the same; its hashes are 64 bits wide."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._events = 0

    def apply(self, slot: int, pages: Sequence[bytes]) -> None:
        keys = self.key(pages)
        blocks = [{"block_hash": key, "tokens_hash": key} for key in keys]
        self._events += 1
        stored = {"stored": {"parent_hash": None, "blocks": blocks}}
        told = {"event_id": self._events, "data": stored}
        self._tree.apply_event(slot, json.dumps(told).encode())

    @staticmethod
    def key(pages: Sequence[bytes]) -> list[int]:
        return [int.from_bytes(page[:8], "little") >> 1 for page in pages]

    def match(self, keys: list[int]) -> dict[int, int]:
        found = self._tree.find_matches(keys).scores
        return {worker[0]: depth for worker, depth in found.items()}


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def record(role: Role, number: int) -> WorkerRecord:
    """Two workers of each role stand on one host."""
    return WorkerRecord(
        worker_id=f"{role}-{number}",
        instance=f"instance-{role}-{number}",
        role=role,
        address=f"10.0.0.{number // 2}:{7000 + number}",
        page_format=FORMAT,
        model="tiny",
        vocab_size=4096,
        max_context=LARGE,
        capacity_pages=100_000,
    )


def status_of(known: WorkerRecord) -> WorkerStatus:
    """Of a worker that is half full."""
    pool = PoolStatus(
        total=100_000, free=50_000, reserved=0, used=10_000, cached=40_000, quarantined=0
    )
    return WorkerStatus(
        worker_id=known.worker_id,
        instance=known.instance,
        role=known.role,
        state="ready",
        page_format=known.page_format,
        pool=pool,
        queued=1,
        running=2,
    )

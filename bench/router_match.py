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

from pdmesh.registry.feed import PartitionFeed, Position
from pdmesh.registry.index import PrefixIndex
from pdmesh.registry.layout import Layout, Row, joined
from pdmesh.registry.partitions import Partitions
from pdmesh.registry.store import Store
from pdmesh.wire.messages import WorkerRecord

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


class Registered:
    """A registry over the partitions of a running router."""

    def __init__(self, records: Sequence[WorkerRecord], followed: Followed) -> None:
        self._records = list(records)
        self._followed = followed

    def workers(self) -> list[WorkerRecord]:
        return self._records

    def draining(self) -> list[WorkerRecord]:
        return []

    def owned_prefixes(self, hashes: Sequence[bytes]) -> dict[str, int]:
        return self._followed.match(hashes)

    def mark_lost(self, instance: str) -> None:
        raise NotImplementedError


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

"""Pages of one hash hold one content, wherever they are."""

from __future__ import annotations

from zlib import crc32

from pdmesh.simulation.workers import SimWorker


class Contents:
    """The content first seen under each hash; every other page of that hash has to equal it."""

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}

    def check(self, worker: SimWorker) -> list[str]:
        """What is wrong in a worker's prefix cache, one sentence each."""
        problems: list[str] = []
        for page_hash, entry in worker.kv._cache._entries.items():
            found = crc32(worker.pages.bytes_of(entry.page, first=entry.parent is None))
            if self._known.setdefault(page_hash, found) != found:
                problems.append(
                    f"{worker.process}: cached page {entry.page} differs from others of its hash"
                )
        return problems

"""Which of a worker's pages other workers have too: asked now and then, off everybody's way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from pdmesh.registry.layout import Layout, mark_of, pack_group
from pdmesh.registry.ledger import BATCH_PAGES
from pdmesh.registry.store import PageCall, Store, StoreUnavailable, end_task
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import OwnedPage, PageHash
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

PERIOD_S = 5.0


def copies_calls(
    layout: Layout, pages: Iterable[OwnedPage]
) -> list[tuple[PageCall, list[PageHash]]]:
    """The calls that count the owners of these pages: one a partition for each ``BATCH_PAGES``.

    Beside each call the pages in the order of its answer, a byte a page.
    """
    parts: dict[int, list[tuple[int, PageHash]]] = {}
    for page_hash, anchor in pages:
        partition, bucket = layout.place(anchor)
        parts.setdefault(partition, []).append((bucket, page_hash))
    calls = []
    for partition, found in parts.items():
        for at in range(0, len(found), BATCH_PAGES):
            groups: dict[int, list[PageHash]] = {}
            for bucket, page_hash in found[at : at + BATCH_PAGES]:
                groups.setdefault(bucket, []).append(page_hash)
            args = tuple(pack_group(b, map(mark_of, own)) for b, own in groups.items())
            call = PageCall("copies", partition, tuple(groups), args)
            calls.append((call, [page for own in groups.values() for page in own]))
    return calls


class ReplicaWatch:
    """Tells a worker's cache which of its pages have a copy elsewhere.

    What the store does not answer is not known; what was known is left to grow old.

    Args:
        store: of the mesh.
        layout: how its pages are spread.
        coming: the pages to ask about; empty if nobody needs to know.
        learn: takes those of them that have several live owners.
    """

    def __init__(
        self,
        store: Store,
        layout: Callable[[], Layout],
        coming: Callable[[], Sequence[OwnedPage]],
        learn: Callable[[Iterable[PageHash]], None],
    ) -> None:
        self._store = store
        self._layout = layout
        self._coming = coming
        self._learn = learn

    async def run(self) -> None:
        """Asks every ``PERIOD_S`` seconds, more or less."""
        while True:
            await asyncio.sleep(PERIOD_S * (0.75 + secrets.randbelow(500) / 1000))
            await self.ask()

    async def ask(self) -> None:
        """Asks once; a store that is away is asked again the next time."""
        pages = self._coming()
        if not pages:
            return
        asked = copies_calls(self._layout(), pages)
        try:
            answers = await self._store.many([call for call, _ in asked])
        except (StoreUnavailable, ConfigError) as error:
            answers = [StoreUnavailable(str(error))] * len(asked)
        shared: list[PageHash] = []
        failed: StoreUnavailable | None = None
        for (_, own), answer in zip(asked, answers, strict=True):
            if isinstance(answer, StoreUnavailable):
                failed = answer
            else:
                shared += [page for page, count in zip(own, answer, strict=True) if count > 1]
        if failed is not None:
            event(log, "copies_unknown", logging.DEBUG, error=failed)
        if failed is None or shared:
            self._learn(shared)
            event(log, "copies_known", logging.DEBUG, asked=len(pages), shared=len(shared))


@contextlib.asynccontextmanager
async def watching_replicas(
    url: str,
    mesh: str,
    layout: Callable[[], Layout],
    coming: Callable[[], Sequence[OwnedPage]],
    learn: Callable[[Iterable[PageHash]], None],
) -> AsyncIterator[None]:
    """A ``ReplicaWatch`` in the background, with a connection of its own.

    Raises:
        ConfigError: the URL is wrong.
    """
    store = Store(url, mesh)
    watch = ReplicaWatch(store, layout, coming, learn)
    task = asyncio.create_task(watch.run(), name="replica-watch")
    try:
        yield
    finally:
        await end_task(task)
        await store.close()

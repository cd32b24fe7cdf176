"""A worker asks the store which of its pages others have too."""

import asyncio
import secrets
from hashlib import blake2b

import pytest
from store_rig import record, until

from pdmesh.kvcache.replicas import ReplicaHints
from pdmesh.registry import replicas
from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.layout import Layout
from pdmesh.registry.ledger import BATCH_PAGES
from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.replicas import ReplicaWatch, copies_calls, watching_replicas
from pdmesh.registry.store import Store
from pdmesh.wire.hashes import OwnedPage, placed


def chain(name: str, length: int) -> list[OwnedPage]:
    return placed([blake2b(f"{name} {i}".encode(), digest_size=16).digest() for i in range(length)])


@pytest.fixture(scope="module")
def server():
    store = EmbeddedStore()
    store.start()
    yield store
    store.stop()


class Mesh:
    """Leases of one mesh and what they publish, and a client of its own."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, secrets.token_hex(4)
        self.store = Store(url, self.name)
        self.leases: list[WorkerLease] = []

    async def worker(self, *pages: OwnedPage) -> WorkerLease:
        lease = WorkerLease(self.url, self.name, record(f"decode-{len(self.leases)}"))
        self.leases.append(lease)
        await lease.start()
        await lease.ready()
        lease.publish(pages)
        await until(lambda: lease.settled, "published")
        return lease

    def watch(self, lease: WorkerLease, *pages: OwnedPage, store=None):
        hints = ReplicaHints()
        store = store or self.store
        return hints, ReplicaWatch(store, lambda: lease.layout, lambda: pages, hints.learn)


@pytest.fixture
async def mesh(server):
    found = Mesh(server.url)
    yield found
    for lease in found.leases:
        await lease.close()
    await found.store.close()


def hashes(*pages: OwnedPage) -> set[bytes]:
    return {page.page_hash for page in pages}


async def test_pages_of_two_workers_are_known_as_such_and_last_copies_are_not(mesh):
    shared, alone = chain("shared", 40), chain("alone", 40)
    lease = await mesh.worker(*shared, *alone)
    other = await mesh.worker(*shared, *chain("elsewhere", 9))
    hints, watch = mesh.watch(lease, *shared, *alone)
    await watch.ask()
    assert hints() == hashes(*shared)
    other.evict(shared[20:])
    await until(lambda: other.settled, "evicted")
    await watch.ask()
    assert hints() == hashes(*shared[:20])


async def test_a_copy_of_a_worker_that_left_does_not_count(mesh):
    pages = chain("shared", 20)
    lease, other = await mesh.worker(*pages), await mesh.worker(*pages)
    hints, watch = mesh.watch(lease, *pages)
    await watch.ask()
    assert hints() == hashes(*pages)
    await other.close()
    await watch.ask()
    assert hints() == frozenset()


async def test_pages_that_the_store_does_not_know_yet_are_last_copies(mesh):
    pages = chain("new", 20)
    lease = await mesh.worker()
    hints, watch = mesh.watch(lease, *pages)
    await watch.ask()
    assert hints() == frozenset()


async def test_a_store_that_is_away_leaves_the_hints_as_they_were(mesh):
    pages = chain("shared", 20)
    lease = await mesh.worker(*pages)
    await mesh.worker(*pages)
    hints, watch = mesh.watch(lease, *pages)
    await watch.ask()
    away = Store("redis://127.0.0.1:1", mesh.name)
    watch._store = away
    await watch.ask()
    assert hints() == hashes(*pages)
    await away.close()


async def test_with_nothing_to_ask_nobody_is_asked(mesh):
    lease = await mesh.worker()
    hints, watch = mesh.watch(lease, store=object())
    await watch.ask()
    assert hints() == frozenset()


async def test_it_asks_again_and_again_and_ends_with_its_worker(mesh, monkeypatch):
    monkeypatch.setattr(replicas, "PERIOD_S", 0.01)
    pages, hints = chain("shared", 20), ReplicaHints()
    lease = await mesh.worker(*pages)
    around = watching_replicas(
        mesh.url, mesh.name, lambda: lease.layout, lambda: pages, hints.learn
    )
    async with around:
        await mesh.worker(*pages)
        await until(lambda: hints() == hashes(*pages), "the copies are learnt")
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "replica-watch"]


def test_one_call_a_partition_and_batch_with_every_page_once():
    layout = Layout(4)
    pages = [page for i in range(300) for page in chain(str(i), 16)]
    calls = copies_calls(layout, pages)
    asked = [page for _, own in calls for page in own]
    assert len(asked) == len(set(asked)) == len(pages)
    for call, own in calls:
        assert len(own) <= BATCH_PAGES
        assert {layout.place(anchor).partition for h, anchor in pages if h in own} == {
            call.partition
        }
    partitions = [call.partition for call, _ in calls]
    assert len(partitions) <= 4 * (1 + len(pages) // 4 // BATCH_PAGES + 1)
    assert copies_calls(layout, []) == []

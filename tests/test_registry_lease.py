"""Workers' leases and the router's view of them, over a real server that comes and goes."""

import asyncio
import functools
import os
import secrets
import signal
import time
from hashlib import blake2b

import pytest

from pdmesh.registry.client import RegistryView
from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.feed import read_position
from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.store import PageCall, Store, StoreUnavailable, end_task, read_members
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import SEGMENT_PAGES, OwnedPage, PageFormat, placed
from pdmesh.wire.messages import PROTOCOL_VERSION, WorkerRecord

FORMAT = PageFormat("tiny", "w", "float32", 64, 7, 1, 576)
FOR_EVER = 3600.0
LEASE_S = 3.0
"""Of a worker that a test sees renew: longer than a busy machine lets a process stand still."""
PATIENCE = 60.0


def record(
    worker_id: str = "decode-0", instance: str = "a", protocol: int = PROTOCOL_VERSION
) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        instance=instance,
        role="decode",
        address="127.0.0.1:1",
        page_format=FORMAT,
        model="tiny",
        vocab_size=16,
        max_context=64,
        capacity_pages=8,
        protocol=protocol,
    )


def pages(*numbers: int) -> list[bytes]:
    return [blake2b(str(number).encode(), digest_size=16).digest() for number in numbers]


class Pool:
    """What a worker owns, and its lease told of each change. Page n follows page n - 1."""

    def __init__(self) -> None:
        self.owned: dict[int, OwnedPage] = {}
        self.places: dict[int, tuple[int, int]] = {}
        self.lease: WorkerLease | None = None

    def publish(self, *numbers: int) -> None:
        for n in numbers:
            depth, anchor = self.places.get(n - 1, (-1, n))
            depth += 1
            self.places[n] = depth, anchor if depth % SEGMENT_PAGES else n
            self.owned[n] = OwnedPage(*pages(n, self.places[n][1]))
        self.lease.publish([self.owned[n] for n in numbers])

    def evict(self, *numbers: int) -> None:
        self.lease.evict([self.owned.pop(n) for n in numbers])


async def until(condition, what: str) -> None:
    """Asks again and again; only a failure takes long."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(what)


class World:
    """One store, its leases and views; all are closed at the end."""

    def __init__(self, server: EmbeddedStore) -> None:
        self.server = server
        self.mesh = secrets.token_hex(4)
        self.opened: list = []

    def worker(self, rec: WorkerRecord | None = None, **options) -> WorkerLease:
        lease = WorkerLease(self.server.url, self.mesh, rec or record(), **options)
        self.opened.append(lease)
        return lease

    async def ready_worker(self, rec: WorkerRecord | None = None, **options) -> WorkerLease:
        lease = self.worker(rec, **options)
        await lease.start()
        await lease.ready()
        return lease

    async def ready_pool(self, **options) -> Pool:
        pool = Pool()
        pool.lease = await self.ready_worker(snapshot=lambda: list(pool.owned.values()), **options)
        return pool

    async def view(self, **options) -> RegistryView:
        view = RegistryView(self.server.url, self.mesh, **options)
        self.opened.append(view)
        await view.start()
        return view

    async def wipe(self) -> None:
        store = Store(self.server.url, self.mesh)
        await store.execute("FLUSHALL")
        await store.close()

    async def keys(self) -> set[str]:
        store = Store(self.server.url, self.mesh)
        found = await store.execute("KEYS", f"*{{{self.mesh}:*")
        await store.close()
        return {key.decode() for key in found}


@pytest.fixture
async def world(monkeypatch):
    monkeypatch.setattr("pdmesh.registry.client._FIRST_SNAPSHOT_S", PATIENCE)
    server = EmbeddedStore()
    server.start()
    world = World(server)
    yield world
    for thing in reversed(world.opened):
        await thing.close()
    server.stop()


async def records(store: Store) -> int:
    """How many live records the store counts."""
    layout = (await store.roster()).layout
    calls = [PageCall("position", number) for number in range(layout.partitions)]
    found = [read_position(answer) for answer in await store.many(calls)]
    return sum(row.pages for position in found for row in position.rows.values())


def names(view: RegistryView) -> list[str]:
    return [worker.worker_id for worker in view.workers()]


async def test_a_worker_is_seen_from_ready_to_drain(world):
    view = await world.view()
    lease = world.worker()
    await lease.start()
    follower = world.worker(record("decode-1"))
    await follower.start()
    await follower.ready()
    await until(lambda: names(view) == ["decode-1"], "a joining worker is no candidate")
    await lease.ready()
    await until(lambda: names(view) == ["decode-0", "decode-1"], "both are ready")
    assert view.workers()[0] == record()
    await lease.drain()
    await until(lambda: names(view) == ["decode-1"], "a draining worker is no candidate")


async def test_a_closed_worker_leaves_no_key(world):
    pool = await world.ready_pool()
    view = await world.view()
    pool.publish(1, 2)
    await until(lambda: view.owned_prefix("decode-0", pages(1, 2)) == 2, "published")
    await pool.lease.close()
    world.opened.remove(pool.lease)
    await until(lambda: names(view) == [], "gone at once")
    assert not [key for key in await world.keys() if "decode-0" in key]


async def test_the_owned_prefix_follows_publish_and_evict(world):
    pool = await world.ready_pool()
    view = await world.view()
    pool.publish(1, 2, 3)
    await until(lambda: view.owned_prefix("decode-0", pages(1, 2, 3)) == 3, "all three")
    assert view.owned_prefix("decode-0", pages(1, 9)) == 1
    assert view.owned_prefix("decode-0", pages(9)) == 0
    assert view.owned_prefix("nobody", pages(1)) == 0
    pool.evict(3, 2)
    await until(lambda: view.owned_prefix("decode-0", pages(1, 2, 3)) == 1, "two are gone")


async def test_a_view_that_starts_late_reads_what_was_published_before(world):
    pool = await world.ready_pool()
    pool.publish(*range(1_500))
    await until(lambda: pool.lease.settled, "sent")
    view = await world.view()
    await until(lambda: view.owned_prefix("decode-0", pages(*range(1_500))) == 1_500, "all")


async def test_pages_may_be_published_from_another_thread(world):
    pool = await world.ready_pool()
    view = await world.view()
    await asyncio.to_thread(pool.publish, 1, 2)
    await until(lambda: view.owned_prefix("decode-0", pages(1, 2)) == 2, "both")


async def test_a_dead_worker_disappears_after_its_lease(world):
    lease = await world.ready_worker(ttl_s=0.3)
    view = await world.view()
    await until(lambda: names(view) == ["decode-0"], "it is there")
    await lease.stop()  # the process stops to renew, as a killed one does
    await until(lambda: names(view) == [], "the view drops it")
    for _ in range(6000):
        if not [key for key in await world.keys() if "decode-0" in key]:
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("a key of the dead worker remains")


async def test_a_renewed_lease_lasts(world):
    lease = await world.ready_worker(ttl_s=LEASE_S)
    store = Store(world.server.url, world.mesh)
    epoch, first = lease.epoch, await store.execute("PTTL", store.keys.worker("decode-0"))
    highest = first
    for _ in range(6000):
        left = await store.execute("PTTL", store.keys.worker("decode-0"))
        assert left > 0
        if left > highest + 50:
            break
        highest = min(highest, left)
        await asyncio.sleep(0.01)
    else:
        pytest.fail("the lease was never renewed")
    assert lease.epoch == epoch
    await store.close()


async def test_a_fenced_worker_registers_again_and_publishes_everything_it_owns(world):
    pool = await world.ready_pool(ttl_s=LEASE_S)
    view = await world.view()
    pool.publish(1, 2, 3)
    pool.evict(3)
    await until(lambda: view.owned_prefix("decode-0", pages(1, 2)) == 2, "published")
    before = pool.lease.epoch
    store = Store(world.server.url, world.mesh)
    await store.execute("DEL", store.keys.worker("decode-0"))
    await until(lambda: pool.lease.epoch > before, "a new epoch")
    await until(lambda: pool.lease.settled, "sent")
    await until(lambda: view.owned_prefix("decode-0", pages(1, 2)) == 2, "published again")
    assert await records(store) == 2
    assert names(view) == ["decode-0"]
    await store.close()


async def test_an_overflowing_queue_ends_in_a_new_epoch_with_the_whole_truth(world):
    pool = await world.ready_pool(queue_limit=10)
    view = await world.view()
    pool.publish(1, 2, 3)
    await until(lambda: view.owned_prefix("decode-0", pages(1, 2, 3)) == 3, "published")
    before = pool.lease.epoch
    pool.evict(2)
    pool.publish(*range(100, 150))
    await until(lambda: pool.lease.epoch > before, "a new epoch")
    everything = pages(*range(100, 150))
    await until(lambda: view.owned_prefix("decode-0", everything) == 50, "all are told")
    assert view.owned_prefix("decode-0", pages(1, 2)) == 1
    assert names(view) == ["decode-0"]


async def test_a_new_process_takes_the_name_over_and_the_old_one_does_not_take_it_back(world):
    old = await world.ready_worker(record(instance="a"), ttl_s=LEASE_S)
    view = await world.view()
    new = await world.ready_worker(record(instance="b"), ttl_s=LEASE_S)
    await until(lambda: [w.instance for w in view.workers()] == ["b"], "the new one is seen")
    await until(lambda: not old.connected, "the old one is refused")
    epoch = new.epoch
    for _ in range(20):
        await asyncio.sleep(0.02)
        assert [w.instance for w in view.workers()] == ["b"]
    assert new.epoch == epoch


async def test_the_view_keeps_the_last_membership_while_the_store_is_down(world):
    pool = await world.ready_pool()
    view = await world.view()
    pool.publish(1)
    await until(lambda: view.owned_prefix("decode-0", pages(1)) == 1, "published")
    world.server.stop()
    await until(lambda: not view.connected, "the loss is noticed")
    assert names(view) == ["decode-0"]
    assert view.owned_prefix("decode-0", pages(1)) == 1
    pool.publish(2)  # nothing is lost meanwhile
    world.server.start()
    await until(lambda: view.connected, "the return is noticed")
    await until(lambda: view.owned_prefix("decode-0", pages(1, 2)) == 2, "all is told again")
    assert names(view) == ["decode-0"]


@pytest.mark.parametrize("how", ["wiped", "restarted"])
async def test_a_worker_stays_a_candidate_through_a_loss_of_all_data(world, how):
    pool = await world.ready_pool(ttl_s=LEASE_S)
    view = await world.view(grace_s=FOR_EVER)
    pool.publish(1)
    await until(lambda: view.owned_prefix("decode-0", pages(1)) == 1, "published")
    before = pool.lease.epoch
    if how == "wiped":
        await world.wipe()
    else:
        world.server.stop()
        world.server.start()

    def still_there() -> bool:
        assert names(view) == ["decode-0"]
        return pool.lease.epoch > before and view._state._entries["decode-0"].member.epoch > before

    await until(still_there, "registered again")
    await until(lambda: view.owned_prefix("decode-0", pages(1)) == 1, "published again")


async def test_a_worker_that_died_with_the_store_is_dropped_after_the_grace(world):
    now = [0.0]
    lease = await world.ready_worker()
    view = await world.view(grace_s=10.0, clock=lambda: now[0])
    await lease.stop()
    await world.wipe()
    await until(lambda: view._state._entries["decode-0"].keep_until == 10.0, "grace begins")
    assert names(view) == ["decode-0"]
    now[0] = 11.0
    await until(lambda: names(view) == [], "the grace is over")


async def test_a_lost_instance_gets_nothing_more_until_another_takes_its_place(world):
    await world.ready_worker(record(instance="a"))
    view = await world.view(lost_s=FOR_EVER)
    view.mark_lost("a")
    assert names(view) == []
    await world.ready_worker(record("decode-1", instance="x"))
    await until(lambda: names(view) == ["decode-1"], "others are not concerned")
    await world.ready_worker(record(instance="b"))
    await until(lambda: names(view) == ["decode-0", "decode-1"], "the new instance is used")


async def test_an_instance_reported_lost_that_goes_on_renewing_comes_back(world):
    now = [0.0]
    await world.ready_worker(ttl_s=LEASE_S)
    view = await world.view(lost_s=15.0, clock=lambda: now[0])
    view.mark_lost("a")
    now[0] = 14.0
    await until(lambda: view._state.seq >= 0, "")
    assert names(view) == []
    now[0] = 16.0
    await until(lambda: names(view) == ["decode-0"], "it is alive")


async def test_marking_an_unknown_instance_lost_does_nothing(world):
    await world.ready_worker()
    view = await world.view()
    view.mark_lost("nobody")
    assert names(view) == ["decode-0"]


async def test_a_worker_of_another_protocol_is_ignored_and_the_view_goes_on(world):
    view = await world.view()
    await world.ready_worker(record("decode-9", protocol=99))
    await world.ready_worker(record())
    await until(lambda: names(view) == ["decode-0"], "only ours")
    late = await world.view()
    assert names(late) == ["decode-0"]
    await world.ready_worker(record("decode-1"))
    for one in (view, late):
        await until(lambda one=one: names(one) == ["decode-0", "decode-1"], "still following")


async def test_a_worker_waits_for_a_store_that_is_down_at_start(world):
    world.server.stop()
    lease = world.worker()
    starting = asyncio.ensure_future(lease.start())
    await until(lambda: lease._lost, "it has tried")
    assert not starting.done()
    world.server.start()
    await asyncio.wait_for(starting, PATIENCE)
    assert [m.record.worker_id for m in await read_members(world.server.url, world.mesh)]


async def test_a_view_finds_a_store_that_is_down_at_start(world, monkeypatch):
    monkeypatch.setattr("pdmesh.registry.client._FIRST_SNAPSHOT_S", 0.05)
    world.server.stop()
    view = await world.view()
    assert view.workers() == []
    assert not view.connected
    world.server.start()
    await world.ready_worker()
    await until(lambda: names(view) == ["decode-0"], "found")


async def test_a_state_told_while_the_store_was_away_arrives_later(world):
    lease = world.worker(ttl_s=60)
    await lease.start()
    call = lease._store.call

    async def away(*_):
        raise StoreUnavailable("away")

    lease._store.call = away
    await lease.ready()
    assert not lease.connected
    lease._store.call = call
    lease.publish(placed(pages(1)))  # wakes the background task
    view = await world.view()
    await until(lambda: names(view) == ["decode-0"], "it became ready")


class Hindered(Store):
    """A store whose calls a test can hinder, each by name and once: it is given the call."""

    def __init__(self, world: World) -> None:
        super().__init__(world.server.url, world.mesh)
        self.hindered: dict = {}

    async def call(self, name, worker_id, *args):
        ask = functools.partial(super().call, name, worker_id, *args)
        hinder = self.hindered.pop(name, None)
        return await (ask() if hinder is None else hinder(ask))


async def test_a_state_whose_answer_was_lost_may_have_been_heard(world):
    store = Hindered(world)
    lease = await world.ready_worker(store=store, ttl_s=FOR_EVER)
    await lease.stop()  # or it might tell the state a second time

    async def lost(ask):
        await ask()
        raise StoreUnavailable("the answer is lost")

    store.hindered["set_state"] = lost
    await lease.drain()
    await lease.ready()
    assert (await store.member("decode-0")).state == "ready"


async def test_a_state_whose_answer_nobody_waited_for_may_have_been_heard(world):
    store, heard = Hindered(world), asyncio.Event()
    lease = await world.ready_worker(store=store)

    async def unanswered(ask):
        await ask()
        heard.set()
        await asyncio.Event().wait()

    store.hindered["set_state"] = unanswered
    draining = asyncio.ensure_future(lease.drain())
    await heard.wait()
    draining.cancel()
    await asyncio.wait({draining})
    await lease.ready()
    assert (await store.member("decode-0")).state == "ready"


async def test_a_state_that_nobody_waits_for_any_more_is_told_all_the_same(world):
    store, begun = Hindered(world), asyncio.Event()
    lease = await world.ready_worker(store=store)

    async def hinder(ask):
        begun.set()
        await asyncio.Event().wait()

    store.hindered["set_state"] = hinder
    draining = asyncio.ensure_future(lease.drain())
    await begun.wait()
    draining.cancel()
    for _ in range(6000):
        if (await store.member("decode-0")).state == "draining":
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("the store was never told")


async def test_a_store_that_hangs_is_a_store_that_is_away(world):
    view = await world.view()
    lease = WorkerLease(f"{world.server.url}?socket_timeout=0.2", world.mesh, record(), ttl_s=60)
    world.opened.append(lease)
    await lease.start()
    os.kill(world.server.pid, signal.SIGSTOP)
    await lease.ready()
    assert not lease.connected
    os.kill(world.server.pid, signal.SIGCONT)
    await until(lambda: names(view) == ["decode-0"] and lease.connected, "both go on")


async def test_what_a_view_began_last_ends_before_its_connections_are_closed(world):
    view = await world.view()
    await end_task(view._task)

    async def follow():
        try:
            await asyncio.Event().wait()
        finally:  # as where the store's answer came together with the end
            view._keeping = asyncio.ensure_future(asyncio.Event().wait())

    view._task = asyncio.ensure_future(follow())
    await asyncio.sleep(0)
    await view.close()
    assert view._keeping.cancelled()


@pytest.mark.parametrize("url", ["foo://x", "redis://127.0.0.1:port", "127.0.0.1:6379", ""])
def test_a_wrong_url_is_one_sentence(url):
    with pytest.raises(ConfigError, match="not understood"):
        RegistryView(url, "m")


async def test_a_wrong_password_is_one_sentence_without_the_password(world):
    url = f"redis://:secret@127.0.0.1:{world.server.port}"
    view = RegistryView(url, "m")
    with pytest.raises(ConfigError, match="refuses the login") as raised:
        await view.start()
    assert "secret" not in str(raised.value)

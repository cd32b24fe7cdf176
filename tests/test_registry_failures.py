"""What happens to leases, page lists and routers when real servers and workers fail."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from child_path import python_path
from cluster_rig import cluster, move_slot
from store_rig import Churn, Crowd, Proxy, record, until

from pdmesh.registry.client import RegistryView
from pdmesh.registry.keys import Keys
from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.store import Store, read_members

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = [1, pytest.param(5, marks=pytest.mark.full)]


@pytest.fixture
async def proxies():
    made = []

    async def make(port: int) -> Proxy:
        made.append(await Proxy(port).start())
        return made[-1]

    yield make
    for proxy in made:
        await proxy.close()


async def busy_for(crowd: Crowd, changes: int = 60) -> None:
    """Lets the workers change what they own, and checks that nobody is lost meanwhile."""
    before = sum(churn.steps for churn in crowd.churns.values())
    while sum(churn.steps for churn in crowd.churns.values()) < before + changes:
        crowd.never_without_workers()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_a_promoted_replica_that_lacks_the_last_writes_is_brought_up_to_date(
    servers, proxies, rounds
):
    primary = servers("a0")
    proxy = await proxies(primary.port)
    async with Crowd(proxy.url) as crowd:
        for number in range(rounds):
            replica = servers(f"a{number + 1}")
            replica.do("REPLICAOF", "127.0.0.1", primary.port)
            await asyncio.to_thread(
                replica.wait, lambda r=replica: r.info()["master_link_status"] == "up", "link"
            )
            await busy_for(crowd)
            replica.do("REPLICAOF", "NO", "ONE")  # from now on it misses what is written
            await busy_for(crowd)
            primary.kill()
            proxy.target, primary = replica.port, replica
            proxy.cut()
            await busy_for(crowd)
        await crowd.converges()


async def test_a_primary_that_stays_up_as_a_replica_is_left_for_the_new_one(servers, proxies):
    """Nobody closes the old connections: they answer that they may only be read."""
    old, new = servers("a"), servers("b")
    new.do("REPLICAOF", "127.0.0.1", old.port)
    await asyncio.to_thread(new.wait, lambda: new.info()["master_link_status"] == "up", "link")
    proxy = await proxies(old.port)
    async with Crowd(proxy.url) as crowd:
        await busy_for(crowd)
        epochs = {name: churn.lease.epoch for name, churn in crowd.churns.items()}
        before = proxy.opened
        new.do("REPLICAOF", "NO", "ONE")
        proxy.target = new.port
        old.do("REPLICAOF", "127.0.0.1", new.port)
        await busy_for(crowd)
        await until(lambda: proxy.opened >= before + 3, "workers and router connect afresh")
        await crowd.converges()
        assert new.info()["role"] == "master"
        assert all(churn.lease.connected for churn in crowd.churns.values())
        found = await read_members(new.url, crowd.mesh)
        assert {m.record.worker_id: m.epoch for m in found} == {
            name: churn.lease.epoch for name, churn in crowd.churns.items()
        }
        assert all(churn.lease.epoch >= epochs[name] for name, churn in crowd.churns.items())


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_a_loss_of_all_data_is_made_good(servers, rounds):
    server = servers("a")
    async with Crowd(server.url) as crowd:
        for _ in range(rounds):
            await busy_for(crowd)
            server.do("FLUSHALL")
            await busy_for(crowd)
        await crowd.converges()


@pytest.mark.parametrize("lost", ["rows", "a bucket", "an event stream", "functions"])
async def test_a_loss_of_a_part_is_found_by_the_audit_and_made_good(servers, lost):
    server = servers("a")
    async with Crowd(server.url, audit_s=0.3) as crowd:
        await busy_for(crowd)
        keys = Keys(crowd.mesh)
        if lost == "functions":
            server.do("FUNCTION", "FLUSH")
        elif lost == "a bucket":
            await crowd.rest()
            await until(lambda: all(c.lease.settled for c in crowd.churns.values()), "settled")
            bucket = next(k for k in server.do("KEYS", f"pdmesh:{{{crowd.mesh}:*") if b":b:" in k)
            rows = bucket.split(b":b:")[0] + b":dg"
            server.do("DEL", bucket, rows)
        else:
            server.do("DEL", *(keys.partition(n)[lost == "an event stream"] for n in range(16)))
        await crowd.converges()


@pytest.mark.parametrize(
    ("delay", "timeout"), [(1.0, 0.2), pytest.param(5.0, 3.0, marks=pytest.mark.full)]
)
async def test_a_slow_store_costs_hits_and_no_worker(servers, proxies, delay, timeout):
    proxy = await proxies(servers("a").port)
    async with Crowd(f"{proxy.url}?socket_timeout={timeout}") as crowd:
        (view,) = crowd.views
        await busy_for(crowd)
        proxy.delay = delay
        await until(lambda: not view.connected, "the delay is noticed")
        crowd.never_without_workers()
        assert not view.warm
        hashes, _ = crowd.churns["decode-0"].prompts()[0]
        assert await view.lookup(hashes, budget_s=0.003) == {}
        await busy_for(crowd)
        proxy.delay = 0.0
        await crowd.converges()
        crowd.never_without_workers()


async def test_a_store_that_is_gone_leaves_the_last_membership(servers, proxies):
    proxy = await proxies(servers("a").port)
    async with Crowd(proxy.url) as crowd:
        await busy_for(crowd)
        proxy.open = False
        proxy.cut()
        await until(lambda: not crowd.views[0].connected, "noticed")
        await busy_for(crowd, 200)
        proxy.open = True
        await crowd.converges()


async def test_a_worker_whose_clock_jumps_keeps_its_lease_and_its_pages(servers):
    server, jump = servers("a"), [0.0]
    loop = asyncio.get_running_loop()
    async with Crowd(server.url, clock=lambda: loop.time() + jump[0]) as crowd:
        epochs = {name: churn.lease.epoch for name, churn in crowd.churns.items()}
        for step in (120.0, 0.0, -120.0, 0.0):
            jump[0] = step
            for _ in range(3):  # longer than a lease
                await asyncio.sleep(0.5)
                crowd.never_without_workers()
            await busy_for(crowd)
        await crowd.converges()
        assert epochs == {name: churn.lease.epoch for name, churn in crowd.churns.items()}


async def test_of_two_workers_of_one_name_the_later_one_stays(servers):
    server = servers("a")
    async with Crowd(server.url, ("decode-0",)) as crowd:
        await busy_for(crowd)
        first = crowd.churns["decode-0"]
        second = Churn(99)
        second.lease = WorkerLease(
            server.url, crowd.mesh, record("decode-0"), snapshot=second.snapshot, ttl_s=1.0
        )
        await second.lease.start()
        await second.lease.ready()
        crowd.churns["decode-0"] = second
        for _ in range(50):
            first.step()
            await asyncio.sleep(0.005)
        await until(lambda: not first.lease.connected, "the first is refused")
        await busy_for(crowd)
        await crowd.converges()
        view = crowd.views[0]
        assert [r.instance for r in view.workers()] == [second.lease.record.instance]
        assert all(view.owned_prefixes(hashes) == {} for hashes, _ in first.prompts())
        await first.lease.close()


class Process:
    """A worker in a process of its own."""

    def __init__(self, url: str, mesh: str, seed: int) -> None:
        program = [sys.executable, "-P", str(ROOT / "tests" / "registry_worker.py")]
        environment = {**os.environ, "PYTHONPATH": python_path("tests")}
        self.prompts = Churn(seed).prompts
        self.process = subprocess.Popen(
            [*program, url, mesh, "decode-0", str(seed)], env=environment
        )

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def names(view: RegistryView) -> list[str]:
    return [worker.worker_id for worker in view.workers()]


async def roster(url: str, mesh: str) -> list[str]:
    return [member.record.worker_id for member in await read_members(url, mesh)]


@pytest.fixture
async def watched(servers):
    server = servers("a")
    view = RegistryView(server.url, "m")
    await view.start()
    processes: list[Process] = []

    def start(seed: int) -> Process:
        processes.append(Process(server.url, "m", seed))
        return processes[-1]

    yield server, view, start
    for process in processes:
        process.end()
    await view.close()


def known(view: RegistryView, seed: int) -> int:
    """How many prompts of a worker process with this seed the router knows an owner of."""
    return sum(bool(view.owned_prefixes(hashes)) for hashes in fixed_prompts(seed))


def in_use(view: RegistryView, seed: int) -> bool:
    """Whether the router knows all of them, and that the worker is ready, which it tells later."""
    return known(view, seed) == 20 and names(view) == ["decode-0"]


def fixed_prompts(seed: int) -> list[tuple[bytes, ...]]:
    from registry_worker import prompts

    return [tuple(page.page_hash for page in chain) for chain in prompts(seed)]


async def test_a_worker_that_is_stopped_for_three_leases_is_left_and_found_again(watched):
    server, view, start = watched
    process = start(1)
    await until(lambda: in_use(view, 1), "all is known")
    instance = view.workers()[0].instance
    process.signal(signal.SIGSTOP)
    await until(lambda: names(view) == [], "its lease ends")
    assert await roster(server.url, "m") == []
    assert known(view, 1) == 0, "no page leads to a dead owner"
    await asyncio.sleep(2.0)
    process.signal(signal.SIGCONT)
    await until(lambda: in_use(view, 1), "all is known again")
    assert [w.instance for w in view.workers()] == [instance], "the process is the same"


async def test_a_worker_that_restarts_under_its_name_has_its_own_pages_only(watched):
    _, view, start = watched
    process = start(1)
    await until(lambda: in_use(view, 1), "all is known")
    process.end()
    start(2)
    await until(lambda: in_use(view, 2), "all of the second is known")
    assert known(view, 1) == 0


async def test_a_killed_worker_leaves_no_route_and_its_records_are_fenced(watched):
    server, view, start = watched
    process = start(1)
    await until(lambda: in_use(view, 1), "all is known")
    process.end()
    await until(lambda: names(view) == [], "its lease ends")
    assert known(view, 1) == 0
    store = Store(server.url, "m")

    async def fenced() -> bool:
        return not (await store.roster()).dead

    await until(fenced, "a router fences the slot")
    await store.close()


@pytest.mark.parametrize("partitions", [8, pytest.param(64, marks=pytest.mark.full)])
async def test_a_cluster_moves_its_slots_while_workers_publish(servers, partitions):
    nodes = cluster(servers, 2)
    url = f"{nodes[0].url}?cluster=true&partitions={partitions}"
    async with Crowd(url, ttl_s=5.0) as crowd:
        await busy_for(crowd)
        keys = Keys(crowd.mesh)
        tags = [keys.events, *(keys.page_events(n) for n in range(partitions))]
        slots = {int(nodes[0].do("CLUSTER", "KEYSLOT", key)) for key in tags}
        first = {slot for slot in slots if slot < 8_192}
        assert first
        assert slots - first
        for slot in first:
            await asyncio.to_thread(move_slot, slot, nodes[0], nodes[1])
        await busy_for(crowd)
        for slot in slots:
            await asyncio.to_thread(move_slot, slot, nodes[1], nodes[0])
        late = await crowd.watch()
        await busy_for(crowd)
        await crowd.converges()
        assert names(late) == ["decode-0", "decode-1"]

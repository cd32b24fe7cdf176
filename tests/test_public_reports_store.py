"""Faults of registries that users of other systems reported, tried on real servers and leases.

docs/testing.md lists them all.
"""

import asyncio
import contextlib
import secrets
from hashlib import blake2b

import pytest
from store_rig import Churn, Crowd, record, until

from pdmesh.registry.client import RegistryView
from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.layout import Layout, mark_of, pack_group
from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.store import PageCall, Store, read_members
from pdmesh.wire.codec import encode
from pdmesh.wire.hashes import OwnedPage, placed

LAYOUT = Layout(16)


def chain(name: str, length: int) -> list[OwnedPage]:
    return placed([blake2b(f"{name} {i}".encode(), digest_size=16).digest() for i in range(length)])


def hashes(pages: list[OwnedPage]) -> tuple[bytes, ...]:
    return tuple(page.page_hash for page in pages)


@pytest.fixture(scope="module")
def server():
    store = EmbeddedStore()
    store.start()
    yield store
    store.stop()


class Mesh:
    """Leases, a router's view and a plain client of one mesh."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, secrets.token_hex(4)
        self.store = Store(url, self.name)
        self.view = RegistryView(url, self.name)
        self.leases: list[WorkerLease] = []

    async def worker(self, name: str = "decode-0", pages=(), **options) -> WorkerLease:
        lease = WorkerLease(
            self.url, self.name, record(name), snapshot=lambda: list(pages), **options
        )
        self.leases.append(lease)
        await lease.start()
        await lease.ready()
        return lease

    def instances(self) -> list[str]:
        return [worker.instance for worker in self.view.workers()]

    async def claim(self, instance: str, ttl_ms: int = 60_000) -> bytes:
        """Asks for the name decode-0 without taking it from anybody alive."""
        own = encode(record("decode-0", instance))
        rest = (ttl_ms, "ready", 0, "candidate", LAYOUT.name, 0)
        answer = await self.store.call("register", "decode-0", instance, own, *rest)
        return answer[0]


@pytest.fixture
async def mesh(server):
    found = Mesh(server.url)
    await found.view.start()
    yield found
    for lease in found.leases:
        await lease.close()
    await found.view.close()
    await found.store.close()


# ---- sgl-project/sglang#39822: the index credited a worker with what it had before it died ------


async def test_a_worker_that_comes_back_empty_is_credited_with_nothing(mesh):
    """It had 200 pages, was killed, and is back before its lease ended."""
    prompts = [chain(f"prompt {i}", 20) for i in range(10)]
    old = await mesh.worker(pages=[page for pages in prompts for page in pages], ttl_s=60)
    await until(
        lambda: all(mesh.view.owned_prefix("decode-0", hashes(p)) == 20 for p in prompts), "known"
    )
    await old.stop()
    new = await mesh.worker(ttl_s=60)
    await until(lambda: mesh.instances() == [new.record.instance], "the new process is seen")
    for pages in prompts:
        assert mesh.view.owned_prefixes(hashes(pages)) == {}
        assert await mesh.view.lookup(hashes(pages), budget_s=30) == {}
    new.publish(prompts[0][:3])
    await until(lambda: mesh.view.owned_prefix("decode-0", hashes(prompts[0])) == 3, "its own")


async def test_a_batch_of_evictions_goes_on_behind_an_absent_page_and_may_be_repeated(mesh):
    """As ai-dynamo/dynamo#14652: the batch ended at the first page that was not there."""
    first, absent, last = pages = chain("batch", 3)
    store, place = mesh.store, LAYOUT.place(pages[0].anchor)

    async def change(name: str, seq: int, *own: OwnedPage):
        group = pack_group(place.bucket, [mark_of(page.page_hash) for page in own])
        call = PageCall(name, place.partition, (place.bucket,), (5, 10, seq, group))
        return (await store.one(call))[0]

    async def owners() -> list[int]:
        group = pack_group(place.bucket, [mark_of(page.page_hash) for page in pages])
        return list(await store.one(PageCall("copies", *place[:1], place[1:], (group,))))

    await store.one(PageCall("fence", place.partition, (), (5, 10)))
    assert await change("publish", 1, first, last) == b"OK"
    assert await owners() == [1, 0, 1]
    assert await change("evict", 2, first, absent, last) == b"OK"
    assert await owners() == [0, 0, 0]
    assert await change("evict", 2, first, absent, last) == b"DUP"
    assert await change("evict", 3, first, absent, last) == b"OK"
    assert await owners() == [0, 0, 0]


# ---- llm-d/llm-d-router#1737: lost events were not noticed, late ones undid later ones ---------


class Unreliable(Store):
    """A way to the store on which calls about pages get lost, come twice, or come late as well."""

    def __init__(self, url: str, mesh: str) -> None:
        super().__init__(url, mesh)
        self.fates: list[str] = []
        self.late: list[PageCall] = []

    async def many(self, calls):
        answers = await super().many(calls)
        for call, fate in zip(calls, self.fates, strict=False):
            if call.name in ("publish", "evict"):
                self.late += [call] * (fate == "late")
                if fate == "twice":
                    await super().many([call])
        self.fates = self.fates[len(calls) :]
        return answers


async def test_a_late_copy_of_an_old_word_undoes_no_later_one(mesh):
    store = Unreliable(mesh.url, mesh.name)
    pages = chain("chat", 30)
    owned = list(pages[:5])
    lease = await mesh.worker(pages=owned, ttl_s=60, store=store)
    await until(lambda: lease.settled, "told")
    store.fates = ["late", "twice"] * 20
    lease.publish(pages[5:])
    await until(lambda: lease.settled, "published")
    lease.evict(pages[20:])
    await until(lambda: lease.settled, "evicted")
    assert store.late
    answers = await Store.many(store, store.late)
    assert {answer[0] for answer in answers} == {b"DUP"}
    await until(lambda: mesh.view.owned_prefix("decode-0", hashes(pages)) == 20, "known")
    assert await mesh.view.lookup(hashes(pages), budget_s=30) == {"decode-0": 20}


async def test_a_word_that_the_store_has_lost_is_missed_at_the_next_comparison(mesh):
    pages = chain("chat", 30)
    lease = await mesh.worker(pages=pages, ttl_s=60, audit_s=0.2)
    await until(lambda: lease.settled, "told")
    keys = {mesh.store.keys.partition(LAYOUT.place(page.anchor).partition)[0] for page in pages}
    await mesh.store.execute("DEL", keys.pop())
    assert await mesh.view.lookup(hashes(pages), budget_s=30) != {"decode-0": 30}
    await until(lambda: mesh.view.owned_prefix("decode-0", hashes(pages)) == 30, "made good")

    async def found() -> bool:
        return await mesh.view.lookup(hashes(pages), budget_s=30) == {"decode-0": 30}

    await until(found, "in the store too")


# ---- redis/redis-py#818: a claim for ever, and a release of another's claim --------------------


class Dead(BaseException):
    """The process is gone."""


class Mortal(Store):
    """A way to the store of a process that dies before one of its commands, or after it."""

    def __init__(self, url: str, mesh: str, lives: int, after: bool) -> None:
        super().__init__(url, mesh)
        self.lives, self.after, self.sent = lives, after, 0

    async def execute(self, *command):
        return await self._send(super().execute(*command))

    async def many(self, calls):
        return await self._send(super().many(calls))

    async def _send(self, sending):
        self.sent += 1
        if self.sent < self.lives:
            return await sending
        if self.after and self.sent == self.lives:
            await sending
        else:
            sending.close()
        raise Dead


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("lives", [1, 2, 3, 4])
async def test_a_claim_whose_owner_died_between_any_two_commands_ends_with_its_lease(
    mesh, lives, after
):
    store = Mortal(mesh.url, mesh.name, lives, after)
    lease = WorkerLease(mesh.url, mesh.name, record("decode-0"), ttl_s=0.3, store=store)
    with contextlib.suppress(Dead):
        await lease.start()
        await lease.ready()
        lease.publish(chain("its", 3))
        await until(lambda: any(task.done() for task in lease._tasks), "it dies")
    await lease.stop()
    assert store.sent >= lives
    await Store.close(store)

    async def claimed() -> bool:
        return await mesh.claim("another") == b"OK"

    await until(claimed, "the name is free again")
    (member,) = await read_members(mesh.url, mesh.name)
    assert member.record.instance == "another"


async def test_of_many_that_claim_a_name_at_once_one_has_it(mesh):
    answers = await asyncio.gather(*(mesh.claim(f"i{i}") for i in range(20)))
    assert sorted(answers) == [b"OK"] + [b"TAKEN"] * 19


async def test_a_worker_that_slept_past_its_lease_neither_renews_nor_releases_the_next_ones(mesh):
    first = await mesh.worker(ttl_s=0.3)
    await first.stop()  # it sleeps

    async def claimed() -> bool:
        return await mesh.claim("second") == b"OK"

    await until(claimed, "its lease ends")
    for name, rest in (("renew", (300,)), ("set_state", (300, "draining")), ("deregister", ())):
        answer = await mesh.store.call(name, "decode-0", first.epoch, *rest)
        assert answer[0] == b"FENCED"
    await first.close()
    await until(lambda: mesh.instances() == ["second"], "the claim of the second stands")
    (member,) = await read_members(mesh.url, mesh.name)
    assert (member.record.instance, member.state) == ("second", "ready")


# ---- kagkarlsson/db-scheduler#433: leases judged by comparing the clocks of two machines -------


async def test_clocks_two_minutes_fast_and_slow_change_no_lease_and_a_dead_one_ends(server):
    loop = asyncio.get_running_loop()
    async with Crowd(server.url) as crowd:
        for name, step in (("fast-0", 120.0), ("slow-0", -120.0)):
            churn = crowd.churns[name] = Churn(len(name))
            churn.lease = WorkerLease(
                server.url,
                crowd.mesh,
                record(name),
                snapshot=churn.snapshot,
                ttl_s=1.0,
                clock=lambda step=step: loop.time() + step,
            )
            await churn.lease.start()
            await churn.lease.ready()
        (view,) = crowd.views
        await until(lambda: len(view.workers()) == 4, "all are there")
        epochs = {name: churn.lease.epoch for name, churn in crowd.churns.items()}
        end = loop.time() + 2.5  # more than two leases
        while loop.time() < end:
            crowd.never_without_workers()
            await asyncio.sleep(0.02)
        assert epochs == {name: churn.lease.epoch for name, churn in crowd.churns.items()}
        fast = crowd.churns.pop("fast-0")
        await fast.lease.stop()
        await until(lambda: len(view.workers()) == 3, "the dead one goes")
        await crowd.converges()
        await fast.lease.close()

"""A worker process around its work: how it ends, on a signal and on a fault."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager, suppress

import pytest

from pdmesh.registry import host
from pdmesh.registry.draining import Life, Workload, counted
from pdmesh.registry.host import Binding, host_worker
from pdmesh.wire.errors import ConfigError, Draining, PdmeshError, Unavailable
from pdmesh.wire.handoff import DrainRequest
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import Empty, PoolStatus, WorkerRecord, WorkerStatus
from pdmesh.wire.rpc import Client, Method


class FakeLease:
    """Notes what is asked of it; ``refuses`` as a store with another password would."""

    def __init__(self, refuses=False):
        self.refuses = refuses
        self.calls = []
        self.is_ready = asyncio.Event()
        self.draining = asyncio.Event()
        self.drained = asyncio.Event()
        self.drained.set()

    async def start(self):
        if self.refuses:
            raise ConfigError("the store refuses the login")
        self.calls.append("start")

    async def ready(self):
        self.calls.append("ready")
        self.is_ready.set()

    async def drain(self):
        self.calls.append("drain")
        self.draining.set()
        await self.drained.wait()

    async def close(self):
        self.calls.append("close")


class Worker:
    """A hosted worker with one endless stream and a loop that may be told to die."""

    def __init__(self, refuses=False, port=0, drain_s=60.0):
        self.answers = 0
        self.handed_back = []
        self.reserving = asyncio.Event()
        self.withdrawn = asyncio.Event()
        self.lease = FakeLease(refuses)
        self.address = ""
        self.die = asyncio.Event()
        self.streams_cut = 0
        self.loop_ended = False
        self.finished = False
        self.life = Life()
        methods = [
            Method("Endless", Empty, stream=self.endless),
            Method("Status", Empty, unary=self.status),
            Method("Reserve", Empty, unary=self.reserve),
            Method("LendPages", Empty, unary=self.lend),
        ]
        work = Workload(lambda: counted(self.answers, "answer"), self.hand_back)
        self.running = asyncio.ensure_future(
            host_worker(
                Binding("127.0.0.1", port),
                methods,
                self.run,
                self.make,
                self.finish,
                self.life,
                work,
                drain_s,
            )
        )

    async def reserve(self, _):
        self.reserving.set()
        await self.withdrawn.wait()
        raise self.handed_back[0]

    async def lend(self, _):
        return Empty()

    def hand_back(self, error):
        self.handed_back.append(error)
        self.withdrawn.set()

    async def endless(self, _):
        try:
            yield Empty()
            await asyncio.Event().wait()
        finally:
            self.streams_cut += 1

    async def status(self, _):
        fmt, record = PageFormat("m", "w", "float32", 64, 1, 0, 1), self.make(self.address)[0]
        pool = PoolStatus(total=1, free=1, reserved=0, used=0, cached=0, quarantined=0)
        return WorkerStatus(
            worker_id=record.worker_id,
            instance=record.instance,
            role="decode",
            state=self.life.state,
            page_format=fmt,
            pool=pool,
            queued=0,
            running=0,
        )

    async def run(self):
        try:
            await self.die.wait()
            raise RuntimeError("the books are wrong")
        finally:
            self.loop_ended = True

    async def finish(self):
        self.finished = True

    def make(self, address):
        self.address = address
        fmt = PageFormat("m", "w", "float32", 64, 1, 0, 1)
        record = WorkerRecord(
            worker_id="decode-0",
            instance="i",
            role="decode",
            address=address,
            page_format=fmt,
            model="m",
            vocab_size=1,
            max_context=1,
            capacity_pages=1,
        )
        return record, self.lease


@asynccontextmanager
async def closing(client):
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(autouse=True)
def _short_drain(monkeypatch):
    monkeypatch.setattr(host, "GRACE_S", 0.1)


async def first_message(worker):
    """A client in the middle of an endless stream."""
    client = Client(worker.address, "decode")
    stream = client.stream("Endless", Empty(), Empty)
    await anext(stream)
    return client, stream


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_cuts_what_does_not_end_and_deregisters(number):
    worker = Worker()
    await worker.lease.is_ready.wait()
    client, stream = await first_message(worker)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(worker.running, 50)  # not the whole time to drain
    assert worker.lease.calls == ["start", "ready", "drain", "close"]
    assert (worker.streams_cut, worker.loop_ended, worker.finished) == (1, True, True)
    with pytest.raises(PdmeshError):
        await anext(stream)
    await client.close()


async def test_a_worker_says_that_it_starts_is_ready_and_drains():
    worker = Worker()
    assert worker.life.state == "starting"
    await worker.lease.is_ready.wait()
    await asyncio.sleep(0)
    worker.lease.drained.clear()
    async with closing(Client(worker.address, "decode")) as client:
        assert (await client.unary("Status", Empty(), WorkerStatus, timeout=30)).state == "ready"
        os.kill(os.getpid(), signal.SIGTERM)
        await worker.lease.draining.wait()
        assert (await client.unary("Status", Empty(), WorkerStatus, timeout=30)).state == "draining"
        worker.lease.drained.set()
    await asyncio.wait_for(worker.running, 180)


async def test_a_worker_ends_though_its_registration_takes_no_notice_of_that_at_first():
    worker, begun = Worker(), asyncio.Event()

    async def start():
        begun.set()
        with suppress(asyncio.CancelledError):  # as a wait of Python 3.11 may, once
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    worker.lease.start = start
    await begun.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(worker.running, 30)
    assert worker.lease.calls == ["close"]


@asynccontextmanager
async def serving(**options):
    """A worker that is ready, and a client of it; the worker is ended afterwards."""
    worker = Worker(**options)
    await worker.lease.is_ready.wait()
    async with closing(Client(worker.address, "decode")) as client:
        yield worker, client
        worker.answers = 0
        if not worker.running.done():
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(worker.running, 180)


def ask(client, method, request=None, answer=Empty):
    return client.unary(method, request or Empty(), answer, timeout=30)


async def test_after_sigterm_a_worker_lends_pages_but_takes_nothing_new_until_nothing_is_left():
    async with serving() as (worker, client):
        worker.answers = 2
        os.kill(os.getpid(), signal.SIGTERM)
        await worker.lease.draining.wait()
        with pytest.raises(Draining, match="decode-0 is draining"):
            await ask(client, "Reserve")
        assert not worker.reserving.is_set()  # the worker itself is not even asked
        await ask(client, "LendPages")
        assert not worker.running.done()
        worker.answers = 0
        await asyncio.wait_for(worker.running, 180)
        assert worker.lease.calls == ["start", "ready", "drain", "close"]


async def test_a_worker_with_nothing_left_refuses_by_name_before_it_ends(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("pdmesh.registry.host.SEEN_S", 60.0)
    async with serving() as (worker, client):
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            while not any(r.getMessage() == "drained" for r in caplog.records):
                await asyncio.sleep(0.01)
        with pytest.raises(Draining, match="decode-0 is draining"):
            await ask(client, "Reserve")
        os.kill(os.getpid(), signal.SIGTERM)  # routers may not have heard, and it ends at once
        await asyncio.wait_for(worker.running, 180)


async def test_what_waits_at_a_draining_worker_is_handed_back_with_the_same_error():
    async with serving() as (worker, client):
        waiting = asyncio.ensure_future(ask(client, "Reserve"))
        await worker.reserving.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Draining, match="decode-0 is draining"):
            await waiting
        await asyncio.wait_for(worker.running, 180)


async def test_draining_ends_when_its_time_is_over(caplog):
    caplog.set_level("INFO")
    async with serving(drain_s=0.2) as (worker, _):
        worker.answers = 3
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(worker.running, 180)
    cut = next(r.fields for r in caplog.records if r.getMessage() == "drain_cut")
    assert (cut["left"], cut["reason"]) == ("3 answers", "0.2 s are over")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_draining(number):
    async with serving() as (worker, _):
        worker.answers = 1
        os.kill(os.getpid(), signal.SIGTERM)
        await worker.lease.draining.wait()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(worker.running, 180)
        assert worker.finished


async def test_a_worker_that_is_asked_to_drain_stays_and_can_be_taken_back():
    async with serving() as (worker, client):
        for _ in range(2):  # asking twice changes nothing
            status = await ask(client, "Drain", DrainRequest(), WorkerStatus)
            assert status.state == "draining"
        with pytest.raises(Draining):
            await ask(client, "Reserve")
        assert not worker.reserving.is_set()
        worker.lease.is_ready.clear()
        assert (await ask(client, "Undrain", answer=WorkerStatus)).state == "ready"
        assert worker.lease.is_ready.is_set()
        again = asyncio.ensure_future(ask(client, "Reserve"))
        await worker.reserving.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Draining):
            await again
        await asyncio.wait_for(worker.running, 180)


async def test_a_worker_that_is_ending_cannot_be_taken_back():
    async with serving() as (worker, client):
        worker.answers = 1
        os.kill(os.getpid(), signal.SIGTERM)
        await worker.lease.draining.wait()
        with pytest.raises(Unavailable, match="cannot be undone"):
            await ask(client, "Undrain", answer=WorkerStatus)


async def test_a_worker_that_was_asked_to_drain_ends_at_sigterm_when_it_is_empty(caplog):
    async with serving() as (worker, client):
        worker.answers = 1
        await ask(client, "Drain", DrainRequest(reason="upgrade"), WorkerStatus)
        os.kill(os.getpid(), signal.SIGTERM)
        await ask(client, "LendPages")
        assert not worker.running.done()
        worker.answers = 0
        await asyncio.wait_for(worker.running, 180)
        assert worker.lease.calls == ["start", "ready", "drain", "close"]


async def test_a_dead_loop_ends_the_worker_with_its_error():
    worker = Worker()
    await worker.lease.is_ready.wait()
    client, stream = await first_message(worker)
    worker.die.set()
    with pytest.raises(RuntimeError, match="the books are wrong"):
        await asyncio.wait_for(worker.running, 180)
    assert worker.streams_cut == 1
    assert worker.lease.calls[-1] == "close"
    await stream.aclose()
    await client.close()


async def test_a_store_that_refuses_ends_the_worker_with_a_sentence():
    worker = Worker(refuses=True)
    with pytest.raises(ConfigError, match="refuses the login"):
        await asyncio.wait_for(worker.running, 180)
    assert worker.loop_ended
    assert worker.lease.calls == ["close"]


async def test_a_taken_port_is_named():
    first = Worker()
    await first.lease.is_ready.wait()
    port = int(first.address.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        await Worker(port=port).running
    os.kill(os.getpid(), signal.SIGTERM)
    await first.running

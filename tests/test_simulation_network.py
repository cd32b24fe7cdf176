"""Calls over the simulated network: what arrives, when, and what the errors say."""

import asyncio
import random

import pytest

from pdmesh.simulation.loop import Process, VirtualLoop
from pdmesh.simulation.network import KEEPALIVE_S, Network, SimClient
from pdmesh.wire.errors import DeadlineExceeded, InternalError, Overloaded, WorkerLost
from pdmesh.wire.messages import Empty, ReleaseRequest
from pdmesh.wire.rpc import Method


class Bench:
    """A client process and a server process, and what the server was asked."""

    def __init__(self):
        self.loop = VirtualLoop(random.Random(3))
        self.network = Network(self.loop, random.Random(4), lambda *_, **__: None)
        self.client, self.server = Process("client"), Process("server")
        self.asked, self.cancelled = [], []
        for process in (self.client, self.server):
            self.network.join(process)
        methods = [
            Method("Release", ReleaseRequest, unary=self.release),
            Method("Stream", ReleaseRequest, stream=self.stream),
        ]
        self.network.serve(self.server, "host:1", "decode", methods)

    async def release(self, request):
        self.asked.append(request.reason)
        if request.reason == "full":
            raise Overloaded("no room")
        if request.reason == "broken":
            raise KeyError("x")
        if request.reason == "slow":
            try:
                await asyncio.sleep(100.0)
            except asyncio.CancelledError:
                self.cancelled.append(self.loop.time())
                raise
        return Empty()

    async def stream(self, request):
        for number in range(3):
            await asyncio.sleep(1.0)
            yield ReleaseRequest(lease_id=str(number), reason=request.reason)
        raise Overloaded("no more")

    def run(self, work):
        """Runs ``work(client)`` in the client's process."""

        async def main():
            return await work(SimClient(self.network, "host:1", "decode"))

        task = self.loop.spawn(self.client, main())
        try:
            return self.loop.run_until_complete(task)
        finally:
            self.loop.abandon()


def ask(client, reason, timeout=None):
    request = ReleaseRequest(lease_id="a", reason=reason)
    return client.unary("Release", request, Empty, timeout=timeout)


def test_a_call_is_answered_and_takes_time():
    bench = Bench()
    assert bench.run(lambda client: ask(client, "done")) == Empty()
    assert bench.asked == ["done"]
    assert bench.loop.time() > 0


def test_an_error_comes_out_as_the_class_it_was():
    with pytest.raises(Overloaded, match="no room"):
        Bench().run(lambda client: ask(client, "full"))


def test_a_handler_that_breaks_is_an_internal_error_and_is_noted():
    bench = Bench()
    with pytest.raises(InternalError):
        bench.run(lambda client: ask(client, "broken"))
    assert "KeyError" in bench.network.problems[0]


def test_a_stream_gives_its_items_in_order_and_then_its_error():
    seen = []

    async def work(client):
        request = ReleaseRequest(lease_id="a", reason="r")
        async for item in client.stream("Stream", request, ReleaseRequest):
            seen.append(item.lease_id)

    with pytest.raises(Overloaded):
        Bench().run(work)
    assert seen == ["0", "1", "2"]


def test_a_call_that_takes_too_long_ends_at_both_ends():
    bench = Bench()

    async def work(client):
        with pytest.raises(DeadlineExceeded):
            await ask(client, "slow", timeout=5.0)
        await asyncio.sleep(1.0)

    bench.run(work)
    assert len(bench.cancelled) == 1
    assert bench.cancelled[0] == pytest.approx(5.0, abs=0.1)


def test_a_caller_that_leaves_ends_the_handler():
    bench = Bench()

    async def work(client):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(client, "slow"), 2.0)
        await asyncio.sleep(1.0)

    bench.run(work)
    assert bench.cancelled[0] == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("end", ["kill", "cut"])
def test_calls_are_lost_with_the_connection(end):
    bench = Bench()

    async def work(client):
        if end == "kill":
            bench.loop.call_later(3.0, bench.loop.kill, bench.server)
        else:
            bench.loop.call_later(3.0, bench.network.cut, "client", "server", "reset")
        with pytest.raises(WorkerLost):
            await ask(client, "slow")
        assert bench.loop.time() == pytest.approx(3.0, abs=0.1)
        if end == "kill":
            with pytest.raises(WorkerLost, match="refused"):
                await ask(client, "done")
        else:
            await ask(client, "done")
            assert bench.cancelled

    bench.run(work)


def test_a_short_partition_delays_and_a_long_one_ends_the_connection():
    bench = Bench()

    async def work(client):
        await ask(client, "first")
        bench.network.partition("client", "server", 5.0)
        await ask(client, "second")
        assert bench.loop.time() == pytest.approx(5.0, abs=0.1)
        begun = bench.loop.time()
        bench.network.partition("client", "server", 100.0)
        with pytest.raises(WorkerLost):
            await ask(client, "third")
        assert bench.loop.time() - begun >= KEEPALIVE_S

    bench.run(work)


def test_a_paused_server_answers_when_it_goes_on():
    bench = Bench()

    async def work(client):
        bench.loop.pause(bench.server)
        bench.loop.call_later(7.0, bench.loop.resume, bench.server)
        await ask(client, "done")

    bench.run(work)
    assert bench.loop.time() == pytest.approx(7.0, abs=0.1)

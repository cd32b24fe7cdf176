"""Channels to workers: kept while anything may still be said over them."""

import asyncio

import pytest
import router_fakes as fakes

from pdmesh.router import clients
from pdmesh.router.clients import PRUNE_LOOKS, WorkerClients
from pdmesh.wire.errors import DeadlineExceeded, WorkerLost
from pdmesh.wire.messages import Empty, WorkerStatus
from pdmesh.wire.rpc import Client


class Channel:
    def __init__(self):
        self.calls, self.closed = 0, False

    async def close(self):
        assert not self.calls, "a call is cut"
        self.closed = True


def clients_of(*records):
    made = {}

    def connect(address, service):
        return made.setdefault(address, Channel())

    opened = WorkerClients(connect)
    for record in records:
        opened.decode(record)
    return opened, [made[record.address] for record in records]


async def look(opened, times, alive=(), busy=()):
    for _ in range(times):
        await opened.prune(alive, lambda instance: instance in busy)


async def test_a_channel_is_closed_when_its_worker_has_been_gone_for_a_while():
    here, gone = fakes.FakeWorker("a", "decode"), fakes.FakeWorker("b", "decode")
    for number, worker in enumerate((here, gone)):
        worker.address = f"10.0.0.{number}:1"
    records = [worker.record() for worker in (here, gone)]
    opened, (stays, goes) = clients_of(*records)
    await look(opened, PRUNE_LOOKS - 1, [records[0].instance])
    assert not goes.closed
    await look(opened, 1, [record.instance for record in records])  # it was only away
    await look(opened, PRUNE_LOOKS - 1, [records[0].instance])
    assert not goes.closed
    await look(opened, 1, [records[0].instance])
    assert goes.closed
    assert not stays.closed


async def test_a_channel_with_a_call_or_a_booking_is_left_open():
    worker = fakes.FakeWorker("a", "decode")
    worker.address = "10.0.0.1:1"
    opened, (channel,) = clients_of(worker.record())
    channel.calls = 1
    await look(opened, 3 * PRUNE_LOOKS)
    channel.calls = 0
    await look(opened, 3 * PRUNE_LOOKS, busy=[worker.instance])
    assert not channel.closed
    await look(opened, 1)
    assert channel.closed


async def test_a_release_reaches_a_worker_that_has_left_the_registry(tmp_path):
    async with fakes.mesh(tmp_path, decode=1, poll_interval=0.005) as mesh:
        (worker,) = mesh.decode
        begun = worker.wait_in("Release")
        asking = asyncio.create_task(mesh.chat(max_tokens=3))
        await asyncio.wait_for(begun.wait(), 30)
        gone = [r for r in mesh.registry.records if r.instance == worker.instance]
        mesh.registry.records.remove(*gone)
        await asyncio.sleep(0.005 * 4 * PRUNE_LOOKS)
        worker.hold["Release"].set()
        await asking
        async with asyncio.timeout(60):
            while worker.leases:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), WorkerLost("reset")])
async def test_a_release_that_does_not_get_through_is_tried_again(tmp_path, error, monkeypatch):
    """A worker that stood still for longer than a call may last has freed nothing."""
    monkeypatch.setattr(clients, "RELEASE_WAITS", (0.01, 0.01))
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        (worker,) = mesh.decode
        worker.fail["Release"] = [error, error]
        await mesh.chat(max_tokens=3)
        async with asyncio.timeout(60):
            while worker.leases:
                await asyncio.sleep(0.005)
        assert len(worker.released) == 1
        assert worker.fail["Release"] == []


async def test_a_router_that_ends_tries_a_release_once(tmp_path, monkeypatch):
    monkeypatch.setattr(clients, "RELEASE_WAITS", (1000.0,))
    async with asyncio.timeout(60), fakes.mesh(tmp_path, decode=1) as mesh:
        (worker,) = mesh.decode
        worker.fail["Release"] = [WorkerLost("reset")] * 2
        await mesh.chat(max_tokens=3)
    assert len(worker.fail["Release"]) == 1
    assert worker.released == []


async def test_a_call_over_a_channel_that_is_closed_is_a_lost_worker():
    client = Client("127.0.0.1:1", "decode")
    await client.close()
    with pytest.raises(WorkerLost, match="127.0.0.1:1, Status: not connected"):
        await client.unary("Status", Empty(), WorkerStatus, timeout=5)
    with pytest.raises(WorkerLost, match="127.0.0.1:1, Stream: not connected"):
        async for _ in client.stream("Stream", Empty(), WorkerStatus, timeout=5):
            pass
    assert client.calls == 0

"""Requests wait at a full decode worker, keep their place, and leave without a trace."""

import asyncio

import grpc
import pytest
import router_fakes as fakes

from pdmesh.wire import chat_pb2
from pdmesh.wire.messages import PrefillRequest, ReserveRequest

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def fill(mesh, *workers):
    for worker in workers or mesh.decode:
        worker.full = True


def make_room(worker):
    worker.full = False
    worker.freed.set()


async def waiting(mesh, count=1):
    """Waits until that many requests wait, and returns their worker."""
    async with asyncio.timeout(60):
        while sum(len(w.waiting) for w in mesh.decode) < count:
            await asyncio.sleep(0.005)
    return next(w for w in mesh.decode if w.waiting)


async def test_every_worker_is_asked_before_one_is_waited_at(tmp_path):
    async with fakes.mesh(tmp_path, decode=3) as mesh:
        fill(mesh)
        chat = asyncio.create_task(mesh.chat(max_tokens=3, timeout=60))
        worker = await waiting(mesh)
        asked = [r for w in mesh.decode for r in w.seen(ReserveRequest)]
        assert sorted(r.wait_ms > 0 for r in asked) == [False, False, False, True]
        (request,) = worker.waiting
        assert 50_000 < request.wait_ms < 59_500  # gRPC rounds a timeout up
        assert mesh.router.metrics.value("pdmesh_num_requests_waiting") == 1
        assert mesh.prefill[0].seen(PrefillRequest) == []
        await asyncio.sleep(0.05)
        make_room(worker)
        answer = await chat
        assert answer.reason == "length"
        assert answer.last.timing.queue_ms > 50
        assert mesh.router.metrics.value("pdmesh_num_requests_waiting") == 0
        assert mesh.router.metrics.value("pdmesh_request_queue_time_seconds_sum") > 0.05
        failed = mesh.router.metrics.value("pdmesh_failed_attempts_total", role="decode")
        assert not failed, "want of room is no failure"
        await mesh.at_rest()


async def test_a_worker_with_room_is_not_waited_at(tmp_path):
    async with fakes.mesh(tmp_path, decode=2) as mesh:
        fill(mesh, mesh.decode[0])
        for _ in range(4):
            await mesh.chat(max_tokens=2)
        assert all(r.wait_ms == 0 for w in mesh.decode for r in w.seen(ReserveRequest))


async def test_a_request_that_waits_says_how_long_it_has_waited_and_its_priority(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        fill(mesh)
        request = chat_pb2.ChatRequest(
            prompt_token_ids=[5], priority=7, sampling=chat_pb2.Sampling(max_tokens=2, n=2)
        )
        mesh.decode[0].hold["Reserve"] = asyncio.Event()
        reached = mesh.decode[0].wait_in("Reserve")
        chat = asyncio.create_task(mesh.chat(request))
        await reached.wait()
        await asyncio.sleep(0.1)
        mesh.decode[0].hold["Reserve"].set()
        worker = await waiting(mesh)
        (held,) = worker.waiting
        assert held.waited_ms >= 100
        assert (held.priority, held.n) == (7, 2)
        make_room(worker)
        await chat
        assert mesh.prefill[0].seen(PrefillRequest)[0].priority == 7
        assert mesh.prefill[0].seen(PrefillRequest)[0].waited_ms >= held.waited_ms


async def test_a_worker_that_dies_is_not_waited_at_any_longer(tmp_path):
    async with fakes.mesh(tmp_path, decode=2) as mesh:
        fill(mesh)
        chat = asyncio.create_task(mesh.chat(max_tokens=3, timeout=60))
        worker = await waiting(mesh)
        (first,) = worker.waiting
        (other,) = [w for w in mesh.decode if w is not worker]
        await worker.die()
        async with asyncio.timeout(60):
            while not other.waiting:
                await asyncio.sleep(0.005)
        assert other.waiting[0].waited_ms >= first.waited_ms
        make_room(other)
        assert (await chat).reason == "length"
        await mesh.at_rest()


async def test_where_no_worker_lets_it_wait_the_client_is_told_at_once(tmp_path):
    async with fakes.mesh(tmp_path, decode=2) as mesh:
        fill(mesh)
        for worker in mesh.decode:
            worker.queue_full = True
        error = await mesh.error(fakes.ask(max_tokens=3), timeout=60)
        assert error.code() is EXHAUSTED
        assert error.details() == "all room is taken: 2 decode workers are full; retry later"
        assert [len(w.seen(ReserveRequest)) for w in mesh.decode] == [2, 2]
        assert mesh.outcome("overloaded") == 1
        await mesh.at_rest()


async def test_one_full_queue_leads_to_the_next_worker(tmp_path):
    async with fakes.mesh(tmp_path, decode=2) as mesh:
        fill(mesh)
        mesh.decode[0].queue_full = True
        chat = asyncio.create_task(mesh.chat(max_tokens=3))
        worker = await waiting(mesh)
        assert worker is mesh.decode[1]
        make_room(worker)
        assert (await chat).reason == "length"


async def test_the_wait_ends_before_the_deadline_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("pdmesh.router.run.WAIT_GRACE", 60.0)
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        fill(mesh)
        error = await mesh.error(fakes.ask(max_tokens=3), timeout=61)
        assert error.code() is EXHAUSTED
        error = await mesh.error(fakes.ask(max_tokens=3), timeout=50)  # no time to wait at all
        assert error.code() is EXHAUSTED
        assert mesh.decode[0].seen(ReserveRequest)[-1].wait_ms == 0
        await mesh.at_rest()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_while_it_waits_is_taken_out_of_the_queue(tmp_path, n):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        fill(mesh)
        call = mesh.stub.StreamChat(fakes.ask(max_tokens=3, n=n), timeout=60)
        worker = await waiting(mesh)
        call.cancel()
        async with asyncio.timeout(60):
            while worker.waiting:
                await asyncio.sleep(0.005)
        assert len(worker.withdrawn) == 1
        make_room(worker)
        await mesh.at_rest()
        assert worker.leases == set()
        assert mesh.router.metrics.value("pdmesh_num_requests_waiting") == 0
        assert (await mesh.chat(max_tokens=2)).reason == "length"


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_as_room_comes_leaves_no_lease_behind(tmp_path, n):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        fill(mesh)
        call = mesh.stub.StreamChat(fakes.ask(max_tokens=3, n=n), timeout=60)
        worker = await waiting(mesh)
        withdrawing = worker.wait_in("Release")
        call.cancel()
        async with asyncio.timeout(60):
            await withdrawing.wait()
        make_room(worker)
        async with asyncio.timeout(60):
            while len(worker.leases) < n:
                await asyncio.sleep(0.005)
        worker.hold["Release"].set()
        await mesh.at_rest()
        assert worker.leases == set()
        assert worker.withdrawn == []


async def test_many_that_wait_are_all_served_once_there_is_room(tmp_path):
    async with fakes.mesh(tmp_path, decode=2) as mesh:
        fill(mesh)
        chats = [asyncio.create_task(mesh.chat(max_tokens=3, n=2)) for _ in range(20)]
        await waiting(mesh, 20)
        assert all(w.waiting for w in mesh.decode), "they are spread"
        for worker in mesh.decode:
            make_room(worker)
        assert all(a.reason == "length" for a in await asyncio.gather(*chats))
        await mesh.at_rest()


async def test_an_answer_that_was_preempted_waits_for_room_again(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        worker = mesh.decode[0]
        worker.preempt_at = [4]
        reached = worker.wait_in("Token")
        chat = asyncio.create_task(mesh.chat(max_tokens=9))
        async with asyncio.timeout(60):
            await reached.wait()
        worker.full = True
        worker.hold["Token"].set()
        await waiting(mesh)
        make_room(worker)
        assert len((await chat).ids) == 9
        await mesh.at_rest()


async def test_a_worker_that_was_full_is_asked_again_after_a_preemption(tmp_path):
    async with fakes.mesh(tmp_path, decode=2, poll_interval=60) as mesh:
        first, second = mesh.decode
        fill(mesh, first)
        mesh.router.view.add(second.instance, "decode", 20, 0)
        second.preempt_at = [4]
        reached = second.wait_in("Token")
        chat = asyncio.create_task(mesh.chat(max_tokens=9))
        async with asyncio.timeout(60):
            await reached.wait()
        make_room(first)
        fill(mesh, second)
        second.hold["Token"].set()
        assert (await chat).last.timing.decode_worker == "decode-0"
        assert [r.wait_ms for r in first.seen(ReserveRequest)] == [0, 0]
        mesh.router.view.add(second.instance, "decode", -20, 0)
        await mesh.at_rest()


async def test_what_no_worker_could_ever_hold_is_refused_before_any_wait(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        fill(mesh)
        mesh.registry.records = [
            fakes.msgspec.structs.replace(r, capacity_pages=10) for r in mesh.registry.records
        ]
        error = await mesh.error(fakes.ask(max_tokens=300, n=3))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "max_tokens 300 for each of 3 answers fit the memory of no" in error.details()
        assert mesh.decode[0].seen(ReserveRequest) == []

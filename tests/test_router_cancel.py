"""A client that leaves, or whose deadline passes, leaves nothing behind at any worker."""

import asyncio

import grpc
import pytest
import router_fakes as fakes

from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire import chat_pb2
from pdmesh.wire.messages import StreamRequest

TOKENIZER = load_tokenizer(fakes.MODEL_PATH)
STORY = TOKENIZER.encode("Once upon a time a crow 🐦 sang to the sea, and the sea sang back to it.")
STAGES = ["Reserve", "Prefill", "Stream", "Token"]


def hold(mesh, stage):
    """Makes a request wait at a stage; returns the worker and an event set once it is there."""
    worker = mesh.prefill[0] if stage == "Prefill" else mesh.decode[0]
    return worker, worker.wait_in(stage)


async def open_and_wait(mesh, stage, **sampling):
    """A call that has reached a stage."""
    worker, reached = hold(mesh, stage)
    call = mesh.stub.StreamChat(fakes.ask(max_tokens=100, **sampling), timeout=60)
    async with asyncio.timeout(60):
        await reached.wait()
    return call, worker


@pytest.mark.parametrize("stage", STAGES)
async def test_a_cancelled_call_ends_the_work_and_frees_the_lease(tmp_path, stage):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        call, worker = await open_and_wait(mesh, stage)
        assert mesh.bookings() > 0
        call.cancel()
        if stage == "Reserve":
            # The reservation is on its way: it is released as soon as it has come.
            async with asyncio.timeout(60):
                while mesh.bookings():
                    await asyncio.sleep(0.005)
            worker.hold["Reserve"].set()
            async with asyncio.timeout(60):
                while not worker.released:
                    await asyncio.sleep(0.005)
        await mesh.at_rest()
        assert len(mesh.decode[0].released) == 1
        assert mesh.decode[0].released[0].reason == "cancelled"
        if stage != "Reserve":
            expected = "Prefill" if stage == "Prefill" else "Stream"
            async with asyncio.timeout(60):
                while expected not in worker.cancelled:
                    await asyncio.sleep(0.005)
        assert mesh.outcome("cancelled") == 1
        worker.hold.clear()
        worker.reached.clear()
        assert (await mesh.chat(max_tokens=3)).reason == "length"


@pytest.mark.parametrize("stage", STAGES)
async def test_a_closed_connection_ends_the_work_too(tmp_path, stage):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        worker, reached = hold(mesh, stage)
        channel = fakes.client_channel(mesh.router.address)
        stub = chat_pb2_grpc_stub(channel)
        call = stub.StreamChat(fakes.ask(max_tokens=100))
        reading = asyncio.create_task(read(call))
        async with asyncio.timeout(60):
            await reached.wait()
        await channel.close()
        worker.hold[stage].set() if stage == "Reserve" else None
        await mesh.at_rest()
        await asyncio.gather(reading, return_exceptions=True)
        assert mesh.outcome("cancelled") == 1


def chat_pb2_grpc_stub(channel):
    from pdmesh.wire import chat_pb2_grpc

    return chat_pb2_grpc.ChatServiceStub(channel)


async def read(call):
    return [response async for response in call]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_deadline_ends_the_work_with_its_status(tmp_path, stage):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        worker, reached = hold(mesh, stage)
        deadlines = [0.4, 3.0, 30.0]
        while not reached.is_set():  # the first that is long enough
            error = await mesh.error(fakes.ask(max_tokens=100), timeout=deadlines.pop(0))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        worker.hold["Reserve"].set() if stage == "Reserve" else None
        await mesh.at_rest()
        ended = mesh.outcome("deadline") + mesh.outcome("cancelled")
        assert 1 <= ended <= 3 - len(deadlines), "one too short for the way there is not counted"


async def test_a_client_without_a_deadline_gets_the_default_one(tmp_path):
    async with fakes.mesh(tmp_path, decode=1, default_timeout=0.3) as mesh:
        hold(mesh, "Token")
        error = await mesh.error(fakes.ask(max_tokens=100), timeout=None)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details() == "the deadline passed before the answer was complete"
        await mesh.at_rest()
        assert mesh.outcome("deadline") == 1


async def test_cancelling_one_request_leaves_one_with_a_longer_id_alone(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        worker, reached = hold(mesh, "Token")
        worker.answer = mesh.prefill[0].answer = STORY
        first = mesh.stub.StreamChat(fakes.ask(max_tokens=len(STORY), request_id="req-1"))
        second = mesh.stub.StreamChat(fakes.ask(max_tokens=len(STORY), request_id="req-10"))
        async with asyncio.timeout(60):
            while len(worker.seen(StreamRequest)) < 2:
                await asyncio.sleep(0.01)
            await reached.wait()
        first.cancel()
        first.cancel()
        async with asyncio.timeout(60):
            while len(worker.released) < 1:
                await asyncio.sleep(0.01)
        worker.hold["Token"].set()
        answer = fakes.Answer(await read(second))
        assert answer.ids == STORY
        await mesh.at_rest()
        assert mesh.outcome("cancelled") == 1


async def test_an_id_that_is_running_is_refused_and_free_again_afterwards(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        call, worker = await open_and_wait(mesh, "Token", request_id="mine")
        error = await mesh.error(fakes.ask(request_id="mine"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "a request with the id mine is running already"
        worker.hold["Token"].set()
        await read(call)
        await mesh.chat(max_tokens=2, request_id="mine")
        await mesh.at_rest()


async def test_a_stop_string_cancels_the_decode_stream(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        mesh.prefill[0].answer = mesh.decode[0].answer = STORY
        answer = await mesh.chat(max_tokens=3000, stop=["upon"])
        assert answer.reason == "stop"
        await mesh.at_rest()
        assert mesh.decode[0].streamed < 3000


async def test_a_client_that_does_not_read_stops_the_worker_instead_of_filling_memory(tmp_path):
    async with fakes.mesh(tmp_path, decode=1, max_context=fakes.HUGE) as mesh:
        worker = mesh.decode[0]
        worker.chunk = 64
        request = chat_pb2.ChatRequest(
            prompt_token_ids=[5], sampling=chat_pb2.Sampling(max_tokens=1_000_000, logprobs=20)
        )
        call = mesh.stub.StreamChat(request)
        await call.read()
        async with asyncio.timeout(60):
            before = -1
            while worker.streamed != before:
                before = worker.streamed
                await asyncio.sleep(0.5)
        assert worker.streamed < 100_000
        for _ in range(50):
            await call.read()
        call.cancel()
        await mesh.at_rest()


async def test_stopping_the_router_ends_running_requests_and_frees_their_leases(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        call, _ = await open_and_wait(mesh, "Token")
        await mesh.router.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await read(call)
        assert mesh.decode[0].leases == set()
        assert mesh.bookings() == 0

"""One request's id leads through the logs of router, prefill and decode."""

import asyncio
import logging
from contextlib import asynccontextmanager

import grpc
import pytest
import router_fakes as fakes
from worker_rig import MODEL, SECRET, VOCAB, prompt_of, rig

from pdmesh.router.clients import Background, DecodeClient
from pdmesh.router.config import RouterConfig
from pdmesh.router.server import Router
from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import InternalError
from pdmesh.wire.messages import (
    Empty,
    PrefillRequest,
    ReleaseRequest,
    ReserveRequest,
    StreamRequest,
    WorkerRecord,
    WorkerStatus,
)
from pdmesh.wire.rpc import Client, Method, add_service


async def serve_side(side, role, fmt):
    """One of the rig's workers behind gRPC; returns its server and record."""
    worker = side.worker
    record = WorkerRecord(
        worker_id=f"{role}-0",
        instance=role,
        role=role,
        address="",
        page_format=fmt,
        model="tiny",
        vocab_size=VOCAB,
        max_context=MODEL.config.max_position_embeddings,
        capacity_pages=64,
    )

    async def status(_: Empty) -> WorkerStatus:
        return WorkerStatus(
            worker_id=record.worker_id,
            instance=role,
            role=role,
            state="ready",
            page_format=fmt,
            pool=side.kv.status(),
            queued=worker.queued,
            running=worker.running,
        )

    methods = [Method("Status", Empty, unary=status)]
    if role == "prefill":
        methods.append(Method("Prefill", PrefillRequest, unary=worker.prefill))
    else:
        methods += [
            Method("Reserve", ReserveRequest, unary=worker.reserve),
            Method("Stream", StreamRequest, stream=worker.stream),
            Method("Release", ReleaseRequest, unary=worker.release),
        ]
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    add_service(server, role, methods)
    await server.start()
    return server, fakes.msgspec.structs.replace(record, address=f"127.0.0.1:{port}")


@asynccontextmanager
async def whole_mesh(tmp_path):
    """A router over the rig's workers, through gRPC; yields the rig and a client's stub."""
    (tmp_path / "secret").write_bytes(SECRET)
    registry = fakes.FakeRegistry()
    config = RouterConfig(
        model_path=fakes.MODEL_PATH,
        model_name="tiny",
        secret_file=tmp_path / "secret",
        redis_url="redis://unused",
        poll_interval=0.02,
        stop_grace=0.0,
        max_attempts=1,
    )
    async with rig() as workers:
        servers = []
        for side, role in ((workers.prefill, "prefill"), (workers.decode, "decode")):
            server, record = await serve_side(side, role, workers.format)
            servers.append(server)
            registry.records.append(record)
        router = Router(config, registry)
        await router.start()
        channel = fakes.client_channel(router.address)
        try:
            async with asyncio.timeout(10):
                while router.view.polled() < 2:
                    await asyncio.sleep(0.002)
            yield workers, fakes.chat_pb2_grpc.ChatServiceStub(channel)
        finally:
            await channel.close()
            await router.stop()
            for server in servers:
                await server.stop(None)


def told(caplog, request_id: str) -> dict[str, list[str]]:
    """Events that name a request, by the part of the mesh that logged them."""
    found: dict[str, list[str]] = {}
    for record in caplog.records:
        fields = getattr(record, "fields", {})
        named = [fields.get("request"), *str(fields.get("requests", "")).split(",")]
        if request_id in named:
            found.setdefault(record.name.split(".")[1], []).append(record.getMessage())
    return found


def question(request_id: str, **sampling) -> chat_pb2.ChatRequest:
    return chat_pb2.ChatRequest(
        request_id=request_id,
        prompt_token_ids=prompt_of(100),
        sampling=chat_pb2.Sampling(temperature=0.0, ignore_eos=True, **sampling),
    )


async def test_one_id_leads_through_router_prefill_and_decode(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with whole_mesh(tmp_path) as (_, stub):
        async for _ in stub.StreamChat(question("req-1", max_tokens=6), timeout=30):
            pass
        async for _ in stub.StreamChat(question("req-2", max_tokens=1), timeout=30):
            pass
    assert told(caplog, "req-1") == {
        "router": ["received", "routed", "first_token", "finished"],
        "prefill": ["prefilled"],
        "decode": ["reserved", "arrived", "finished"],
    }
    assert told(caplog, "req-2")["decode"] == ["reserved", "released"]
    assert told(caplog, "req-3") == {}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_failed_step_names_its_requests(tmp_path, caplog, role):
    caplog.set_level(logging.INFO)
    async with whole_mesh(tmp_path) as (workers, stub):
        gate = getattr(workers, role).gate
        if role == "prefill":
            gate.failure = RuntimeError("no more memory")
        else:
            gate.poison = prompt_of(100)[:5]  # fails when its sequence runs alone, too
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stub.StreamChat(question("req-1", max_tokens=6), timeout=30):
                pass
    found = told(caplog, "req-1")
    assert f"{role} step failed" in found[role]
    assert found["router"][-1] == "failed"
    if role == "prefill":  # no sequence ever came to use the lease
        assert found["decode"][0] == "reserved"
        assert "ended_early" in found["decode"]


async def test_a_lease_given_up_before_its_pages_came_is_told_with_its_request(caplog):
    caplog.set_level(logging.INFO)
    async with rig() as workers:
        lease = await workers.reserve(prompt_of(100), request_id="req-1")
        await workers.release(lease, "cancelled")
    assert told(caplog, "req-1")["decode"] == ["reserved", "ended_early"]


async def test_a_transfer_that_fails_is_told_with_its_request(caplog):
    caplog.set_level(logging.INFO)
    async with rig() as workers:
        lease = await workers.reserve(prompt_of(100), request_id="req-1")
        workers.prefill.gate.hold()
        prefill = asyncio.ensure_future(workers.compute(prompt_of(100), lease, request_id="req-1"))
        await workers.prefill.gate.step_begins()
        prefill.cancel()
        await asyncio.wait({prefill})
        workers.prefill.gate.let_go()
        async with asyncio.timeout(10):
            while "kvtransfer" not in told(caplog, "req-1"):
                await asyncio.sleep(0.002)
        await workers.release(lease, "failed")
    assert told(caplog, "req-1")["kvtransfer"] == ["transfer_failed"]


async def test_a_release_that_fails_is_told_with_its_request(caplog):
    caplog.set_level(logging.INFO)
    decode = fakes.FakeDecode("decode-0", "decode")

    async def broken(_: ReleaseRequest) -> Empty:
        raise InternalError("no")

    decode.release = broken
    record = await decode.start()
    client, background = Client(record.address, "decode"), Background()
    request = ReserveRequest(
        request_id="req-1",
        attempt=1,
        num_prompt_tokens=1,
        hashes=(),
        max_tokens=1,
        deadline_ms=1000,
    )
    async with DecodeClient(record, client, background).reserve(request):
        pass
    await background.finish()
    await client.close()
    await decode.die()
    assert told(caplog, "req-1")["router"] == ["release_failed"]

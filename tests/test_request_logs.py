"""One request's id leads through the logs of router, prefill and decode."""

import asyncio
import logging

import grpc
import pytest
import router_fakes as fakes
from router_rig import whole_mesh
from worker_rig import prompt_of, rig

from pdmesh.router.clients import Background, DecodeClient
from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import InternalError
from pdmesh.wire.messages import Empty, ReleaseRequest, ReserveRequest
from pdmesh.wire.rpc import Client


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
        async with asyncio.timeout(60):
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
        deadline_ms=60_000,
    )
    async with DecodeClient(record, client, background).reserve(request):
        pass
    await background.finish()
    await client.close()
    await decode.die()
    assert told(caplog, "req-1")["router"] == ["release_failed"]

"""What stands around the chat service: keepalive, health, reflection, metrics, start and stop."""

import asyncio
import contextlib
import logging
import time
import urllib.request

import grpc
import msgspec
import pytest
import router_fakes as fakes
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdmesh.router.clients import WorkerClients
from pdmesh.router.config import RouterConfig
from pdmesh.router.server import Router, serve_router
from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import ConfigError, UnknownModel, error_from_wire
from pdmesh.wire.messages import StreamRequest
from pdmesh.wire.rpc import (
    MAX_INTERNAL_MESSAGE,
    MAX_PUBLIC_MESSAGE,
    channel_options,
    server_options,
)
from pdmesh.wire.sampling import SamplingParams

HEALTH = health_pb2.HealthCheckResponse


def test_both_ends_agree_on_keepalive():
    client = dict(channel_options())
    for limit in (MAX_PUBLIC_MESSAGE, MAX_INTERNAL_MESSAGE):
        server = dict(server_options(limit))
        ping = client["grpc.keepalive_time_ms"]
        assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] < ping
        assert server["grpc.keepalive_permit_without_calls"] == 1
        assert client["grpc.keepalive_permit_without_calls"] == 1
        assert client["grpc.http2.max_pings_without_data"] == 0
        for end in (client, server):
            assert ping + end["grpc.keepalive_timeout_ms"] <= 20_000
            # What ends a connection whose ping is not answered; gRPC's own default is a minute.
            assert ping + end["grpc.http2.ping_timeout_ms"] <= 20_000


def test_both_ends_agree_on_message_sizes():
    client = dict(channel_options())
    public, internal = (
        dict(server_options(MAX_PUBLIC_MESSAGE)),
        dict(server_options(MAX_INTERNAL_MESSAGE)),
    )
    assert public["grpc.max_receive_message_length"] == 8 * 2**20
    assert internal["grpc.max_receive_message_length"] == client["grpc.max_send_message_length"]
    for server in (public, internal):
        assert server["grpc.max_send_message_length"] <= client["grpc.max_receive_message_length"]


DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
"""HTTP/2 frame types (RFC 9113, section 6)."""


def frame(kind, payload=b"", flags=0, stream=0):
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def call(path, message):
    """The frames of a unary gRPC request on stream 1 (header fields as plain literals)."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "test"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    block = b"".join(
        bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields
    )
    body = b"\0" + len(message).to_bytes(4) + message
    return frame(HEADERS, block, flags=4, stream=1) + frame(DATA, body, flags=1, stream=1)


class RawClient:
    """Speaks just enough HTTP/2 to ping as often as it likes."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))

    async def read_frame(self):
        head = await self.reader.readexactly(9)
        payload = await self.reader.readexactly(int.from_bytes(head[:3]))
        assert head[3] != GOAWAY, f"the server hangs up: {payload[8:]!r}"
        return head[3], head[4], payload

    async def ping(self, count):
        """Sends pings back to back and waits until each is acknowledged."""
        for i in range(count):
            self.writer.write(frame(PING, i.to_bytes(8)))
        acknowledged = 0
        async with asyncio.timeout(60):
            while acknowledged < count:
                kind, flags, _ = await self.read_frame()
                acknowledged += kind == PING and flags == 1


async def raw_client(address):
    host, port = address.split(":")
    return RawClient(*await asyncio.open_connection(host, int(port)))


async def test_a_client_that_pings_often_without_calls_is_not_cut_off(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        for address in (mesh.router.address, mesh.decode[0].address):
            client = await raw_client(address)
            await client.ping(100)
            client.writer.close()


async def test_a_client_that_pings_often_during_a_silent_stream_gets_its_answer(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        reached = mesh.prefill[0].wait_in("Prefill")
        client = await raw_client(mesh.router.address)
        request = fakes.ask(max_tokens=3).SerializeToString()
        client.writer.write(call("/pdmesh.v1.ChatService/StreamChat", request))
        await reached.wait()
        await client.ping(100)
        mesh.prefill[0].hold["Prefill"].set()
        data = b""
        async with asyncio.timeout(60):
            while b"length" not in data:
                kind, _, payload = await client.read_frame()
                data += payload if kind == DATA else b""
        client.writer.close()
        await mesh.at_rest()


class Cable:
    """A TCP proxy that can be cut: then it carries nothing and tells nobody."""

    def __init__(self, address):
        self.host, port = address.split(":")
        self.port = int(port)
        self.whole = asyncio.Event()
        self.whole.set()
        self.tasks = []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.server.wait_closed()

    async def _carry(self, reader, writer):
        self.tasks.append(asyncio.current_task())
        ends = [writer]
        try:
            await self.whole.wait()
            there, back = await asyncio.open_connection(self.host, self.port)
            ends.append(back)
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        finally:
            for end in ends:
                end.transport.abort()
            await asyncio.sleep(0)

    async def _pump(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self.whole.wait()
                writer.write(data)
                await writer.drain()
        await self.whole.wait()  # the end of a connection does not get through either
        writer.close()


NOTICED_S = 25
"""Keepalive needs 10 s to ask and 10 s to give up."""


async def within(seconds, condition):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["Prefill", "Stream"])
async def test_a_cut_between_client_and_router_is_noticed_at_both_ends(tmp_path, method):
    async with fakes.mesh(tmp_path, decode=1) as mesh, Cable(mesh.router.address) as cable:
        worker = mesh.prefill[0] if method == "Prefill" else mesh.decode[0]
        reached = worker.wait_in(method)
        async with fakes.client_channel(cable.address) as channel:
            stub = fakes.chat_pb2_grpc.ChatServiceStub(channel)
            call = stub.StreamChat(fakes.ask(max_tokens=4), timeout=300)
            reading = asyncio.ensure_future(read_all(call))
            await reached.wait()
            cable.whole.clear()
            cut = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(reading, NOTICED_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await within(NOTICED_S - (time.monotonic() - cut), lambda: worker.cancelled == [method])
            await mesh.at_rest()


async def read_all(call):
    return [response async for response in call]


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["Prefill", "Stream"])
async def test_a_cut_between_router_and_worker_is_noticed_at_both_ends(tmp_path, method):
    """The request goes on elsewhere, and the worker that was cut off ends its part."""
    role = "prefill" if method == "Prefill" else "decode"
    async with fakes.mesh(tmp_path, prefill=2, decode=2) as mesh:
        first, second = getattr(mesh, role)
        reached = first.wait_in(method)
        async with Cable(first.address) as cable:
            # A new instance behind the cable, as the router keeps the channel of the old one.
            first.instance = "0123456789abcdef"
            index = next(i for i, r in enumerate(mesh.registry.records) if r.role == role)
            mesh.registry.records[index] = msgspec.structs.replace(
                mesh.registry.records[index], instance=first.instance, address=cable.address
            )
            await within(60, lambda: first.instance in {r.instance for r in usable(mesh, role)})
            mesh.router.view.add(second.instance, role, 20, 20_000)
            answer = asyncio.ensure_future(mesh.chat(max_tokens=4, timeout=300))
            await asyncio.wait_for(reached.wait(), 60)
            cable.whole.clear()
            cut = time.monotonic()
            done = await asyncio.wait_for(answer, NOTICED_S)
            assert len(done.ids) == 4
            assert done.last.timing.attempts == 2
            await within(NOTICED_S - (time.monotonic() - cut), lambda: first.cancelled == [method])
            cable.whole.set()
            mesh.router.view.add(second.instance, role, -20, -20_000)
            for worker in mesh.decode:
                worker.leases.clear()


def usable(mesh, role):
    return mesh.router.view.ready(role)


async def test_health_follows_the_workers(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        stub = health_pb2_grpc.HealthStub(mesh.channel)
        for service in ("", "pdmesh.v1.ChatService"):
            request = health_pb2.HealthCheckRequest(service=service)
            await becomes(stub, request, HEALTH.SERVING)
        records = mesh.registry.records
        mesh.registry.records = records[:1]
        await becomes(stub, request, HEALTH.NOT_SERVING)
        mesh.registry.records = records
        await becomes(stub, request, HEALTH.SERVING)


async def becomes(stub, request, status):
    async with asyncio.timeout(60):
        while (await stub.Check(request)).status != status:
            await asyncio.sleep(0.01)


async def test_reflection_describes_the_service(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        stub = reflection_pb2_grpc.ServerReflectionStub(mesh.channel)
        ask = reflection_pb2.ServerReflectionRequest
        requests = [
            ask(list_services=""),
            ask(file_containing_symbol="pdmesh.v1.ChatService"),
        ]
        answers = [a async for a in stub.ServerReflectionInfo(iter(requests), timeout=60)]
        names = {s.name for s in answers[0].list_services_response.service}
        assert {"pdmesh.v1.ChatService", "grpc.health.v1.Health"} <= names
        assert b"StreamChat" in answers[1].file_descriptor_response.file_descriptor_proto[0]


async def test_the_model_and_its_limits_are_listed(tmp_path):
    async with fakes.mesh(tmp_path, decode=2, max_context=500) as mesh:
        (card,) = (await mesh.stub.ListModels(chat_pb2.ListModelsRequest())).models
        assert (card.name, card.vocab_size, card.max_context) == ("tiny", 4096, 500)
        assert (card.prefill_workers, card.decode_workers) == (1, 2)


async def test_metrics_are_served_over_http(tmp_path):
    async with fakes.mesh(tmp_path, decode=1, metrics_port=0) as mesh:
        await mesh.chat(max_tokens=4)
        url = f"http://127.0.0.1:{mesh.router.metrics_port}/metrics"

        def get():
            with urllib.request.urlopen(url, timeout=60) as answer:
                return answer.read().decode()

        text = await asyncio.to_thread(get)
        assert 'pdmesh_requests_total{outcome="length"} 1.0' in text
        assert "pdmesh_num_requests_running 0.0" in text
        assert "pdmesh_generation_tokens_total 4.0" in text


async def test_what_the_router_has_not_read_of_a_stream_stays_at_the_worker():
    worker = fakes.FakeDecode("decode-0", "decode", max_context=fakes.HUGE)
    clients = WorkerClients()
    decode = clients.decode(await worker.start())
    request = StreamRequest(
        lease_id="l",
        generation=1,
        request_id="r",
        attempt=1,
        token_ids=(5,),
        first_token=6,
        sampling=SamplingParams(max_tokens=100_000),
    )
    stream = decode.stream(request, 60)
    assert (await anext(stream)).position == 1
    async with asyncio.timeout(60):
        before = -1
        while worker.streamed != before:
            before = worker.streamed
            await asyncio.sleep(0.3)
    assert worker.streamed < 30
    await stream.aclose()
    await clients.close()
    await worker.server.stop(None)


async def test_a_request_leaves_a_line_for_each_event_with_its_id(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        await mesh.chat(max_tokens=3, request_id="r-1")
        await mesh.error(fakes.ask(request_id="r-2", top_k=9999))
        await mesh.at_rest()
    lines = [(r.getMessage(), getattr(r, "fields", {})) for r in caplog.records]
    assert [name for name, f in lines if f.get("request") == "r-1"] == [
        "received",
        "routed",
        "first_token",
        "finished",
    ]
    (routed,) = [f for name, f in lines if name == "routed"]
    assert "decode-0:cost=" in routed["scores"]
    assert "prefill-0:cost=" in routed["scores"]
    assert [name for name, f in lines if f.get("request") == "r-2"] == ["refused"]


def config(tmp_path, **changes):
    secret = tmp_path / "secret"
    secret.write_bytes(b"k" * 32)
    fields = {
        "model_path": fakes.MODEL_PATH,
        "model_name": "tiny",
        "secret_file": secret,
        "redis_url": "redis://127.0.0.1:1/0",
        "max_context": 4096,
    }
    return RouterConfig(**(fields | changes))


async def test_a_taken_port_is_said_in_one_sentence(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        port = int(mesh.router.address.split(":")[1])
        second = Router(config(tmp_path, port=port), mesh.registry)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await second.start()
        await second.stop()
        third = Router(config(tmp_path, metrics_port=port), mesh.registry)
        with pytest.raises(ConfigError, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            await third.start()
        await third.stop()


def test_a_wrong_checkpoint_directory_or_secret_is_said_in_one_sentence(tmp_path):
    registry = fakes.FakeRegistry()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Router(config(tmp_path, model_path=tmp_path), registry)
    with pytest.raises(ConfigError, match="cannot read the secret file"):
        Router(config(tmp_path, secret_file=tmp_path / "none"), registry)


async def test_a_router_starts_without_its_store_and_says_that_no_worker_is_ready(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    serving = asyncio.create_task(serve_router(config(tmp_path)))
    async with asyncio.timeout(60):
        while not (ready := [r for r in caplog.records if r.getMessage() == "ready"]):
            await asyncio.sleep(0.02)
    channel = fakes.client_channel(ready[0].fields["address"])
    stub = fakes.chat_pb2_grpc.ChatServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.StreamChat(fakes.ask(), timeout=60):
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "no prefill worker is ready"
    await channel.close()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


def test_an_unknown_model_is_an_invalid_argument_on_the_wire_too():
    error = error_from_wire("UnknownModel", "model 'x' is not served here")
    assert isinstance(error, UnknownModel)
    assert error.status == "INVALID_ARGUMENT"

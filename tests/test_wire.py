"""Messages, hashes and errors: what crosses a process boundary means the same on both sides."""

import asyncio
import contextlib
import itertools

import grpc
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.wire import errors
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import Incompatible, InternalError, InvalidRequest, error_from_wire
from pdmesh.wire.hashes import PageFormat, page_hashes, root_hash
from pdmesh.wire.logs import quote
from pdmesh.wire.messages import Empty, ReserveRequest, TokenChunk, TokenLogprobs
from pdmesh.wire.rpc import (
    MAX_INTERNAL_MESSAGE,
    Client,
    Method,
    add_service,
    channel_options,
    server_options,
)
from pdmesh.wire.sampling import SamplingParams

KEY = b"0123456789abcdef"
FORMAT = PageFormat(
    model="tiny",
    weights="w",
    dtype="float32",
    page_size=64,
    num_layers=8,
    mtp_layers=1,
    latent_width=576,
)


def reserve(**changes):
    fields = {
        "request_id": "r",
        "attempt": 0,
        "num_prompt_tokens": 70,
        "hashes": (b"\x00" * 16, b"\xff" * 16),
        "max_tokens": 5,
        "deadline_ms": 1000,
    }
    return ReserveRequest(**{**fields, **changes})


def test_the_msgpack_package_reads_what_msgspec_writes():
    chunk = TokenChunk(
        attempt=1, position=3, token_ids=(5, 6), logprobs=(TokenLogprobs(logprob=-0.5),)
    )
    assert msgpack.unpackb(encode(chunk)) == {
        "type": "tokens",
        "attempt": 1,
        "position": 3,
        "token_ids": [5, 6],
        "logprobs": [{"logprob": -0.5}],
    }


def test_what_msgpack_writes_is_decoded_and_checked():
    packed = msgpack.packb(
        {
            "request_id": "r",
            "attempt": 0,
            "num_prompt_tokens": 70,
            "hashes": [b"\x00" * 16, b"\xff" * 16],
            "max_tokens": 5,
            "deadline_ms": 1000,
        }
    )
    assert decode(packed, ReserveRequest) == reserve()


@pytest.mark.parametrize("data", [b"", b"\xc1", b"junk junk", msgpack.packb({"request_id": 7})])
def test_bytes_that_are_no_message_are_refused_by_name(data):
    with pytest.raises(InvalidRequest, match="malformed ReserveRequest"):
        decode(data, ReserveRequest)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data):
    try:
        decode(data, ReserveRequest)
    except InvalidRequest:
        return


def test_every_error_survives_the_wire_and_has_a_grpc_status():
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    for kind in kinds:
        if issubclass(kind, errors.PdmeshError) and kind is not errors.PdmeshError:
            assert type(error_from_wire(kind.__name__, "why")) is kind
            assert kind.status in grpc.StatusCode.__members__


def test_an_unknown_error_becomes_an_internal_one():
    assert type(error_from_wire("Nonsense", "why")) is InternalError


def test_only_full_pages_have_hashes_and_each_depends_on_all_tokens_before():
    root = root_hash(KEY, FORMAT.fingerprint())
    tokens = list(range(200))
    hashes = page_hashes(KEY, root, tokens, 64)
    assert len(hashes) == 3
    assert len(set(hashes)) == 3
    assert page_hashes(KEY, root, tokens[:128], 64) == hashes[:2]
    changed = [7, *tokens[1:]]
    assert not set(page_hashes(KEY, root, changed, 64)) & set(hashes)


def test_labels_that_join_to_the_same_string_share_no_page():
    """Compare vllm-project/vllm#44701."""
    fingerprint = FORMAT.fingerprint()
    labels = [("", ""), ("x", ""), ("", "x"), ("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    roots = [root_hash(KEY, fingerprint, tenant, adapter) for tenant, adapter in labels]
    assert len(set(roots)) == len(labels)


def test_another_key_gives_other_hashes():
    fingerprint = FORMAT.fingerprint()
    assert root_hash(KEY, fingerprint) != root_hash(KEY[::-1], fingerprint)


def test_every_field_of_the_page_format_changes_the_fingerprint():
    import msgspec

    changed = {
        "model": "other",
        "weights": "v",
        "dtype": "bfloat16",
        "page_size": 16,
        "num_layers": 7,
        "mtp_layers": 0,
        "latent_width": 320,
        "layout": 2,
        "arithmetic": "exact",
        "precision": "fp8",
        "packed": True,
    }
    assert set(changed) == set(FORMAT.__struct_fields__)
    prints = [
        msgspec.structs.replace(FORMAT, **{name: value}).fingerprint()
        for name, value in changed.items()
    ]
    assert len({FORMAT.fingerprint(), *prints}) == len(changed) + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("temperature", 1e9),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 4097),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (4096,)),
        ("stop_token_ids", (2**31,)),
    ],
)
def test_an_absurd_sampling_value_is_refused_by_its_name(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value}).validate(4096)
    assert field in str(caught.value) or "stop string" in str(caught.value)


def test_the_limits_themselves_are_allowed():
    SamplingParams(
        temperature=1e-6, top_p=1e-9, top_k=4096, seed=2**64 - 1, logprobs=20, max_tokens=1
    ).validate(4096)


def test_a_log_value_stays_on_one_line():
    assert quote("plain") == "plain"
    assert quote('a "b"\nc=d') == '"a \\"b\\"\\nc=d"'
    assert quote("") == '""'


def options_of(pairs):
    return dict(pairs)


def test_both_ends_agree_about_keepalive():
    """A client must never ping more often than a server bears (llm-d/llm-d-kv-cache#359)."""
    client, server = options_of(channel_options()), options_of(server_options(1))
    interval = client["grpc.keepalive_time_ms"]
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < interval
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] < interval
    assert server["grpc.http2.max_ping_strikes"] == 0
    assert server["grpc.keepalive_permit_without_calls"] == 1
    assert client["grpc.http2.max_pings_without_data"] == 0


async def serve(methods):
    server = grpc.aio.server(options=server_options(MAX_INTERNAL_MESSAGE))
    port = server.add_insecure_port("127.0.0.1:0")
    add_service(server, "test", methods)
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_an_error_raised_by_a_peer_comes_out_as_itself():
    async def refuse(_):
        raise Incompatible("page_size is 64 here and 16 there")

    async def crash(_):
        raise ZeroDivisionError("oops")

    server, address = await serve(
        [Method("Refuse", Empty, unary=refuse), Method("Crash", Empty, unary=crash)]
    )
    client = Client(address, "test")
    with pytest.raises(Incompatible, match="page_size is 64 here"):
        await client.unary("Refuse", Empty(), Empty)
    with pytest.raises(InternalError, match="oops"):
        await client.unary("Crash", Empty(), Empty)
    with pytest.raises(InternalError):
        await client.unary("NoSuchMethod", Empty(), Empty)
    await client.close()
    await server.stop(None)


async def test_an_absent_peer_is_unavailable():
    client = Client("127.0.0.1:1", "test")
    with pytest.raises(errors.Unavailable, match=r"test worker at 127\.0\.0\.1:1"):
        await client.unary("Any", Empty(), Empty, timeout=5)
    await client.close()


async def test_a_message_over_the_internal_limit_is_too_large_and_sent_once():
    calls = []
    huge = (b"x" * (MAX_INTERNAL_MESSAGE + 1),)

    async def echo(request):
        calls.append("Echo")
        return request

    async def inflate(_):
        calls.append("Inflate")
        return reserve(hashes=huge)

    async def swell(_):
        calls.append("Swell")
        yield reserve()
        yield reserve(hashes=huge)

    server, address = await serve(
        [
            Method("Echo", ReserveRequest, unary=echo),
            Method("Inflate", Empty, unary=inflate),
            Method("Swell", Empty, stream=swell),
        ]
    )
    async with watched(address) as (door, connections):
        client = Client(door, "test")
        small = await client.unary("Echo", reserve(), ReserveRequest, timeout=30)
        assert small == reserve()
        with pytest.raises(errors.TooLarge, match=r"Echo: .*larger"):
            await client.unary("Echo", reserve(hashes=huge), ReserveRequest, timeout=30)
        with pytest.raises(errors.TooLarge, match=r"Inflate: .*larger"):
            await client.unary("Inflate", Empty(), ReserveRequest, timeout=30)
        stream = client.stream("Swell", Empty(), ReserveRequest, timeout=30)
        assert await anext(stream) == reserve()
        with pytest.raises(errors.TooLarge, match=r"Swell: .*larger"):
            await anext(stream)
        assert await client.unary("Echo", reserve(), ReserveRequest, timeout=30) == reserve()
        assert calls == ["Echo", "Inflate", "Swell", "Echo"], "nothing is sent a second time"
        assert len(connections) == 1, "the connection outlives the refusals"
        await client.close()
    await server.stop(None)


async def test_a_server_refuses_a_message_over_the_internal_limit_by_itself():
    calls = []

    async def take(_):
        calls.append("Take")
        return Empty()

    server, address = await serve([Method("Take", ReserveRequest, unary=take)])
    unlimited = [("grpc.max_send_message_length", -1)]
    async with (
        watched(address) as (door, connections),
        grpc.aio.insecure_channel(door, options=unlimited) as channel,
    ):
        call = channel.unary_unary("/pdmesh.internal.test/Take")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(encode(reserve(hashes=(b"x" * MAX_INTERNAL_MESSAGE,))), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert calls == []
        await call(encode(reserve()), timeout=30)
        assert calls == ["Take"]
        assert len(connections) == 1
    await server.stop(None)


@contextlib.asynccontextmanager
async def watched(address):
    """Another address for a server, and a list of the connections that were made to it."""
    host, port = address.split(":")
    connections, carrying = [], []

    async def pump(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader, writer):
        connections.append(writer)
        carrying.append(asyncio.current_task())
        there, back = await asyncio.open_connection(host, int(port))
        try:
            await asyncio.gather(pump(reader, back), pump(there, writer))
        finally:
            for end in (writer, back):
                end.transport.abort()
            await asyncio.sleep(0)

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with proxy:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", connections
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


async def test_a_client_may_bound_what_is_sent_ahead_of_its_reading():
    sent = 0

    async def endless(_):
        nonlocal sent
        for sent in itertools.count():
            yield TokenChunk(attempt=0, position=sent, token_ids=(sent % 9,) * 10)

    async def big(_):
        return TokenChunk(attempt=0, position=0, token_ids=tuple(range(10_000)))

    methods = [Method("Endless", Empty, stream=endless), Method("Big", Empty, unary=big)]
    server, address = await serve(methods)
    client = Client(address, "test", ahead=512)
    stream = client.stream("Endless", Empty(), TokenChunk)
    assert (await anext(stream)).position == 0
    async with asyncio.timeout(60):
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.3)
    assert sent < 30
    positions = [(await anext(stream)).position for _ in range(100)]
    assert positions == list(range(1, 101)), "it goes on as soon as it is read"
    await stream.aclose()
    larger = await client.unary("Big", Empty(), TokenChunk)
    assert larger.token_ids == tuple(range(10_000)), "one message may be larger"
    await client.close()
    await server.stop(None)


async def test_closing_a_stream_cancels_it_at_the_peer():
    ended = asyncio.Event()

    async def endless(_):
        try:
            for i in itertools.count():
                yield TokenChunk(attempt=0, position=i, token_ids=(1,))
                await asyncio.sleep(0.001)
        finally:
            ended.set()

    server, address = await serve([Method("Endless", Empty, stream=endless)])
    client = Client(address, "test")
    stream = client.stream("Endless", Empty(), TokenChunk)
    assert (await anext(stream)).position == 0
    await stream.aclose()
    await asyncio.wait_for(ended.wait(), 60)
    await client.close()
    await server.stop(None)


async def test_a_peer_of_another_protocol_is_refused_by_name():
    async def answer(_):
        return Empty()

    server, address = await serve([Method("Any", Empty, unary=answer)])
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/pdmesh.internal.test/Any")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(encode(Empty()), metadata=(("pdmesh-protocol", "999"),))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "999" in caught.value.details()
    await server.stop(None)


@pytest.mark.parametrize("junk", [b"\xc1\xff\x00" * 50, b""])
async def test_junk_in_place_of_a_message_is_an_invalid_argument(junk):
    async def answer(_):
        return Empty()

    server, address = await serve([Method("Reserve", ReserveRequest, unary=answer)])
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/pdmesh.internal.test/Reserve")(junk)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(None)

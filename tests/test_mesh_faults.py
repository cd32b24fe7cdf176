"""What users do wrong and what processes suffer, against a real mesh.

After every scenario the next request is served, and nothing stays in use, in quarantine or in the
store. The mesh is shared by the tests of this file; a process that a test kills is restarted, and
no other process may die. What becomes of the tokens: test_mesh_retries.py.
"""

import asyncio
import os
import signal
import socket
import time

import grpc
import meshes
import pytest
import redis
from mesh_faults import DECODE, alive, busy, ready_again, restarted

from pdmesh.registry.keys import Keys
from pdmesh.registry.layout import Row, pack_row
from pdmesh.wire import chat_pb2

PAGE = 64
PROMPT = list(range(300, 400))


@pytest.fixture(scope="module")
def mesh():
    with meshes.running_mesh() as running:
        yield running


@pytest.fixture
async def stub(mesh):
    """A client of the mesh, none of whose processes may die meanwhile."""
    before = mesh.pids()
    async with meshes.chat_stub(mesh.address) as stub:
        yield stub
        answer = await meshes.ask(stub, PROMPT, max_tokens=2, ignore_eos=True)
        assert len(answer.token_ids) == 2, "the request after the scenario is served"
    assert await mesh.problems() == []
    assert [name for name, pid in before.items() if not alive(pid)] == []
    assert mesh.pids() == before


def chat(**fields):
    return chat_pb2.ChatRequest(**fields)


def says(text, role="user"):
    return [chat_pb2.Message(role=role, content=text)]


def sampling(**fields):
    return chat(messages=says("Hi"), sampling=chat_pb2.Sampling(**fields))


NAN = float("nan")
BAD_REQUESTS = {
    "unknown model": (chat(model="gpt-9", messages=says("Hi")), "gpt-9"),
    "no messages": (chat(), "message"),
    "empty content": (chat(messages=says("")), "content"),
    "unknown role": (chat(messages=says("Hi", role="wizard")), "wizard"),
    "the assistant speaks last": (chat(messages=says("Hi", role="assistant")), "user"),
    "both messages and ids": (chat(messages=says("Hi"), prompt_token_ids=[5]), "both"),
    "a prompt longer than the context": (chat(prompt_token_ids=[5] * 5000), "context"),
    "a prompt and answer longer than the context": (
        chat(prompt_token_ids=[5] * 4000, sampling=chat_pb2.Sampling(max_tokens=200)),
        "context",
    ),
    "six megabytes of text": (chat(messages=says("word " * 1_200_000)), "context"),
    "a million token ids": (chat(prompt_token_ids=[4000] * 1_000_000), "context"),
    "a negative id": (chat(prompt_token_ids=[5, -1]), "-1"),
    "the first id after the vocabulary": (chat(prompt_token_ids=[4096]), "4096"),
    "an id of 2**31": (chat(prompt_token_ids=[2**31]), str(2**31)),
    "zero tokens wanted": (sampling(max_tokens=0), "max_tokens"),
    "a temperature that is no number": (sampling(temperature=NAN), "temperature"),
    "an infinite temperature": (sampling(temperature=float("inf")), "temperature"),
    "a negative temperature": (sampling(temperature=-1.0), "temperature"),
    "top_p of zero": (sampling(top_p=0.0), "top_p"),
    "top_p that is no number": (sampling(top_p=NAN), "top_p"),
    "top_k over the vocabulary": (sampling(top_k=5000), "top_k"),
    "too many logprobs": (sampling(logprobs=21), "logprobs"),
    "an empty stop string": (sampling(stop=[""]), "stop"),
    "a stop id outside the vocabulary": (sampling(stop_token_ids=[4096]), "stop_token_ids"),
}


async def read_all(call):
    return [response async for response in call]


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_input_gets_one_clear_sentence(stub, name):
    request, named = BAD_REQUESTS[name]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(stub.StreamChat(request, timeout=60))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in caught.value.details()
    assert "\n" not in caught.value.details()


async def test_a_message_over_the_size_limit_is_resource_exhausted(stub):
    request = chat(messages=says("x" * 10_000_000))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(stub.StreamChat(request, timeout=60))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def ports_of(mesh) -> list[int]:
    """Every TCP port that a process of the mesh listens on."""
    inodes = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for fields in (line.split() for line in list(lines)[1:]):
                if fields[3] == "0A":
                    inodes[fields[9]] = int(fields[1].rsplit(":", 1)[1], 16)
    ports = set()
    for pid in mesh.pids().values():
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if target.startswith("socket:["):
                ports.add(inodes.get(target[8:-1], 0))
    return sorted(ports - {0})


@pytest.mark.parametrize(
    "junk",
    [b"\x00" * 4096, b"\xff" * 70_000, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64],
    ids=["zeros", "ones", "http", "all bytes"],
)
async def test_binary_junk_on_every_port_hurts_nobody(mesh, stub, junk):
    ports = await ports_of(mesh)
    assert len(ports) >= 7, "router, three workers, two page receivers and the store"
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            try:
                connection.sendall(junk)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(10)
                while connection.recv(65536):
                    pass
            except OSError:
                continue


async def test_max_tokens_counts_the_token_that_prefill_made(stub):
    for wanted in (1, 2):
        answer = await meshes.ask(stub, PROMPT, max_tokens=wanted, ignore_eos=True)
        assert len(answer.token_ids) == wanted
        assert answer.finish == "length"
        assert answer.usage.completion_tokens == wanted


async def test_the_context_may_be_filled_to_its_last_token(stub):
    prompt = [5 + i % 900 for i in range(4095)]
    answer = await meshes.ask(stub, prompt, max_tokens=1, ignore_eos=True, timeout=500)
    assert len(answer.token_ids) == 1


async def test_the_second_turn_of_a_chat_computes_only_the_rest(stub):
    story = "Tell me a story about a fox who lost her way in the forest. " * 12
    first = chat(
        messages=says(story),
        sampling=chat_pb2.Sampling(max_tokens=80, ignore_eos=True, temperature=0),
    )
    responses = await read_all(stub.StreamChat(first, timeout=120))
    text = "".join(r.text for r in responses)
    second = chat(
        messages=[
            *says(story),
            chat_pb2.Message(role="assistant", content=text),
            *says("And then?"),
        ],
        sampling=chat_pb2.Sampling(max_tokens=4),
    )
    usage = (await read_all(stub.StreamChat(second, timeout=120)))[-1].usage
    shared = responses[-1].usage.prompt_tokens // PAGE * PAGE
    assert shared >= 2 * PAGE
    assert usage.cached_tokens >= shared
    assert usage.prompt_tokens > usage.cached_tokens


@pytest.mark.parametrize("tokens_seen", [0, 1, 5])
async def test_a_client_that_leaves_frees_both_sides(mesh, stub, tokens_seen):
    length = 200 if tokens_seen else 3000  # without a token it leaves while its prompt is computed
    wanted, prompt = 4000 - length, [9 + (tokens_seen + i) % 700 for i in range(length)]
    before = await tokens_generated(mesh)
    async with mesh.watch() as statuses:
        call = stub.StreamChat(
            chat(
                prompt_token_ids=prompt,
                sampling=chat_pb2.Sampling(max_tokens=wanted, ignore_eos=True, temperature=0),
            ),
            timeout=120,
        )
        seen = 0
        while seen < tokens_seen:
            seen += len((await call.read()).token_ids)
        await busy(statuses)
        assert call.cancel(), "the answer was still on its way"
    assert await mesh.problems() == []
    assert await tokens_generated(mesh) - before < wanted // 2, "the work ended with the client"


async def test_a_deadline_ends_the_work_everywhere(mesh, stub):
    before = await tokens_generated(mesh)
    for deadline in (1.0, 4.0, 16.0):  # the first that is long enough to begin
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await meshes.ask(stub, PROMPT, timeout=deadline, max_tokens=3900, ignore_eos=True)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await mesh.problems() == []
        if generated := await tokens_generated(mesh) - before:
            break
    assert 0 < generated < 3000


async def tokens_generated(mesh):
    return sum(status.tokens_generated for status in await mesh.statuses())


async def test_killing_the_router_ends_its_streams_and_frees_their_pages(mesh):
    old, before = mesh.pids()["router"], await tokens_generated(mesh)
    async with (
        meshes.chat_stub(mesh.address) as stub,
        mesh.watch() as statuses,
        meshes.asking(stub, PROMPT, max_tokens=3000, ignore_eos=True) as (task, answer),
    ):
        await meshes.first_token(task, answer)
        await busy(statuses, *DECODE)
        os.kill(old, signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError):
            await task
    await restarted(mesh, "router", old)
    assert len((await served_again(mesh)).token_ids) == 3
    assert await mesh.problems() == []
    assert await tokens_generated(mesh) - before < 1500, "the work ended with the router"


async def served_again(mesh, timeout=180):
    """The first answer after the router was away."""
    async with asyncio.timeout(timeout):
        while True:
            try:
                async with meshes.chat_stub(mesh.address) as stub:
                    return await meshes.ask(stub, PROMPT, max_tokens=3, ignore_eos=True)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)


async def test_no_key_of_a_dead_worker_stays_in_the_store(mesh):
    """A killed worker comes back as a new instance; after its lease nothing names the old one."""
    old = mesh.pids()["decode-0"]
    dead = next(s.instance for s in await mesh.statuses() if s.worker_id == "decode-0")
    os.kill(old, signal.SIGKILL)
    await restarted(mesh, "decode-0", old)
    await ready_again(mesh)
    assert dead in mesh.instances
    assert dead not in {s.instance for s in await mesh.statuses()}
    assert await mesh.problems() == []


async def test_a_lost_store_fails_no_request(mesh):
    old = mesh.pids()["store"]
    async with (
        meshes.chat_stub(mesh.address) as stub,
        meshes.asking(stub, PROMPT, max_tokens=300, ignore_eos=True) as (task, answer),
    ):
        await meshes.first_token(task, answer)
        os.kill(old, signal.SIGKILL)
        assert not task.done()
        during = await meshes.ask(stub, PROMPT[:50], max_tokens=5, ignore_eos=True)
        assert len(during.token_ids) == 5
        assert len((await task).token_ids) == 300
        assert answer.timing.attempts == 1
        await restarted(mesh, "store", old)
        await ready_again(mesh)
        assert len((await meshes.ask(stub, PROMPT, max_tokens=5, ignore_eos=True)).token_ids) == 5
    assert await mesh.problems() == []


@pytest.mark.parametrize("fault", ["a missing worker", "a dead worker's pages", "a dead instance"])
async def test_a_mesh_is_not_called_at_rest_when_it_is_not(mesh, monkeypatch, fault):
    """The check that all tests here rely on sees what it is for."""
    keys = Keys(mesh.info["name"])
    assert await mesh.problems() == []
    with redis.Redis.from_url(mesh.info["redis_url"]) as store:
        if fault == "a missing worker":
            monkeypatch.setattr(mesh, "workers", 4)
        elif fault == "a dead worker's pages":
            store.hset(keys.partition(0)[0], 9, pack_row(Row(1, 1, 1, 1, 1)))
        else:
            gone = "0123456789abcdef"
            monkeypatch.setattr(mesh, "instances", {*mesh.instances, gone})
            store.hset(keys.shared[0], "left", gone)
        try:
            assert len(await mesh.problems(patience=0)) == 1
        finally:
            store.hdel(keys.partition(0)[0], 9)
            store.hdel(keys.shared[0], "left")


@pytest.mark.full  # the same supervisor in test_launch_up.py, with processes that load nothing
def test_killing_up_itself_leaves_no_process_behind():
    with meshes.running_mesh() as own:
        pids = own.pids()
        assert {"store", "router", "prefill-0", "decode-0", "decode-1"} <= set(pids)
        assert all(alive(pid) for pid in pids.values())
        own.process.kill()
        own.process.wait()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and any(alive(pid) for pid in pids.values()):
            time.sleep(0.1)
        assert [name for name, pid in pids.items() if alive(pid)] == []

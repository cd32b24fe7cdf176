"""Faults that users of other systems reported, tried on a mesh of real processes.

Exact mode, so that every answer can be held to the one that was left alone, to the last bit. The
processes stand still where a fault is to hit them (staged.py). docs/testing.md lists all reports.
"""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import meshes
import pytest
from child_path import python_path
from mesh_matrix import DECODE, KILL, PAUSE, PREFILL, other, staged_mesh

from pdmesh.registry.store import read_members
from pdmesh.router.clients import RELEASE_TIMEOUT
from pdmesh.router.moves import MOST_MOVES
from pdmesh.wire import chat_pb2

PAGE = 64
POOL = 16
ROOM = POOL * PAGE
"""Tokens that fill a decode worker's pool."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    pages = f"pages = {POOL}"
    with staged_mesh(tmp_path_factory.mktemp("reports"), pages) as play:
        yield play


@pytest.fixture
async def stub(play):
    """A client of the mesh, which is at rest afterwards."""
    async with meshes.chat_stub(play.mesh.address) as stub:
        yield stub
    play.stage.release()
    assert await play.mesh.problems() == [], play.mesh.log()


def words(seed, length):
    return [300 + (seed * 977 + 31 * i) % 3500 for i in range(length)]


async def until(condition, what, timeout=180):
    async with asyncio.timeout(timeout):
        while not await condition():
            await asyncio.sleep(0.02)


async def until_at_rest(play, name):
    try:
        await until(lambda: at_rest(play, name), "the pages are free again")
    except TimeoutError:
        raise AssertionError(f"{name}: {await pool_of(play, name)}\n{play.mesh.log()}") from None


async def pool_of(play, name):
    async with play.mesh.watch() as statuses:
        (status,) = await statuses(name)
    return status.pool


async def at_rest(play, name):
    pool = await pool_of(play, name)
    return not (pool.used or pool.reserved or pool.quarantined)


@asynccontextmanager
async def stuck_in_transfer(play, stub, prompt, name):
    """A request half of whose pages have come; yields its task, prefill and decode worker."""
    play.stage.hold(PREFILL, "Prefill.before")
    play.stage.hold(DECODE, "wire", play.midway("hold"))
    async with meshes.asking(
        stub, prompt, max_tokens=8, ignore_eos=True, tenant=name, request_id=name
    ) as (task, answer):
        (prefill,) = await play.stage.reached("Prefill.before")
        play.stage.let(PREFILL, "Prefill.before")
        (decode,) = await play.stage.reached("wire")
        yield task, answer, prefill, decode


# ---- vllm-project/vllm#46283: pages that wait for a peer which is gone -------------------------


@pytest.mark.parametrize("rounds", [2, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("action", [PAUSE, KILL])
async def test_pages_of_a_client_that_left_come_back_while_the_sender_hangs(
    play, stub, action, rounds
):
    """vllm-project/vllm#46283: more pages than there are, if each round lost its own."""
    prompt = words(1, 7 * PAGE)
    for number in range(rounds):
        name = f"hang-{action[:7]}-{rounds}-{number}"
        async with stuck_in_transfer(play, stub, prompt, name) as (task, _, prefill, decode):
            pid = play.mesh.pids()[prefill]
            os.kill(pid, signal.SIGKILL if action == KILL else signal.SIGSTOP)
            try:
                task.cancel()
                await until_at_rest(play, decode)
            finally:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                play.stage.release()
        if action == KILL:
            assert await play.mesh.problems() == []
    whole = await meshes.ask(stub, words(2, ROOM - 8), max_tokens=8, ignore_eos=True)
    assert len(whole.token_ids) == 8, "the whole pool is admitted"


async def test_pages_come_back_from_a_worker_that_stood_still_when_it_was_told(play, stub):
    """The same where nobody hears of the end: the sender hangs, and so did the receiver."""
    async with stuck_in_transfer(play, stub, words(9, 7 * PAGE), "deaf") as (task, _, one, other):
        pids = [play.mesh.pids()[name] for name in (one, other)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        task.cancel()
        try:
            await asyncio.sleep(RELEASE_TIMEOUT + 1.0)
            os.kill(pids[1], signal.SIGCONT)
            await until(lambda: registered(play.mesh.info, other), "it has its lease again")
            await until_at_rest(play, other)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            play.stage.release()


# ---- sgl-project/sglang#24527: pages given on while somebody still writes them -----------------


async def test_pages_of_an_aborted_request_go_to_the_next_one_unspoilt(play, stub):
    """sgl-project/sglang#24527: what the slow sender of the first writes later is fenced."""
    first, second = words(3, 8 * PAGE), words(4, ROOM - 8)
    want = await meshes.ask(stub, second, max_tokens=8, ignore_eos=True, tenant="alone")
    async with stuck_in_transfer(play, stub, first, "slow") as (task, _, _, decode):
        task.cancel()
        async with (
            meshes.asking(stub, second, max_tokens=8, ignore_eos=True, tenant="b1") as (one, a),
            meshes.asking(stub, second, max_tokens=8, ignore_eos=True, tenant="b2") as (two, b),
        ):
            await until(lambda: reserved(play, decode), "it has the pages")
            play.stage.release()
            await asyncio.gather(one, two)
    assert a.token_ids == b.token_ids == want.token_ids
    assert {a.timing.decode_worker, b.timing.decode_worker} == set(DECODE)


async def reserved(play, name):
    pool = await pool_of(play, name)
    return pool.reserved + pool.used == POOL


async def test_pages_that_a_standing_sender_may_still_write_are_given_to_nobody(play, stub):
    """sgl-project/sglang#24527 in shared memory, where the receiver cannot stop a writer."""
    first, second = words(5, ROOM - 8), words(6, ROOM - 8)
    want = await meshes.ask(stub, second, max_tokens=8, ignore_eos=True, tenant="alone")
    play.stage.hold(PREFILL, "Step.at", "1")  # some chunks are sent, and others are not
    async with meshes.asking(stub, first, max_tokens=8, ignore_eos=True, tenant="a") as (task, _):
        (victim,) = await play.stage.reached("Step.at")
        pid = play.mesh.pids()[victim]
        os.kill(pid, signal.SIGSTOP)
        play.stage.release()
        task.cancel()
        try:
            async with (
                meshes.asking(stub, second, max_tokens=8, ignore_eos=True, tenant="c1") as (t, c1),
                meshes.asking(stub, second, max_tokens=8, ignore_eos=True, tenant="c2") as (u, c2),
            ):
                await asyncio.wait({t, u}, return_when=asyncio.FIRST_COMPLETED)
                os.kill(pid, signal.SIGCONT)
                await asyncio.gather(t, u)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert c1.token_ids == c2.token_ids == want.token_ids


# ---- vllm-project/vllm#52234: workers that do not fit are paired ------------------------------

OTHERS = {
    "page_size": ["--page-size", "32"],
    "layers": ["--no-mtp"],
    "dtype": ["--dtype", "bfloat16"],
    "arithmetic": ["--arithmetic", "fast"],
}


@pytest.mark.parametrize(
    "what",
    ["layers", *(pytest.param(o, marks=pytest.mark.full) for o in OTHERS if o != "layers")],
)
async def test_a_worker_of_another_page_format_gets_no_request_and_the_log_says_why(
    play, stub, what, tmp_path
):
    """vllm-project/vllm#52234: never a success from pages that were not meant for it."""
    info = play.mesh.info
    join = info["join"]
    command = [sys.executable, "-P", "-m", "pdmesh.launch.cli", "serve", "decode"]
    command += ["--id", "stranger", "--redis", info["redis_url"], "--mesh", info["name"]]
    command += ["--secret-file", join["secret_file"], "--model", join["model_path"]]
    command += ["--model-name", join["model_name"], "--arithmetic", "exact", "--pages", "8"]
    path = tmp_path / "stranger.log"
    with path.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *command,
            *OTHERS[what],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=sink,
            stderr=sink,
        )
    try:
        await until(lambda: registered(info, "stranger"), "it has joined")
        router = play.mesh.state_dir / "logs" / "router.log"
        await until(lambda: says(router, "stranger", what), "the router knows it")
        alone = await meshes.ask(stub, words(7, 90), max_tokens=6, ignore_eos=True)
        for tenant in range(4):
            again = await meshes.ask(
                stub, words(7, 90), max_tokens=6, ignore_eos=True, tenant=f"s{tenant}"
            )
            assert again.token_ids == alone.token_ids
            assert again.timing.decode_worker in DECODE
    except TimeoutError as error:
        raise AssertionError(path.read_text()) from error
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.wait()


async def registered(info, name):
    found = await read_members(info["redis_url"], info["name"])
    return any(m.record.worker_id == name and m.state == "ready" for m in found)


async def says(path: Path, *words):
    """Whether a line has all the words. The log is the mesh's: other cases have written to it."""
    return any(all(word in line for word in words) for line in path.read_text().splitlines())


# ---- sgl-project/sglang#36029: a worker that is started again at its address ------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_restarted_at_its_address_in_a_transfer_hurts_one_request_at_most(
    play, stub, role
):
    """sgl-project/sglang#36029: its old connections are not used again."""
    prompt, before, pids = words(8, 5 * PAGE), await addresses(play), play.mesh.pids()
    want = await meshes.ask(stub, prompt, max_tokens=8, ignore_eos=True)
    async with stuck_in_transfer(play, stub, prompt, f"again-{role}") as (task, answer, *pair):
        victim = pair[role == "decode"]
        await play.hit(victim, KILL, play.stage.release)
        await task
    assert answer.token_ids == want.token_ids
    more = [
        await meshes.ask(stub, prompt, max_tokens=8, ignore_eos=True, tenant=f"{role}-{number}")
        for number in range(10)
    ]
    assert [m.token_ids for m in more] == [want.token_ids] * 10
    assert sum(m.timing.attempts > 1 for m in more) <= 1
    assert await play.mesh.problems() == []
    used = [
        await meshes.ask(stub, prompt, max_tokens=8, ignore_eos=True, tenant=f"{role}+{number}")
        for number in range(6)
    ]
    assert [u.token_ids for u in used] == [want.token_ids] * 6
    assert await addresses(play) == before
    assert {n for n, pid in play.mesh.pids().items() if pid != pids[n]} == {victim}


async def addresses(play):
    found = await read_members(play.mesh.info["redis_url"], play.mesh.info["name"])
    return {m.record.worker_id: m.record.address for m in found}


# ---- ai-dynamo/dynamo#13600: what an answer that goes on elsewhere has to bring along ---------

LENGTH, START = 90, 100
BOUNDARY = 2 * PAGE - START
PLACES = (1, BOUNDARY - 1, BOUNDARY, LENGTH - 1)
"""Tokens that the client has. An answer moves once its decode worker has sent one (2), and with the
last but one here its source may have come to the end already, which is no move."""
EVERYTHING = {
    "seed": 11,
    "temperature": 0.9,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.1,
    "min_tokens": 40,
    "logprobs": 2,
}


async def told(stub, name, tenant, **sampling):
    """An answer, and after each piece (tokens so far, length of the text so far)."""
    fields = {"temperature": 0.0, "max_tokens": LENGTH, **sampling}
    request = chat_pb2.ChatRequest(
        sampling=chat_pb2.Sampling(**fields),
        prompt_token_ids=words(9, START),
        tenant=tenant,
        request_id=name,
    )
    tokens, text, logprobs, grown, last = [], "", [], [], None
    async for r in stub.StreamChat(request, timeout=180):
        tokens += r.token_ids
        text += r.text
        logprobs += [(e.logprob, *e.top_token_ids, *e.top_logprobs) for e in r.logprobs]
        grown.append((len(tokens), len(text)))
        last = r
    return (tokens, text, logprobs, last.finish_reason), grown, last.timing.attempts


async def stop_at(stub, place):
    """A text that begins in the tokens before ``place`` and ends in those after it."""
    (_, text, *_), grown, _ = await told(stub, "whole", "stops", ignore_eos=True)
    length = max(at for tokens, at in grown if tokens <= place) if place > 1 else 1
    return text[max(0, length - 2) : length + 2]


@pytest.mark.parametrize(
    ("how", "place"),
    [
        *(("move", place) for place in (2, *PLACES[1:])),
        ("kill", BOUNDARY),
        *(pytest.param("kill", p, marks=pytest.mark.full) for p in PLACES if p != BOUNDARY),
    ],
)
async def test_an_answer_that_goes_on_elsewhere_brings_all_its_state_along(play, stub, how, place):
    """ai-dynamo/dynamo#13600: seed, penalties, min_tokens, logprobs, MTP; half a stop string."""
    kinds = {
        "everything": EVERYTHING,
        "half-a-stop": {"stop": [await stop_at(stub, place)], "ignore_eos": True},
        "exactly-max_tokens": {"min_tokens": LENGTH, "temperature": 1.0, "seed": 3},
    }
    alone = {k: (await told(stub, k, "alone", **kind))[0] for k, kind in kinds.items()}
    assert alone["half-a-stop"][3] == "stop"
    play.stage.hold(DECODE, "Stream.at", str(place))
    tenant = f"{how}-{place}"
    tasks = {
        k: asyncio.ensure_future(told(stub, f"{k}-{tenant}", tenant, **kind))
        for k, kind in kinds.items()
    }
    await play.stage.reached("Stream.at")
    play.stage.hold(DECODE, "Step.pace", "0.1")  # it does not come to its end before it moves
    await until(lambda: held_or_over(play, tasks, tenant, place), "all have come so far")
    held = await play.running()
    assert held or place == 1
    if how == "kill":
        victims = await play.holders()
        await play.hit(next(iter(victims.values())), KILL, play.stage.release)
        ends = await asyncio.gather(*tasks.values())
    else:
        async with asyncio.TaskGroup() as group:
            moves = [group.create_task(play.move(name)) for name in list(held)[:MOST_MOVES]]
            await play.begun(moves)
            play.stage.release()
        ends = await asyncio.gather(*tasks.values())
        states = [move.result().state for move in moves]
        assert "moved" in states or place == LENGTH - 1, [move.result().reason for move in moves]
    assert {k: end[0] for k, end in zip(tasks, ends, strict=True)} == alone
    if how == "kill":
        assert max(attempts for *_, attempts in ends) == 2


async def held_or_over(play, tasks, tenant, place):
    """Whether every answer that is not over has exactly so many tokens."""
    counts = await play.counts()
    return all(
        task.done() or counts.get(f"{kind}-{tenant}", 0) == place for kind, task in tasks.items()
    )


# ---- ai-dynamo/dynamo#11647: a worker that stays connected and says nothing ------------------


async def test_a_stream_leaves_a_worker_that_stands_still_and_its_late_tokens_are_nothing(
    play, stub
):
    """ai-dynamo/dynamo#11647: the stream moves within the limit; the sleeper wakes up harmless."""
    prompt, name = words(10, 100), "sleeper"
    want = await meshes.ask(stub, prompt, max_tokens=150, ignore_eos=True, tenant="alone")
    play.stage.hold(DECODE, "Step.at", str(len(prompt) + 9))
    async with meshes.asking(
        stub, prompt, max_tokens=150, ignore_eos=True, tenant=name, request_id=name
    ) as (task, answer):
        sleeper = await play.holder(name)
        pid = play.mesh.pids()[sleeper]
        os.kill(pid, signal.SIGSTOP)
        play.stage.release()
        try:
            await task
            assert answer.token_ids == want.token_ids
            assert answer.timing.decode_worker == other(sleeper)
            assert await play.running() == {}
        finally:
            os.kill(pid, signal.SIGCONT)
    assert await play.mesh.problems() == []
    assert play.mesh.pids()[sleeper] == pid
    used = [
        await meshes.ask(stub, prompt, max_tokens=4, ignore_eos=True, tenant=f"awake-{number}")
        for number in range(8)
    ]
    assert {u.timing.decode_worker for u in used} == set(DECODE), "no booking was left behind"
    assert {tuple(u.token_ids) for u in used} == {tuple(want.token_ids[:4])}

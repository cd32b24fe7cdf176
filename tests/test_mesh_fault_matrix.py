"""The fault matrix, in real processes: each fault at each point where it can hit.

After every fault the client has the right tokens, to the last bit (exact mode), or its router is
gone and it has an explicit error; then the mesh is whole, every pool at its baseline and nothing in
quarantine. The processes stand still at the point in question while they are hit (staged.py).
"""

import asyncio
import contextlib
import itertools
import random

import grpc
import meshes
import pytest
import redis
import torch
from mesh_matrix import (
    CASES,
    DECODE,
    KILL,
    MOVE_PLACES,
    PAUSE,
    PREFILL,
    PROMPT_PLACES,
    SAMPLE,
    STORE,
    other,
    staged_mesh,
    table,
)

from pdmesh.model.reference import generate_reference
from pdmesh.model.weights import load_model

PROMPT = list(range(300, 470))
LENGTH = 120
IN_THE_MIDDLE = ("Step.at", str(len(PROMPT) + 9))
"""Where an answer to the prompt stands still until it moves."""
_number = itertools.count()

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    with staged_mesh(tmp_path_factory.mktemp("matrix")) as play:
        yield play


@pytest.fixture(scope="module")
def want(play):
    torch.set_num_threads(1)
    model = load_model(play.model, torch.float32, torch.device("cpu"))
    return generate_reference(model, PROMPT, LENGTH, arithmetic="exact")


@pytest.fixture
async def whole(play):
    """What was done to the mesh is over: it serves, and nothing stayed behind."""
    yield
    play.stage.release()
    assert await play.mesh.problems() == [], play.mesh.log()
    answer = await served(play)
    assert len(answer.token_ids) == 3


async def served(play, timeout=180):
    async with asyncio.timeout(timeout):
        while True:
            try:
                async with meshes.chat_stub(play.mesh.address) as stub:
                    return await meshes.ask(stub, PROMPT, max_tokens=3, ignore_eos=True, tenant="x")
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)


def asking(stub, request_id, max_tokens=LENGTH):
    """An answer that shares no page with another."""
    return meshes.asking(
        stub,
        PROMPT,
        max_tokens=max_tokens,
        ignore_eos=True,
        tenant=request_id,
        request_id=request_id,
    )


def new_id():
    return f"case-{next(_number)}"


def params(cases, sample):
    return [
        pytest.param(c, marks=() if c in sample else pytest.mark.full, id=str(c)) for c in cases
    ]


async def judge(case, task, answer, want):
    """The answer is right and whole; or it was cut off, and nobody but the router is to blame."""
    if (case.victim, case.action) == ("router", KILL):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await task
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert answer.finish == ""
    else:
        await task
        assert answer.finish == "length"
    assert answer.token_ids == want[: len(answer.token_ids)]


@pytest.mark.parametrize("case", params([c for c in CASES if not c.moving], SAMPLE))
async def test_a_prompt_survives_what_happens_to_a_process(play, want, whole, case):
    workers, place = PROMPT_PLACES[case.place]
    await_at = "Prefill.before"
    play.stage.hold(workers, place, play.midway("hold"))
    if place == "wire":
        play.stage.hold(PREFILL, await_at)
    async with (
        meshes.chat_stub(play.mesh.address) as stub,
        asking(stub, new_id(), 12) as (task, answer),
    ):
        (at,) = await play.stage.reached(await_at if place == "wire" else place)
        prefill, decode = await who(play, workers, at, place)
        if place == "wire":
            play.stage.let(PREFILL, await_at)
            (decode,) = await play.stage.reached("wire")
            prefill = at
        victim = {"prefill": prefill, "decode": decode, "router": "router"}[case.victim]
        await play.hit(victim, case.action, play.stage.release)
        await judge(case, task, answer, want)


async def who(play, workers, at, place):
    """Prefill and decode worker of the only request: the one at the place, and the other role's."""
    if workers is DECODE or place == "wire":
        return PREFILL[0], at
    statuses = await play.mesh.statuses()
    decode = max((s for s in statuses if s.role == "decode"), key=lambda s: s.leases)
    return at, decode.worker_id


@pytest.mark.parametrize("case", params([c for c in CASES if c.moving], SAMPLE))
async def test_an_answer_that_moves_survives_what_happens_to_a_process(play, want, whole, case):
    workers, place = MOVE_PLACES[case.place]
    name = new_id()
    play.stage.hold(DECODE, *IN_THE_MIDDLE)
    async with (
        meshes.chat_stub(play.mesh.address) as stub,
        asking(stub, name) as (task, answer),
    ):
        source = await play.holder(name)
        victim = {"source": source, "target": other(source), "router": "router"}[case.victim]
        play.stage.hold(workers, place)
        async with play.moving(name) as move:
            await play.begun([move])
            play.stage.let(DECODE, "Step.at")
            await play.stage.reached(place)
            await play.hit(victim, case.action, play.stage.release)
            await judge(case, task, answer, want)


@pytest.mark.parametrize("moving", [False, True], ids=["prompt", "move"])
@pytest.mark.parametrize("what", ["flip", "cut", "hold"])
async def test_pages_that_are_lost_or_changed_on_their_way_are_sent_again(
    play, want, whole, what, moving
):
    """Half of the bytes arrive, then a bit flips, or the connection ends, or it stands still."""
    name = new_id()
    async with meshes.chat_stub(play.mesh.address) as stub:
        if moving:
            play.stage.hold(DECODE, *IN_THE_MIDDLE)
        else:
            play.stage.hold(DECODE, "wire", play.midway(what))
        async with asking(stub, name, LENGTH if moving else 12) as (task, answer):
            if moving:
                source = await play.holder(name)
                play.stage.hold([other(source)], "wire", play.midway(what))
                async with play.moving(name) as move:
                    await play.begun([move])
                    play.stage.let(DECODE, "Step.at")
                    await play.stage.reached("wire")
                    if what == "hold":
                        await asyncio.sleep(1)
                        play.stage.release()
                    report = await move
                    assert what == "hold" or report.state != "moved"
            else:
                await play.stage.reached("wire")
                if what == "hold":
                    await asyncio.sleep(1)
                play.stage.release()
            await task
    assert answer.token_ids == want[: len(answer.token_ids)]
    assert answer.finish == "length"
    assert moving or what == "hold" or answer.timing.attempts > 1


SAMPLINGS = [
    {},
    {"temperature": 1.0, "seed": 5, "logprobs": 2},
    {"temperature": 0.8, "seed": 6, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"repetition_penalty": 1.2, "min_tokens": 50},
]


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.timeout(3600)
async def test_every_failover_after_a_kill_is_right_to_the_last_bit(play, whole, count):
    """So many answers lose their worker somewhere in the middle and go on at another."""
    rng, failovers = random.Random(count), 0
    async with meshes.chat_stub(play.mesh.address) as stub:
        alone = [await asked(stub, n, "alone") for n in range(len(SAMPLINGS))]
        while failovers < count:
            async with contextlib.AsyncExitStack() as stack:
                mine = [
                    await stack.enter_async_context(lasting(stub, n, new_id()))
                    for n in range(len(SAMPLINGS))
                ]
                for task, answer in mine:
                    await meshes.first_token(task, answer)
                await asyncio.sleep(rng.random() * 0.5)
                held = list((await play.running()).values())
                if not held:
                    continue
                await play.hit(max(DECODE, key=held.count), KILL)
                await asyncio.gather(*(task for task, _ in mine))
            for (_, answer), want in zip(mine, alone, strict=True):
                assert seen(answer) == seen(want)
                failovers += answer.timing.attempts - 1
            assert await play.mesh.problems() == [], play.mesh.log()


def seen(answer):
    logprobs = [(e.logprob, *e.top_token_ids, *e.top_logprobs) for e in answer.logprobs]
    return answer.token_ids, answer.text, answer.finish, logprobs


def lasting(stub, number, tenant):
    fields = {"max_tokens": 120, "ignore_eos": True, **SAMPLINGS[number]}
    return meshes.asking(stub, PROMPT[number:], tenant=tenant, **fields)


async def asked(stub, number, tenant):
    async with lasting(stub, number, tenant) as (task, _):
        return await task


STORE_FAULTS = [
    KILL,
    PAUSE,
    pytest.param("wiped", marks=pytest.mark.full),
]


@pytest.mark.parametrize("action", STORE_FAULTS)
async def test_a_store_that_is_gone_or_slow_or_empty_changes_no_answer(play, want, whole, action):
    name = new_id()
    play.stage.hold(DECODE, *IN_THE_MIDDLE)
    async with (
        meshes.chat_stub(play.mesh.address) as stub,
        asking(stub, name) as (task, answer),
    ):
        await play.holder(name)
        if action == "wiped":
            with redis.Redis.from_url(play.mesh.info["redis_url"]) as store:
                store.flushall()
            play.stage.release()
        else:
            await play.hit(STORE, action, play.stage.release)
        async with asking(stub, new_id(), 12) as (second, during), play.moving(name) as move:
            await second
            report = await move
        await task
    assert during.token_ids == want[:12]
    assert answer.token_ids == want
    assert report is None or report.state in ("moved", "ended", "failed")


def test_the_table_in_the_documentation_is_this_matrix():
    text = (meshes.ROOT / "docs" / "testing.md").read_text()
    assert "\n".join(table()) in text

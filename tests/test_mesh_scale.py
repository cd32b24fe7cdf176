"""A real mesh that grows, shrinks and is renewed while answers are streaming.

No answer fails, and each has the tokens that it has when it is left alone.
"""

import asyncio
import signal
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import meshes
import pytest
from checkpoints import random_checkpoint
from mesh_changes import (
    admin,
    drain,
    members,
    pdmesh,
    published,
    said,
    started,
    status,
    stopped,
    undrain,
    until,
)
from mesh_faults import alive

from pdmesh.wire import chat_pb2
from pdmesh.wire.admin import AnswerList
from pdmesh.wire.messages import Empty

STREAMS = 8
PROMPTS = [list(range(300 + 40 * i, 350 + 44 * i)) for i in range(STREAMS)]
TOKENS = 48
LONG = 600
PATIENT = "[mesh]\nlease_ttl_s = 20.0\n"
"""A process that stands still in a test is not taken for dead."""
MORE = ["prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1", "decode-2", "decode-3"]


@pytest.fixture(scope="module", params=["exact", pytest.param("fast", marks=pytest.mark.full)])
def mesh(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("random-model")
    random_checkpoint(folder, num_hidden_layers=2, max_position_embeddings=4096)
    arguments = ("--model", str(folder), "--arithmetic", request.param, "--drain-s", "60")
    with meshes.running_mesh(*arguments, topology=PATIENT) as running:
        yield running


@pytest.fixture
async def stub(mesh):
    """A client; afterwards the mesh is at rest, with one prefill and two decode workers."""
    async with meshes.chat_stub(mesh.address) as stub:
        yield stub
        await until(lambda: at_rest(mesh), "the last change did not end")
        answer = await meshes.ask(stub, PROMPTS[0], max_tokens=2, ignore_eos=True)
        assert len(answer.token_ids) == 2
    assert await mesh.problems() == []


async def at_rest(mesh) -> bool:
    """Scales back, unless a change whose client has gone is still about to end."""
    process = await started(mesh, "scale", "prefill=1", "decode=2")
    out, _ = await asyncio.wait_for(process.communicate(), 300)
    under_way = b"another change is under way" in out
    assert under_way or process.returncode == 0, out.decode() + mesh.log()
    return not under_way


def question(stub, prompt, tokens=TOKENS, **rest):
    return meshes.ask(stub, prompt, max_tokens=tokens, ignore_eos=True, timeout=300, **rest)


def sampling(number: int) -> dict:
    """Every other stream is greedy, the rest is seeded."""
    return {"temperature": 0.9, "seed": number} if number % 2 else {}


@asynccontextmanager
async def steady_streams(stub):
    """Keeps one answer to each prompt streaming; each has to be the one of a quiet mesh.

    Yields the answers so far, which go on to grow.
    """
    quiet = [
        (await question(stub, prompt, **sampling(number))).token_ids
        for number, prompt in enumerate(PROMPTS)
    ]
    over = asyncio.Event()
    answers = []

    async def stream(number: int) -> None:
        while not over.is_set():
            answer = await question(stub, PROMPTS[number], **sampling(number))
            assert answer.token_ids == quiet[number]
            assert answer.finish == "length"
            assert answer.usage.completion_tokens == TOKENS
            answers.append(answer)

    async with asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(stream(number))
        try:
            yield answers
            seen = len(answers)
            while len(answers) < seen + STREAMS:  # it still works
                await asyncio.sleep(0.05)
        finally:
            over.set()


def served_by(answers, field: str) -> set[str]:
    return {getattr(answer.timing, field) for answer in answers}


async def test_workers_come_and_go_while_answers_stream(mesh, stub):
    async with steady_streams(stub) as answers:
        await pdmesh(mesh, "scale", "prefill=3", "decode=4")
        assert set(await members(mesh)) == set(MORE)
        pids, at = mesh.pids(), len(answers)

        async def all_are_used() -> bool:
            lately = answers[at:]
            used = served_by(lately, "decode_worker") | served_by(lately, "prefill_worker")
            return set(MORE) <= used

        await until(all_are_used, "new workers get no work")
        async with AsyncExitStack() as stack:
            lasting = [
                await stack.enter_async_context(asking(stub, prompt, 3000))
                for prompt in PROMPTS[:4]
            ]
            for task, told in lasting:
                await meshes.first_token(task, told)
            await pdmesh(mesh, "scale", "decode=1", "prefill=1")
            router = await stack.enter_async_context(admin(mesh))
            found = (await router.unary("Answers", Empty(), AnswerList, timeout=60)).answers
            assert {answer.worker_id for answer in found} == {"decode-0"}
            over = [*answers[at:], *(told for _, told in lasting if told.timing)]
            moved = [*(a.migrations for a in found), *(a.timing.migrations for a in over)]
            assert sum(moved) > 0, "a worker that goes hands over"
        assert set(await members(mesh)) == {"prefill-0", "decode-0"}
        assert not [name for name in set(MORE) - {"prefill-0", "decode-0"} if alive(pids[name])]
    assert answers[-1].timing.decode_worker == "decode-0"


async def test_a_rolling_restart_fails_no_answer(mesh, stub):
    before = mesh.pids()
    async with steady_streams(stub):
        lines = await pdmesh(mesh, "restart")
    assert sum(" is replaced by " in line for line in lines) == 3
    after = mesh.pids()
    workers = set(await members(mesh))
    assert len(workers) == 3
    assert not {after[name] for name in workers} & set(before.values())
    assert after["router"] == before["router"]


# ---- a worker that joined -----------------------------------------------------------------------


@asynccontextmanager
async def guest(mesh, stub, *flags: str):
    """A decode worker that joined, and gets all new work: the others drain."""
    process = await started(
        mesh, "serve", "decode", "--join", mesh.info["name"], "--id", "guest", *flags
    )

    async def joined() -> bool:
        assert process.returncode is None, (await process.stdout.read()).decode()
        return "guest" in await members(mesh)

    others = sorted(name for name in await members(mesh) if name.startswith("decode"))
    try:
        await until(joined, "it does not join")
        for name in others:
            await pdmesh(mesh, "drain", name)
        await known(stub, 1)
        yield process, others
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        for name in others:
            await pdmesh(mesh, "drain", name, "--undo")


async def known(stub, decode: int) -> None:
    """Waits until the router would send new answers to so many decode workers."""

    async def counted() -> bool:
        (card,) = (await stub.ListModels(chat_pb2.ListModelsRequest(), timeout=30)).models
        return card.decode_workers == decode

    await until(counted, "the router sees other workers")


async def taken_back(mesh, stub, others) -> None:
    """Lets the others take new work again, and the router know."""
    for name in others:
        await undrain(mesh, name)
    await known(stub, len(others) + 1)


async def cut_short(mesh, process) -> None:
    """Two SIGTERMs: the guest ends though an answer is left, which nobody could move meanwhile."""
    with stopped(mesh.pids()["router"]):
        process.send_signal(signal.SIGTERM)
        await said(process, "event=draining")
        process.send_signal(signal.SIGTERM)
        assert 'left="1 answer"' in await said(process, "event=drain_cut")


def asking(stub, prompt, tokens):
    return meshes.asking(stub, prompt, max_tokens=tokens, ignore_eos=True, timeout=300)


async def ended_well(mesh, process) -> None:
    assert await asyncio.wait_for(process.wait(), 60) == 0
    assert "guest" not in await members(mesh)


async def test_a_worker_that_joined_serves_and_finishes_what_it_has_at_sigterm(mesh, stub):
    quiet = (await question(stub, PROMPTS[1], 100)).token_ids
    async with guest(mesh, stub) as (process, _):
        async with asking(stub, PROMPTS[1], 100) as (task, told):
            await meshes.first_token(task, told)
            process.send_signal(signal.SIGTERM)
            answer = await task
        await ended_well(mesh, process)
    assert answer.token_ids == quiet
    assert answer.timing.decode_worker == "guest"


@pytest.mark.full  # as the one below
async def test_a_second_sigterm_ends_a_worker_and_its_answer_goes_on_elsewhere(mesh, stub):
    quiet = (await question(stub, PROMPTS[2], LONG)).token_ids
    async with guest(mesh, stub) as (process, others):
        async with asking(stub, PROMPTS[2], LONG) as (task, told):
            await meshes.first_token(task, told)
            await taken_back(mesh, stub, others)
            await cut_short(mesh, process)
            answer = await task
        await ended_well(mesh, process)
    assert answer.token_ids == quiet
    assert answer.timing.decode_worker in others
    assert (answer.timing.attempts, answer.timing.migrations) == (2, 0), mesh.log()


@pytest.mark.full
@pytest.mark.parametrize("elsewhere", [True, False])
async def test_a_promise_of_a_worker_that_ends_before_the_pages_come_is_made_elsewhere(
    mesh, stub, elsewhere
):
    """Or fails by name, where there is no other worker."""
    quiet = (await question(stub, PROMPTS[3], 8)).token_ids
    async with guest(mesh, stub) as (process, others), asking(stub, PROMPTS[3], 8) as (task, _):
        pids = mesh.pids()
        with stopped(next(pids[name] for name in pids if name.startswith("prefill"))):

            async def promised() -> bool:
                return (await status(mesh, "guest")).leases == 1

            await until(promised, "nothing is reserved")
            if elsewhere:
                await taken_back(mesh, stub, others)
            await cut_short(mesh, process)
            await ended_well(mesh, process)  # while it ends, pages that came would be welcome
        if elsewhere:
            answer = await task
            assert answer.token_ids == quiet
            assert answer.timing.decode_worker in others
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="no decode worker is ready"):
                await task


async def test_the_last_decode_worker_finishes_its_answers_or_fails_them_when_time_is_over(
    mesh, stub
):
    async with guest(mesh, stub, "--drain-s", "0.2") as (process, _):
        async with asking(stub, PROMPTS[4], 3000) as (task, told):
            await meshes.first_token(task, told)
            process.send_signal(signal.SIGTERM)
            assert "0.2 s are over" in await said(process, "event=drain_cut")
            with pytest.raises(grpc.aio.AioRpcError, match="no decode worker is ready"):
                await task
        await ended_well(mesh, process)


async def test_a_worker_that_drains_goes_on_lending_its_pages(mesh, stub):
    for chat in range(10):  # the router hears a moment after the store
        prompt = list(range(3000 + chat, 3640 + chat))
        quiet = await question(stub, prompt, 8)
        owner = quiet.timing.decode_worker
        (other,) = (n for n in await members(mesh) if n.startswith("decode") and n != owner)
        before = (await status(mesh, other)).pulled_pages
        await published(mesh)
        await drain(mesh, owner)
        try:
            await known(stub, 1)
            again = await question(stub, prompt, 8)
            assert again.token_ids == quiet.token_ids
            assert again.timing.decode_worker == other
            pulled = (await status(mesh, other)).pulled_pages - before
            assert (await status(mesh, owner)).problems == ()
        finally:
            await undrain(mesh, owner)
            await known(stub, 2)
        if pulled:
            break
    assert pulled


async def test_a_client_that_stops_watching_does_not_stop_a_scale(mesh, stub):
    for wanted in (3, 4, 5):  # until one is not over before the signal comes
        process = await started(mesh, "scale", f"decode={wanted}")
        assert (await process.stdout.readline()).decode() == f"scaling to decode={wanted}\n"
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        if process.returncode == 130:
            break
    assert process.returncode == 130
    assert "the change goes on in the mesh" in out.decode()

    async def all_there() -> bool:
        return sum(name.startswith("decode") for name in await members(mesh)) == wanted

    await until(all_there, "the scale was given up")

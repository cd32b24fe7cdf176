"""A real mesh that grows, shrinks and is renewed while answers are streaming.

In exact arithmetic, so that an answer that had to go on elsewhere has the same tokens.
"""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager

import meshes
import pytest
from mesh_faults import alive

from pdmesh.registry.store import read_members

PROMPTS = [list(range(300 + 40 * i, 400 + 47 * i)) for i in range(4)]
TOKENS = 24


@pytest.fixture(scope="module")
def mesh():
    with meshes.running_mesh("--arithmetic", "exact", "--drain-s", "60") as running:
        yield running


@pytest.fixture
async def stub(mesh):
    """A client; afterwards the mesh is at rest, with one prefill and two decode workers."""
    async with meshes.chat_stub(mesh.address) as stub:
        yield stub
        await pdmesh(mesh, "scale", "prefill=1", "decode=2")
        answer = await meshes.ask(stub, PROMPTS[0], max_tokens=2, ignore_eos=True)
        assert len(answer.token_ids) == 2
    assert await mesh.problems() == []


def environment(mesh) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_RUNTIME_DIR": str(mesh.state_dir.parent.parent),
        "PYTHONPATH": str(meshes.ROOT / ".pythonpath"),
    }


async def started(mesh, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "pdmesh.launch.cli", *arguments),
        env=environment(mesh),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def pdmesh(mesh, *arguments: str) -> list[str]:
    """Runs a command that has to succeed; returns the lines it printed."""
    process = await started(mesh, *arguments)
    out, _ = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 0, out.decode() + mesh.log()
    return out.decode().splitlines()


async def ready(mesh) -> set[str]:
    members = await read_members(mesh.info["redis_url"], mesh.info["name"])
    return {member.record.worker_id for member in members if member.state == "ready"}


async def until(condition, what: str, timeout: float = 120) -> None:
    async with asyncio.timeout(timeout):
        while not await condition():
            await asyncio.sleep(0.1)
    assert await condition(), what


def question(stub, prompt, tokens=TOKENS, **rest):
    return meshes.ask(stub, prompt, max_tokens=tokens, ignore_eos=True, timeout=300, **rest)


@asynccontextmanager
async def steady_streams(stub):
    """Keeps one answer to each prompt streaming; each has to be the one of a quiet mesh.

    Yields the answers so far, which go on to grow.
    """
    quiet = [(await question(stub, prompt)).token_ids for prompt in PROMPTS]
    over = asyncio.Event()
    answers = []

    async def stream(number: int) -> None:
        while not over.is_set():
            answer = await question(stub, PROMPTS[number])
            assert answer.token_ids == quiet[number]
            assert answer.finish == "length"
            answers.append(answer)

    async with asyncio.TaskGroup() as group:
        for number in range(len(PROMPTS)):
            group.create_task(stream(number))
        try:
            yield answers
            seen = len(answers)
            while len(answers) < seen + len(PROMPTS):  # it still works
                await asyncio.sleep(0.05)
        finally:
            over.set()


def served_by(answers, field: str) -> set[str]:
    return {getattr(answer.timing, field) for answer in answers}


async def test_workers_come_and_go_while_answers_stream(mesh, stub):
    async with steady_streams(stub) as answers:
        await pdmesh(mesh, "scale", "decode=3", "prefill=2")
        assert await ready(mesh) == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
        pids, at = mesh.pids(), len(answers)

        async def new_ones_are_used() -> bool:
            lately = answers[at:]
            used = served_by(lately, "decode_worker") | served_by(lately, "prefill_worker")
            return {"decode-2", "prefill-1"} <= used

        await until(new_ones_are_used, "new workers get no work")
        await pdmesh(mesh, "scale", "decode=1", "prefill=1")
        assert await ready(mesh) == {"prefill-0", "decode-0"}
        assert not [name for name in ("prefill-1", "decode-1", "decode-2") if alive(pids[name])]
    assert answers[-1].timing.decode_worker == "decode-0"


async def test_a_rolling_restart_fails_no_answer(mesh, stub):
    before = mesh.pids()
    async with steady_streams(stub):
        lines = await pdmesh(mesh, "restart")
    assert sum(" is replaced by " in line for line in lines) == 3
    after = mesh.pids()
    workers = await ready(mesh)
    assert len(workers) == 3
    assert not {after[name] for name in workers} & set(before.values())
    assert after["router"] == before["router"]


@asynccontextmanager
async def guest(mesh):
    """A decode worker that joined, and gets all new work: the others drain."""
    process = await started(mesh, "serve", "decode", "--join", mesh.info["name"], "--id", "guest")

    async def joined() -> bool:
        assert process.returncode is None, (await process.stdout.read()).decode()
        return "guest" in await ready(mesh)

    others = sorted(name for name in await ready(mesh) if name.startswith("decode"))
    try:
        await until(joined, "it does not join")
        for name in others:
            await pdmesh(mesh, "drain", name)
        yield process, others
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        for name in others:
            await pdmesh(mesh, "drain", name, "--undo")


async def test_a_worker_that_joined_serves_and_finishes_what_it_has_at_sigterm(mesh, stub):
    quiet = (await question(stub, PROMPTS[1], 100)).token_ids
    async with guest(mesh) as (process, _):
        async with meshes.asking(stub, PROMPTS[1], max_tokens=100, ignore_eos=True) as (task, told):
            await meshes.first_token(task, told)
            process.send_signal(signal.SIGTERM)
            answer = await task
        assert answer.token_ids == quiet
        assert answer.timing.decode_worker == "guest"
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert "guest" not in await ready(mesh)


async def test_a_second_sigterm_ends_a_worker_and_its_answer_goes_on_elsewhere(mesh, stub):
    quiet = (await question(stub, PROMPTS[2], 300)).token_ids
    async with guest(mesh) as (process, others):
        async with meshes.asking(
            stub, PROMPTS[2], max_tokens=300, ignore_eos=True, timeout=300
        ) as (task, told):
            await meshes.first_token(task, told)
            for name in others:
                await pdmesh(mesh, "drain", name, "--undo")
            process.send_signal(signal.SIGTERM)

            async def draining() -> bool:
                return "guest" not in await ready(mesh)

            await until(draining, "it does not drain")
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), 60)
            answer = await task
        assert answer.token_ids == quiet


async def test_a_client_that_stops_watching_does_not_stop_a_scale(mesh, stub):
    process = await started(mesh, "scale", "decode=3")
    assert (await process.stdout.readline()).decode() == "scaling to decode=3\n"
    process.send_signal(signal.SIGINT)
    out, _ = await process.communicate()
    assert process.returncode == 130
    assert "the change goes on in the mesh" in out.decode()

    async def three() -> bool:
        return sum(name.startswith("decode") for name in await ready(mesh)) == 3

    await until(three, "the scale was given up")

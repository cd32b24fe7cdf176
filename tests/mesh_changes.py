"""What tests do to a running mesh: the commands that change it, and signals to its processes."""

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import meshes
from child_path import python_path

from pdmesh.launch.registry import check
from pdmesh.registry.roster import Member
from pdmesh.registry.store import Store, read_members
from pdmesh.wire.admin import AnswerList, MoveOrder, MoveReport, RunningAnswer
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.handoff import DrainRequest
from pdmesh.wire.messages import Empty, WorkerRecord, WorkerStatus
from pdmesh.wire.rpc import Client


def environment(mesh) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_RUNTIME_DIR": str(mesh.state_dir.parent.parent),
        "PYTHONPATH": python_path(),
    }


async def started(mesh, *arguments: str) -> asyncio.subprocess.Process:
    """Starts a ``pdmesh`` command; its output can be read."""
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


async def members(mesh) -> dict[str, WorkerRecord]:
    """The workers that are ready, by name."""
    return {m.record.worker_id: m.record for m in await _listed(mesh) if m.state == "ready"}


async def _listed(mesh, tries: int = 10) -> list[Member]:
    """All workers in the store, which on a busy machine may need to be asked again."""
    for _ in range(tries - 1):
        with suppress(PdmeshError):
            return await read_members(mesh.info["redis_url"], mesh.info["name"])
    return await read_members(mesh.info["redis_url"], mesh.info["name"])


async def drain(mesh, name: str) -> None:
    """Has a worker take nothing new; does not wait until it is empty."""
    await _call(mesh, name, "Drain", DrainRequest(reason="a test"))


async def undrain(mesh, name: str) -> None:
    await _call(mesh, name, "Undrain", Empty())


async def status(mesh, name: str) -> WorkerStatus:
    return await _call(mesh, name, "Status", Empty())


async def _call(mesh, name: str, method: str, request) -> WorkerStatus:
    record = next(m.record for m in await _listed(mesh) if m.record.worker_id == name)
    client = Client(record.address, record.role)
    try:
        return await client.unary(method, request, WorkerStatus, timeout=30)
    finally:
        await client.close()


@asynccontextmanager
async def admin(mesh):
    """A client of the router's internal service, which has a new address after a restart.

    A test that has something done to a running answer asks here: a command takes seconds to start
    on a loaded machine, and the answer may be over by then.
    """
    info = json.loads((mesh.state_dir / "mesh.json").read_text())
    client = Client(info["router_admin"], "router")
    try:
        yield client
    finally:
        await client.close()


async def running_answer(router: Client, request_id: str, phase: str = "running") -> RunningAnswer:
    """The request's answer, once it is in this phase."""
    async with asyncio.timeout(90):
        while True:
            found = await router.unary("Answers", Empty(), AnswerList, timeout=30)
            for answer in found.answers:
                if (answer.request_id, answer.phase) == (request_id, phase):
                    return answer
            await asyncio.sleep(0.01)


async def move(router: Client, request_id: str, target: str = "") -> MoveReport:
    """Moves the request's answer; the last report."""
    order = MoveOrder(request_id=request_id, target=target)
    reports = router.stream("MigrateAnswer", order, MoveReport, timeout=120)
    return [report async for report in reports][-1]


LONG, FURTHER_TOKENS = 2000, 40
"""An answer that is not over before it has moved, and how many tokens it is read on after that."""


async def moved_in_the_middle(
    mesh,
    prompt: list[int],
    workers: tuple[str, str],
    long: int = LONG,
    further: int = FURTHER_TOKENS,
    **sampling,
) -> list[int]:
    """Moves an answer once; what comes before and after is what one has that is left alone.

    Returns the tokens that were looked at.
    """
    fields = {"ignore_eos": True, "max_tokens": long, **sampling}
    asking = partial(meshes.asking, request_id="moves", tenant="moved", **fields)
    async with meshes.chat_stub(mesh.address) as stub, admin(mesh) as router:
        async with asking(stub, prompt) as (task, answer):
            here = (await running_answer(router, "moves")).worker_id
            there = next(name for name in workers if name != here)
            report = await move(router, "moves", there)
            found = (report.state, report.source, report.target)
            assert found == ("moved", here, there), report.reason
            after = await running_answer(router, "moves")
            assert (after.worker_id, after.migrations) == (there, 1)
            await meshes.grown(task, answer, len(answer.token_ids) + further)
            told, logprobs = list(answer.token_ids), list(answer.logprobs)
        alone = {**fields, "max_tokens": len(told), "tenant": "left alone"}
        want = await meshes.ask(stub, prompt, **alone)
        assert (told, logprobs) == (want.token_ids, want.logprobs)
    return told


async def published(mesh) -> None:
    """Waits until the store has the pages that the workers have."""
    store = Store(mesh.info["redis_url"], mesh.info["name"])

    async def equal() -> bool:
        return (await check(store))[0]["ok"]

    try:
        await until(equal, "the store differs from the workers")
    finally:
        await store.close()


async def until(condition, what: str, timeout: float = 240) -> None:
    """Waits until ``condition()`` is true; ``what`` says what is wrong if that never comes."""
    deadline = time.monotonic() + timeout
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


async def said(process, text: str, timeout: float = 180) -> str:
    """Reads what a process prints up to a line with ``text``; returns it."""
    async with asyncio.timeout(timeout):
        while line := (await process.stdout.readline()).decode():
            if text in line:
                return line
    raise AssertionError(f"it ended without {text!r}")


@contextmanager
def stopped(pid: int):
    """A process that stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def resident_mib(pid: int) -> float:
    """Memory that a process has in use and shares with no other, in MiB."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        sizes = {line.split()[0]: int(line.split()[1]) for line in list(file)[1:]}
    return (sizes["Private_Clean:"] + sizes["Private_Dirty:"]) / 1024

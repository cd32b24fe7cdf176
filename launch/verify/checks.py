"""The checks of ``pdmesh verify``: each asks for a case, disturbs it, and judges the answer."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from pdmesh.launch.verify.asking import Asked, Disturb, ask
from pdmesh.launch.verify.cases import Case
from pdmesh.launch.verify.compare import beyond_rounding, checksum_difference, difference
from pdmesh.launch.verify.mesh import MeshUnderTest, new_tenant
from pdmesh.launch.verify.report import Result, Verdict
from pdmesh.wire.admin import MoveReport
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.ids import new_request_id

PAUSED_S = 3.0
_LOGPROBS = 5
"""Asked for where an answer may be computed again in another form: to tell rounding from error."""
_ROUNDING = {"float32": 1e-3}
_COARSE = 0.1
"""Most that log-probabilities of the same token may differ by, by dtype; of the others."""
_RESTARTED_S = 120.0
_TRIES = 5
"""An answer that is over before it moves, or before its fault is done, is asked for again."""


@dataclass(frozen=True)
class Fault:
    """Something that is done to the processes of a mesh while an answer is generated or moves.

    Attributes:
        name: e.g. "decode worker killed".
        moving: a move of the answer begins just before.
        victim: the worker that has the answer ("source"), or one that it could move to ("target").
        number: the signal.
    """

    name: str
    moving: bool
    victim: str
    number: signal.Signals


FAULTS = (
    Fault("worker killed", False, "source", signal.SIGKILL),
    Fault("worker stands still for a while", False, "source", signal.SIGSTOP),
    Fault("source killed while moving", True, "source", signal.SIGKILL),
    Fault("target killed while moving", True, "target", signal.SIGKILL),
    Fault("source stands still while moving", True, "source", signal.SIGSTOP),
    Fault("target stands still while moving", True, "target", signal.SIGSTOP),
)


async def check_move(mesh: MeshUnderTest, case: Case) -> Result:
    """The answer that is moved about is the answer that is left alone, and so are its pages."""
    began = time.monotonic()
    moves = Moves(mesh)

    async def judged() -> Result:
        moves.refusals.clear()
        alone, stop = await _left_alone(mesh, case)
        tenant = new_tenant()
        moved = await ask(
            mesh.stub, case, new_request_id(), tenant, stop=stop, disturb=moves.at_point
        )
        if wrong := difference(alone.answers, moved.answers):
            return Result("migration", case.name, "failed", wrong)
        if not moves.pauses_ms:
            why = "; ".join(moves.refusals) or "the answer was over before"
            return Result("migration", case.name, "not tried", f"it did not move: {why}")
        wrong, pages = await _compare_pages(mesh, case, moved, tenant)
        return Result(
            "migration", case.name, "failed" if wrong else "passed", wrong or "", 0, pages
        )

    result = await _tried("migration", case.name, judged)
    return replace(
        result,
        moves=len(moves.pauses_ms),
        pauses_ms=tuple(moves.pauses_ms),
        seconds=time.monotonic() - began,
    )


async def check_handoff(mesh: MeshUnderTest, case: Case) -> Result:
    """The same question from another tenant, so with no page in common, has the same answer."""
    began = time.monotonic()

    async def judged() -> Result:
        first = await ask(mesh.stub, case, new_request_id(), new_tenant())
        second = await ask(mesh.stub, case, new_request_id(), new_tenant())
        wrong = difference(first.answers, second.answers)
        where = f"at {first.workers[1]} and {second.workers[1]}"
        return Result("hand-off", case.name, "failed" if wrong else "passed", wrong or where)

    result = await _guarded("hand-off", case.name, judged)
    return replace(result, seconds=time.monotonic() - began)


async def check_fault(mesh: MeshUnderTest, case: Case, fault: Fault) -> Result:
    """After a fault the answer is right, or an explicit error; and everything is given back."""
    began = time.monotonic()
    name = f"{fault.name}: {case.name}"
    fmt = mesh.records[0].page_format
    exact = fmt.arithmetic == "exact"
    case = replace(case, points=case.points[:1])
    if not exact:
        case = replace(case, sampling={**case.sampling, "logprobs": _LOGPROBS})
    moves = Moves(mesh)

    async def judged() -> Result:
        moves.disturbed = False
        alone, stop = await _left_alone(mesh, case)
        disturb = _injector(mesh, fault, moves)
        try:
            moved = await ask(
                mesh.stub, case, new_request_id(), new_tenant(), stop=stop, disturb=disturb
            )
        except PdmeshError as error:
            verdict: Verdict = "passed" if moves.disturbed else "failed"
            return Result("faults", name, verdict, f"ended with an error: {error.message}")
        if moved.problems or not moves.disturbed:
            why = "; ".join(moved.problems) or "the answer was over before"
            return Result("faults", name, "not tried", why)
        wrong = difference(alone.answers, moved.answers)
        detail = wrong or f"answered in {moved.attempts} attempts"
        if wrong and not exact and moved.attempts > len(moved.answers):
            detail = f"computed again, within rounding: {wrong}"
            tolerance = _ROUNDING.get(fmt.dtype, _COARSE)
            wrong = beyond_rounding(
                alone.answers, moved.answers, tolerance, greedy=case.plainly_greedy
            )
            detail = wrong or detail
        return Result("faults", name, "failed" if wrong else "passed", detail)

    result = await _tried("faults", name, judged)
    if unrest := await _recovered(mesh):
        result = replace(result, verdict="failed", detail=f"{result.detail}; {unrest}")
    return replace(result, moves=len(moves.pauses_ms), seconds=time.monotonic() - began)


async def check_rest(mesh: MeshUnderTest) -> Result:
    """Nothing is in use, reserved or in quarantine any more."""
    began = time.monotonic()
    found = await mesh.unrest()
    return Result(
        "rest",
        "everything is given back",
        "failed" if found else "passed",
        "; ".join(found),
        seconds=time.monotonic() - began,
    )


class Moves:
    """Moves of one request and what became of them."""

    def __init__(self, mesh: MeshUnderTest) -> None:
        self._mesh = mesh
        self.pauses_ms: list[float] = []
        self.refusals: list[str] = []
        self.disturbed = False
        """A fault was done meanwhile."""

    async def at_point(self, request_id: str, point: int) -> None:
        """Has all answers of the request moved once, as soon as they can be."""
        try:
            while await self._mesh.phase(request_id) == "starting":
                await asyncio.sleep(0)
            reports = await self._mesh.move(request_id)
        except PdmeshError as error:
            self.refusals.append(error.message)
            return
        for report in reports:
            if report.state == "moved":
                self.pauses_ms.append(report.pause_ms)
            else:
                self.refusals.append(report.reason or report.state)


async def _left_alone(mesh: MeshUnderTest, case: Case) -> tuple[Asked, str]:
    """The answers that nobody disturbs, and the stop string that they end with."""
    alone = await ask(mesh.stub, case, new_request_id(), new_tenant())
    text = alone.answers[0].text
    if not case.stop_from_answer or len(text) < 9:
        return alone, ""
    start = len(text) * 2 // 3
    stop = text[start : start + 3]
    return await ask(mesh.stub, case, new_request_id(), new_tenant(), stop=stop), stop


async def _compare_pages(
    mesh: MeshUnderTest, case: Case, asked: Asked, tenant: str
) -> tuple[str | None, int]:
    """Pages that two decode workers have of the same tokens: what differs, and how many are same.

    The pages of a tenant come from one request, so both workers' copies have one origin.
    """
    if not mesh.place.secret:
        return None, 0
    tokens = [*case.prompt, *asked.answers[0].token_ids]
    found = await mesh.page_checksums(tokens, tenant)
    pages = 0
    for source, target in itertools.combinations(found.items(), 2):
        wrong = checksum_difference(source, target)
        if wrong:
            return wrong, pages
        pages += min(len(source[1]), len(target[1]))
    return None, pages


def _injector(mesh: MeshUnderTest, fault: Fault, moves: Moves) -> Disturb:
    async def inject(request_id: str, point: int) -> None:
        source = await mesh.holder(request_id)
        others = [r.worker_id for r in mesh.decode if r.worker_id != source]
        if source is None or not others:
            raise PdmeshError("the answer was over before, or there is one decode worker only")
        victim = source if fault.victim == "source" else others[0]
        target = others[0]
        pid = mesh.place.pids().get(victim)
        if pid is None:
            raise PdmeshError(f"{victim} is no process of this machine's mesh")
        move = asyncio.create_task(mesh.move(request_id, target)) if fault.moving else None
        if move is not None:
            await _under_way(mesh, request_id, move)
        moves.disturbed = True
        if fault.number is signal.SIGSTOP:
            await stand_still(pid, PAUSED_S)
        else:
            os.kill(pid, fault.number)
        if move is not None:
            with suppress(PdmeshError):
                reports = await move
                moves.pauses_ms += [r.pause_ms for r in reports if r.state == "moved"]

    return inject


async def stand_still(pid: int, seconds: float) -> None:
    """Stops a process for a while; it goes on also where the wait is cancelled."""
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def _under_way(
    mesh: MeshUnderTest, request_id: str, move: asyncio.Task[list[MoveReport]]
) -> None:
    """Returns when the router has begun to move the answer, or is through with it."""
    while not move.done() and await mesh.phase(request_id) == "running":
        await asyncio.sleep(0)


async def _recovered(mesh: MeshUnderTest) -> str:
    """Waits until the mesh is whole again; what is wrong with it if it does not become so."""
    deadline = asyncio.get_running_loop().time() + _RESTARTED_S
    while True:
        await mesh.refresh()
        found = await mesh.unrest(0.0)
        if not found and mesh.whole():
            return ""
        if asyncio.get_running_loop().time() >= deadline:
            return "; ".join(found) or "a worker did not come back"
        await asyncio.sleep(0.5)


async def _tried(group: str, name: str, judged: Callable[[], Awaitable[Result]]) -> Result:
    """What the check comes to, by the last try if it was never tried."""
    for _ in range(_TRIES):
        result = await _guarded(group, name, judged)
        if result.verdict != "not tried":
            break
    return result


async def _guarded(group: str, name: str, judged: Callable[[], Awaitable[Result]]) -> Result:
    try:
        return await judged()
    except PdmeshError as error:
        return Result(group, name, "failed", error.message)

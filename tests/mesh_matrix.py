"""The fault matrix over real processes: what is done to whom, and where it hits them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import meshes
import staged
from checkpoints import random_checkpoint
from mesh_changes import admin, move, running_answer

from pdmesh.model.config import ModelConfig
from pdmesh.wire.admin import AnswerList, MoveReport
from pdmesh.wire.errors import PdmeshError, WorkerLost
from pdmesh.wire.ids import PAGE_SIZE
from pdmesh.wire.messages import Empty

DECODE = ("decode-0", "decode-1")
PREFILL = ("prefill-0", "prefill-1")
STORE = "store"
LEASE_TTL_S = 1.5
PAUSE_S = 2.5
"""Longer than the lease and than the router's patience."""

PROMPT_PLACES = {
    "before reserve": (DECODE, "Reserve.before"),
    "after grant": (PREFILL, "Prefill.before"),
    "mid chunk": (DECODE, "wire"),
    "after FIN": (PREFILL, "Prefill.after"),
}
MOVE_PLACES = {
    "precopy": (DECODE, "AdoptRound.before"),
    "frozen": (DECODE, "Capsule.before"),
    "commit in flight": (DECODE, "Stream.commit"),
    "after commit": (DECODE, "Continue.before"),
}
KILL, PAUSE = "SIGKILL", "SIGSTOP, SIGCONT"


@dataclass(frozen=True)
class Case:
    """A cell of the matrix."""

    victim: str
    """prefill, decode, source, target, router."""
    action: str
    place: str

    @property
    def moving(self) -> bool:
        return self.place in MOVE_PLACES

    def __str__(self) -> str:
        return f"{self.victim}, {self.action.split(',')[0]}, {self.place}"


CASES = [
    *(Case(v, a, p) for v in ("prefill", "decode", "router") for a in (KILL, PAUSE)
      for p in PROMPT_PLACES),
    *(Case(v, a, p) for v in ("target", "source", "router") for a in (KILL, PAUSE)
      for p in MOVE_PLACES),
]  # fmt: skip
SAMPLE = {
    Case("prefill", KILL, "mid chunk"),
    Case("prefill", PAUSE, "after FIN"),
    Case("decode", KILL, "after grant"),
    Case("decode", PAUSE, "mid chunk"),
    Case("target", KILL, "commit in flight"),
    Case("target", PAUSE, "precopy"),
    Case("source", KILL, "frozen"),
    Case("source", PAUSE, "after commit"),
    Case("router", KILL, "after commit"),
    Case("router", PAUSE, "frozen"),
}


@dataclass
class StagedMesh:
    """A mesh of processes that stand still where they are told to."""

    mesh: meshes.Mesh
    stage: staged.Stage
    model: Path

    def midway(self, what: str) -> str:
        """Directions for a wire: flip, cut or hold in the middle of the second page."""
        config = ModelConfig.from_path(self.model)
        layers = config.num_hidden_layers + config.num_nextn_predict_layers
        return f"{what} {layers * PAGE_SIZE * config.latent_width * 4 * 3 // 2}"

    @asynccontextmanager
    async def router(self, timeout: float = 90):
        """A client of the router's internal service, once it answers."""
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(timeout):
                while True:
                    client = await stack.enter_async_context(admin(self.mesh))
                    with suppress(WorkerLost):
                        await client.unary("Answers", Empty(), AnswerList, timeout=30)
                        break
                    await asyncio.sleep(0.1)
            yield client

    async def holder(self, request_id: str) -> str:
        """The decode worker that generates the request, once one does."""
        async with self.router() as router:
            return (await running_answer(router, request_id)).worker_id

    async def running(self) -> dict[str, str]:
        """The decode worker of each request that has one."""
        return {a.request_id: a.worker_id for a in await self._answers() if a.phase != "starting"}

    async def holders(self) -> dict[str, str]:
        """As ``running``, and of those too that have sent nothing yet."""
        return {a.request_id: a.worker_id for a in await self._answers()}

    async def counts(self) -> dict[str, int]:
        """How many tokens the router has of each request that a decode worker has."""
        return {a.request_id: a.tokens for a in await self._answers()}

    async def _answers(self):
        async with self.router() as router:
            return (await router.unary("Answers", Empty(), AnswerList, timeout=30)).answers

    async def move(self, request_id: str, target: str = "") -> MoveReport:
        """Moves the request's answers; the last report."""
        async with self.router() as router:
            return await move(router, request_id, target)

    async def begun(self, moves: Sequence[asyncio.Future]) -> None:
        """Waits until the router has begun with one of these moves, or is through with it."""
        while not any(m.done() for m in moves):
            if any(a.phase in ("moving", "activating") for a in await self._answers()):
                return
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def moving(self, request_id: str, target: str = ""):
        """Has the request moved meanwhile; how it went does not matter."""

        async def try_to():
            with suppress(PdmeshError):
                return await self.move(request_id, target)

        task = asyncio.ensure_future(try_to())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def hit(self, name: str, action: str, during=lambda: None) -> None:
        """Kills or pauses a process; ``during`` is called while it is dead or stands still."""
        pid = self.mesh.pids()[name]
        if action == KILL:
            os.kill(pid, signal.SIGKILL)
            during()
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            during()
            await asyncio.sleep(PAUSE_S)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def staged_mesh(folder: Path, decode: str = "", **variables: str):
    """A staged mesh of two prefill and two decode workers with a small random model, exact.

    ``variables`` are added to its environment.
    """
    stage, model = folder / "stage", folder / "model"
    stage.mkdir()
    model.mkdir()
    random_checkpoint(model, num_hidden_layers=2, max_position_embeddings=4096)
    topology = f"""
    [mesh]
    lease_ttl_s = {LEASE_TTL_S}
    [model]
    path = "{model}"
    arithmetic = "exact"
    [prefill]
    workers = 2
    [decode]
    workers = 2
    draft_tokens = 2
    {decode}
    """
    with meshes.running_mesh(
        topology=topology,
        program=(str(Path(staged.__file__).absolute()),),
        variables={staged.VARIABLE: str(stage), **variables},
    ) as mesh:
        mesh.workers = 4
        yield StagedMesh(mesh, staged.Stage(stage), model)


def other(name: str, names=DECODE) -> str:
    """The other one of two workers."""
    return next(n for n in names if n != name)


def table() -> list[str]:
    """The matrix as it stands in docs/testing.md."""
    places = [*PROMPT_PLACES, *MOVE_PLACES]
    lines = [f"| fault | {' | '.join(places)} |", "|---" * (len(places) + 1) + "|"]
    for victim, action in dict.fromkeys((case.victim, case.action) for case in CASES):
        cells = [Case(victim, action, place) for place in places]
        marks = [" ●" if c in SAMPLE else " ○" if c in CASES else "" for c in cells]
        lines.append(f"| {victim}: {action} |" + "".join(f"{mark} |" for mark in marks))
    return lines

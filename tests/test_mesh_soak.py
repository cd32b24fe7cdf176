"""Many requests while workers drain, die, are replaced and hand answers over, all at random.

Every answer is compared, token for token, with the reference of its request left alone. With ``-s``
the figures of a run are printed.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import grpc
import mesh_changes as changes
import meshes
import pytest
import torch
from checkpoints import VOCAB, random_checkpoint

from pdmesh.model.reference import generate_reference
from pdmesh.wire.admin import AnswerList, MoveOrder, MoveReport
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.messages import Empty
from pdmesh.wire.rpc import Client
from pdmesh.wire.sampling import SamplingParams

SAMPLE, ALL = (60, 6, 5), (1000, 60, 12)
"""Answers at least, things that are done to the mesh meanwhile, and requests at a time."""
LONGEST = 64
SPARED = ("prefill-0", "decode-0")
"""They are never killed or replaced: their memory is looked at."""
FLAT_MIB = 16.0
"""Most that a process may grow after the warm-up."""
TIE = 1e-3
"""Logits closer than this may be in another order where a prompt was computed in another form."""
TOPOLOGY = """
[mesh]
drain_s = 60.0
[model]
arithmetic = "{}"
page_size = 16
[prefill]
workers = 2
pages = 96
threads = 1
[decode]
workers = 3
pages = 48
threads = 1
"""


@dataclass(frozen=True)
class Case:
    """One request of which the answer is known."""

    prompt: list[int]
    sampling: dict
    expected: list[int]


@dataclass
class Soak:
    """What a run has come to."""

    done: int = 0
    wrong: list = field(default_factory=list)
    failed: list[tuple[float, str]] = field(default_factory=list)
    """When it failed, and how."""
    ties: int = 0
    again: int = 0
    """Answers with more than one attempt."""
    moved: int = 0
    faults: Counter = field(default_factory=Counter)
    kills: list[float] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)
    """Of each process in MiB, after the warm-up and at the end."""

    def report(self) -> str:
        before, after = self.memory
        grown = ", ".join(f"{n} {before[n]:.0f} -> {after[n]:.0f}" for n in sorted(before))
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        return (
            f"{self.done} answers, {len(self.wrong)} wrong, {len(self.failed)} failed, "
            f"{self.moved} moves, {self.again} with more than one attempt, {self.ties} near ties; "
            f"{faults}; MiB: {grown}"
        )


def make_cases(model, arithmetic: str) -> list[Case]:
    """Prompts that share beginnings, greedy and seeded by turns."""
    rng, cases = random.Random(5), []
    shared = [rng.randrange(20, VOCAB) for _ in range(96)]
    for number in range(16):
        own = [rng.randrange(20, VOCAB) for _ in range(rng.randint(1, 60))]
        prompt = shared[: rng.choice((0, 16, 40, 96))] + own
        sampling = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}
        alone = generate_reference(
            model,
            prompt,
            LONGEST,
            arithmetic=arithmetic,
            sampling=SamplingParams(max_tokens=LONGEST, ignore_eos=True, **sampling),
        )
        cases.append(Case(prompt, sampling, alone))
    return cases


def is_tie(model, case: Case, got: list[int], wanted: list[int]) -> bool:
    """Whether a greedy answer goes another way where two logits are all but equal."""
    at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
    seen: list[torch.Tensor] = []
    generate_reference(model, case.prompt + wanted[:at], 1, on_logits=seen.append)
    logits = seen[0].flatten()
    return bool(abs(logits[got[at]] - logits[wanted[at]]) < TIE)


# ---- what is done to the mesh -------------------------------------------------------------------


class Disturber:
    """Does one thing after the other, each when some more answers are done."""

    def __init__(self, mesh, soak: Soak, rng: random.Random) -> None:
        self.mesh, self.soak, self.rng = mesh, soak, rng
        self._router = Client(mesh.info["router_admin"], "router")

    async def close(self) -> None:
        await self._router.close()

    async def workers(self, spared: bool = True) -> list[str]:
        """Names of those that are ready, without those that have to live on."""
        found = sorted(await changes.members(self.mesh))
        return [name for name in found if not (spared and name in SPARED)]

    async def whole(self) -> None:
        """Waits until as many workers as in the beginning are ready."""

        async def all_ready() -> bool:
            return len(await changes.members(self.mesh)) >= self.mesh.workers

        await changes.until(all_ready, "the mesh did not recover")

    async def drain(self) -> None:
        """A worker takes nothing new for a while; at decode its answers move away."""
        name = self.rng.choice(await self.workers(spared=False))
        await changes.drain(self.mesh, name)

        async def empty() -> bool:
            found = await changes.status(self.mesh, name)
            return found.leases + found.running + found.queued == 0

        await changes.until(empty, f"{name} is not emptied")
        await changes.undrain(self.mesh, name)

    async def kill(self) -> None:
        name = self.rng.choice(await self.workers())
        old = (await changes.members(self.mesh))[name].instance
        self.soak.kills.append(time.monotonic())
        os.kill(self.mesh.pids()[name], signal.SIGKILL)

        async def another() -> bool:
            """Also in the store, which lists the dead one until its lease ends."""
            found = (await changes.members(self.mesh)).get(name)
            return found is not None and found.instance != old

        await changes.until(another, f"{name} is not started again")

    async def restart(self) -> None:
        await changes.pdmesh(self.mesh, "restart", self.rng.choice(await self.workers()))

    async def migrate(self) -> None:
        """Moves a few running answers; one that cannot move goes on where it is."""
        found = await self._router.unary("Answers", Empty(), AnswerList, timeout=30)
        some = self.rng.sample(found.answers, min(3, len(found.answers)))
        for answer in some:
            order = MoveOrder(request_id=answer.request_id)
            try:
                async for _ in self._router.stream("MigrateAnswer", order, MoveReport, timeout=60):
                    pass
            except PdmeshError:
                pass  # it was over meanwhile

    async def run(self, count: int) -> None:
        """Does ``count`` things, each of them equally often."""
        acts = [self.drain, self.kill, self.migrate, self.drain, self.restart, self.migrate]
        left: list = []
        for number in range(count):
            if number == count // 4:
                self.soak.memory.append(memory(self.mesh))
            left = left or self.rng.sample(acts, len(acts))
            act = left.pop()
            await self.whole()
            await act()
            self.soak.faults[act.__name__] += 1
        async with asyncio.timeout(120):
            while not self.soak.moved:  # answers may have been over before, every time
                await self.migrate()
        await self.whole()


def memory(mesh) -> dict[str, float]:
    """Of the router and of the workers that live through the whole run."""
    pids = mesh.pids()
    return {name: changes.resident_mib(pids[name]) for name in ("router", *SPARED)}


# ---- the requests -------------------------------------------------------------------------------


async def soak_mesh(mesh, cases: list[Case], size, model, arithmetic: str) -> Soak:
    """Answers stream until there are enough, and all that was to be done to the mesh is done."""
    soak, rng = Soak(), random.Random(17)
    answers, acts, streams = size
    over = asyncio.Event()

    async def one(stub) -> None:
        case, tokens = rng.choice(cases), rng.randint(4, LONGEST)
        answer = meshes.Answer()
        try:
            await meshes.ask(
                stub,
                case.prompt,
                into=answer,
                timeout=300,
                max_tokens=tokens,
                ignore_eos=True,
                **case.sampling,
            )
        except grpc.aio.AioRpcError as error:
            soak.failed.append((time.monotonic(), f"{error.code().name}: {error.details()}"))
        else:
            judge(case, answer, tokens)
        soak.done += 1

    def judge(case: Case, answer: meshes.Answer, tokens: int) -> None:
        got, wanted = answer.token_ids, case.expected[:tokens]
        soak.moved += answer.timing.migrations
        soak.again += answer.timing.attempts > 1
        if len(got) == tokens == answer.usage.completion_tokens and answer.finish == "length":
            if got == wanted:
                return
            greedy = not case.sampling["temperature"]
            if arithmetic == "fast" and greedy and is_tie(model, case, got, wanted):
                soak.ties += 1
                return
        soak.wrong.append((case.sampling, answer.timing.attempts, got, wanted))

    async def client(stub) -> None:
        while not over.is_set() or soak.done < answers:
            await one(stub)

    async def disturb() -> None:
        await disturber.run(acts)
        over.set()

    disturber = Disturber(mesh, soak, random.Random(23))
    try:
        async with meshes.chat_stub(mesh.address) as stub, asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(client(stub))
            group.create_task(disturb())
    finally:
        await disturber.close()
    soak.memory.append(memory(mesh))
    return soak


def uncaused(soak: Soak, within: float = 30.0) -> list[str]:
    """Failures that no kill shortly before explains."""
    return [
        why for at, why in soak.failed if not any(0 <= at - kill < within for kill in soak.kills)
    ]


@pytest.mark.parametrize(
    ("arithmetic", "size"),
    [
        ("exact", SAMPLE),
        pytest.param("fast", SAMPLE, marks=pytest.mark.full),
        pytest.param("exact", ALL, marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
        pytest.param("fast", ALL, marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
    ],
)
async def test_nothing_is_lost_doubled_or_kept_while_workers_come_and_go(
    arithmetic, size, tmp_path
):
    model = random_checkpoint(tmp_path, num_hidden_layers=2)
    cases = make_cases(model, arithmetic)
    with meshes.running_mesh(
        "--model", str(tmp_path), topology=TOPOLOGY.format(arithmetic)
    ) as mesh:
        mesh.workers = 5
        soak = await soak_mesh(mesh, cases, size, model, arithmetic)
        sys.stdout.write(soak.report() + "\n")
        assert soak.done >= size[0]
        assert not soak.wrong, f"{len(soak.wrong)} wrong, first {soak.wrong[0]}\n{mesh.log()}"
        assert uncaused(soak) == [], mesh.log()
        assert soak.moved > 0
        assert await mesh.problems() == []
    if size == ALL:
        for before, after in pairwise(soak.memory):
            grown = {name: after[name] - before[name] for name in before}
            assert max(grown.values()) < FLAT_MIB, soak.report()

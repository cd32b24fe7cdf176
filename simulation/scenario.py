"""What one seed stands for: the mesh, the requests and the faults. Values only."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Literal

from pdmesh.simulation.model import PAGE_SIZE, VOCAB, sim_format
from pdmesh.wire.hashes import Arithmetic, PageFormat
from pdmesh.wire.sampling import SamplingParams

_SHARING = 5
"""One seed in so many is about pulls under pressure."""
FaultKind = Literal[
    "kill",
    "pause",
    "cut",
    "partition",
    "slow",
    "store_down",
    "store_wiped",
    "store_wrong",
    "router_restart",
    "drain",
    "migrate",
]


@dataclass(frozen=True)
class MeshSpec:
    """Sizes and settings of the simulated mesh. Seconds are virtual."""

    num_prefill: int
    num_decode: int
    prefill_pages: int
    decode_pages: int
    mtp: bool
    draft_tokens: int
    growth_tokens: int
    max_batch: int
    max_waiting: int
    chunk_tokens: int
    max_queue: int
    one_sided: bool
    lease_idle_s: float
    lease_ttl_s: float
    park_pages: int
    arithmetic: Arithmetic
    loan_s: float
    pull_s: float
    poll_s: float
    pulling: bool
    """Requests go anywhere, and what others have cached is always fetched."""
    read_s: float
    """Longest time of a read of half a page."""

    @property
    def page_format(self) -> PageFormat:
        return sim_format(self.mtp, self.arithmetic)

    def never_fits(self, client: ClientSpec) -> bool:
        """Whether all answers of a request together may need more pages than there are."""
        tokens = len(client.prompt) + client.sampling.max_tokens
        return client.n * -(-tokens // PAGE_SIZE) > min(self.decode_pages, self.prefill_pages)


@dataclass(frozen=True)
class ClientSpec:
    """One request, and how its client behaves.

    ``cancel_after`` counts from ``at``; ``slow_s`` is what the client takes for each message.
    """

    name: str
    at: float
    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int
    priority: int
    timeout: float
    tenant: str = ""
    cancel_after: float | None = None
    slow_s: float = 0.0


@dataclass(frozen=True)
class FaultSpec:
    """One fault; what ``target`` and ``other`` name depends on the kind."""

    at: float
    kind: FaultKind
    target: str = ""
    other: str = ""
    seconds: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class Scenario:
    """Everything that a seed decides beforehand."""

    seed: int
    mesh: MeshSpec
    clients: tuple[ClientSpec, ...]
    faults: tuple[FaultSpec, ...]
    flip: float = 0.0
    cut: float = 0.0
    stall: float = 0.0
    move_every: float = 0.0
    """Seconds between two moves of some running answer; 0: none."""

    @property
    def calm(self) -> bool:
        """Nothing goes wrong: every request that has time must be served."""
        return not (self.faults or self.flip or self.cut or self.stall)

    @property
    def workers(self) -> tuple[str, ...]:
        return workers_of(self.mesh)


def workers_of(mesh: MeshSpec) -> tuple[str, ...]:
    """Names of all workers."""
    prefill = [f"prefill-{i}" for i in range(mesh.num_prefill)]
    return (*prefill, *(f"decode-{i}" for i in range(mesh.num_decode)))


@dataclass
class _Draw:
    rng: random.Random
    hasty: bool = False
    """Most clients do not wait for the end."""
    alike: bool = False
    """Most prompts begin with one of few long texts."""
    bases: list[list[int]] = field(default_factory=list)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def mesh(self) -> MeshSpec:
        rng = self.rng
        tight = self.chance(0.5)
        mtp = self.chance(0.7)
        pulling = self.chance(0.8 if self.alike else 0.2)
        return MeshSpec(
            num_prefill=rng.randint(1, 2),
            num_decode=rng.randint(1, 3),
            prefill_pages=rng.randint(14, 24) if tight else rng.randint(24, 80),
            decode_pages=rng.randint(14, 24) if tight else rng.randint(24, 80),
            mtp=mtp,
            draft_tokens=rng.randint(0, 3) if mtp else 0,
            growth_tokens=rng.choice((0, 0, 4, 16)),
            max_batch=rng.choice((1, 2, 4, 8)),
            max_waiting=rng.choice((2, 64)),
            chunk_tokens=rng.choice((16, 32, 64, 128)),
            max_queue=rng.choice((4, 64)),
            one_sided=self.chance(0.5),
            lease_idle_s=rng.choice((2.0, 5.0)),
            lease_ttl_s=rng.choice((1.0, 3.0)),
            park_pages=rng.choice((0, 4, 1000)),
            arithmetic=rng.choice(("exact", "fast")),
            loan_s=rng.choice((0.01, 0.04, 0.04, 10.0)),
            pull_s=rng.choice((0.1, 2.0)) if pulling else rng.choice((0.0, 0.02, 2.0)),
            poll_s=rng.choice((0.25, 1.0, 1.0)),
            pulling=pulling,
            read_s=rng.choice((0.002, 0.02, 0.1)),
        )

    def prompt(self) -> tuple[int, ...]:
        """Some share a beginning, some are the same, lengths lie about page boundaries too."""
        rng = self.rng
        alike = self.bases and self.chance(0.9 if self.alike else 0.7)
        tokens = list(rng.choice(self.bases)) if alike else []
        if tokens and self.chance(0.1 if self.alike else 0.4):
            tokens = tokens[: rng.randint(1, len(tokens))]
        if not tokens or self.chance(0.7):
            tokens += [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 50))]
        if self.chance(0.3):
            pages = max(1, len(tokens) // PAGE_SIZE)
            tokens = tokens[: pages * PAGE_SIZE + rng.randint(-1, 1)]
        tokens = tokens[:110]
        if self.chance(0.1 if self.alike else 0.4):
            self.bases.append(tokens)
        return tuple(tokens)

    def client(self, number: int, span: float) -> ClientSpec:
        rng = self.rng
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, rng.randint(1, 60), rng.randint(10, 40))),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.getrandbits(32),
            ignore_eos=self.chance(0.3),
            min_tokens=rng.choice((0, 0, 8)),
        )
        return ClientSpec(
            name=f"r{number}",
            at=rng.uniform(0.0, span),
            prompt=self.prompt(),
            sampling=sampling,
            n=rng.choice((1, 1, 1, 2, 3)),
            priority=rng.choice((0, 0, 0, 1, -1)),
            timeout=rng.choice((30.0, 60.0, 60.0, rng.uniform(0.05, 5.0))),
            tenant=rng.choice(("", "", "t")),
            cancel_after=self.patience(),
            slow_s=0.05 if self.chance(0.1) else 0.0,
        )

    def patience(self) -> float | None:
        if self.hasty:
            return self.rng.uniform(0.0, 0.4) if self.chance(0.6) else None
        return self.rng.uniform(0.0, 2.0) if self.chance(0.15) else None

    def fault(self, mesh: MeshSpec, span: float) -> FaultSpec:
        rng, workers = self.rng, workers_of(mesh)
        kind: FaultKind = rng.choice(
            (
                "kill",
                "kill",
                "kill",
                "pause",
                "pause",
                "cut",
                "cut",
                "partition",
                "partition",
                "slow",
                "store_down",
                "store_wiped",
                "store_wrong",
                "router_restart",
                "drain",
                "migrate",
            )
        )
        target = rng.choice(workers)
        others = [name for name in (*workers, "router") if name != target]
        seconds = rng.choice((rng.uniform(0.05, 1.0), rng.uniform(1.0, 8.0), 25.0))
        if kind == "kill":
            seconds = rng.uniform(0.2, 10.0)
        return FaultSpec(
            at=rng.uniform(0.2, span + 1.0),
            kind=kind,
            target=target,
            other=rng.choice(others),
            seconds=seconds,
            factor=rng.choice((10.0, 100.0)),
        )


def draw_scenario(seed: int, requests: int = 10) -> Scenario:
    """The scenario of a seed."""
    draw = _Draw(random.Random(f"scenario {seed}"))
    draw.hasty = draw.chance(0.2)
    draw.alike = draw.chance(0.5)
    if draw.alike:
        for _ in range(draw.rng.randint(1, 4)):
            length = draw.rng.randint(40, 100)
            draw.bases.append([draw.rng.randrange(1, VOCAB) for _ in range(length)])
    mesh = draw.mesh()
    span = draw.rng.choice((0.2, 1.0, 4.0))
    clients = sorted((draw.client(i, span) for i in range(requests)), key=lambda c: c.at)
    faults: list[FaultSpec] = []
    trouble = [0.0, 0.0, 0.0]
    if not draw.chance(0.2):
        count = draw.rng.randint(0, 6)
        faults = sorted((draw.fault(mesh, span) for _ in range(count)), key=lambda f: f.at)
        trouble = [draw.rng.choice((0.0, 0.0, 0.002, 0.02)) for _ in range(3)]
    move_every = draw.rng.choice((0.0, 0.0, 0.02, 0.1))
    flip, cut, stall = trouble
    drawn = Scenario(seed, mesh, tuple(clients), tuple(faults), flip, cut, stall, move_every)
    return sharing(drawn) if seed % _SHARING == _SHARING - 1 else drawn


def sharing(scenario: Scenario) -> Scenario:
    """The same with prompts that share long beginnings, workers that each have few pages, and slow
    reads of pages on short loan: pulls all the time, while owners evict what is being read."""
    rng = random.Random(f"sharing {scenario.seed}")
    mesh = replace(
        scenario.mesh,
        num_prefill=2,
        num_decode=3,
        prefill_pages=13,
        decode_pages=13,
        growth_tokens=0,
        pulling=True,
        pull_s=2.0,
        loan_s=rng.choice((0.01, 0.04)),
        read_s=0.1,
    )
    bases = [tuple(rng.randrange(1, VOCAB) for _ in range(90)) for _ in range(3)]
    clients = tuple(
        replace(
            client,
            n=1,
            at=0.1 * number,
            prompt=(*rng.choice(bases), number + 1),
            timeout=60.0,
            cancel_after=client.cancel_after if number % 2 else None,
        )
        for number, client in enumerate(scenario.clients)
    )
    return replace(scenario, mesh=mesh, clients=clients, move_every=0.0)

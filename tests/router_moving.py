"""Fake decode workers that hand running answers over, in every wrong way too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import router_fakes as fakes

from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire.admin import AnswerList, MoveOrder, MoveReport
from pdmesh.wire.errors import InternalError, InvalidRequest, LeaseGone, Overloaded, PdmeshError
from pdmesh.wire.handoff import (
    AbortAsked,
    CommitAsked,
    ContinueRequest,
    DecideRequest,
    MigrateRequest,
    StreamItem,
)
from pdmesh.wire.messages import Empty, StreamRequest, TokenChunk
from pdmesh.wire.rpc import Client, Method

TOKENIZER = load_tokenizer(fakes.MODEL_PATH)
STORY = TOKENIZER.encode("Once upon a time a crow 🐦 sang to the sea, and the sea sang back to it.")

HONEST = "commit"
SOURCE_PLANS = (
    HONEST,
    "twice",
    "stale chunks",
    "abort",
    "abort with lease",
    "abort, then commit",
    "gap",
    "other attempt",
    "tail of another attempt",
    "never offered",
    "bad token",
    "die when asked",
    "die with lease",
    "die at commit",
    "end when asked",
    "finish instead",
)
TARGET_PLANS = (
    HONEST,
    "refuse",
    "refuse: invalid",
    "fail inside",
    "die before active",
    "die after active",
    "end before active",
    "end after active",
    "repeat",
    "full",
)
REFUSALS: dict[str, PdmeshError] = {
    "refuse": LeaseGone("nothing of it is here"),
    "refuse: invalid": InvalidRequest("its position is another"),
    "fail inside": InternalError("x"),
    "full": Overloaded("no pages"),
}


@dataclass
class Running:
    """One answer at one worker: the next position, and the handoff asked for."""

    request: StreamRequest
    attempt: int
    position: int
    end: int
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    migrate: MigrateRequest | None = None
    decisions: dict[int, asyncio.Future[bool]] = field(default_factory=dict)
    handing: MigrateRequest | None = None
    """The handoff under way; the next one may be asked for already."""
    promised: str = ""
    """Lease at its target."""

    def decision(self, handoff: int) -> asyncio.Future[bool]:
        loop = asyncio.get_running_loop()
        return self.decisions.setdefault(handoff, loop.create_future())


@dataclass
class MovingDecode(fakes.FakeDecode):
    peers: dict[str, MovingDecode] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    adopted: dict[str, Running] = field(default_factory=dict)
    plans: list[str] = field(default_factory=list)
    """For each handoff as its source; honest where none is left."""
    welcomes: list[str] = field(default_factory=list)
    """For each handoff as its target."""
    pause_at: int | None = None
    """Output position at which answers wait until they are asked to move, or ``go`` is set."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    paused: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    more: int = 1
    """Tokens that are sent between the question and the standstill."""
    unsent: int = 2
    """Tokens made, and sent in the commit only."""
    pace_s: float = 0.0
    """Between tokens."""
    asleep: asyncio.Event | None = None
    """Like a stopped process until it is set: connected, and silent."""
    moves: int = 0
    open: int = 0
    """Handoffs that it works on as a source."""
    most_open: int = 0

    def methods(self) -> list[Method]:
        return [
            *super().methods(),
            Method("Migrate", MigrateRequest, unary=self.migrate),
            Method("Decide", DecideRequest, unary=self.decide),
            Method("Continue", ContinueRequest, stream=self.continue_),
        ]

    # ---- as a source ----------------------------------------------------------------------

    async def migrate(self, request: MigrateRequest) -> Empty:
        await self.enter("Migrate", request)
        one = self.running.get(request.lease_id)
        if one is None:
            raise LeaseGone("over")
        if one.migrate is None or one.migrate.handoff < request.handoff:
            one.migrate = request
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            one.asked.set()
        return Empty()

    async def decide(self, request: DecideRequest) -> Empty:
        await self.enter("Decide", request)
        one = self.running.get(request.lease_id)
        if one is not None:
            decision = one.decision(request.handoff)
            if not decision.done():
                decision.set_result(request.committed)
            assert decision.result() == request.committed, "a decision changed"
        return Empty()

    async def stream(self, request: StreamRequest) -> AsyncIterator[StreamItem]:
        await self.enter("Stream", request)
        start = request.output_offset
        one = Running(request, request.attempt, start + 1, start + request.sampling.max_tokens)
        async for item in self.generate(one, request.lease_id):
            yield item

    async def generate(self, one: Running, lease_id: str) -> AsyncIterator[StreamItem]:
        self.running[lease_id] = one
        freeze_at = None
        try:
            while one.position < one.end:
                await self.awake()
                if self.pause_at is not None and one.position >= self.pause_at:
                    await self.wait_to_move(one)
                if one.migrate is not None:
                    if freeze_at is None:
                        freeze_at = min(one.position + self.more, one.end - 1)
                    if one.position >= freeze_at:
                        async for item in self.hand_over(one):
                            yield item
                        freeze_at = None
                        continue
                yield self.tokens(one, one.position, one.position + 1)
                one.position += 1
        finally:
            self.running.pop(lease_id, None)
            if one.promised and one.handing is not None:
                decided = one.decisions.get(one.handing.handoff)
                known = decided is not None and decided.done() and not decided.cancelled()
                if not (known and decided.result()):  # a wait that is cancelled cancels it
                    self.abort_target(one)  # the source says so, or the target hears nothing

    async def awake(self) -> None:
        await asyncio.sleep(self.pace_s)
        if self.asleep is not None:
            await self.asleep.wait()

    async def wait_to_move(self, one: Running) -> None:
        self.paused.release()
        waits = [asyncio.ensure_future(e.wait()) for e in (one.asked, self.go)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def hand_over(self, one: Running) -> AsyncIterator[StreamItem]:
        """Ends when the answer goes on here; never where it was handed over."""
        plan = self.plans.pop(0) if self.plans else HONEST
        migrate = one.handing = one.migrate
        target, number = self.peers[migrate.target.instance], migrate.handoff
        self.open -= 1
        if plan == "abort":
            yield AbortAsked(handoff=number, reason="the target is full")
            await self.undone(one)
            return
        if plan == "die when asked":
            await self.vanish()
        if plan == "finish instead":
            yield msgspec_replace(self.tokens(one, one.position, one.position + 1), finish="stop")
            await asyncio.Event().wait()
        if plan == "end when asked":
            raise LeaseGone("its pages are gone")
        commit = self.promise(one, target)
        if plan == "die with lease":
            await self.vanish()
        if plan in ("abort with lease", "abort, then commit"):
            yield AbortAsked(handoff=number, reason="a round failed", lease_id=one.promised)
            if plan == "abort, then commit":
                yield commit
            await self.undone(one)
            return
        for item in twisted(plan, commit, one):
            yield item
        if plan == "die at commit":
            await one.decision(number)
            await self.vanish()
        if await one.decision(number):
            await asyncio.Event().wait()  # until the stream is closed
        await self.undone(one)

    def promise(self, one: Running, target: MovingDecode) -> CommitAsked:
        """Pages and capsule at the target, and what the router is asked."""
        migrate = one.migrate
        target.moves += 1
        one.promised = f"{target.worker_id}-moved-{target.moves}"
        target.leases.add(one.promised)
        until = min(one.position + self.unsent, one.end)
        target.adopted[one.promised] = replace(
            one,
            position=until,
            asked=asyncio.Event(),
            migrate=None,
            handing=None,
            decisions={},
            promised="",
        )
        return CommitAsked(
            attempt=one.attempt,
            handoff=migrate.handoff,
            lease_id=one.promised,
            generation=7,
            tail=self.tokens(one, migrate.acknowledged, until),
        )

    async def undone(self, one: Running) -> None:
        """Once the router has said so, the answer goes on here."""
        refused = one.handing
        assert not await one.decision(refused.handoff)
        self.abort_target(one)
        one.handing, one.promised = None, ""
        if one.migrate is refused:
            one.migrate = None
            one.asked.clear()

    def abort_target(self, one: Running) -> None:
        if one.handing is not None and one.promised:
            target = self.peers[one.handing.target.instance]
            target.leases.discard(one.promised)
            target.adopted.pop(one.promised, None)

    async def vanish(self) -> None:
        asyncio.get_running_loop().create_task(self.die())
        await asyncio.Event().wait()

    async def die(self) -> None:
        self.leases.clear()
        await super().die()

    def tokens(self, one: Running, start: int, end: int) -> TokenChunk:
        ids = tuple(self.token(one.request.sample_index, p) for p in range(start, end))
        count = one.request.sampling.logprobs
        return TokenChunk(
            attempt=one.attempt,
            position=start,
            token_ids=ids,
            logprobs=tuple(e for t in ids if (e := fakes.logprobs(t, count))),
            finish="length" if end >= one.end else None,
            drafted=2 * end,
            accepted=end,
        )

    # ---- as a target ----------------------------------------------------------------------

    async def continue_(self, request: ContinueRequest) -> AsyncIterator[StreamItem]:
        await self.enter("Continue", request)
        welcome = self.welcomes.pop(0) if self.welcomes else HONEST
        one = self.adopted.pop(request.lease_id, None)
        if welcome in REFUSALS:
            raise REFUSALS[welcome]
        if welcome == "die before active":
            await self.vanish()
        if welcome == "end before active":
            return
        if one is None or request.generation != 7 or one.position != request.position:
            raise LeaseGone("nothing of it is here")
        one.attempt = request.attempt
        yield TokenChunk(attempt=one.attempt, position=one.position, token_ids=())
        if welcome == "die after active":
            await self.vanish()
        if welcome == "end after active":
            return
        if welcome == "repeat":
            yield msgspec_replace(self.tokens(one, 0, one.position), finish=None)
        async for item in self.generate(one, request.lease_id):
            yield item

    async def status(self, request: Empty):
        await self.awake()
        return await super().status(request)

    async def release(self, request):
        await self.awake()
        self.adopted.pop(request.lease_id, None)
        return await super().release(request)


def msgspec_replace(chunk, **changes):
    return fakes.msgspec.structs.replace(chunk, **changes)


def twisted(plan: str, commit: CommitAsked, one: Running) -> list[StreamItem]:
    """What is sent in place of an honest question."""
    tail = commit.tail
    bad = msgspec_replace(
        tail, token_ids=(*tail.token_ids, 70_000), logprobs=(*tail.logprobs, *tail.logprobs[:1])
    )
    twists = {
        "twice": [commit, commit],
        "stale chunks": [
            TokenChunk(attempt=one.attempt - 1, position=one.position, token_ids=(7, 7)),
            commit,
            TokenChunk(attempt=one.attempt, position=one.position, token_ids=(7, 7, 7, 7)),
        ],
        "gap": [msgspec_replace(commit, tail=msgspec_replace(tail, position=one.position + 9))],
        "other attempt": [
            msgspec_replace(commit, attempt=9, tail=msgspec_replace(tail, attempt=9))
        ],
        "tail of another attempt": [msgspec_replace(commit, tail=msgspec_replace(tail, attempt=9))],
        "never offered": [msgspec_replace(commit, handoff=commit.handoff + 9), commit],
        "bad token": [msgspec_replace(commit, tail=bad)],
    }
    return twists.get(plan, [commit])


class MovingMesh:
    """A mesh of ``MovingDecode``s with the router's internal service."""

    def __init__(self, mesh: fakes.Mesh) -> None:
        self.mesh = mesh
        self.admin = Client(mesh.router.admin_address, "router")
        self._load: dict[str, int] = {}

    @property
    def decode(self) -> list[MovingDecode]:
        return self.mesh.decode

    def prefer(self, number: int, load: int = 20) -> None:
        """New answers go to this decode worker: the others look busy."""
        self.forget_load()
        for worker in self.decode:
            if worker is not self.decode[number]:
                self._load[worker.instance] = load
                self.mesh.router.view.add(worker.instance, "decode", load, 0)

    def forget_load(self) -> None:
        for instance, load in self._load.items():
            self.mesh.router.view.add(instance, "decode", -load, 0)
        self._load = {}

    async def start(self, count: int = 1, request_id: str = "r", **sampling):
        """A request whose answers are all at the place where they wait, as the router knows too."""
        sampling = {"max_tokens": len(STORY), **sampling}
        if count > 1:
            sampling["n"] = count
        request = fakes.ask(request_id=request_id, **sampling)
        answer = asyncio.create_task(self.mesh.chat(request))
        async with asyncio.timeout(60):
            for _ in range(count):
                await self.decode[0].paused.acquire()
            come = self.decode[0].pause_at or 0
            while sum(a.tokens >= come for a in await self.running(request_id)) < count:
                await asyncio.sleep(0.002)
        return answer

    async def answers(self):
        return (await self.admin.unary("Answers", Empty(), AnswerList)).answers

    async def running(self, request_id: str):
        found = [a for a in await self.answers() if a.request_id == request_id]
        return [a for a in found if a.phase == "running"]

    async def move(self, request_id: str = "r", **order) -> list[MoveReport]:
        reports = self.admin.stream(
            "MigrateAnswer", MoveOrder(request_id=request_id, **order), MoveReport, timeout=60
        )
        return [report async for report in reports]

    def value(self, outcome: str) -> float:
        return self.mesh.router.metrics.value("pdmesh_migrations_total", outcome=outcome)

    async def at_rest(self) -> None:
        self.forget_load()
        await self.mesh.at_rest()
        assert not await self.answers()
        for worker in self.decode:
            assert not worker.running
            assert not worker.adopted


@asynccontextmanager
async def moving_mesh(tmp_path, *, decode: int = 2, pause_at: int | None = 6, **config):
    """New answers go to decode-0 and wait there at output position ``pause_at``."""
    defaults = {"poll_interval": 60}
    async with fakes.mesh(
        tmp_path, decode=decode, kind=MovingDecode, **(defaults | config)
    ) as mesh:
        peers = {worker.instance: worker for worker in mesh.decode}
        for worker in mesh.workers:
            worker.answer = STORY
        for worker in mesh.decode:
            worker.peers = peers
        mesh.decode[0].pause_at = pause_at
        moving = MovingMesh(mesh)
        moving.prefer(0)
        try:
            yield moving
        finally:
            await moving.admin.close()

"""The router's part in live migration, for one answer: the gateway's machine and its effects."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

from worker_rig import PATIENCE, until

from pdmesh.kvtransfer.protocol import migration_gateway as g
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.handoff import (
    AbortAsked,
    CommitAsked,
    ContinueRequest,
    DecideRequest,
    MigrateRequest,
    StreamItem,
)
from pdmesh.wire.messages import Empty, FirstToken, Lease, ReleaseRequest, TokenChunk
from pdmesh.wire.sampling import SamplingParams


@dataclass
class Moving:
    """One answer that is told to move, and what the client gets of it.

    ``points``: (output position, worker): when the answer enters a step with so many tokens, it is
    told to move there, and the step waits until it is about to stop or will not move.
    """

    mesh: object
    prompt: list[int]
    sampling: SamplingParams
    lease: Lease
    first: FirstToken
    points: list[tuple[int, int]] = field(default_factory=list)
    index: int = 0
    eos: tuple[int, ...] = ()
    worker: int = 0
    logprobs: list = field(default_factory=list)
    finish: str | None = None
    drafted: int = 0
    decisions: list[str] = field(default_factory=list)
    """"committed to <worker>" or "aborted: <reason>"."""
    frozen_at: list[int] = field(default_factory=list)
    """Output positions at which it moved."""
    decide = True
    """Whether it answers questions."""
    lag: int = 0
    """It reads on when more tokens than that wait for it, or no more will come for now."""
    longest: int = 0
    """Tokens of a chunk at most."""

    def __post_init__(self):
        self.loop = asyncio.get_running_loop()
        lease_id = (self.lease.lease_id, *self.lease.forks)[self.index]
        self.leases = {self.instance(self.worker): (lease_id, self.lease.generation)}
        self.state = g.GatewayState(
            self.instance(self.worker), tokens=(self.first.token_ids[self.index],)
        )
        if self.first.logprobs:
            self.logprobs = [self.first.logprobs[self.index]]
        self.asked: list[CommitAsked | AbortAsked] = []
        self.next: ContinueRequest | None = None
        self.points = list(self.points)

    def instance(self, number):
        return self.mesh.decodes[number].instance

    def number(self, instance):
        return next(i for i, s in enumerate(self.mesh.decodes) if s.instance == instance)

    @property
    def tokens(self):
        return list(self.state.tokens)

    @property
    def sequence(self):
        """At its owner."""
        side = self.mesh.decodes[self.number(self.state.owner)]
        entry = side.worker._leases.find(self.leases[self.state.owner][0])
        return None if entry is None else entry.sequence

    # ---- streams --------------------------------------------------------------------------

    async def run(self):
        """Reads the answer to its end, wherever it goes."""
        request = self.mesh.stream_request(
            self.prompt,
            self.lease,
            self.first,
            self.sampling,
            answer=self.index,
            eos_token_ids=self.eos,
        )
        for side in self.mesh.decodes:
            side.gate.before.append(self._before_step)
        try:
            stream = self.mesh.decodes[self.worker].worker.stream(request)
            while stream is not None:
                stream = await self._read(stream)
        finally:
            for side in self.mesh.decodes:
                side.gate.before.remove(self._before_step)
            for instance, (lease_id, _) in self.leases.items():
                request = ReleaseRequest(lease_id=lease_id, reason="finished")
                await self.mesh.call(instance, "Release", request, Empty)
        return self

    async def _read(self, stream):
        """Reads one stream; the next one, if the answer goes on elsewhere."""
        self.next = None
        async with aclosing(stream):
            async for item in stream:
                await self.take(decode(encode(item), StreamItem))
                if self.finish:
                    return None
                if self.lag:
                    await until(self._enough)
        await until(lambda: self.next, lambda: "the stream ended, and the answer did not")
        target = self.mesh.decodes[self.number(self.state.owner)]
        return target.worker.continue_(decode(encode(self.next), ContinueRequest))

    def _enough(self):
        sequence = self.sequence
        if sequence is None or sequence.done or sequence.moving or sequence.stopping:
            return True
        return sum(len(chunk.token_ids) for chunk in sequence.unread) > self.lag

    async def take(self, item):
        if isinstance(item, TokenChunk):
            self.longest = max(self.longest, len(item.token_ids))
            self.finish, self.drafted = item.finish, item.drafted
            if not item.token_ids and not item.finish:
                await self.feed(g.ActiveArrived(item.attempt))
                return
            self._log(item)
            await self.feed(
                g.ChunkArrived(item.attempt, item.position, item.token_ids, bool(item.finish))
            )
            return
        self.asked.append(item)
        if not self.decide:
            return
        if isinstance(item, CommitAsked):
            target = self.state.target
            self.leases[target] = item.lease_id, item.generation
            self._log(item.tail)
            await self.feed(
                g.CommitAsked(
                    item.attempt, item.handoff, target, item.tail.position, item.tail.token_ids
                )
            )
        else:
            if item.lease_id:
                self.leases[self.state.target] = item.lease_id, 1
            self.decisions.append(f"aborted: {item.reason}")
            await self.feed(g.AbortAsked(item.handoff))

    def _log(self, chunk):
        if self.sampling.logprobs is not None:
            assert len(chunk.logprobs) == len(chunk.token_ids)
            self.logprobs += chunk.logprobs[len(self.state.tokens) - chunk.position :]

    # ---- the machine ----------------------------------------------------------------------

    async def feed(self, event):
        before = self.state.owner
        self.state, effects = g.step(self.state, event)
        for effect in effects:
            await self._apply(before, effect)

    async def _apply(self, before, effect):
        match effect:
            case g.PostMigrate(worker, handoff, target):
                lease_id, generation = self.leases[worker]
                request = MigrateRequest(
                    lease_id=lease_id,
                    generation=generation,
                    handoff=handoff,
                    target=self.mesh.record(self.number(target)),
                    acknowledged=len(self.state.tokens),
                )
                await self.mesh.call(worker, "Migrate", request, Empty)
            case g.PostCommitted(handoff) | g.PostAborted(handoff):
                committed = isinstance(effect, g.PostCommitted)
                request = DecideRequest(
                    lease_id=self.leases[before][0], handoff=handoff, committed=committed
                )
                await self.mesh.call(before, "Decide", request, Empty)
            case g.PostActivate(worker, _, attempt, position):
                lease_id, generation = self.leases[worker]
                self.next = ContinueRequest(
                    lease_id=lease_id, generation=generation, attempt=attempt, position=position
                )
                self.decisions.append(f"committed to {worker}")
                self.frozen_at.append(position)
            case g.AbortTarget(worker, _) if worker in self.leases:
                request = ReleaseRequest(lease_id=self.leases[worker][0], reason="aborted")
                await self.mesh.call(worker, "Release", request, Empty)

    async def move(self, target):
        """Tells the answer to move."""
        await self.feed(g.MigrationWanted(self.instance(target)))

    # ---- moving at a point ----------------------------------------------------------------

    def _before_step(self, rows):
        for row in rows:
            mine = list(row.tokens[: len(self.prompt)]) == list(self.prompt)
            if mine and row.sampling.index == self.index and row.sampling.params == self.sampling:
                generated = len(row.tokens) - len(self.prompt)
                if self.points and generated >= self.points[0][0]:
                    _, target = self.points.pop(0)
                    work = asyncio.run_coroutine_threadsafe(self._move_now(target), self.loop)
                    work.result(PATIENCE)

    async def _move_now(self, target):
        await until(lambda: self.state.active)
        if self.instance(target) == self.state.owner:
            return
        sequence = self.sequence
        try:
            await self.move(target)
        except PdmeshError as error:
            self.decisions.append(f"refused: {error.message}")
            return
        await until(lambda: sequence.stopping or not sequence.moving or self._in_line(sequence))

    def _in_line(self, sequence):
        """It waits for others to have moved, and these may need the step that waits for it."""
        migrations = self.mesh.decodes[self.number(self.state.owner)].worker.migrations
        move = migrations._moves.get(sequence)
        return move is None or (migrations._places.locked() and not move.handoff.placed)


async def moving(mesh, prompt, points=(), n=1, eos=(), worker=0, request_id="r", **sampling):
    """The ``n`` answers of one request, prefilled and ready to ``run``."""
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    lease = await mesh.reserve(
        prompt, params.max_tokens, worker, n=n, wait_ms=20_000, request_id=request_id
    )
    first = await mesh.compute(prompt, lease, params, n=n, request_id=request_id)
    return [
        Moving(mesh, prompt, params, lease, first, points, index, tuple(eos), worker)
        for index in range(n)
    ]

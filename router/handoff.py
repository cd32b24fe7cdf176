"""A running answer, and its moves from one decode worker to another.

``kvtransfer.protocol.migration_gateway`` decides; here is what its effects do. The tokens that came
since the last decision are told to it in one piece before the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType

from pdmesh.kvtransfer.protocol import migration_gateway as gateway
from pdmesh.router.account import Account
from pdmesh.router.booking import Seat
from pdmesh.router.clients import DecodeClient, WorkerClients, within
from pdmesh.router.failure import AttemptFailed, blame
from pdmesh.router.leases import HeldLease, release_all
from pdmesh.router.move import Move, farewell
from pdmesh.router.run import Run
from pdmesh.router.silence import Watched
from pdmesh.router.stream import Delta
from pdmesh.router.view import MeshView
from pdmesh.wire.admin import AnswerPhase, MoveState
from pdmesh.wire.errors import DeadlineExceeded, PdmeshError
from pdmesh.wire.handoff import (
    AbortAsked,
    CommitAsked,
    ContinueRequest,
    DecideRequest,
    MigrateRequest,
    StreamItem,
)
from pdmesh.wire.messages import StreamRequest, TokenChunk, WorkerRecord

OFFER_TRIES = 3
HANDOFF_S = 30.0
"""Seconds after which a handoff that is still open is aborted."""
_NO_ATTEMPT = 0


@dataclass(frozen=True)
class Surroundings:
    """What an answer needs of its router."""

    view: MeshView
    clients: WorkerClients
    account: Account
    clock: Callable[[], float]
    silence_s: float


class LiveAnswer:
    """An answer while a decode worker generates it; its leases are released on leaving.

    Args:
        run: the answer.
        worker: where it is generated first.
        lease: there.
        seat: the booking, which moves with it.
        around: see Surroundings.
        moved: called with each move that is done.
    """

    def __init__(
        self,
        run: Run,
        worker: WorkerRecord,
        lease: HeldLease,
        seat: Seat,
        around: Surroundings,
        moved: Callable[[LiveAnswer, Move], None],
    ) -> None:
        self.run = run
        self.worker = worker
        self._lease = lease
        self._spare: HeldLease | None = None
        """At a target that the answer did not get to."""
        self._seat = seat
        self._around = around
        self._moved = moved
        self._state: gateway.GatewayState | None = None
        self._move: Move | None = None
        self._targets: dict[int, WorkerRecord] = {}
        self._stream: Watched[StreamItem] | None = None
        self._begun = False
        self._last_token_at = around.clock()

    async def __aenter__(self) -> LiveAnswer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        held = [self._lease, *([self._spare] if self._spare is not None else [])]
        try:
            if self._stream is not None:
                await self._stream.aclose()
        finally:
            await release_all(held, kind, error, traceback)

    @property
    def phase(self) -> AnswerPhase:
        if self._move is not None:
            return "activating" if self._move.committed else "moving"
        return "running" if self._begun else "starting"

    @property
    def move(self) -> Move | None:
        """The handoff under way."""
        return self._move

    # ---- the stream -----------------------------------------------------------------------

    def begin(self, request: StreamRequest) -> None:
        """Asks for the tokens after the first at once: from then on the worker sees whether
        anybody reads, and frees the lease when its router dies."""
        decode = self._decode(self.worker)
        self._stream = self._watched(decode.stream(request, self.run.call_timeout()))
        self._stream.open()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """The tokens after the first, to the end of the answer, through all its moves.

        Raises:
            AttemptFailed: the worker that had the answer is gone, or its tokens do not fit.
        """
        assert self._stream is not None, "begin comes first"
        while self.run.gate.finish is None:
            try:
                with blame(self.worker):
                    delta = self._take(await self._stream.next())
            except AttemptFailed as failure:
                raise self._lost(failure.worker, failure.error) from failure
            except PdmeshError as error:
                if self.phase != "activating":
                    raise
                raise self._lost(self.worker, error) from error
            if delta.token_ids or delta.text:
                yield delta

    def _take(self, item: StreamItem) -> Delta:
        match item:
            case TokenChunk():
                current = item.attempt == self.run.gate.attempt
                delta = self.run.take(item)
                if current:
                    self._generated(delta)
                return delta
            case CommitAsked():
                return self._commit(item)
            case AbortAsked():
                self._abort(item)
        return Delta(self.run.index)

    def _generated(self, delta: Delta) -> None:
        """The owner generates: it has sent something of this attempt."""
        now = self._around.clock()
        self._begun = True
        if self._state is not None and not self._state.active:
            self._step(gateway.ActiveArrived(self.run.gate.attempt))
        over = self.run.gate.finish is not None
        move = self._move
        if move is not None and move.committed and (delta.token_ids or over):
            move.pause_s = now - self._last_token_at
            self._finish(move, "moved")
        if delta.token_ids:
            self._last_token_at = now

    # ---- a handoff ------------------------------------------------------------------------

    def offer(self, target: WorkerRecord) -> Move | None:
        """Asks the answer's worker to hand it over; None if this is not the time."""
        if self.phase != "running" or self.run.gate.finish is not None:
            return None
        if not self._step(gateway.MigrationWanted(target.instance)):
            return None
        assert self._state is not None
        number = self.run.handoffs = self._state.handoff
        move = self._move = Move(number, self.worker, target)
        self._targets[number] = target
        self._around.account.migrating(self.run, self.worker, target)
        self._spawn_offer(move)
        return move

    def give_up(self, move: Move, reason: str) -> None:
        """Aborts a handoff, unless it is decided."""
        if not move.decided.is_set():
            self._settle(self._step(gateway.AbortAsked(move.number)), "", reason)

    def _spawn_offer(self, move: Move) -> None:
        lease, decode = self._lease, self._decode(self.worker)

        async def work() -> None:
            error: PdmeshError | None = None
            for _ in range(OFFER_TRIES):
                if not self._reminded():
                    return
                request = MigrateRequest(
                    lease_id=lease.lease_id,
                    generation=lease.generation,
                    handoff=move.number,
                    target=move.target,
                    acknowledged=len(self.run.gate.tokens),
                )
                try:
                    await decode.migrate(request)
                except DeadlineExceeded as late:  # it may have come: said again, it changes nothing
                    error = late
                except PdmeshError as refusal:
                    self.give_up(move, refusal.message)
                    return
                else:
                    await within(HANDOFF_S, move.decided)
                    self.give_up(move, f"it was not ready within {HANDOFF_S:g} s")
                    return
            self.give_up(move, error.message if error else "")

        self._around.clients.background.spawn(work())

    def _reminded(self) -> bool:
        """Whether an offer is still waiting for its end."""
        offer = gateway.PostMigrate
        return any(isinstance(effect, offer) for effect in self._step(gateway.Reminded()))

    def _commit(self, asked: CommitAsked) -> Delta:
        """The source has the target ready. The first decision stands, whoever asks again."""
        target, tail = self._targets.get(asked.handoff), asked.tail
        name = "" if target is None else target.instance
        attempt = asked.attempt if tail.attempt == asked.attempt else _NO_ATTEMPT
        before = self._synced()
        event = gateway.CommitAsked(
            attempt, asked.handoff, name, tail.position, tuple(tail.token_ids)
        )
        after, effects = gateway.step(before, event)
        move = self._move
        if after.attempt == before.attempt or target is None or move is None:
            self._state = after
            self._settle(effects, asked.lease_id, "its tokens do not continue the answer")
            return Delta(self.run.index)
        self._spare = self._decode(target).adopted(
            asked.lease_id, asked.generation, self.run.worker_request_id
        )
        delta = self.run.take(tail)
        self._generated(delta)
        if self.run.gate.finish is None:
            self._state = after
            self._switch(move, self._spare)
        return delta

    def _switch(self, move: Move, lease: HeldLease) -> None:
        """The target goes on; the source hears so, and is let go."""
        assert self._state is not None
        assert self._stream is not None
        self._around.clients.background.spawn(
            farewell(self._decode(self.worker), self._lease, move.number, self._stream)
        )
        self.worker, self._lease, self._spare = move.target, lease, None
        self._seat.move(move.target.instance)
        self.run.moved(move.target, self._state.attempt)
        request = ContinueRequest(
            lease_id=lease.lease_id,
            generation=lease.generation,
            attempt=self._state.attempt,
            position=len(self.run.gate.tokens),
        )
        continued = self._decode(self.worker).continued(request, self.run.call_timeout())
        self._stream = self._watched(continued)
        self._stream.open()
        move.committed = True
        move.decided.set()

    def _abort(self, asked: AbortAsked) -> None:
        self._settle(
            self._step(gateway.AbortAsked(asked.handoff)),
            asked.lease_id,
            asked.reason or "the source asked for its end",
        )

    def _settle(self, effects: tuple[gateway.Effect, ...], lease_id: str, reason: str) -> None:
        """Tells the source what stands; ``lease_id`` is the target's if it is known."""
        for effect in effects:
            match effect:
                case gateway.PostCommitted(number):
                    self._decide(number, committed=True)
                case gateway.PostAborted(number):
                    self._decide(number, committed=False)
                    target = self._targets.get(number)
                    if lease_id and target is not None:
                        decode = self._decode(target)
                        decode.adopted(lease_id, 0, self.run.worker_request_id).start_release(
                            "not taken over"
                        )
                    if self._move is not None and self._move.number == number:
                        self._finish(self._move, "failed", reason)
                case _:
                    pass

    def _decide(self, number: int, *, committed: bool) -> None:
        request = DecideRequest(lease_id=self._lease.lease_id, handoff=number, committed=committed)
        self._around.clients.background.spawn(self._decode(self.worker).decide(request))

    # ---- endings --------------------------------------------------------------------------

    def _lost(self, worker: WorkerRecord, error: PdmeshError) -> AttemptFailed:
        """The owner is lost, or did not take the answer over; another attempt goes on."""
        move = self._move
        moving = move is not None and move.committed
        if self._state is not None:
            state = self._state
            lost = gateway.WorkerLost(state.owner)
            self._step(lost if state.active else gateway.ActivateRefused(state.attempt))
        if move is not None:
            self._finish(move, "failed", error.message)
        return AttemptFailed(worker, error, moving=moving)

    def _end(self) -> None:
        if self._state is not None:
            self._step(gateway.Ended())
        if self._move is not None:
            self._finish(self._move, "ended")

    def _finish(self, move: Move, state: MoveState, reason: str = "") -> None:
        move.state, move.reason = state, reason
        account = self._around.account
        if state == "moved":
            account.migrated(self.run, move.source, move.target, move.pause_s)
        elif state == "failed":
            account.migration_failed(self.run, move.source, move.target, reason)
        else:
            account.migration_ended()
        self._move = None
        move.decided.set()
        move.done.set()
        self._moved(self, move)

    # ---- the machine ----------------------------------------------------------------------

    def _synced(self) -> gateway.GatewayState:
        """The machine's state with all tokens that have come."""
        gate, state = self.run.gate, self._state
        if state is None:
            return gateway.GatewayState(
                owner=self.worker.instance,
                attempt=gate.attempt,
                tokens=tuple(gate.tokens),
                handoff=self.run.handoffs,
            )
        known = len(state.tokens)
        if known == len(gate.tokens):
            return state
        new = gateway.ChunkArrived(gate.attempt, known, tuple(gate.tokens[known:]))
        return gateway.step(state, new)[0]

    def _step(self, event: gateway.Event) -> tuple[gateway.Effect, ...]:
        self._state, effects = gateway.step(self._synced(), event)
        return effects

    # ---- the workers ----------------------------------------------------------------------

    def _decode(self, worker: WorkerRecord) -> DecodeClient:
        return self._around.clients.decode(worker)

    def _watched(self, items: AsyncGenerator[StreamItem, None]) -> Watched[StreamItem]:
        worker, view = self.worker, self._around.view

        def alive(within: float) -> asyncio.Future[bool]:
            return asyncio.ensure_future(view.alive(worker, within))

        return Watched(worker.worker_id, items, self._around.silence_s, alive)

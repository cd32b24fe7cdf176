"""Running answers that leave this decode worker: the effects of ``migration_source``.

Everything happens on the event loop; copies and checksums run on threads of their own. What can be
done while the answer goes on is done then. Its pages stay its own until nothing reads them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pdmesh.decode.capsule import answer_of, pending_bytes, whole_output
from pdmesh.decode.leases import Leases
from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.outgoing import Handoff, Move, TargetCalls
from pdmesh.decode.peers import Peers
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.protocol import migration_source as source
from pdmesh.kvtransfer.protocol.migration import Capsule
from pdmesh.kvtransfer.protocol.migration_source import OVER, Phase, SourceState, step
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.wire.errors import InvalidRequest, LeaseGone, PdmeshError
from pdmesh.wire.handoff import AbortAsked, CommitAsked, DecideRequest, MigrateRequest
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Empty, TokenChunk

log = logging.getLogger(__name__)

REMIND_S = 1.0
_THREADS = 8


class Migrations:
    """The handoffs of which this worker is the source.

    Args:
        is_aside: whether a sequence's pages are set aside.
        wake: makes the loop look again.
    """

    def __init__(
        self,
        store: LatentStore,
        leases: Leases,
        scheduler: DecodeScheduler[DecodeSequence],
        limits: DecodeLimits,
        sender: TransferSender,
        peers: Peers,
        is_aside: Callable[[DecodeSequence], bool],
        wake: Callable[[], None],
    ) -> None:
        self._leases = leases
        self._scheduler = scheduler
        self._limits = limits
        self._sender = sender
        self._peers = peers
        self._is_aside = is_aside
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_THREADS, "decode-migrate")
        self._calls = TargetCalls(store, sender, peers, leases, limits, self._threads)
        self._places = asyncio.Semaphore(limits.max_migrations)
        self._moves: dict[DecodeSequence, Move] = {}
        self._frozen: set[DecodeSequence] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.moved_out = 0
        self.observe: Callable[[float], None] | None = None
        """Told of the seconds for which an answer that moved out stood still."""

    # ---- what the router says -------------------------------------------------------------

    async def migrate(self, request: MigrateRequest) -> Empty:
        """Begins a handoff; the answer's stream tells how it goes. Idempotent.

        Raises:
            LeaseGone: the lease is over.
            InvalidRequest: it is not being streamed, or its pages are set aside: ask again later.
        """
        entry = self._leases.find(request.lease_id)
        if entry is None or entry.generation != request.generation or entry.leaving:
            raise LeaseGone(f"lease {request.lease_id} is over")
        if entry.ended is not None or (entry.sequence is not None and entry.sequence.done):
            raise LeaseGone(f"lease {request.lease_id} is over")
        if entry.sequence is None:
            raise InvalidRequest(f"lease {request.lease_id} is not being streamed yet")
        if request.target.instance == self._limits.instance:
            raise InvalidRequest("an answer cannot move to the worker that it is at")
        if self._is_aside(entry.sequence):
            raise InvalidRequest(f"the pages of lease {request.lease_id} are set aside")
        move = self._moves.get(entry.sequence) or self._begin(entry.sequence, request)
        if move.state.phase is Phase.DECODING:
            move.target = request.target
        self._feed(move, source.ChunkAcknowledged(request.acknowledged))
        self._feed(move, source.MigrateAsked(request.handoff, request.target.instance))
        return Empty()

    async def decide(self, request: DecideRequest) -> Empty:
        """Takes the router's decision on a handoff. Idempotent; one long over is no error."""
        entry = self._leases.find(request.lease_id)
        move = None if entry is None or entry.sequence is None else self._moves.get(entry.sequence)
        if move is not None:
            kind = source.Committed if request.committed else source.Aborted
            self._feed(move, kind(request.handoff))
        return Empty()

    def _begin(self, sequence: DecodeSequence, request: MigrateRequest) -> Move:
        output = whole_output(sequence.request, sequence.tokens)
        unread = sum(len(chunk.token_ids) for chunk in sequence.unread)
        state = SourceState(
            answer=answer_of(sequence.request),
            attempt=sequence.request.attempt,
            output=output,
            acknowledged=len(output) - unread,
            full_pages=len(sequence.hashes),
        )
        move = self._moves[sequence] = Move(sequence, state, request.target)
        return move

    # ---- what the worker says -------------------------------------------------------------

    def stepped(self, sequence: DecodeSequence, chunk: TokenChunk) -> None:
        """A step of the sequence has ended, and its chunk is queued."""
        if move := self._moves.get(sequence):
            full = len(sequence.hashes)
            self._feed(move, source.Stepped(chunk.token_ids, full, sequence.done))

    def handed_on(self, sequence: DecodeSequence, chunk: TokenChunk) -> None:
        """The stream has handed a chunk on."""
        if move := self._moves.get(sequence):
            self._feed(move, source.ChunkAcknowledged(chunk.position + len(chunk.token_ids)))

    def stopped(self, sequence: DecodeSequence) -> None:
        """The sequence has left the batch. Between steps."""
        move = self._moves[sequence]
        sequence.stopping = False
        move.frozen_at = self._loop.time()
        self._frozen.add(sequence)
        num_pages = self._limits.pages(sequence.computed)
        self._feed(move, source.Stopped(sequence.computed, num_pages, pending_bytes(sequence)))

    def lost(self, sequence: DecodeSequence) -> None:
        """Nobody wants the sequence any more. Idempotent."""
        if move := self._moves.get(sequence):
            self._feed(move, source.GatewayLost())

    def forget(self, sequence: DecodeSequence) -> None:
        """The sequence has ended here."""
        self.lost(sequence)
        self._frozen.discard(sequence)
        self._moves.pop(sequence, None)

    def drop_cancelled(self) -> list[DecodeSequence]:
        """The sequences that were ended while they stood still."""
        return [s for s in self._frozen if s.cancelled]

    # ---- the machine ----------------------------------------------------------------------

    def _feed(self, move: Move, what: source.Event) -> None:
        move.state, effects = step(move.state, what)
        for effect in effects:
            self._apply(move, effect)
        self._settle(move)

    def _apply(self, move: Move, effect: source.Effect) -> None:
        match effect:
            case source.PostReserve(number, _):
                move.handoff = Handoff(number, move.target)
                self._of_handoff(move, self._reserve)
            case source.StartRound(_, index, first, count):
                self._of_handoff(move, partial(self._round, index=index, first=first, count=count))
            case source.StopDecoding():
                move.sequence.stopping = True
                self._wake()
                self._open_early(move)
            case source.PostCapsule(_, capsule):
                self._of_handoff(move, partial(self._capsule, capsule=capsule))
            case source.PostCommit() | source.PostAbort():
                self._ask(move, effect)
            case source.AbortTarget():
                if move.handoff is not None:
                    self._abandon(move.handoff)
            case source.Resume():
                self._resume(move)
            case source.Free():
                if move.state.phase is Phase.RELEASED:
                    self._handed_over(move)
            case source.PostTokens():
                pass  # chunks are in the stream's queue, in order

    def _settle(self, move: Move) -> None:
        """Keeps what hangs on the phase as it has to be."""
        phase = move.state.phase
        sequence, handoff = move.sequence, move.handoff
        sequence.moving = phase is not Phase.DECODING and phase not in OVER
        if not sequence.moving and handoff is not None and not handoff.over:
            handoff.over = True
            if handoff.placed:
                self._places.release()
            self._wake()  # its pages may be set aside again
        asking = phase in (Phase.COMMITTING, Phase.ABORTING)
        if asking and move.reminder is None:
            move.reminder = self._loop.call_later(REMIND_S, self._remind, move)
        elif not asking and move.reminder is not None:
            move.reminder.cancel()
            move.reminder = None

    def _remind(self, move: Move) -> None:
        move.reminder = None
        self._feed(move, source.Reminded())

    def _ask(self, move: Move, effect: source.PostCommit | source.PostAbort) -> None:
        """Puts a question to the router into the stream, after all tokens."""
        handoff = move.handoff
        mine = handoff is not None and handoff.number == effect.handoff
        item: CommitAsked | AbortAsked
        if isinstance(effect, source.PostCommit):
            assert handoff is not None
            item = CommitAsked(
                attempt=effect.attempt,
                handoff=effect.handoff,
                lease_id=handoff.lease_id,
                generation=handoff.generation,
                tail=move.tail(effect.position, effect.tail),
            )
        else:
            item = AbortAsked(
                handoff=effect.handoff,
                reason=(handoff.reason if mine and handoff else "") or "it is not to move now",
                lease_id=handoff.lease_id if mine and handoff else "",
            )
            event(
                log,
                "not_moved",
                request=move.sequence.request.request_id,
                handoff=effect.handoff,
                reason=item.reason,
            )
        move.sequence.queue.put_nowait(item)

    def _resume(self, move: Move) -> None:
        sequence = move.sequence
        sequence.stopping = False
        if sequence in self._frozen:
            self._frozen.remove(sequence)
            self._scheduler.add(sequence)
        self._wake()

    def _handed_over(self, move: Move) -> None:
        sequence, state = move.sequence, move.state
        assert move.frozen_at is not None
        frozen = self._loop.time() - move.frozen_at
        self.moved_out += 1
        event(
            log,
            "moved_out",
            request=sequence.request.request_id,
            lease=sequence.entry.lease_id,
            target=state.target,
            tokens=sequence.generated,
            pages=state.copied,
            rounds=state.rounds,
            frozen_ms=f"{frozen * 1e3:.1f}",
        )
        if self.observe is not None:
            self.observe(frozen)
        self._frozen.discard(sequence)
        self._moves.pop(sequence, None)
        sequence.queue.put_nowait(None)
        self._leases.free(sequence.entry)

    # ---- what is under way to the target --------------------------------------------------

    def _of_handoff(
        self, move: Move, work: Callable[[Move, Handoff], Coroutine[Any, Any, None]]
    ) -> None:
        assert move.handoff is not None
        self._keep(self._guarded(move, move.handoff, work))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(
        self,
        move: Move,
        handoff: Handoff,
        work: Callable[[Move, Handoff], Coroutine[Any, Any, None]],
    ) -> None:
        """Runs a part of a handoff; whatever fails in it fails the handoff, never the answer."""
        try:
            await work(move, handoff)
            return
        except PdmeshError as error:
            reason = error.message
        except Exception as error:  # noqa: BLE001 - told to the router; the answer goes on
            log.exception("handoff failed")
            reason = f"internal error: {error}"
        if not handoff.over:
            handoff.reason = reason
            self._feed(move, source.TargetFailed(handoff.number, reason))

    async def _reserve(self, move: Move, handoff: Handoff) -> None:
        """Asks the target to promise the pages, when it is this handoff's turn."""
        await self._places.acquire()
        if handoff.over:
            self._places.release()
            return
        handoff.placed = True
        have_pages = await self._calls.adopt(move.sequence, handoff)
        if handoff.over:
            self._abandon(handoff)
        else:
            self._feed(move, source.TargetGranted(handoff.number, have_pages))

    async def _round(
        self, move: Move, handoff: Handoff, index: int, first: int, count: int
    ) -> None:
        await self._calls.send_round(move.sequence, handoff, index, first, count)
        if not handoff.over:
            self._feed(move, source.RoundDone(handoff.number, index))

    def _open_early(self, move: Move) -> None:
        """Asks for the last round while the step under way still runs."""
        handoff, state = move.handoff, move.state
        assert handoff is not None
        opening = self._calls.open_early(move.sequence, handoff, state.rounds, state.copied)
        if opening is not None:
            self._tasks.add(opening)
            opening.add_done_callback(self._tasks.discard)

    async def _capsule(self, move: Move, handoff: Handoff, capsule: Capsule) -> None:
        await self._calls.send_capsule(move.sequence, handoff, capsule)
        self._feed(move, source.TargetReady(handoff.number, len(capsule.output)))

    def _abandon(self, handoff: Handoff) -> None:
        """Aborts the rounds under way and tells the target."""
        handoff.abort_transfers()
        if handoff.lease_id:
            self._keep(self._calls.release(handoff))

    async def close(self) -> None:
        """Ends all handoffs, for the end of the process."""
        self._sender.close()
        await self._peers.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        self._threads.shutdown(wait=False, cancel_futures=True)

"""The running decode worker: arrivals, and one step after another.

All state is touched on the event loop only; the compute thread sees rows and returns results.
Pages are freed between steps, never under a step, and not while a remote write can still land.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from pdmesh.decode.admission import check_stream, new_sequence
from pdmesh.decode.facts import DecodeStepFacts
from pdmesh.decode.lease import LeaseEntry
from pdmesh.decode.leases import Leases
from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.paging import Paging
from pdmesh.decode.runner import DecodeRunner, StepRows
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.wire.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    LeaseGone,
    PdmeshError,
    Preempted,
)
from pdmesh.wire.hashes import root_hash
from pdmesh.wire.logs import event
from pdmesh.wire.messages import (
    Empty,
    Lease,
    ReleaseRequest,
    ReserveRequest,
    StreamRequest,
    TokenChunk,
)

log = logging.getLogger(__name__)


class DecodeWorker:
    """Owns the leases, the pages and the batch of one decode worker."""

    def __init__(
        self,
        runner: DecodeRunner,
        kv: KvManager,
        store: LatentStore,
        receiver: TransferReceiver,
        scheduler: DecodeScheduler[DecodeSequence],
        limits: DecodeLimits,
    ) -> None:
        self._runner = runner
        self._kv = kv
        self._receiver = receiver
        self._scheduler = scheduler
        self._limits = limits
        self._fingerprint = limits.page_format.fingerprint()
        scheduler.rank = lambda sequence: sequence.entry.rank
        self._leases = Leases(kv, store, receiver, limits, self._let_go, self._serve_room)
        self._wake = asyncio.Event()
        self._compute = ThreadPoolExecutor(1, "decode-compute")
        self._paging = Paging(
            kv,
            store,
            limits,
            self._leases.room,
            scheduler,
            self._compute,
            self._end_preempted,
            self._wake.set,
        )
        self.observe: Callable[[DecodeStepFacts], None] | None = None
        """Told of every step, on the event loop."""
        self.tokens_generated = 0
        self.cancelled = 0
        """Leases ended early by their client, a deadline or a cut stream, each counted once. A
        stream that the router cuts because it has found a stop string is one of them."""
        self.drafted = 0
        self.accepted = 0
        """Draft tokens verified, and of those right."""
        self.step_ms = 0.0

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def queued(self) -> int:
        """Sequences that wait for a place in the batch or for their pages, and reservations."""
        return self._scheduler.waiting + self._paging.parked + self._leases.waiting

    @property
    def preempted(self) -> int:
        """How often a sequence had to give its pages up."""
        return self._paging.preempted

    @property
    def parked(self) -> int:
        """Sequences whose pages are set aside now."""
        return self._paging.parked

    @property
    def parked_bytes(self) -> int:
        """Host memory that set-aside pages take."""
        return self._paging.parked_bytes

    @property
    def running(self) -> int:
        return self._scheduler.running

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        return self._kv.check_integrity() + self._receiver.check_integrity()

    # ---- reserve, stream, release ---------------------------------------------------------

    async def reserve(self, request: ReserveRequest) -> Lease:
        """Promises pages for a prompt and its answers; waits for room if the request says so.

        Raises:
            InvalidRequest: it can never fit here, or makes no sense.
            Overloaded: there is no room, and none came in time.
            DeadlineExceeded: the deadline passed while it waited.
        """
        return await self._leases.grant(request)

    async def stream(self, request: StreamRequest) -> AsyncIterator[TokenChunk]:
        """Waits for the pages, then yields the tokens of every step until the sequence ends.

        Raises:
            LeaseGone: the lease is over.
            InvalidRequest: it is being streamed already, was reserved for something else, or its
                grammar is stuck.
            TransferFailed: the pages did not arrive; nothing was generated.
            Cancelled: the lease was released, or its deadline passed, meanwhile.
            Preempted: its pages were needed by others, and could not be kept either.
            InternalError: its step failed, also when it ran alone.
        """
        entry = self._leases.find(request.lease_id)
        if entry is None or entry.generation != request.generation or entry.ended is not None:
            raise LeaseGone(f"lease {request.lease_id} is over")
        if entry.streaming:
            raise InvalidRequest(f"lease {request.lease_id} is being streamed already")
        hashes = check_stream(self._limits, entry.request, request)
        entry.streaming = True
        try:
            sequence = await self._admit(entry, request, hashes)
            while True:
                item = await sequence.queue.get()
                if isinstance(item, PdmeshError):
                    raise item
                yield item
                if item.finish is not None:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self._let_go(entry, Cancelled("the stream was cut"))
            raise
        except PdmeshError as error:
            self._let_go(entry, error)
            if entry.ended is not None and entry.ended is not error:
                raise entry.ended from error  # why it could not go on: the lease was ended
            raise
        finally:
            self._let_go(entry, InternalError("the stream ended"))

    async def _admit(
        self, entry: LeaseEntry, request: StreamRequest, hashes: list[bytes]
    ) -> DecodeSequence:
        """Waits for the prompt's pages; then the sequence joins the batch."""
        opened = time.monotonic()
        grammars, grammar = self._limits.grammars, request.sampling.grammar
        if grammars is not None and grammar:
            await asyncio.to_thread(grammars.compile, grammar)  # kept, and used again below
        assert entry.group is not None
        patience = max(0.001, entry.request.deadline_ms / 1e3)
        fin = await self._receiver.wait(entry.group.transfer_id, patience)
        if not self._leases.holds(entry):
            raise LeaseGone(f"lease {entry.lease_id} is over")
        sequence = new_sequence(self._limits, entry, request, fin, hashes)
        sequence.transfer_ms = (time.monotonic() - opened) * 1e3
        event(
            log,
            "arrived",
            request=request.request_id,
            attempt=request.attempt,
            lease=entry.lease_id,
            ms=f"{sequence.transfer_ms:.1f}",
        )
        self._leases.arrive(entry, hashes)
        entry.sequence = sequence
        self._scheduler.add(sequence)
        self._wake.set()
        return sequence

    async def release(self, request: ReleaseRequest) -> Empty:
        """Ends a lease, whatever its state, and returns when its pages are free or in quarantine.

        Takes a reservation that waits out of the line, if it is its ticket. Idempotent.
        """
        self._leases.withdraw(request.lease_id)
        entry = self._leases.find(request.lease_id)
        if entry is not None:
            why = f"the lease was released: {request.reason}"
            early = entry.streaming or request.reason == "cancelled"
            name = "ended_early" if early or request.reason != "finished" else "released"
            self._let_go(entry, Cancelled(why) if early else LeaseGone(why), name)
            await entry.freed.wait()
        return Empty()

    # ---- the loop -------------------------------------------------------------------------

    async def run(self) -> None:
        """Steps for ever; waits without polling while there is nothing to do.

        Raises:
            Exception: what no single sequence is to blame for; the worker cannot go on.
        """
        while True:
            await self._paging.bring_back()
            for sequence in self._paging.drop_cancelled():
                self._end(sequence)
            for sequence in self._scheduler.take(lambda s: s.cancelled):
                self._end(sequence)
            batch = await self._paging.next_batch()
            if batch:
                await self._step(batch)
            else:
                await self._wake.wait()
                self._wake.clear()

    async def _step(self, batch: list[DecodeSequence]) -> None:
        try:
            await self._run_step(batch)
        except _StepFailed as failed:
            fields = {"requests": ",".join(s.request.request_id for s in batch)}
            log.error("decode step failed", exc_info=failed.__cause__, extra={"fields": fields})
            for sequence in batch:
                await self._step_alone(sequence)

    async def _step_alone(self, sequence: DecodeSequence) -> None:
        """Runs one sequence of a step that failed: only who fails again is to blame."""
        if sequence.cancelled:
            return
        try:
            await self._run_step([sequence])
        except _StepFailed as failed:
            cause = failed.__cause__
            if isinstance(cause, InvalidRequest):  # the request itself is to blame
                self._let_go(sequence.entry, cause)
            else:
                self._let_go(sequence.entry, InternalError(f"decode step failed: {cause}"))

    async def _run_step(self, batch: list[DecodeSequence]) -> None:
        began = time.perf_counter()
        rows = [sequence.rows() for sequence in batch]
        loop = asyncio.get_running_loop()
        try:
            steps = await loop.run_in_executor(self._compute, self._runner.step, rows)
        except Exception as error:
            raise _StepFailed from error
        duration = (time.perf_counter() - began) * 1e3
        self.step_ms = 0.9 * self.step_ms + 0.1 * duration if self.step_ms else duration
        tokens, accepted = self.tokens_generated, self.accepted
        for sequence, step in zip(batch, steps, strict=True):
            if not sequence.cancelled:
                self._apply(sequence, step, duration)
        if self.observe is not None:
            self.observe(
                DecodeStepFacts(
                    duration_s=time.perf_counter() - began,
                    model_s=steps[0].model_s,
                    num_sequences=len(steps),
                    num_tokens=self.tokens_generated - tokens,
                    drafted=sum(step.drafted for step in steps),
                    accepted=self.accepted - accepted,
                    pages_used=self._kv.status().used,
                )
            )

    def _apply(self, sequence: DecodeSequence, step: StepRows, duration: float) -> None:
        drafted, accepted = sequence.drafted, sequence.accepted
        chunk, complete = sequence.apply(step, duration)
        self._publish(sequence, complete)
        self.tokens_generated += len(chunk.token_ids)
        self.drafted += sequence.drafted - drafted
        self.accepted += sequence.accepted - accepted
        sequence.queue.put_nowait(chunk)
        if sequence.done:
            self._end(sequence)

    def _publish(self, sequence: DecodeSequence, complete: int) -> None:
        size = self._limits.page_format.page_size
        if (len(sequence.hashes) + 1) * size > complete:
            return
        root = root_hash(self._limits.secret, self._fingerprint, sequence.request.tenant)
        first, hashes = sequence.extend_hashes(self._limits.secret, root, size, complete)
        sequence.entry.reservation.publish(first, hashes)

    # ---- endings --------------------------------------------------------------------------

    def _let_go(self, entry: LeaseEntry, why: PdmeshError, name: str = "ended_early") -> None:
        """Ends a lease from outside the loop: at once, or after the running step. Idempotent.

        ``name`` is the event logged for a lease that no sequence came to use.
        """
        if entry.ended is not None or not self._leases.holds(entry):
            return
        entry.ended = why
        self.cancelled += isinstance(why, Cancelled)
        if entry.sequence is None:
            request = entry.request.request_id
            event(log, name, request=request, lease=entry.lease_id, tokens=0, reason=why.message)
            self._leases.free(entry)
        else:
            entry.sequence.queue.put_nowait(why)
            self._wake.set()

    def _end(self, sequence: DecodeSequence) -> None:
        """Takes a sequence out of the batch and frees its lease. Between steps."""
        ended = sequence.entry.ended
        event(
            log,
            "finished" if ended is None else "ended_early",
            request=sequence.request.request_id,
            tokens=sequence.generated,
            drafted=sequence.drafted,
            accepted=sequence.accepted,
            reason="done" if ended is None else ended.message,
        )
        self._scheduler.remove(sequence)
        self._leases.free(sequence.entry)

    def _end_preempted(self, sequence: DecodeSequence, why: Preempted) -> None:
        """Ends a sequence that gave its pages up for good. Between steps."""
        self._let_go(sequence.entry, why)
        self._end(sequence)

    def _serve_room(self) -> None:
        """Pages may have become free: for those in line, and for sequences that lack some."""
        self._leases.room.serve()
        self._wake.set()

    def close(self) -> None:
        """Ends the compute thread."""
        self._compute.shutdown(wait=False, cancel_futures=True)


class _StepFailed(Exception):
    """The compute thread raised; the cause says what."""

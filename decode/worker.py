"""The running decode worker: arrivals, and one step after another.

All state is touched on the event loop only; the compute thread sees rows and returns results.
Pages are freed between steps, never under a step, and not while a remote write can still land.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from pdmesh.decode.admission import check_stream, new_sequence
from pdmesh.decode.leases import DecodeLimits, Leases
from pdmesh.decode.runner import DecodeRunner, StepRows
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.sequence import DecodeSequence, LeaseEntry
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.wire.errors import Cancelled, InternalError, InvalidRequest, LeaseGone, PdmeshError
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
        self._leases = Leases(kv, receiver, limits, self._let_go)
        self._wake = asyncio.Event()
        self._compute = ThreadPoolExecutor(1, "decode-compute")
        self.tokens_generated = 0
        self.cancelled = 0
        """Leases ended early by their client, a deadline or a cut stream, each counted once. A
        stream that the router cuts because it has found a stop string is one of them."""
        self.step_ms = 0.0

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def queued(self) -> int:
        return self._scheduler.waiting

    @property
    def running(self) -> int:
        return self._scheduler.running

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        return self._kv.check_integrity() + self._receiver.check_integrity()

    # ---- reserve, stream, release ---------------------------------------------------------

    async def reserve(self, request: ReserveRequest) -> Lease:
        """Promises pages for the prompt and all it may generate, or refuses at once.

        Raises:
            InvalidRequest: it can never fit here, or makes no sense.
            Overloaded: there is no room now.
        """
        return self._leases.grant(request)

    async def stream(self, request: StreamRequest) -> AsyncIterator[TokenChunk]:
        """Waits for the pages, then yields the tokens of every step until the sequence ends.

        Raises:
            LeaseGone: the lease is over.
            InvalidRequest: it is being streamed already, or was reserved for something else.
            TransferFailed: the pages did not arrive; nothing was generated.
            Cancelled: the lease was released, or its deadline passed, meanwhile.
            InternalError: a step failed.
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
        fin = await self._receiver.wait(entry.lease_id, max(0.001, entry.request.deadline_ms / 1e3))
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
        reservation = entry.reservation
        reservation.publish(reservation.matched, hashes[reservation.matched :])
        entry.sequence = sequence
        self._scheduler.add(sequence)
        self._wake.set()
        return sequence

    async def release(self, request: ReleaseRequest) -> Empty:
        """Ends a lease, whatever its state, and returns when its pages are free or in quarantine.

        Idempotent.
        """
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
            for sequence in self._scheduler.take(lambda s: s.cancelled):
                self._end(sequence)
            batch = self._scheduler.next_batch()
            if batch:
                await self._step(batch)
            else:
                await self._wake.wait()
                self._wake.clear()

    async def _step(self, batch: list[DecodeSequence]) -> None:
        size = self._limits.page_format.page_size
        for sequence in batch:
            reservation = sequence.entry.reservation
            reservation.grow(max(0, sequence.pages_needed(size) - len(reservation.pages)))
        rows = [sequence.rows() for sequence in batch]
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            steps = await loop.run_in_executor(self._compute, self._runner.step, rows)
        except Exception as error:
            requests = ",".join(sequence.request.request_id for sequence in batch)
            log.exception("decode step failed", extra={"fields": {"requests": requests}})
            for sequence in batch:
                self._let_go(sequence.entry, InternalError(f"decode step failed: {error}"))
            return
        duration = (time.monotonic() - began) * 1e3
        self.step_ms = 0.9 * self.step_ms + 0.1 * duration if self.step_ms else duration
        for sequence, step in zip(batch, steps, strict=True):
            if not sequence.cancelled:
                self._apply(sequence, step, duration)

    def _apply(self, sequence: DecodeSequence, step: StepRows, duration: float) -> None:
        chunk, complete = sequence.apply(step, duration)
        self._publish(sequence, complete)
        self.tokens_generated += len(chunk.token_ids)
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

    def close(self) -> None:
        """Ends the compute thread."""
        self._compute.shutdown(wait=False, cancel_futures=True)

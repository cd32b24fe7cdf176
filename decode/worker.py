"""The running decode worker: leases, arrivals and one step after another.

All state is touched on the event loop only; the compute thread sees rows and returns results.
Pages are freed between steps, never under a step, and not while a remote write can still land.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from pdmesh.decode.runner import DecodeRunner
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.sequence import DecodeSequence, LeaseEntry
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.wire.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    LeaseGone,
    Overloaded,
    PdmeshError,
    TransferFailed,
)
from pdmesh.wire.hashes import PageFormat, page_hashes, root_hash
from pdmesh.wire.ids import new_request_id
from pdmesh.wire.logs import event
from pdmesh.wire.messages import (
    Empty,
    Fin,
    Lease,
    ReleaseRequest,
    ReserveRequest,
    StreamRequest,
    TokenChunk,
)
from pdmesh.wire.sampling import check_token_ids

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeLimits:
    """What the worker checks a request against."""

    instance: str
    page_format: PageFormat
    vocab_size: int
    max_context: int
    secret: bytes
    lease_idle_s: float


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
        self._leases: dict[str, LeaseEntry] = {}
        self._quarantines: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        receiver.on_drained = self.drained
        self._wake = asyncio.Event()
        self._compute = ThreadPoolExecutor(1, "decode-compute")
        self.tokens_generated = 0
        self.cancelled = 0
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

    # ---- reserve, stream, release ---------------------------------------------------------

    async def reserve(self, request: ReserveRequest) -> Lease:
        """Promises pages for the prompt and all it may generate, or refuses at once."""
        page_format = self._limits.page_format
        size = page_format.page_size
        total_tokens = request.num_prompt_tokens + request.max_tokens
        if request.num_prompt_tokens < 1 or request.max_tokens < 1:
            raise InvalidRequest("a reservation needs at least one prompt and one output token")
        if total_tokens > self._limits.max_context:
            raise InvalidRequest(
                f"{request.num_prompt_tokens} prompt tokens and max_tokens {request.max_tokens} "
                f"are more than the context of {self._limits.max_context} tokens"
            )
        prompt_pages = -(-request.num_prompt_tokens // size)
        reservation = self._kv.reserve(request.hashes, prompt_pages, -(-total_tokens // size))
        if reservation is None:
            raise Overloaded("no pages are free on this decode worker; retry in a second")
        entry = LeaseEntry(new_request_id(), 1, request, reservation)
        missing = reservation.grow(prompt_pages - reservation.matched)
        self._receiver.expect(
            entry.lease_id, entry.generation, missing, reservation.matched, page_format.num_layers
        )
        self._leases[entry.lease_id] = entry
        self._start_timers(entry)
        return Lease(
            lease_id=entry.lease_id,
            generation=entry.generation,
            instance=self._limits.instance,
            cached_pages=reservation.matched,
            num_pages=prompt_pages,
            transports=self._receiver.addresses,
            page_format=page_format,
        )

    def _start_timers(self, entry: LeaseEntry) -> None:
        loop = asyncio.get_running_loop()
        deadline = max(0.0, entry.request.deadline_ms / 1e3)
        entry.timers = [
            loop.call_later(deadline, self._expire, entry, "deadline passed"),
            loop.call_later(
                self._limits.lease_idle_s, self._expire_idle, entry, "no prefill and no reader"
            ),
        ]

    def _expire_idle(self, entry: LeaseEntry, reason: str) -> None:
        if not entry.streaming:
            self._expire(entry, reason)

    def _expire(self, entry: LeaseEntry, reason: str) -> None:
        """A deadline starts the end of a lease; pages follow when nothing can touch them."""
        if self._leases.get(entry.lease_id) is entry:
            event(log, "lease expired", request=entry.request.request_id, reason=reason)
            if entry.sequence is not None:
                entry.sequence.queue.put_nowait(Cancelled(reason))
            self._let_go(entry)

    async def stream(self, request: StreamRequest) -> AsyncIterator[TokenChunk]:
        """Waits for the pages, then yields the tokens of every step until the sequence ends."""
        entry = self._leases.get(request.lease_id)
        if entry is None or entry.generation != request.generation:
            raise LeaseGone(f"lease {request.lease_id} is over")
        if entry.streaming:
            raise InvalidRequest(f"lease {request.lease_id} is being streamed already")
        root = root_hash(self._limits.secret, self._fingerprint, request.tenant)
        hashes = self._check(request, entry, root)
        entry.streaming = True
        try:
            opened = time.monotonic()
            fin = await self._arrival(entry, request)
            sequence = self._admit(entry, request, fin, hashes)
            sequence.transfer_ms = (time.monotonic() - opened) * 1e3
            while True:
                item = await sequence.queue.get()
                if isinstance(item, PdmeshError):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            if self._leases.get(entry.lease_id) is entry:
                self.cancelled += 1
                self._let_go(entry)

    def _check(self, request: StreamRequest, entry: LeaseEntry, root: bytes) -> list[bytes]:
        """Hashes of the prompt's full pages, computed here: a wrong one must not enter a cache."""
        limits = self._limits
        if len(request.token_ids) != entry.request.num_prompt_tokens:
            raise InvalidRequest("the prompt differs from the one that was reserved for")
        if request.sampling.max_tokens > entry.request.max_tokens:
            raise InvalidRequest("max_tokens exceeds what was reserved")
        check_token_ids(list(request.token_ids), limits.vocab_size, "token_ids")
        check_token_ids([request.first_token], limits.vocab_size, "first_token")
        request.sampling.validate(limits.vocab_size)
        hashes = page_hashes(limits.secret, root, request.token_ids, limits.page_format.page_size)
        if tuple(hashes) != entry.request.hashes:
            raise InvalidRequest("the prompt's page hashes differ from those reserved for")
        return hashes

    async def _arrival(self, entry: LeaseEntry, request: StreamRequest) -> Fin:
        timeout = max(0.001, entry.request.deadline_ms / 1e3)
        fin = await self._receiver.wait(entry.lease_id, timeout)
        if fin.first_token != request.first_token:
            raise TransferFailed("the first token differs between router and prefill worker")
        return fin

    def _admit(
        self, entry: LeaseEntry, request: StreamRequest, fin: Fin, hashes: list[bytes]
    ) -> DecodeSequence:
        if self._leases.get(entry.lease_id) is not entry:
            raise LeaseGone(f"lease {entry.lease_id} is over")
        reservation = entry.reservation
        reservation.publish(reservation.matched, hashes[reservation.matched :])
        stops = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops.update(request.eos_token_ids)
        sequence = DecodeSequence(
            entry=entry,
            request=request,
            tokens=[*request.token_ids, request.first_token],
            computed=len(request.token_ids),
            pending=self._last_hidden(fin),
            stop_tokens=frozenset(stops),
            hashes=list(hashes),
        )
        if sequence.room < 1:
            raise InvalidRequest("max_tokens is used up by the first token")
        entry.sequence = sequence
        self._scheduler.add(sequence)
        self._wake.set()
        return sequence

    def _last_hidden(self, fin: Fin) -> torch.Tensor | None:
        if self._limits.page_format.mtp_layers == 0:
            return None
        if not fin.last_hidden:
            raise TransferFailed("prefill sent no hidden state though MTP is on")
        dtype = getattr(torch, self._limits.page_format.dtype)
        return torch.frombuffer(bytearray(fin.last_hidden), dtype=dtype).unsqueeze(0)

    async def release(self, request: ReleaseRequest) -> Empty:
        """Ends a lease, whatever its state, and returns when its pages are free or in quarantine.

        Idempotent.
        """
        entry = self._leases.get(request.lease_id)
        if entry is not None:
            self.cancelled += entry.sequence is not None or entry.streaming
            self._let_go(entry)
            await entry.freed.wait()
        return Empty()

    # ---- the loop -------------------------------------------------------------------------

    async def run(self) -> None:
        """Steps for ever; waits without polling while there is nothing to do."""
        loop = asyncio.get_running_loop()
        size = self._limits.page_format.page_size
        while True:
            batch = self._scheduler.next_batch()
            for sequence in [s for s in batch if s.cancelled]:
                self._end(sequence)
            batch = [s for s in batch if not s.cancelled]
            if not batch:
                if not self._scheduler.waiting:
                    await self._wake.wait()
                self._wake.clear()
                continue
            for sequence in batch:
                reservation = sequence.entry.reservation
                reservation.grow(max(0, sequence.pages_needed(size) - len(reservation.pages)))
            rows = [sequence.rows() for sequence in batch]
            began = time.monotonic()
            try:
                steps = await loop.run_in_executor(self._compute, self._runner.step, rows)
            except Exception as error:
                log.exception("decode step failed")
                for sequence in batch:
                    sequence.queue.put_nowait(InternalError(f"decode step failed: {error}"))
                    sequence.cancelled = True
                continue
            duration = (time.monotonic() - began) * 1e3
            self.step_ms = 0.9 * self.step_ms + 0.1 * duration if self.step_ms else duration
            for sequence, step in zip(batch, steps, strict=True):
                chunk, complete = sequence.apply(step, duration)
                self._publish(sequence, complete)
                self.tokens_generated += len(chunk.token_ids)
                if not sequence.cancelled:
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

    def _let_go(self, entry: LeaseEntry) -> None:
        """Ends a lease from outside the loop: at once, or after the running step."""
        if entry.sequence is not None and not entry.sequence.done:
            entry.sequence.cancelled = True
            self._wake.set()
        else:
            self._free(entry)

    def _end(self, sequence: DecodeSequence) -> None:
        self._scheduler.remove(sequence)
        sequence.done = True
        event(
            log,
            "cancelled" if sequence.cancelled else "finished",
            request=sequence.request.request_id,
            tokens=sequence.generated,
            drafted=sequence.drafted,
            accepted=sequence.accepted,
        )
        self._free(sequence.entry)

    def _free(self, entry: LeaseEntry) -> None:
        """Gives the pages back; those a remote write may still reach go to quarantine."""
        if self._leases.pop(entry.lease_id, None) is None:
            return
        for timer in entry.timers:
            timer.cancel()
        if not self._receiver.cancel(entry.lease_id):
            self._quarantine(entry)
        entry.reservation.release()
        entry.freed.set()

    def _quarantine(self, entry: LeaseEntry) -> None:
        """Sets aside the pages that a one-sided write may still reach; ``on_drained`` ends it."""
        reservation = entry.reservation
        pages = reservation.pages[reservation.published :]
        self._quarantines[entry.lease_id] = reservation.quarantine(pages)
        event(log, "quarantined", request=entry.request.request_id, pages=len(pages))

    def drained(self, lease_id: str) -> None:
        """No write of a cancelled lease can land any more. Call it from any thread."""
        self._loop.call_soon_threadsafe(self._end_quarantine, lease_id)

    def _end_quarantine(self, lease_id: str) -> None:
        token = self._quarantines.pop(lease_id, None)
        if token is not None:
            self._kv.end_quarantine(token)

    def close(self) -> None:
        """Ends the compute thread."""
        self._compute.shutdown(wait=False, cancel_futures=True)

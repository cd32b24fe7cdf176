"""The running prefill worker: jobs come in, steps run on one compute thread, pages go out.

All state is touched on the event loop only; the compute thread sees a batch and returns results.
Pages are freed between steps, and not before every push of them has been acknowledged or given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from pdmesh.kvcache.manager import KvManager, Reservation
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.sender import Transfer, TransferSender
from pdmesh.prefill.runner import ChunkResult, PrefillRunner, PromptRows
from pdmesh.prefill.scheduler import Chunk, PrefillJob, PrefillScheduler, first_position
from pdmesh.wire.errors import Incompatible, InternalError, InvalidRequest, PdmeshError
from pdmesh.wire.hashes import PageFormat, page_hashes, root_hash
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Fin, FirstToken, PrefillRequest
from pdmesh.wire.sampling import check_token_ids

log = logging.getLogger(__name__)


@dataclass
class _Work:
    """A job with its effects: pages, transfer and the caller who waits."""

    job: PrefillJob
    request: PrefillRequest
    hashes: list[bytes]
    transfer: Transfer
    first: asyncio.Future[FirstToken]
    arrived: float
    started: float = 0.0
    reservation: Reservation | None = None
    carry: torch.Tensor | None = None
    pushed: list[int] = field(default_factory=list)
    """Pages pushed so far, one count a layer."""


@dataclass(frozen=True)
class PrefillLimits:
    """What the worker checks a request against."""

    page_format: PageFormat
    vocab_size: int
    max_context: int
    secret: bytes


class PrefillWorker:
    """Owns the queue, the pages and the transfers of one prefill worker."""

    def __init__(
        self,
        runner: PrefillRunner,
        kv: KvManager,
        store: LatentStore,
        scheduler: PrefillScheduler,
        limits: PrefillLimits,
    ) -> None:
        self._runner = runner
        self._kv = kv
        self._store = store
        self._scheduler = scheduler
        self._limits = limits
        self._fingerprint = limits.page_format.fingerprint()
        self._work: dict[str, _Work] = {}
        self._wake = asyncio.Event()
        self._compute = ThreadPoolExecutor(1, "prefill-compute")
        self._transfers = ThreadPoolExecutor(16, "prefill-transfer")
        self._sender = TransferSender()
        self._finishing: set[asyncio.Task[None]] = set()
        self.tokens_computed = 0
        self.cancelled = 0
        self.step_ms = 0.0

    @property
    def finishing(self) -> int:
        """Prompts whose pages are still being pushed after their first token."""
        return len(self._finishing)

    @property
    def queued(self) -> int:
        return self._scheduler.queued

    @property
    def running(self) -> int:
        return self._scheduler.running

    # ---- requests -------------------------------------------------------------------------

    async def prefill(self, request: PrefillRequest) -> FirstToken:
        """Computes a prompt and pushes its pages; returns when the first token is known."""
        self._check(request)
        transfer = await self._open(request)
        key = f"{request.request_id}/{request.attempt}/{request.lease.lease_id}"
        if key in self._work:
            raise InvalidRequest(f"request {key} is being computed already")
        root = root_hash(self._limits.secret, self._fingerprint, request.tenant)
        size = self._limits.page_format.page_size
        work = _Work(
            job=PrefillJob(key, len(request.token_ids)),
            request=request,
            hashes=page_hashes(self._limits.secret, root, request.token_ids, size),
            transfer=transfer,
            first=asyncio.get_running_loop().create_future(),
            arrived=time.monotonic(),
            pushed=[request.lease.cached_pages] * self._limits.page_format.num_layers,
        )
        self._work[key] = work
        try:
            self._scheduler.add(work.job)
            self._wake.set()
            return await asyncio.shield(work.first)
        except PdmeshError as error:
            if not work.first.done():  # the queue was full
                self._give_up(work, error.message)
            raise
        except asyncio.CancelledError:
            if not work.first.done():
                self.cancelled += 1
                work.job.cancelled = True
                self._wake.set()
            raise

    async def _open(self, request: PrefillRequest) -> Transfer:
        opening = asyncio.get_running_loop().run_in_executor(
            self._transfers, self._sender.open, request.lease
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_abort_late)
            raise

    def _check(self, request: PrefillRequest) -> None:
        limits = self._limits
        if not request.token_ids:
            raise InvalidRequest("the prompt has no tokens")
        if len(request.token_ids) >= limits.max_context:
            raise InvalidRequest(
                f"the prompt has {len(request.token_ids)} tokens; "
                f"the context holds {limits.max_context}, one of them for the answer"
            )
        check_token_ids(list(request.token_ids), limits.vocab_size, "token_ids")
        request.sampling.validate(limits.vocab_size)
        difference = limits.page_format.difference(request.lease.page_format)
        if difference:
            raise Incompatible(f"prefill and decode worker do not fit together: {difference}")

    # ---- the loop -------------------------------------------------------------------------

    async def run(self) -> None:
        """Steps for ever; waits without polling while there is nothing to do."""
        loop = asyncio.get_running_loop()
        while True:
            for job in self._scheduler.take_cancelled():
                self._give_up(self._work[job.job_id], "cancelled")
            chunks = self._scheduler.next_batch(self._start)
            if not chunks:
                await self._wake.wait()
                self._wake.clear()
                continue
            works = [self._work[chunk.job.job_id] for chunk in chunks]
            rows = [self._rows(work, chunk) for work, chunk in zip(works, chunks, strict=True)]
            began = time.monotonic()
            try:
                results = await loop.run_in_executor(self._compute, self._runner.step, rows)
            except Exception as error:
                log.exception("prefill step failed")
                for work, chunk in zip(works, chunks, strict=True):
                    self._scheduler.drop(chunk.job)
                    self._fail(work, InternalError(f"prefill step failed: {error}"))
                continue
            duration = (time.monotonic() - began) * 1e3
            self.step_ms = 0.9 * self.step_ms + 0.1 * duration if self.step_ms else duration
            for work, chunk, result in zip(works, chunks, results, strict=True):
                self._apply(work, chunk, result)

    def _start(self, job: PrefillJob) -> bool:
        """Reserves a job's pages; False if there is no room until others finish."""
        work = self._work[job.job_id]
        size = self._limits.page_format.page_size
        pages = -(-job.num_tokens // size)
        try:
            reservation = self._kv.reserve(work.hashes, pages, pages)
        except PdmeshError as error:
            work.job.cancelled = True
            if not work.first.done():
                work.first.set_exception(error)
            self._wake.set()
            return False
        if reservation is None:
            return False
        reservation.grow(pages - reservation.matched)
        work.reservation = reservation
        work.started = time.monotonic()
        cached = reservation.matched * size
        job.write_from = cached
        mtp = self._limits.page_format.mtp_layers > 0
        job.next_position = first_position(job.num_tokens, cached, mtp)
        return True

    def _rows(self, work: _Work, chunk: Chunk) -> PromptRows:
        assert work.reservation is not None
        request, end = work.request, chunk.end
        return PromptRows(
            tokens=request.token_ids,
            page_table=tuple(work.reservation.pages),
            start=chunk.start,
            end=end,
            write_from=chunk.write_from,
            sampling=request.sampling,
            output_position=request.output_offset,
            last=chunk.last,
            push=lambda layer: self._push(work, layer, end),
            carry=work.carry,
        )

    def _push(self, work: _Work, layer: int, end: int) -> None:
        """Pushes the pages of ``layer`` that are complete below position ``end``.

        Pages that the prefill worker had cached and decode lacks go out with the first chunk.
        """
        assert work.reservation is not None
        size = self._limits.page_format.page_size
        complete = end // size if end < work.job.num_tokens else work.request.lease.num_pages
        for index in range(work.pushed[layer], complete):
            page = work.reservation.pages[index]
            work.transfer.push(index, layer, self._store.read(page, layer))
        work.pushed[layer] = max(work.pushed[layer], complete)

    def _apply(self, work: _Work, chunk: Chunk, result: ChunkResult) -> None:
        self._scheduler.advance(chunk)
        self.tokens_computed += chunk.end - chunk.start
        assert work.reservation is not None
        size = self._limits.page_format.page_size
        matched = work.reservation.matched
        work.reservation.publish(matched, work.hashes[matched : chunk.end // size])
        work.carry = result.carry
        if not chunk.last:
            return
        assert result.token_id is not None
        self._answer(work, result)
        task = asyncio.create_task(self._finish(work, result.token_id))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    def _answer(self, work: _Work, result: ChunkResult) -> None:
        assert result.token_id is not None
        lease, now = work.request.lease, time.monotonic()
        first = FirstToken(
            token_id=result.token_id,
            logprobs=result.logprobs,
            cached_tokens=min(work.job.write_from, work.job.num_tokens - 1),
            computed_tokens=work.job.num_tokens - min(work.job.write_from, work.job.num_tokens - 1),
            pushed_pages=lease.num_pages - lease.cached_pages,
            queue_ms=(work.started - work.arrived) * 1e3,
            compute_ms=(now - work.started) * 1e3,
        )
        event(
            log,
            "prefilled",
            request=work.request.request_id,
            tokens=work.job.num_tokens,
            cached=first.cached_tokens,
            pushed_pages=first.pushed_pages,
            ms=round(first.compute_ms, 1),
        )
        if not work.first.done():
            work.first.set_result(first)

    async def _finish(self, work: _Work, token: int) -> None:
        """Sends FIN and frees the pages once no push of them is under way."""
        lease, carry = work.request.lease, work.carry
        mtp = self._limits.page_format.mtp_layers > 0
        missing = lease.num_pages - lease.cached_pages
        fin = Fin(
            lease_id=lease.lease_id,
            generation=lease.generation,
            request_id=work.request.request_id,
            num_writes=missing * self._limits.page_format.num_layers,
            first_token=token,
            last_hidden=_raw(carry) if mtp and carry is not None else b"",
        )
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._transfers, work.transfer.finish, fin)
        except PdmeshError as error:
            event(log, "push failed", request=work.request.request_id, reason=error.message)
            await loop.run_in_executor(self._transfers, work.transfer.abort, error.message)
        finally:
            self._forget(work)

    # ---- endings --------------------------------------------------------------------------

    def _fail(self, work: _Work, error: PdmeshError) -> None:
        if not work.first.done():
            work.first.set_exception(error)
        self._give_up(work, error.message)

    def _give_up(self, work: _Work, reason: str) -> None:
        """Stops pushing, waits until no push is under way, then frees the pages."""
        event(log, "prefill given up", request=work.request.request_id, reason=reason)
        if not work.first.done():
            work.first.cancel()

        async def drain() -> None:
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._transfers, work.transfer.abort, reason)
            finally:
                self._forget(work)

        task = asyncio.create_task(drain())
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    def _forget(self, work: _Work) -> None:
        if work.reservation is not None:
            work.reservation.release()
        self._work.pop(work.job.job_id, None)
        self._wake.set()

    def close(self) -> None:
        """Ends the threads and the connections."""
        self._sender.close()
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._transfers.shutdown(wait=False, cancel_futures=True)


def _raw(hidden: torch.Tensor) -> bytes:
    """The bytes of a hidden state, whatever its dtype."""
    return hidden.contiguous().view(torch.uint8).numpy().tobytes()


def _abort_late(opening: asyncio.Future[Transfer]) -> None:
    """Closes a transfer whose caller left while it was being opened."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().abort("cancelled")

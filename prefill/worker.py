"""The running prefill worker: jobs come in, steps run on one compute thread, pages go out.

All state is touched on the event loop only; the compute thread sees a batch and returns results.
Pages are freed between steps, and not before every push of them has been acknowledged or given up.

A step that fails is done again, each of its prompts alone, so that only a prompt that fails alone
ends with an error.

A push never waits: what is queued for a slow receiver is a view of pages that stay pinned. So a
slow receiver holds pages here, for as long as its request's deadline allows, but no step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.pull_fetcher import PrefixFetcher
from pdmesh.kvtransfer.sender import Transfer, TransferSender
from pdmesh.kvtransfer.transport import Dialer
from pdmesh.model.grammar import Grammar
from pdmesh.prefill.facts import PrefillStepFacts
from pdmesh.prefill.runner import ChunkResult, PrefillRunner
from pdmesh.prefill.scheduler import Chunk, PrefillJob, PrefillScheduler, first_position
from pdmesh.prefill.sending import page_sender
from pdmesh.prefill.steps import Steps, step_facts
from pdmesh.prefill.work import PrefillLimits, Work
from pdmesh.wire.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    PdmeshError,
    TransferFailed,
)
from pdmesh.wire.logs import event
from pdmesh.wire.messages import FirstToken, PrefillRequest

log = logging.getLogger(__name__)

_COMPILING_THREADS = 2
_OPENING_THREADS = 32
_ACKNOWLEDGED_S = 60.0
"""Longest wait for the acknowledgement of a prompt's pages."""


class PrefillWorker:
    """Owns the queue, the pages and the transfers of one prefill worker.

    ``observe`` is told of every step, on the event loop; ``clock`` gives monotonic seconds;
    ``sender`` pushes the pages; without one, a sender over ``dialers`` or the usual transports.
    """

    def __init__(
        self,
        runner: PrefillRunner,
        kv: KvManager,
        store: LatentStore,
        scheduler: PrefillScheduler,
        limits: PrefillLimits,
        *,
        observe: Callable[[PrefillStepFacts], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        dialers: Sequence[Dialer] = (),
        sender: TransferSender | None = None,
    ) -> None:
        self._kv = kv
        self._store = store
        self._scheduler = scheduler
        self._limits = limits
        self.observe = observe
        self._clock = clock
        self._work: dict[str, Work] = {}
        self._numbers = count()
        self._wake = asyncio.Event()
        self._steps = Steps(runner)
        self._compilers = ThreadPoolExecutor(_COMPILING_THREADS, "prefill-grammar")
        self._openers = ThreadPoolExecutor(_OPENING_THREADS, "prefill-open")
        self._sender = sender or page_sender(limits.page_format, store, dialers=dialers)
        self._finishing: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self.fetcher: PrefixFetcher | None = None
        """Fetches prefixes from other workers; without it all are computed here."""
        self.tokens_computed = 0
        self.cancelled = 0
        """Prompts whose caller left before the first token, each counted once."""
        self.step_ms = 0.0

    @property
    def finishing(self) -> int:
        """Prompts that are over but for their last pushes."""
        return len(self._finishing)

    @property
    def queued(self) -> int:
        return self._scheduler.queued

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def unfinished(self) -> int:
        """Prompts that are not over, their last pushes included."""
        return len(self._work)

    def hand_back(self, error: PdmeshError) -> None:
        """Ends every prompt that is not begun with ``error``; what is begun is finished."""
        for work in self._work.values():
            if not (work.job.started or work.job.cancelled):
                work.refuse(error)
                self._wake.set()

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        return self._kv.check_integrity() + self._sender.check_integrity()

    # ---- requests -------------------------------------------------------------------------

    async def prefill(self, request: PrefillRequest) -> FirstToken:
        """Computes a prompt and pushes its pages; returns when the first token is known.

        Raises:
            InvalidRequest, Incompatible: see ``PrefillLimits.check``.
            LeaseGone: the lease has a writer already, or was given up.
            Overloaded: the queue is full.
            DeadlineExceeded: the request's deadline came before the first token.
            TransferFailed: decode cannot be reached, or refuses the pages.
            InternalError: the prompt cannot be computed.
        """
        arrived = self._clock()
        self._limits.check(request, self._kv.num_pages)
        await self._fetch(request)
        grammar = await self._compiled(request)
        transfer = await self._open(request)
        work = self._add(request, transfer, arrived, grammar)
        try:
            return await asyncio.shield(work.first)
        except asyncio.CancelledError:
            if not work.first.done():
                self.cancelled += 1
                work.job.cancelled = True
                work.transfer.start_abort("cancelled")
                self._wake.set()
            raise

    async def _fetch(self, request: PrefillRequest) -> None:
        """Brings pages that others hold into the cache; the prompt's place in line is not lost."""
        if self.fetcher is None or not request.sources:
            return
        hashes, within_s = self._limits.hashes(request), request.deadline_ms / 1e3
        try:
            await self.fetcher.fetch(hashes, request.sources, within_s=within_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def pages_freed(self) -> None:
        """Pages may have become free that were not the prompts'."""
        self._wake.set()

    async def _open(self, request: PrefillRequest) -> Transfer:
        opening = asyncio.get_running_loop().run_in_executor(
            self._openers, self._sender.open, request.lease
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self.cancelled += 1
            opening.add_done_callback(_abort_late)
            raise

    async def _compiled(self, request: PrefillRequest) -> Grammar | None:
        if not request.sampling.grammar:
            return None
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._compilers, self._limits.grammar, request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def _add(
        self, request: PrefillRequest, transfer: Transfer, arrived: float, grammar: Grammar | None
    ) -> Work:
        number = next(self._numbers)
        job = self._limits.job(f"{request.request_id}#{number}", request, arrived)
        first: asyncio.Future[FirstToken] = asyncio.get_running_loop().create_future()
        work = Work(job, request, self._limits, self._store, transfer, first, arrived, grammar)
        self._work[job.job_id] = work
        job.next_position = self._first_position(job, self._kv.match(job.hashes))
        try:
            self._scheduler.add(job)
        except Overloaded as error:
            self._give_up(work, error.message)
            raise
        self._wake.set()
        return work

    def _first_position(self, job: PrefillJob, cached_pages: int) -> int:
        page_format = self._limits.page_format
        cached = cached_pages * page_format.page_size
        return first_position(job.num_tokens, cached, page_format.mtp_layers > 0)

    # ---- the loop -------------------------------------------------------------------------

    async def run(self) -> None:
        """Steps for ever; waits without polling while there is nothing to do.

        Raises:
            Exception: what no single prompt is to blame for; the worker cannot go on.
        """
        while True:
            if self._fault is not None:
                raise self._fault
            now = self._clock()
            self._sweep(now)
            chunks = self._scheduler.next_batch(now, self._start, self._cached_pages)
            if chunks:
                await self._step(chunks)
            else:
                await self._until_woken(self._scheduler.next_deadline() - now)

    async def _until_woken(self, seconds: float) -> None:
        """Waits for something to do, or for the earliest deadline."""
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(seconds, self._wake.set) if math.isfinite(seconds) else None
        try:
            await self._wake.wait()
        finally:
            if alarm is not None:
                alarm.cancel()
        self._wake.clear()

    def _sweep(self, now: float) -> None:
        """Between steps: drops prompts whose caller has left, whose receiver wants no pages, or
        whose time is over.
        """
        for work in self._work.values():
            failure = work.transfer.failure
            if failure is not None and not (work.job.cancelled or work.first.done()):
                work.refuse(TransferFailed(f"the pages cannot be delivered: {failure}"))
        for job in self._scheduler.take_cancelled():
            work = self._work[job.job_id]
            self._give_up(work, work.transfer.failure or "refused")
        for job in self._scheduler.take_expired(now):
            work = self._work[job.job_id]
            where = "while it was computed" if job.started else "before it could be computed"
            work.refuse(DeadlineExceeded(f"the prompt's deadline came {where}"))
            self._give_up(work, "deadline")

    async def _step(self, chunks: list[Chunk]) -> None:
        batch = [(self._work[chunk.job.job_id], chunk) for chunk in chunks]
        began = self._clock()
        outcomes = await self._steps.run(batch)
        duration = self._clock() - began
        self.step_ms = 0.9 * self.step_ms + 0.1e3 * duration if self.step_ms else 1e3 * duration
        if self.observe is not None:
            self.observe(step_facts(duration, batch, outcomes))
        for (work, chunk), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._scheduler.drop(work.job)
                work.refuse(_told(outcome))
                self._give_up(work, f"step failed: {outcome}")
            else:
                self._apply(work, chunk, outcome)

    def _start(self, job: PrefillJob) -> bool:
        """Reserves a job's pages; False if there is no room until others finish."""
        work = self._work[job.job_id]
        pages = self._limits.num_pages(job.num_tokens)
        try:
            reservation = self._kv.reserve(job.hashes, pages, pages)
        except PdmeshError as error:
            work.refuse(error)
            self._wake.set()
            return False
        if reservation is None:
            return False
        reservation.grow(pages - reservation.matched)
        work.reservation = reservation
        work.started = self._clock()
        job.write_from = reservation.matched * self._limits.page_format.page_size
        job.next_position = self._first_position(job, reservation.matched)
        return True

    def _cached_pages(self, job: PrefillJob) -> int:
        return self._kv.match(job.hashes)

    def _apply(self, work: Work, chunk: Chunk, result: ChunkResult) -> None:
        self._scheduler.advance(chunk)
        self.tokens_computed += chunk.end - chunk.start
        work.publish(chunk.end)
        work.carry = result.carry
        work.begun = True
        if not chunk.last:
            return
        first = work.answer(result, self._clock())
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
        self._spawn(self._finish(work, result.token_ids))

    # ---- endings --------------------------------------------------------------------------

    async def _finish(self, work: Work, tokens: tuple[int, ...]) -> None:
        """Sends FIN and frees the pages once no push of them is under way."""
        timeout = min(_ACKNOWLEDGED_S, max(1.0, work.job.deadline - self._clock()))
        try:
            await work.transfer.finished(work.fin(tokens), timeout)
        except TransferFailed as error:
            event(log, "push failed", request=work.request.request_id, reason=error.message)
        finally:
            self._forget(work)

    def _give_up(self, work: Work, reason: str) -> None:
        """Stops pushing, waits until no push is under way, then frees the pages."""
        event(log, "prefill given up", request=work.request.request_id, reason=reason)
        work.job.cancelled = True
        if not work.first.done():
            work.first.cancel()
        self._spawn(self._drain(work, reason))

    async def _drain(self, work: Work, reason: str) -> None:
        try:
            await work.transfer.aborted(reason)
        finally:
            self._forget(work)

    def _spawn(self, ending: Coroutine[None, None, None]) -> None:
        """Runs an ending beside the loop; a fault in it ends the worker."""

        def over(task: asyncio.Task[None]) -> None:
            self._finishing.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fault = error
                self._wake.set()

        task = asyncio.get_running_loop().create_task(ending)
        self._finishing.add(task)
        task.add_done_callback(over)

    def _forget(self, work: Work) -> None:
        if work.reservation is not None:
            work.reservation.release()
        self._work.pop(work.job.job_id, None)
        self._wake.set()

    async def close(self, grace: float) -> None:
        """Lets pushes of finished prompts end for ``grace`` seconds, then ends threads and links.

        What is still computed or pushed after that is lost; its receiver sees a lost connection.
        """
        if self._finishing:
            await asyncio.wait(set(self._finishing), timeout=grace)
        self._sender.close()
        self._steps.close()
        for pool in (self._compilers, self._openers):
            pool.shutdown(wait=False, cancel_futures=True)


def _told(failure: Exception) -> PdmeshError:
    """What the caller hears of a failed step: as it is where the request itself is to blame."""
    if isinstance(failure, InvalidRequest):
        return failure
    return InternalError(f"prefill step failed: {failure}")


def _abort_late(opening: asyncio.Future[Transfer]) -> None:
    """Closes a transfer whose caller left while it was being opened. Nothing was pushed yet."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().start_abort("cancelled")

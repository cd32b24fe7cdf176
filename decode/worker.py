"""The running decode worker: arrivals, and one step after another.

All state is touched on the event loop only; the compute thread sees rows and returns results.
Pages are freed between steps, never under a step, and not while a remote write can still land.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pdmesh.decode.adoption import Adoptions
from pdmesh.decode.facts import DecodeStepFacts
from pdmesh.decode.lease import LeaseEntry
from pdmesh.decode.leases import Leases
from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.migration import Migrations
from pdmesh.decode.paging import Paging
from pdmesh.decode.peers import Peers
from pdmesh.decode.runner import DecodeRunner
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.decode.stepping import Stepping
from pdmesh.decode.streams import Streams
from pdmesh.kvcache.checksums import page_checksums
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.wire.errors import (
    Cancelled,
    LeaseGone,
    PdmeshError,
    Preempted,
)
from pdmesh.wire.handoff import (
    HANDOFF_ABORTED,
    ChecksumsRequest,
    ContinueRequest,
    PageChecksums,
    StreamItem,
)
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
        *,
        sender: TransferSender | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._kv = kv
        self._store = store
        self._receiver = receiver
        self._scheduler = scheduler
        self._limits = limits
        self._sender = sender or TransferSender(limits.page_format, store=store)
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
        self._stepping = Stepping(runner, kv, limits, self._compute, self._stepped, self._let_go)
        self.migrations = Migrations(
            store,
            self._leases,
            scheduler,
            limits,
            self._sender,
            peers if peers is not None else Peers(),
            self._paging.is_aside,
            self._wake.set,
        )
        """Answers that leave; its methods answer calls."""
        self.adoptions = Adoptions(
            kv, receiver, self._leases, limits, self._let_go, self._join_adopted
        )
        """Answers that come; its methods answer calls."""
        self._streams = Streams(
            limits,
            receiver,
            self._leases,
            self.adoptions,
            self._let_go,
            self.migrations.handed_on,
            self._join,
        )
        self.cancelled = 0
        """Leases ended early by their client, a deadline or a cut stream, each counted once. A
        stream that the router cuts because it has found a stop string is one of them."""

    @property
    def observe(self) -> Callable[[DecodeStepFacts], None] | None:
        """Told of every step, on the event loop."""
        return self._stepping.observe

    @observe.setter
    def observe(self, tell: Callable[[DecodeStepFacts], None] | None) -> None:
        self._stepping.observe = tell

    @property
    def tokens_generated(self) -> int:
        return self._stepping.tokens_generated

    @property
    def drafted(self) -> int:
        """Draft tokens verified."""
        return self._stepping.drafted

    @property
    def accepted(self) -> int:
        """Draft tokens verified and right."""
        return self._stepping.accepted

    @property
    def step_ms(self) -> float:
        """Moving average of a step's duration."""
        return self._stepping.step_ms

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

    def hand_back(self, error: PdmeshError) -> None:
        """Ends the wait of every reservation with ``error``; leases go on."""
        self._leases.hand_back(error)

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        books: tuple[KvManager | TransferReceiver | TransferSender, ...]
        books = (self._kv, self._receiver, self._sender)
        return [problem for book in books for problem in book.check_integrity()]

    # ---- reserve, stream, release ---------------------------------------------------------

    async def reserve(self, request: ReserveRequest) -> Lease:
        """Promises pages for a prompt and its answers; waits for room if the request says so.

        Raises:
            InvalidRequest: it can never fit here, or makes no sense.
            Overloaded: there is no room, and none came in time.
            DeadlineExceeded: the deadline passed while it waited.
        """
        return await self._leases.grant(request)

    def stream(self, request: StreamRequest) -> AsyncIterator[StreamItem]:
        """See ``Streams.stream``."""
        return self._streams.stream(request)

    def continue_(self, request: ContinueRequest) -> AsyncIterator[StreamItem]:
        """See ``Streams.continue_``."""
        return self._streams.continue_(request)

    def _join(self, sequence: DecodeSequence) -> None:
        self._scheduler.add(sequence)
        self._wake.set()

    def _join_adopted(self, sequence: DecodeSequence) -> None:
        self._paging.trim(sequence)
        self._join(sequence)

    async def checksums(self, request: ChecksumsRequest) -> PageChecksums:
        """What the cached leading pages of a prefix hold."""
        layers = self._limits.page_format.mtp_layers
        compute = partial(page_checksums, self._kv, self._store, mtp_layers=layers)
        return await asyncio.to_thread(compute, request.hashes)

    async def release(self, request: ReleaseRequest) -> Empty:
        """Ends a lease, whatever its state, and returns when its pages are free or in quarantine.

        Takes a reservation that waits out of the line, if it is its ticket. Idempotent.
        """
        self._leases.withdraw(request.lease_id)
        entry = self._leases.find(request.lease_id)
        late = request.reason == HANDOFF_ABORTED and self.adoptions.active(request.lease_id)
        if entry is not None and not late:
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
            for sequence in (*self._paging.drop_cancelled(), *self.migrations.drop_cancelled()):
                self._end(sequence)
            for sequence in self._scheduler.take(lambda s: s.cancelled):
                self._end(sequence)
            for sequence in self._scheduler.take(lambda s: s.stopping):
                self.migrations.stopped(sequence)
            batch = await self._paging.next_batch()
            if batch:
                await self._stepping.step(batch)
            else:
                await self._wake.wait()
                self._wake.clear()

    def _stepped(self, sequence: DecodeSequence, chunk: TokenChunk) -> None:
        self.migrations.stepped(sequence, chunk)
        if sequence.done:
            self._end(sequence)

    # ---- endings --------------------------------------------------------------------------

    def _let_go(self, entry: LeaseEntry, why: PdmeshError, name: str = "ended_early") -> None:
        """Ends a lease from outside the loop: at once, or after the running step. Idempotent.

        ``name`` is the event logged for a lease that no sequence came to use.
        """
        if entry.ended is not None or entry.leaving or not self._leases.holds(entry):
            return
        entry.ended = why
        self.cancelled += isinstance(why, Cancelled)
        if entry.sequence is None:
            request = entry.request.request_id
            event(log, name, request=request, lease=entry.lease_id, tokens=0, reason=why.message)
            self._leases.free(entry)
        else:
            entry.sequence.queue.put_nowait(why)
            self.migrations.lost(entry.sequence)
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
        self.migrations.forget(sequence)
        self._leases.free(sequence.entry)

    def _end_preempted(self, sequence: DecodeSequence, why: Preempted) -> None:
        """Ends a sequence that gave its pages up for good. Between steps."""
        self._let_go(sequence.entry, why)
        self._end(sequence)

    def pages_freed(self) -> None:
        """Pages may have become free that were not the sequences'."""
        self._serve_room()

    def _serve_room(self) -> None:
        """Pages may have become free: for those in line, and for sequences that lack some."""
        self._leases.room.serve()
        self._wake.set()

    def close(self) -> None:
        """Ends the compute thread."""
        self._compute.shutdown(wait=False, cancel_futures=True)

"""One handoff as its source sees it: where it stands, and what is asked of the target."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from pdmesh.decode.capsule import capsule_message
from pdmesh.decode.leases import Leases
from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.peers import Peers
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.kvcache.checksums import checksums_of
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.protocol.migration import Capsule
from pdmesh.kvtransfer.protocol.migration_source import SourceState
from pdmesh.kvtransfer.sender import Transfer, TransferSender
from pdmesh.wire.errors import InternalError, PdmeshError, TransferFailed
from pdmesh.wire.handoff import (
    HANDOFF_ABORTED,
    Adoption,
    AdoptRequest,
    ChecksumsRequest,
    PageChecksums,
    Ready,
    RoundRequest,
)
from pdmesh.wire.logs import event
from pdmesh.wire.messages import (
    Empty,
    Fin,
    Lease,
    ReleaseRequest,
    TokenChunk,
    TokenLogprobs,
    WorkerRecord,
)

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Longest wait for a target's answer to a question that needs no copying."""
ROUND_S = 30.0
"""Longest wait for the acknowledgement of a round, and for the target to be ready."""
T = TypeVar("T")
A = TypeVar("A")
R = TypeVar("R")
Hashes = tuple[bytes, ...]
Stamps = tuple[tuple[int, int], ...]
Round = tuple[int, int, int]
"""Index, first page, number of pages."""
MOST_STEP_TOKENS = 8
"""No step adds more."""


@dataclass(eq=False)
class Handoff:
    """Attributes:
    number: of the handoff, as the router counts.
    lease_id, generation: at the target, once it has promised pages.
    over: nothing more is to be done for it but to clean up.
    placed: it takes one of the places for handoffs under way.
    reason: why it will not do, for people.
    transfers: rounds under way.
    early: the last round, asked for while the answer has still to stop: its index, first page and
        number of pages, and the transfer that it will be.
    """

    number: int
    target: WorkerRecord
    lease_id: str = ""
    generation: int = 0
    over: bool = False
    placed: bool = False
    reason: str = ""
    transfers: set[Transfer] = field(default_factory=set)
    early: tuple[Round, asyncio.Task[Transfer]] | None = None

    def abort_transfers(self) -> None:
        """Gives up what is under way; the waiting for it is the pushing task's."""
        for transfer in self.transfers:
            transfer.start_abort("the handoff is over")


@dataclass(eq=False)
class Move:
    """A sequence that was asked to move at least once.

    ``frozen_at``: seconds on the loop's clock, while it stands still.
    """

    sequence: DecodeSequence
    state: SourceState
    target: WorkerRecord
    handoff: Handoff | None = None
    frozen_at: float | None = None
    reminder: asyncio.TimerHandle | None = None

    def tail(self, position: int, tokens: tuple[int, ...]) -> TokenChunk:
        """Tokens of the answer from ``position`` on, with their log-probabilities."""
        sequence = self.sequence
        logprobs: list[TokenLogprobs] = []
        for chunk in sequence.unread:
            logprobs += chunk.logprobs[max(0, position - chunk.position) :]
        return TokenChunk(
            attempt=sequence.request.attempt,
            position=position,
            token_ids=tokens,
            logprobs=tuple(logprobs),
            drafted=sequence.drafted,
            accepted=sequence.accepted,
            transfer_ms=sequence.transfer_ms,
        )


class TargetCalls:
    """What a source asks of a target, without blocking the event loop.

    Each method may take a while, in which the handoff may end: it then stops early.
    """

    def __init__(
        self,
        store: LatentStore,
        sender: TransferSender,
        peers: Peers,
        leases: Leases,
        limits: DecodeLimits,
        threads: Executor,
    ) -> None:
        self._store = store
        self._sender = sender
        self._peers = peers
        self._leases = leases
        self._limits = limits
        self._threads = threads
        self._loop = asyncio.get_running_loop()

    async def _call(
        self, handoff: Handoff, method: str, request: msgspec.Struct, answer: type[T], wait_s: float
    ) -> T:
        return await self._peers.to(handoff.target).unary(method, request, answer, wait_s)

    # ---- adoption -------------------------------------------------------------------------

    async def adopt(self, sequence: DecodeSequence, handoff: Handoff) -> int:
        """Gets the pages promised; how many leading ones the target has."""
        hashes, stamps = await self._offer(sequence, handoff)
        if handoff.over:
            return 0
        request = self._adopt_request(sequence, handoff, hashes, stamps)
        adoption = await self._call(handoff, "Adopt", request, Adoption, ANSWER_S)
        handoff.lease_id, handoff.generation = adoption.lease_id, adoption.generation
        if adoption.have_pages > len(hashes):
            raise InternalError("the target has more pages than it was told of")
        if adoption.transports:
            await self._in_thread(self._sender.connect, adoption.transports)
        return adoption.have_pages

    def _adopt_request(
        self, sequence: DecodeSequence, handoff: Handoff, hashes: Hashes, stamps: Stamps
    ) -> AdoptRequest:
        entry, now = sequence.entry, self._loop.time()
        waited = now - entry.rank.since - entry.request.priority * self._limits.ageing_s
        return AdoptRequest(
            handoff_id=f"{entry.lease_id}/{handoff.number}",
            source=self._limits.instance,
            request_id=sequence.request.request_id,
            page_format=self._limits.page_format,
            hashes=hashes,
            stamps=stamps,
            num_tokens=len(sequence.tokens),
            max_tokens=sequence.room,
            priority=entry.request.priority,
            waited_ms=max(0, round(waited * 1e3)),
            deadline_ms=max(0, round((entry.deadline - now) * 1e3)),
        )

    async def _offer(self, sequence: DecodeSequence, handoff: Handoff) -> tuple[Hashes, Stamps]:
        """Leading pages that the target may use if it has them: the same bits in any case.

        In exact arithmetic the hash says so. In fast arithmetic the same prefix may have been
        computed in another form, so checksums are compared.
        """
        hashes = tuple(sequence.hashes)
        if self._limits.page_format.arithmetic == "exact":
            return hashes, ()
        asked = ChecksumsRequest(hashes=hashes)
        theirs = await self._call(handoff, "Checksums", asked, PageChecksums, ROUND_S)
        if handoff.over:
            return (), ()
        mine = await self._own_checksums(sequence, min(len(hashes), len(theirs.checksums)))
        same = 0
        for own, other in zip(mine, theirs.checksums, strict=False):
            if own != other:
                break
            same += 1
        return hashes[:same], theirs.stamps[:same]

    async def _own_checksums(self, sequence: DecodeSequence, count: int) -> tuple[int, ...]:
        """Of its own pages, which may be others than those cached under the same hashes."""
        compute = partial(
            checksums_of,
            self._store,
            sequence.entry.reservation.pages[:count],
            mtp_layers=self._limits.page_format.mtp_layers,
        )
        self._leases.hold(sequence.entry)
        try:
            return await self._loop.run_in_executor(self._threads, compute)
        finally:
            self._leases.let_go(sequence.entry)

    # ---- pages and capsule ----------------------------------------------------------------

    async def send_round(
        self, sequence: DecodeSequence, handoff: Handoff, index: int, first: int, count: int
    ) -> None:
        """Copies ``count`` pages from page ``first`` of the sequence on, as one transfer."""
        if handoff.early is not None and handoff.early[0] == (index, first, count):
            transfer = await handoff.early[1]
        else:
            transfer = await self._open(handoff, (index, first, count))
        pages = sequence.entry.reservation.page_table[first : first + count]
        self._leases.hold(sequence.entry)
        try:
            await self._push(handoff, transfer, pages, sequence.request.request_id)
        finally:
            self._leases.let_go(sequence.entry)

    def open_early(
        self, sequence: DecodeSequence, handoff: Handoff, index: int, first: int
    ) -> asyncio.Task[Transfer] | None:
        """Opens the last round, from page ``first`` on, while the sequence has still to stop.

        Only where its pages will be as many whatever the step under way adds; else it is opened
        once the sequence has stopped.
        """
        last = self._limits.pages(sequence.computed)
        if last != self._limits.pages(sequence.computed + MOST_STEP_TOKENS):
            return None
        which = index, first, last - first
        opening = self._loop.create_task(self._open(handoff, which))
        opening.add_done_callback(_retrieve)
        handoff.early = which, opening
        return opening

    async def _open(self, handoff: Handoff, which: Round) -> Transfer:
        """A round's transfer; given up already where the handoff has ended meanwhile.

        Raises:
            TransferFailed: the handoff ended before it was opened, or it cannot be opened.
        """
        index, first, count = which
        request = RoundRequest(
            lease_id=handoff.lease_id, index=index, first_page=first, num_pages=count
        )
        lease = await self._call(handoff, "AdoptRound", request, Lease, ANSWER_S)
        if handoff.over:
            raise TransferFailed("the handoff is over")
        transfer = await self._in_thread(self._sender.open, lease)
        handoff.transfers.add(transfer)
        if handoff.over:
            transfer.start_abort("the handoff is over")
        return transfer

    async def _in_thread(self, call: Callable[[A], R], argument: A) -> R:
        return await self._loop.run_in_executor(self._threads, call, argument)

    async def _push(
        self, handoff: Handoff, transfer: Transfer, pages: tuple[int, ...], request_id: str
    ) -> None:
        """When this returns or raises, nothing reads the pages any more."""
        lease = transfer.lease
        try:
            await self._loop.run_in_executor(self._threads, self._push_all, transfer, pages)
            fin = Fin(
                lease_id=lease.lease_id,
                generation=lease.generation,
                request_id=request_id,
                num_writes=transfer.num_writes,
                first_tokens=(),
            )
            await transfer.finished(fin, ROUND_S)
        except BaseException as error:
            if not isinstance(error, TransferFailed):
                await transfer.aborted(f"the source failed: {error}")
            raise
        finally:
            handoff.transfers.discard(transfer)

    def _push_all(self, transfer: Transfer, pages: tuple[int, ...]) -> None:
        transfer.push_pages(transfer.lease.cached_pages, len(pages), pages, self._store)

    async def send_capsule(
        self, sequence: DecodeSequence, handoff: Handoff, capsule: Capsule
    ) -> None:
        """Returns when the target is ready to go on where the sequence stands."""
        message = capsule_message(sequence, handoff.lease_id, capsule)
        ready = await self._call(handoff, "Capsule", message, Ready, ROUND_S)
        if ready.num_tokens != len(sequence.tokens):
            raise InternalError(f"the target is ready for {ready.num_tokens} tokens")

    async def release(self, handoff: Handoff) -> None:
        """Tells the target to give its pages back; if it is not reached, its deadline does."""
        request = ReleaseRequest(lease_id=handoff.lease_id, reason=HANDOFF_ABORTED)
        try:
            await self._call(handoff, "Release", request, Empty, ANSWER_S)
        except PdmeshError as error:
            event(log, "target not told", target=handoff.target.instance, reason=error.message)


def _retrieve(opening: asyncio.Task[Transfer]) -> None:
    """Marks an error as seen: the round may never be needed."""
    if not opening.cancelled():
        opening.exception()

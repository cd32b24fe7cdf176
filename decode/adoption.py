"""Running answers that come to this decode worker: the effects of ``migration_target``.

An adoption is a lease like any other: it has a deadline and an idle time, Release frees it, and
pages that a write may still reach go to quarantine, for each round of pages on its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from pdmesh.decode.admission import sampling_state
from pdmesh.decode.adopted import Adopted, as_reservation, check_adoption, reserve_adoption
from pdmesh.decode.capsule import adopted_sequence, capsule_of, check_capsule, complete_hashes
from pdmesh.decode.lease import LeaseEntry, LeaseGroup
from pdmesh.decode.leases import Leases
from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvtransfer.protocol import migration_target as target
from pdmesh.kvtransfer.protocol.migration_target import Phase, step
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.wire.errors import (
    InvalidRequest,
    LeaseGone,
    Overloaded,
    PdmeshError,
    TransferFailed,
)
from pdmesh.wire.handoff import (
    Adoption,
    AdoptRequest,
    CapsuleMessage,
    ContinueRequest,
    Ready,
    RoundRequest,
)
from pdmesh.wire.ids import new_request_id
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Lease, TokenChunk

log = logging.getLogger(__name__)

IDLE_S = 10.0
"""Seconds without a sign of source or router after which an answer that does not run is let go."""
_REMEMBERED = 4096


class Adoptions:
    """The handoffs of which this worker is the target.

    Args:
        let_go: ends a lease, with the reason.
        start: lets a sequence join the batch.
    """

    def __init__(
        self,
        kv: KvManager,
        receiver: TransferReceiver,
        leases: Leases,
        limits: DecodeLimits,
        let_go: Callable[[LeaseEntry, PdmeshError], None],
        start: Callable[[DecodeSequence], None],
    ) -> None:
        self._kv = kv
        self._receiver = receiver
        self._leases = leases
        self._limits = limits
        self._let_go = let_go
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._by_handoff: dict[str, Adopted] = {}
        self._by_lease: dict[str, Adopted] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self.moved_in = 0

    # ---- what the source says -------------------------------------------------------------

    async def adopt(self, request: AdoptRequest) -> Adoption:
        """Promises every page that an answer can still need. Idempotent.

        Raises:
            Incompatible: the page formats differ.
            InvalidRequest: the numbers make no sense, or can never fit here.
            Overloaded: there is no room now.
            LeaseGone: this handoff is over here.
        """
        known = self._by_handoff.get(request.handoff_id)
        if known is not None:
            self._feed(known, target.ReserveArrived(True, known.answer.have_pages))
            return known.answer
        if request.handoff_id in self._over:
            raise LeaseGone("the handoff is over at the target")
        check_adoption(self._limits, request)
        place = self._leases.place(request.priority, request.waited_ms)
        full = self._leases.room.must_wait(place)
        reservation = None if full else reserve_adoption(self._kv, self._limits, request)
        if reservation is None:
            raise Overloaded("no pages are free on this decode worker; retry in a second")
        entry = LeaseEntry(
            new_request_id(), 1, as_reservation(request), reservation, rank=place, idle_s=IDLE_S
        )
        group = LeaseGroup(reservation, arrived=True)
        entry.group = group
        answer = Adoption(
            lease_id=entry.lease_id,
            generation=entry.generation,
            instance=self._limits.instance,
            have_pages=reservation.matched,
            transports=self._receiver.addresses,
        )
        adopted = Adopted(entry, answer)
        self._by_handoff[request.handoff_id] = self._by_lease[entry.lease_id] = adopted
        entry.on_freed = partial(self._freed, request.handoff_id, adopted)
        self._leases.enter(group, entry, self._loop.time() + max(0, request.deadline_ms) / 1e3)
        self._feed(adopted, target.ReserveArrived(True, reservation.matched))
        event(
            log,
            "adopted",
            request=request.request_id,
            lease=entry.lease_id,
            source=request.source,
            pages=reservation.num_pages + reservation.remaining,
            cached_pages=reservation.matched,
        )
        return answer

    async def adopt_round(self, request: RoundRequest) -> Lease:
        """Lets the source write the pages that come next, as a transfer of its own. Idempotent.

        Raises:
            LeaseGone: the handoff is over here.
            InvalidRequest: these are not the next pages, or they were not promised.
        """
        adopted = self._find(request.lease_id)
        known = adopted.rounds.get(request.index)
        if known is not None and known[0] == request:
            return known[1]
        reservation = adopted.entry.reservation
        first, count = request.first_page, request.num_pages
        if request.index != len(adopted.rounds) or first != reservation.num_pages:
            raise InvalidRequest(f"round {request.index} from page {first} is not the next one")
        if not 0 <= count <= reservation.remaining:
            raise InvalidRequest(f"{count} pages, {reservation.remaining} are promised")
        lease = self._expect(adopted, first, count)
        adopted.rounds[request.index] = (request, lease)
        self._keep(self._wait_for_round(adopted, request.index, lease.lease_id))
        self._leases.touch(adopted.entry)
        return lease

    def _expect(self, adopted: Adopted, first: int, count: int) -> Lease:
        entry, lease_id = adopted.entry, new_request_id()
        pages = entry.reservation.grow(count)
        layers = self._limits.page_format.num_layers
        request_id = entry.request.request_id
        self._receiver.expect(lease_id, 1, pages, first, layers, request_id=request_id)
        assert entry.group is not None
        entry.group.transfers[lease_id] = slice(first, first + count)
        return Lease(
            lease_id=lease_id,
            generation=1,
            instance=self._limits.instance,
            cached_pages=first,
            num_pages=first + count,
            transports=self._receiver.addresses,
            page_format=self._limits.page_format,
        )

    async def _wait_for_round(self, adopted: Adopted, index: int, lease_id: str) -> None:
        patience = max(0.001, adopted.entry.deadline - self._loop.time())
        try:
            await self._receiver.wait(lease_id, patience)
        except PdmeshError as error:
            self._feed(adopted, target.RoundFailed(error.message))
        else:
            self._feed(adopted, target.RoundArrived(index))

    async def capsule(self, message: CapsuleMessage) -> Ready:
        """Answers when the rounds have arrived as well, and the sequence is rebuilt. Idempotent.

        Raises:
            LeaseGone: the handoff is over here.
            InvalidRequest: no sequence can go on from this capsule.
            TransferFailed: a round of pages did not arrive.
        """
        adopted = self._find(message.lease_id)
        if adopted.capsule is None:
            adopted.capsule = message
            try:
                await self._rebuild(adopted, message)
            except PdmeshError as error:
                self._feed(adopted, target.RoundFailed(error.message))
                raise
            if self._leases.holds(adopted.entry):
                self._leases.touch(adopted.entry)
            self._feed(adopted, target.CapsuleArrived(capsule_of(message)))
        await adopted.settled.wait()
        if adopted.sequence is None or adopted.state.phase is Phase.RELEASED:
            raise TransferFailed(adopted.reason)
        return Ready(num_tokens=len(message.request.token_ids) + len(message.output))

    async def _rebuild(self, adopted: Adopted, message: CapsuleMessage) -> None:
        check_capsule(self._limits, message)
        reservation, request = adopted.entry.reservation, message.request
        promised = reservation.num_pages + reservation.remaining
        if self._limits.pages(len(request.token_ids) + request.sampling.max_tokens) > promised:
            raise InvalidRequest("the answer may need more pages than were promised")
        hashes = complete_hashes(self._limits, message)
        offered = adopted.entry.request.hashes[: reservation.matched]
        if tuple(hashes[: reservation.matched]) != offered:
            raise InvalidRequest("the answer's page hashes differ from those it was adopted for")
        sampling = await asyncio.to_thread(sampling_state, self._limits, request, message.output)
        adopted.sequence = adopted_sequence(self._limits, adopted.entry, message, sampling, hashes)

    # ---- what the router says -------------------------------------------------------------

    def activate(self, request: ContinueRequest) -> DecodeSequence:
        """Starts the sequence as ``attempt``; its queue begins with a chunk without tokens.

        Raises:
            LeaseGone: nothing of this handoff is here, or it is not ready for this position.
            InvalidRequest: it has been started already.
        """
        adopted = self._find(request.lease_id)
        entry = adopted.entry
        if entry.generation != request.generation or entry.ended is not None:
            raise LeaseGone(f"lease {request.lease_id} is over")
        if entry.streaming:
            raise InvalidRequest(f"lease {request.lease_id} is being streamed already")
        self._feed(adopted, target.ActivateArrived(request.attempt, request.position))
        if entry.sequence is None:
            raise LeaseGone(
                f"lease {request.lease_id} cannot go on from position {request.position}"
            )
        return entry.sequence

    def _find(self, lease_id: str) -> Adopted:
        adopted = self._by_lease.get(lease_id)
        if adopted is None or not self._leases.holds(adopted.entry):
            raise LeaseGone(f"lease {lease_id} is over")
        return adopted

    # ---- the machine ----------------------------------------------------------------------

    def _feed(self, adopted: Adopted, what: target.Event) -> None:
        adopted.state, effects = step(adopted.state, what)
        for effect in effects:
            self._apply(adopted, effect)

    def _apply(self, adopted: Adopted, effect: target.Effect) -> None:
        match effect:
            case target.PostReady():
                if problem := self._publish(adopted):
                    self._feed(adopted, target.RoundFailed(problem))
                adopted.settled.set()
            case target.PostFailed(reason):
                adopted.reason = reason
            case target.StartDecoding(attempt, _):
                self._begin(adopted, attempt)
            case target.Release():
                self._let_go(adopted.entry, LeaseGone(adopted.reason))
            case (
                target.Keep() | target.PostGranted() | target.PostActive() | target.RefuseActivate()
            ):
                pass  # said by what the calls answer

    def _publish(self, adopted: Adopted) -> str:
        """Shares the complete pages; what is wrong with them, or nothing."""
        reservation, capsule = adopted.entry.reservation, adopted.capsule
        assert capsule is not None
        assert adopted.sequence is not None
        if reservation.num_pages != capsule.num_pages or len(adopted.rounds) != capsule.num_rounds:
            return f"{reservation.num_pages} of {capsule.num_pages} pages came"
        reservation.publish(reservation.published, adopted.sequence.hashes[reservation.published :])
        return ""

    def _begin(self, adopted: Adopted, attempt: int) -> None:
        sequence, entry = adopted.sequence, adopted.entry
        assert sequence is not None
        sequence.request = msgspec.structs.replace(
            sequence.request, lease_id=entry.lease_id, generation=entry.generation, attempt=attempt
        )
        position = sequence.request.output_offset + sequence.generated
        sequence.queue.put_nowait(TokenChunk(attempt=attempt, position=position, token_ids=()))
        entry.sequence = sequence
        self.moved_in += 1
        event(
            log,
            "moved_in",
            request=sequence.request.request_id,
            attempt=attempt,
            lease=entry.lease_id,
            position=position,
        )
        self._start(sequence)

    # ---- endings --------------------------------------------------------------------------

    def active(self, lease_id: str) -> bool:
        """Whether the answer of a lease that came from another worker is generated here."""
        adopted = self._by_lease.get(lease_id)
        return adopted is not None and adopted.state.phase is Phase.ACTIVE

    def _freed(self, handoff_id: str, adopted: Adopted) -> None:
        """The lease is over, however that came."""
        self._feed(adopted, target.AbortArrived())
        if adopted.entry.ended is not None and not adopted.settled.is_set():
            adopted.reason = adopted.entry.ended.message
        adopted.settled.set()
        del self._by_handoff[handoff_id], self._by_lease[adopted.entry.lease_id]
        self._over[handoff_id] = None
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

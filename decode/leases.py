"""The leases of a decode worker: promises of pages, from Reserve until the pages are given back.

A deadline only starts the end of a lease. Its pages go back when nothing can touch them any more:
between steps, and not while a remote write can still land.

The answers of one request form a group. Until its prompt has arrived, one reservation holds the
pages and promises of all of them; then each living answer gets its own, which shares the prompt's
full pages and has a copy of the partial one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Sequence

from pdmesh.decode.lease import LeaseEntry, LeaseGroup
from pdmesh.decode.limits import DecodeLimits, PageNeed, page_need
from pdmesh.decode.queue import Rank, rank
from pdmesh.decode.room import CutWithLease, Room, wait_for_lease
from pdmesh.kvcache.manager import KvManager, Reservation
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.wire.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PdmeshError,
)
from pdmesh.wire.hashes import PageHash
from pdmesh.wire.ids import new_request_id
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Lease, ReserveRequest

log = logging.getLogger(__name__)

Expired = Callable[[LeaseEntry, Cancelled], None]

COLLECT_S = 5.0
"""Seconds within which a router comes for a prompt that has arrived or failed, if it ever comes."""


class Leases:
    """All leases not yet freed.

    Args:
        on_expired: called on the event loop with a lease whose time is over and the reason; it has
            to lead to ``free`` once no step touches the pages.
        on_room: called on the event loop when pages may have become free.
    """

    def __init__(
        self,
        kv: KvManager,
        store: LatentStore,
        receiver: TransferReceiver,
        limits: DecodeLimits,
        on_expired: Expired,
        on_room: Callable[[], None],
    ) -> None:
        self.room = Room()
        self._kv = kv
        self._store = store
        self._receiver = receiver
        self._limits = limits
        self._on_expired = on_expired
        self._on_room = on_room
        self._entries: dict[str, LeaseEntry] = {}
        self._quarantines: dict[str, int] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._turns: dict[str, asyncio.Future[Lease]] = {}
        receiver.on_drained = self.drained

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def waiting(self) -> int:
        """Reservations that wait for room."""
        return len(self._turns)

    def find(self, lease_id: str) -> LeaseEntry | None:
        return self._entries.get(lease_id)

    def holds(self, entry: LeaseEntry) -> bool:
        """Whether the pages of ``entry`` are still its own."""
        return self._entries.get(entry.lease_id) is entry

    # ---- granting -------------------------------------------------------------------------

    async def grant(self, request: ReserveRequest) -> Lease:
        """Promises pages for a prompt and its answers, at once or after waiting for them.

        Raises:
            InvalidRequest: the numbers make no sense, or can never fit here.
            Overloaded: there is no room, and none came within ``wait_ms``.
            DeadlineExceeded: the deadline came first.
        """
        need = self._checked_need(request)
        now = self._loop.time()
        place = self.place(request.priority, request.waited_ms)
        deadline = now + max(0, request.deadline_ms) / 1e3
        lease = None if self.room.must_wait(place) else self._try(request, need, place, deadline)
        if lease is None and request.wait_ms > 0:
            lease = await self._wait(request, need, place, deadline)
        if lease is None:
            raise Overloaded("no pages are free on this decode worker; retry in a second")
        return lease

    def place(self, priority: int, waited_ms: int) -> Rank:
        """The place of one that has been in the mesh for ``waited_ms``."""
        arrived = self._loop.time() - max(0, waited_ms) / 1e3
        return rank(priority, arrived, self._limits.ageing_s, next(self._numbers))

    def _checked_need(self, request: ReserveRequest) -> PageNeed:
        need = page_need(self._limits, request)
        most = max(need.total(request.n), need.most)
        if most > self._kv.num_pages:
            raise InvalidRequest(
                f"the request needs {most} pages of {self._kv.page_size} tokens,"
                f" this worker has {self._kv.num_pages}"
            )
        return need

    async def _wait(
        self, request: ReserveRequest, need: PageNeed, place: Rank, deadline: float
    ) -> Lease | None:
        if self.waiting >= self._limits.max_waiting:
            raise Overloaded(f"{self.waiting} requests wait for pages already")
        left = deadline - self._loop.time()
        ticket = request.ticket or new_request_id()
        granted = self._turns[ticket] = self._loop.create_future()
        try:
            lease = await wait_for_lease(
                self.room,
                place,
                granted,
                lambda: self._try(request, need, place, deadline),
                min(request.wait_ms / 1e3, left),
            )
        except CutWithLease as cut:
            for lease_id in (cut.lease.lease_id, *cut.lease.forks):
                self.free(self._entries[lease_id])
            raise
        finally:
            self._turns.pop(ticket, None)
        if lease is None and left * 1e3 <= request.wait_ms:
            raise DeadlineExceeded("the deadline of the request has passed while it waited")
        return lease

    def withdraw(self, ticket: str) -> None:
        """Ends the wait of a reservation. One that has its lease keeps it: its caller gets it."""
        granted = self._turns.get(ticket)
        if granted is not None and not granted.done():
            granted.set_exception(Cancelled("the reservation was withdrawn while it waited"))

    def hand_back(self, error: PdmeshError) -> None:
        """Ends every wait for room with ``error``."""
        for granted in self._turns.values():
            if not granted.done():
                granted.set_exception(error)

    def _try(
        self, request: ReserveRequest, need: PageNeed, place: Rank, deadline: float
    ) -> Lease | None:
        reservation = self._kv.reserve(request.hashes, need.prompt, need.total(request.n))
        if reservation is None:
            return None
        ids = [new_request_id() for _ in range(request.n)]
        missing = reservation.grow(need.prompt - reservation.matched)
        try:
            self._receiver.expect(
                ids[0],
                1,
                missing,
                reservation.matched,
                self._limits.page_format.num_layers,
                request_id=request.request_id,
            )
        except PdmeshError:
            reservation.release()
            raise
        group = LeaseGroup(reservation, {ids[0]: slice(reservation.matched, None)})
        for answer, lease_id in enumerate(ids):
            self._add(group, answer, lease_id, request, place, deadline)
        event(
            log,
            "reserved",
            request=request.request_id,
            attempt=request.attempt,
            lease=ids[0],
            answers=request.n,
            pages=need.prompt,
            cached_pages=reservation.matched,
        )
        return Lease(
            lease_id=ids[0],
            generation=1,
            instance=self._limits.instance,
            cached_pages=reservation.matched,
            num_pages=need.prompt,
            forks=tuple(ids[1:]),
            transports=self._receiver.addresses,
            page_format=self._limits.page_format,
        )

    def _add(
        self,
        group: LeaseGroup,
        answer: int,
        lease_id: str,
        request: ReserveRequest,
        place: Rank,
        deadline: float,
    ) -> None:
        own = place if answer == 0 else Rank(place.since, place.fresh, next(self._numbers))
        entry = LeaseEntry(
            lease_id, 1, request, group.reservation, answer=answer, rank=own, group=group
        )
        self.enter(group, entry, deadline)

    def enter(self, group: LeaseGroup, entry: LeaseEntry, deadline: float) -> None:
        """From now on the lease is known, and its time runs."""
        group.members.append(entry)
        self._entries[entry.lease_id] = entry
        entry.deadline = deadline
        entry.timers["deadline"] = self._loop.call_at(
            deadline, self._expire, entry, "the deadline of the request has passed"
        )
        self._watch_idle(entry)

    # ---- arrival and end ------------------------------------------------------------------

    def arrive(self, entry: LeaseEntry, hashes: Sequence[PageHash]) -> None:
        """The prompt of ``entry`` is there: each living answer of it gets its own pages.

        Idempotent.

        Args:
            hashes: of the prompt's full pages.
        """
        group = entry.group
        assert group is not None
        if group.arrived:
            return
        base = group.reservation
        base.publish(base.matched, hashes[base.matched :])
        group.arrived = True
        need = page_need(self._limits, entry.request)
        for other in group.members[1:]:
            other.reservation = base.fork(need.shared, need.further)
            if need.prompt > need.shared:
                self._store.copy_page(base.page_table[need.shared], *other.reservation.grow())

    def free(self, entry: LeaseEntry) -> None:
        """Gives the pages back; those a remote write may still reach go to quarantine. Idempotent.

        Call between steps. While transfers read the pages, this waits for them.
        """
        group = entry.group
        if entry.readers:
            entry.leaving = True
            return
        if self._entries.pop(entry.lease_id, None) is None or group is None:
            return
        for timer in entry.timers.values():
            timer.cancel()
        group.members.remove(entry)
        if not group.members:
            for transfer_id, part in group.transfers.items():
                taken_over = self._receiver.phase(transfer_id) is Phase.INSTALLED
                if not self._receiver.cancel(transfer_id):
                    self._quarantine(group.reservation, transfer_id, part)
                elif not group.arrived and not taken_over:
                    self._salvage(group.reservation, entry.request, transfer_id)
        if group.arrived or not group.members:
            entry.reservation.release()
        else:
            group.reservation.shrink(page_need(self._limits, entry.request).further)
        entry.freed.set()
        if entry.on_freed is not None:
            entry.on_freed()
        self._on_room()

    def hold(self, entry: LeaseEntry) -> None:
        """A transfer reads the pages from now on: they are not given back before ``let_go``."""
        entry.readers += 1

    def let_go(self, entry: LeaseEntry) -> None:
        """One transfer reads them no more."""
        entry.readers -= 1
        if entry.leaving:
            self.free(entry)
        elif not entry.readers:
            self._on_room()

    # ---- time -----------------------------------------------------------------------------

    def touch(self, entry: LeaseEntry) -> None:
        """Somebody has come for the lease: its idle time begins anew."""
        entry.timers["idle"].cancel()
        self._watch_idle(entry)

    def _watch_idle(self, entry: LeaseEntry) -> None:
        idle_s = min(self._limits.lease_idle_s, entry.idle_s)
        self._look_later(entry, self._loop.time() + idle_s, written=False)

    def _look_later(self, entry: LeaseEntry, until: float, *, written: bool) -> None:
        """Looks at the latest at ``until``, and before that whether the writer is through."""
        wait = min(COLLECT_S, until - self._loop.time())
        entry.timers["idle"] = self._loop.call_later(wait, self._check_idle, entry, until, written)

    def _check_idle(self, entry: LeaseEntry, until: float, written: bool) -> None:
        """A lease that is neither read nor written is forgotten by all; its deadline may be far.

        Nobody waits long before reading what has been ``written``: its router has died.
        """
        if entry.streaming or entry.group is None:
            return
        phases = {self._receiver.phase(transfer) for transfer in entry.group.transfers}
        now = self._loop.time()
        if Phase.FILLING in phases:
            self._watch_idle(entry)
        elif now >= until:
            self._expire(entry, "no writer and no router came for the lease")
        elif written or Phase.RESERVED in phases or entry.idle_s < math.inf:
            self._look_later(entry, until, written=written)
        else:
            self._look_later(entry, min(until, now + COLLECT_S), written=True)

    def _expire(self, entry: LeaseEntry, reason: str) -> None:
        if self.holds(entry):
            event(log, "lease expired", request=entry.request.request_id, reason=reason)
            self._on_expired(entry, Cancelled(reason))

    def _salvage(self, reservation: Reservation, request: ReserveRequest, transfer_id: str) -> None:
        """Keeps the leading pages of a prompt that did arrive whole, for another attempt.

        No write can land any more. Pages that quarantine held are not kept.
        """
        first = reservation.matched
        hashes = request.hashes[first : first + self._receiver.salvage(transfer_id)]
        if hashes:
            reservation.publish(first, hashes)
            event(log, "salvaged", request=request.request_id, pages=len(hashes))

    # ---- quarantine -----------------------------------------------------------------------

    def _quarantine(self, reservation: Reservation, transfer_id: str, part: slice) -> None:
        """Sets aside the pages that a one-sided write may still reach; ``drained`` ends it."""
        pages = reservation.pages[part]
        self._quarantines[transfer_id] = reservation.quarantine(pages)
        event(log, "quarantined", lease=transfer_id, pages=len(pages))

    def drained(self, lease_id: str) -> None:
        """No write of a freed lease can land any more. Call it from any thread."""
        self._loop.call_soon_threadsafe(self._end_quarantine, lease_id)

    def _end_quarantine(self, lease_id: str) -> None:
        token = self._quarantines.pop(lease_id, None)
        if token is not None and self._kv.end_quarantine(token):
            self._on_room()

"""The leases of a decode worker: promises of pages, from Reserve until the pages are given back.

A deadline only starts the end of a lease. Its pages go back when nothing can touch them any more:
between steps, and not while a remote write can still land.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.decode.sequence import LeaseEntry
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.wire.errors import Cancelled, InvalidRequest, Overloaded, PdmeshError
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.ids import new_request_id
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Lease, ReserveRequest

log = logging.getLogger(__name__)

Expired = Callable[[LeaseEntry, Cancelled], None]


@dataclass(frozen=True)
class DecodeLimits:
    """What the worker checks a request against. ``hidden_size``: values of a hidden state."""

    instance: str
    page_format: PageFormat
    vocab_size: int
    max_context: int
    hidden_size: int
    secret: bytes
    lease_idle_s: float


class Leases:
    """All leases not yet freed.

    Args:
        on_expired: called on the event loop with a lease whose time is over and the reason; it has
            to lead to ``free`` once no step touches the pages.
    """

    def __init__(
        self, kv: KvManager, receiver: TransferReceiver, limits: DecodeLimits, on_expired: Expired
    ) -> None:
        self._kv = kv
        self._receiver = receiver
        self._limits = limits
        self._on_expired = on_expired
        self._entries: dict[str, LeaseEntry] = {}
        self._quarantines: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        receiver.on_drained = self.drained

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, lease_id: str) -> LeaseEntry | None:
        return self._entries.get(lease_id)

    def holds(self, entry: LeaseEntry) -> bool:
        """Whether the pages of ``entry`` are still its own."""
        return self._entries.get(entry.lease_id) is entry

    def grant(self, request: ReserveRequest) -> Lease:
        """Promises pages for a prompt and all it may generate.

        Raises:
            InvalidRequest: the numbers make no sense, or can never fit here.
            Overloaded: there is no room now.
        """
        page_format = self._limits.page_format
        size = page_format.page_size
        total_tokens = self._total_tokens(request)
        prompt_pages = -(-request.num_prompt_tokens // size)
        reservation = self._kv.reserve(request.hashes, prompt_pages, -(-total_tokens // size))
        if reservation is None:
            raise Overloaded("no pages are free on this decode worker; retry in a second")
        entry = LeaseEntry(new_request_id(), 1, request, reservation)
        missing = reservation.grow(prompt_pages - reservation.matched)
        try:
            self._receiver.expect(
                entry.lease_id,
                entry.generation,
                missing,
                reservation.matched,
                page_format.num_layers,
                request_id=request.request_id,
            )
        except PdmeshError:
            reservation.release()
            raise
        self._entries[entry.lease_id] = entry
        self._start_timers(entry)
        event(
            log,
            "reserved",
            request=request.request_id,
            attempt=request.attempt,
            lease=entry.lease_id,
            pages=prompt_pages,
            cached_pages=reservation.matched,
        )
        return Lease(
            lease_id=entry.lease_id,
            generation=entry.generation,
            instance=self._limits.instance,
            cached_pages=reservation.matched,
            num_pages=prompt_pages,
            transports=self._receiver.addresses,
            page_format=page_format,
        )

    def _total_tokens(self, request: ReserveRequest) -> int:
        if request.num_prompt_tokens < 1 or request.max_tokens < 1:
            raise InvalidRequest("a reservation needs at least one prompt and one output token")
        full_pages = request.num_prompt_tokens // self._limits.page_format.page_size
        if len(request.hashes) != full_pages:
            raise InvalidRequest(
                f"{len(request.hashes)} page hashes for a prompt of {full_pages} full pages"
            )
        total = request.num_prompt_tokens + request.max_tokens
        if total > self._limits.max_context:
            raise InvalidRequest(
                f"{request.num_prompt_tokens} prompt tokens and max_tokens {request.max_tokens} "
                f"are more than the context of {self._limits.max_context} tokens"
            )
        return total

    def free(self, entry: LeaseEntry) -> None:
        """Gives the pages back; those a remote write may still reach go to quarantine. Idempotent.

        Call between steps.
        """
        if self._entries.pop(entry.lease_id, None) is None:
            return
        for timer in entry.timers.values():
            timer.cancel()
        if not self._receiver.cancel(entry.lease_id):
            self._quarantine(entry)
        entry.reservation.release()
        entry.freed.set()

    # ---- time -----------------------------------------------------------------------------

    def _start_timers(self, entry: LeaseEntry) -> None:
        deadline_s = max(0.0, entry.request.deadline_ms / 1e3)
        entry.timers["deadline"] = self._loop.call_later(
            deadline_s, self._expire, entry, "the deadline of the request has passed"
        )
        self._watch_idle(entry)

    def _watch_idle(self, entry: LeaseEntry) -> None:
        entry.timers["idle"] = self._loop.call_later(
            self._limits.lease_idle_s, self._check_idle, entry
        )

    def _check_idle(self, entry: LeaseEntry) -> None:
        """A lease that is neither read nor written is forgotten by all; its deadline may be far."""
        if entry.streaming:
            return
        if self._receiver.phase(entry.lease_id) is Phase.FILLING:
            self._watch_idle(entry)
        else:
            self._expire(entry, "no prefill worker and no router came for the lease")

    def _expire(self, entry: LeaseEntry, reason: str) -> None:
        if self.holds(entry):
            event(log, "lease expired", request=entry.request.request_id, reason=reason)
            self._on_expired(entry, Cancelled(reason))

    # ---- quarantine -----------------------------------------------------------------------

    def _quarantine(self, entry: LeaseEntry) -> None:
        """Sets aside the pages that a one-sided write may still reach; ``drained`` ends it."""
        reservation = entry.reservation
        pages = reservation.pages[reservation.published :]
        self._quarantines[entry.lease_id] = reservation.quarantine(pages)
        event(log, "quarantined", request=entry.request.request_id, pages=len(pages))

    def drained(self, lease_id: str) -> None:
        """No write of a freed lease can land any more. Call it from any thread."""
        self._loop.call_soon_threadsafe(self._end_quarantine, lease_id)

    def _end_quarantine(self, lease_id: str) -> None:
        token = self._quarantines.pop(lease_id, None)
        if token is not None:
            self._kv.end_quarantine(token)

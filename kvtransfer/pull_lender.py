"""The owner's side of a pull: loans of cached pages, each with a time of its own.

A loan pins the leading pages of a prefix. Nobody can harm the owner by reading, so the end of its
time is the end of a loan; whoever read on is told so when it asks whether its pages are valid.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.kvcache.checksums import pin_leading
from pdmesh.kvcache.manager import KvManager, Reservation
from pdmesh.kvtransfer.protocol.pull import (
    Expired,
    LeaseAsked,
    OwnerEffect,
    OwnerEvent,
    OwnerPhase,
    OwnerState,
    Pin,
    Prolong,
    ReleaseArrived,
    RenewArrived,
    SayValid,
    Unpin,
    ValidateArrived,
    owner_step,
)
from pdmesh.wire.errors import Incompatible, Unavailable
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.pulls import Loan, LoanAnswer, LoanQuestion, LoanRequest

LOAN_S = 10.0
"""Seconds of a loan that is not renewed."""
_REMEMBERED_S = 600.0
"""How long an ended loan is remembered: far longer than a message of its reader is on the way."""


@dataclass
class _Loan:
    """A loan, or what is remembered of it. ``ends``: when its time is over."""

    state: OwnerState
    first_page: int = 0
    held: Reservation | None = None
    ends: float = 0.0


class PageLender:
    """Lends cached pages. Idempotent by loan id; every method may be called from any thread.

    At most half of the pool is lent at a time, so that loans never stop the worker's own work.

    Args:
        instance: of this process; a loan is worth nothing to another.
        ttl_s: seconds of a loan from its grant or renewal.
        clock: seconds, monotone.

    Attributes:
        transports: (name, address) of the servers that pages are read from.
        on_unpinned: called when pages may have become free, by whichever method found out;
            ``lent_page`` never does.
    """

    def __init__(
        self,
        kv: KvManager,
        instance: str,
        page_format: PageFormat,
        *,
        ttl_s: float = LOAN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv = kv
        self._instance = instance
        self._page_format = page_format
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.RLock()
        self._loans: dict[str, _Loan] = {}
        self._closed = False
        self.transports: tuple[tuple[str, str], ...] = ()
        self.on_unpinned: Callable[[], None] = _nothing

    @property
    def held(self) -> int:
        """Loans that pin pages now."""
        with self._lock:
            return sum(loan.held is not None for loan in self._loans.values())

    # ---- what readers ask -----------------------------------------------------------------

    def lend(self, request: LoanRequest) -> Loan:
        """Pins the leading pages that are here; a loan of no page where there is none.

        Raises:
            Incompatible: the reader has another page format.
            Unavailable: this worker is ending.
        """
        if difference := self._page_format.difference(request.page_format):
            raise Incompatible(f"owner and reader of pages do not fit together: {difference}")
        with self._lock:
            if self._closed:
                raise Unavailable("this worker is ending and lends no pages")
            self.expire()
            loan = self._loans.setdefault(request.loan_id, _Loan(OwnerState(self._instance)))
            if loan.state.phase is OwnerPhase.NONE:
                self._pin(loan, request)
            if loan.state.phase is OwnerPhase.HELD:
                return self._granted(loan)
            if loan.state.phase is OwnerPhase.NONE:
                del self._loans[request.loan_id]
            return Loan(instance=self._instance, num_pages=0)

    def renew(self, question: LoanQuestion) -> LoanAnswer:
        """Begins the loan's time anew, if it has not passed."""
        effects = self._asked(question, RenewArrived(question.instance))
        return LoanAnswer(valid=Prolong() in effects)

    def validate(self, question: LoanQuestion) -> LoanAnswer:
        """Whether the pages have been pinned from the grant until now."""
        effects = self._asked(question, ValidateArrived(question.instance))
        return LoanAnswer(valid=any(isinstance(effect, SayValid) for effect in effects))

    def give_back(self, question: LoanQuestion) -> LoanAnswer:
        """Ends a loan, also one that has not been asked for yet: that one is refused later."""
        effects = self._asked(question, ReleaseArrived())
        return LoanAnswer(valid=Unpin() in effects)

    def lent_page(self, loan_id: str, page: int) -> int | None:
        """The place of a page of the prefix; None if no living loan of this id has it."""
        with self._lock:
            loan = self._loans.get(loan_id)
            if loan is None or loan.held is None or loan.ends <= self._clock():
                return None
            inside = loan.first_page <= page < loan.state.num_pages
            return loan.held.page_table[page] if inside else None

    # ---- time and end ---------------------------------------------------------------------

    def expire(self) -> float | None:
        """Ends the loans whose time is over; returns the seconds until the next one's is."""
        with self._lock:
            now = self._clock()
            for loan_id, loan in list(self._loans.items()):
                if now < loan.ends:
                    continue
                if loan.held is None:
                    del self._loans[loan_id]
                else:
                    self._step(loan, Expired())
            held = [loan.ends for loan in self._loans.values() if loan.held is not None]
            return max(0.0, min(held) - now) if held else None

    def close(self) -> None:
        """Ends every loan; no more are given. Idempotent."""
        with self._lock:
            self._closed = True
            for loan in self._loans.values():
                self._step(loan, ReleaseArrived())

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        with self._lock:
            return [
                f"loan {loan_id} is {loan.state.phase.value}, its pages are not"
                for loan_id, loan in self._loans.items()
                if (loan.state.phase is OwnerPhase.HELD)
                != (loan.held is not None and not loan.held.released)
            ]

    # ---- details --------------------------------------------------------------------------

    def _pin(self, loan: _Loan, request: LoanRequest) -> None:
        held = pin_leading(self._kv, request.hashes)
        if held is None:
            return
        lent = {page for other in self._loans.values() if other.held for page in other.held.pages}
        fits = len(lent | set(held.pages)) <= self._kv.num_pages // 2
        if held.num_pages <= request.first_page or not fits:
            held.release()
            return
        loan.held, loan.first_page = held, request.first_page
        self._step(loan, LeaseAsked(held.num_pages))

    def _granted(self, loan: _Loan) -> Loan:
        assert loan.held is not None
        return Loan(
            instance=self._instance,
            num_pages=loan.state.num_pages,
            page_ids=loan.held.page_table[loan.first_page :],
            ttl_ms=int(max(0.0, loan.ends - self._clock()) * 1e3),
            transports=self.transports,
        )

    def _asked(self, question: LoanQuestion, event: OwnerEvent) -> tuple[OwnerEffect, ...]:
        with self._lock:
            self.expire()
            loan = self._loans.get(question.loan_id)
            if loan is not None:
                return self._step(loan, event)
            loan = _Loan(OwnerState(self._instance))
            effects = self._step(loan, event)
            if loan.state.phase is not OwnerPhase.NONE:
                self._loans[question.loan_id] = loan
            return effects

    def _step(self, loan: _Loan, event: OwnerEvent) -> tuple[OwnerEffect, ...]:
        loan.state, effects = owner_step(loan.state, event)
        now = self._clock()
        if any(isinstance(effect, Pin | Prolong) for effect in effects):
            loan.ends = now + self._ttl_s
        elif loan.state.phase in (OwnerPhase.LAPSED, OwnerPhase.RELEASED) and (
            loan.held is not None or not loan.ends
        ):
            loan.ends = now + _REMEMBERED_S
        if Unpin() in effects:
            self._unpin(loan)
        return effects

    def _unpin(self, loan: _Loan) -> None:
        assert loan.held is not None
        held, loan.held = loan.held, None
        held.release()
        self.on_unpinned()


def _nothing() -> None:
    pass

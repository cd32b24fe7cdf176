"""One attempt to read a prefix from one owner: the pure reader, and what it says is done.

All of it runs on the event loop but the read itself, which blocks a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol, assert_never, get_args

from pdmesh.kvcache.manager import Reservation
from pdmesh.kvtransfer.protocol.pull import (
    AbortRequested,
    Commit,
    ConnectionClosed,
    Fail,
    FreeDestination,
    Granted,
    Invalid,
    PostAsk,
    PostRead,
    PostRelease,
    PostRenew,
    PostValidate,
    ReadDone,
    ReaderEffect,
    ReaderEvent,
    ReaderPhase,
    ReaderState,
    Refused,
    Reminded,
    RenewDue,
    Started,
    Valid,
    reader_step,
)
from pdmesh.kvtransfer.pull_reader import PageReader, ReadOrder, Stop, WrongBytes
from pdmesh.wire.errors import DeadlineExceeded, PdmeshError, TransferFailed, Unavailable
from pdmesh.wire.pulls import Loan, LoanAnswer, LoanQuestion, LoanRequest

log = logging.getLogger(__name__)

Failure = Literal[
    "refused", "invalid", "lost", "checksum", "timeout", "no_transport", "cancelled", "no_room"
]
FAILURES: tuple[Failure, ...] = get_args(Failure)
_RENEWALS = 3
"""In the time of a loan."""
_SHORTEST_RENEWAL_S = 0.01


class Owner(Protocol):
    """A worker that is asked for a loan. Every method may raise PdmeshError."""

    async def lend(self, request: LoanRequest) -> Loan: ...

    async def renew(self, question: LoanQuestion) -> LoanAnswer: ...

    async def validate(self, question: LoanQuestion) -> LoanAnswer: ...

    async def give_back(self, question: LoanQuestion) -> LoanAnswer: ...


@dataclass(frozen=True)
class PullResult:
    """How an attempt went: so many pages are in the cache now, or why none is.

    ``read_s``: seconds that the read itself took.
    """

    pages: int = 0
    read_s: float = 0.0
    failure: Failure | None = None
    reason: str = ""


class PullAttempt:
    """Reads the pages that ``reservation`` promises, as many as the owner has.

    Args:
        reservation: of the reader, its matched pages first; it is released by the attempt, and not
            while a read is under way.
        executor: reads block one of its threads.

    Attributes:
        outcome: known as soon as the attempt has succeeded or failed; a read may still be ending.
        on_outcome: told of it at once.
        ended: is set when nothing of the attempt can touch the reader's pages any more.
    """

    def __init__(
        self,
        owner: Owner,
        request: LoanRequest,
        reservation: Reservation,
        readers: Sequence[PageReader],
        executor: Executor,
        on_ended: Callable[[], None],
    ) -> None:
        self._owner = owner
        self._request = request
        self._reservation = reservation
        self._readers = readers
        self._executor = executor
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._state = ReaderState(len(request.hashes) - request.first_page)
        self._loan = Loan(instance="", num_pages=0)
        self._stop = Stop()
        self._read_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcome: asyncio.Future[PullResult] = self._loop.create_future()
        self.on_outcome: Callable[[PullResult], None] | None = None
        self.ended = asyncio.Event()

    def start(self) -> None:
        """Asks the owner."""
        self._feed(Started())

    def abort(self, reason: str, failure: Failure) -> None:
        """Gives the attempt up; a read under way is told to end."""
        self._feed(AbortRequested(reason), failure)

    @property
    def resting(self) -> bool:
        """Whether no message of the attempt is on its way either."""
        return self.ended.is_set() and not self._tasks

    async def rest(self, grace: float) -> None:
        """Waits for that; messages get ``grace`` seconds."""
        await self.ended.wait()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace)
        for task in set(self._tasks):
            task.cancel()

    # ---- the machine ----------------------------------------------------------------------

    def _feed(self, event: ReaderEvent, failure: Failure = "lost") -> None:
        self._state, effects = reader_step(self._state, event)
        if any(isinstance(effect, PostRead) for effect in effects):
            self._spawn(self._read())
        for effect in effects:
            self._do(effect, failure)

    def _do(self, effect: ReaderEffect, failure: Failure) -> None:
        match effect:
            case PostAsk():
                self._spawn(self._ask())
            case PostRead():
                pass  # one read for all pages
            case PostValidate():
                self._spawn(self._validate())
            case PostRenew():
                self._spawn(self._renew())
            case PostRelease():
                self._spawn(self._give_back())
            case Commit(num_pages):
                self._commit(num_pages)
            case Fail(reason):
                self._stop.ask()
                self._tell(PullResult(failure=failure, reason=reason))
            case FreeDestination():
                self._free()
            case _:
                assert_never(effect)

    def _commit(self, num_pages: int) -> None:
        first = self._reservation.matched
        result = PullResult(num_pages, self._read_s)
        try:
            self._reservation.publish(first, self._request.hashes[first : first + num_pages])
        except PdmeshError as error:
            result = PullResult(failure="refused", reason=error.message)
        self._free()
        self._tell(result)

    def _free(self) -> None:
        self._reservation.release()
        self.ended.set()
        self._on_ended()

    def _tell(self, result: PullResult) -> None:
        if not self.outcome.done():
            self.outcome.set_result(result)
            if self.on_outcome is not None:
                self.on_outcome(result)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a pull failed", exc_info=error)
            self.abort(f"{type(error).__name__}: {error}", "lost")

    # ---- messages -------------------------------------------------------------------------

    @property
    def _question(self) -> LoanQuestion:
        return LoanQuestion(loan_id=self._request.loan_id, instance=self._loan.instance)

    async def _ask(self) -> None:
        try:
            loan = await self._owner.lend(self._request)
        except DeadlineExceeded:
            self._feed(Reminded())
            return
        except PdmeshError as error:
            failure: Failure = "lost" if isinstance(error, Unavailable) else "refused"
            self.abort(f"the owner cannot be asked: {error.message}", failure)
            return
        granted = loan.num_pages - self._request.first_page
        if granted <= 0:
            self._feed(Refused("none of the pages is there"), "refused")
        elif granted != len(loan.page_ids):
            self.abort(f"{granted} pages were lent, {len(loan.page_ids)} have a place", "refused")
        elif self._way(loan) is None:
            self.abort("the owner offers no transport that is known here", "no_transport")
        else:
            if self._state.phase is ReaderPhase.ASKING:
                self._loan = loan
            self._feed(Granted(loan.instance, granted), "refused")

    def _way(self, loan: Loan) -> tuple[PageReader, str] | None:
        """The best transport that both sides have, and the owner's address for it."""
        for name, address in loan.transports:
            for reader in self._readers:
                if reader.name == name and reader.reaches(address):
                    return reader, address
        return None

    async def _read(self) -> None:
        """Whatever happens here, at the end of it no read is under way."""
        num_pages, began = self._state.num_pages, time.monotonic()
        renewing = self._loop.create_task(self._keep_renewing())
        try:
            way = self._way(self._loan)
            assert way is not None
            order = self._order(way[1])
            await self._loop.run_in_executor(self._executor, way[0].read, order, self._stop)
        except WrongBytes as error:
            self._feed(ConnectionClosed(error.message), "checksum")
        except TransferFailed as error:
            self._feed(ConnectionClosed(error.message), "lost")
        except Exception as error:  # noqa: BLE001 - a transport's fault costs a recomputation
            log.error("a read failed", exc_info=error)
            self._feed(ConnectionClosed(f"{type(error).__name__}: {error}"), "lost")
        else:
            self._read_s = time.monotonic() - began
            for page in range(num_pages):
                self._feed(ReadDone(page))
        finally:
            renewing.cancel()

    def _order(self, address: str) -> ReadOrder:
        destinations = self._reservation.grow(self._state.num_pages)
        self._reservation.shrink(self._reservation.remaining)
        return ReadOrder(
            self._request.loan_id,
            address,
            self._request.first_page,
            self._loan.page_ids,
            tuple(destinations),
        )

    async def _keep_renewing(self) -> None:
        while True:
            pause = self._loan.ttl_ms / 1e3 / _RENEWALS
            await asyncio.sleep(max(_SHORTEST_RENEWAL_S, pause))
            self._feed(RenewDue())

    async def _renew(self) -> None:
        with suppress(PdmeshError):  # whether the loan still holds, validation tells
            if not (await self._owner.renew(self._question)).valid:
                self._feed(Invalid(), "invalid")

    async def _validate(self) -> None:
        try:
            answer = await self._owner.validate(self._question)
        except DeadlineExceeded:
            self._feed(Reminded())
        except PdmeshError as error:
            self.abort(f"the owner did not say whether the pages are valid: {error}", "lost")
        else:
            event = Valid(self._loan.instance) if answer.valid else Invalid()
            self._feed(event, "invalid")

    async def _give_back(self) -> None:
        with suppress(PdmeshError):  # else the loan ends with its time
            await self._owner.give_back(self._question)

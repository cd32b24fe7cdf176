"""Cached pages read by another worker: lease, read, validate; both roles as pure functions.

    READER IDLE -> ASKING --Granted--> READING --all read--> VALIDATING --Valid--> COMMITTED
           any --refusal, abort, loss--> DRAINING --no read under way--> FAILED
    OWNER  NONE --LeaseAsked--> HELD --Expired--> LAPSED
                                     --ReleaseArrived--> RELEASED

A read cannot harm the owner, so its lease may end by a timer and the pages may then get other
contents under a slow reader. The reader therefore asks, after its last read, whether the pages were
pinned all the time, and uses nothing before the answer is yes. A lease that has lapsed is never
taken up again, and one of an earlier process of the owner is unknown to the next: the answer is no.
A reader's own pages are free again only when no read into them is under way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never


class OwnerPhase(Enum):
    """Where a lease stands at the worker that has the pages."""

    NONE = "unknown"
    HELD = "held"
    LAPSED = "lapsed"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class OwnerState:
    """One lease (lease id and generation) at ``instance``, the owner's process."""

    instance: str
    phase: OwnerPhase = OwnerPhase.NONE
    num_pages: int = 0


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """A reader wants pages, of which the first ``num_cached`` are here."""

    num_cached: int


@dataclass(frozen=True, slots=True)
class RenewArrived:
    instance: str


@dataclass(frozen=True, slots=True)
class ValidateArrived:
    instance: str


@dataclass(frozen=True, slots=True)
class ReleaseArrived:
    pass


@dataclass(frozen=True, slots=True)
class Expired:
    """Nobody renewed the lease in time, by the owner's clock."""


OwnerEvent = LeaseAsked | RenewArrived | ValidateArrived | ReleaseArrived | Expired


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the first ``num_pages`` pages as they are; start the timer."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class SayGranted:
    instance: str
    num_pages: int


@dataclass(frozen=True, slots=True)
class SayRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class Prolong:
    """Start the timer again."""


@dataclass(frozen=True, slots=True)
class SayValid:
    """The pages were pinned from the grant until now."""

    instance: str


@dataclass(frozen=True, slots=True)
class SayInvalid:
    pass


@dataclass(frozen=True, slots=True)
class Unpin:
    pass


OwnerEffect = Pin | SayGranted | SayRefused | Prolong | SayValid | SayInvalid | Unpin
OwnerStep = tuple[OwnerState, tuple[OwnerEffect, ...]]


def owner_step(state: OwnerState, event: OwnerEvent) -> OwnerStep:
    """The owner's state after ``event``, and what to do about it, in order."""
    held = state.phase is OwnerPhase.HELD
    match event:
        case LeaseAsked(num_cached):
            return _asked(state, num_cached)
        case RenewArrived(instance):
            if held and instance == state.instance:
                return state, (Prolong(),)
            return state, (SayInvalid(),)
        case ValidateArrived(instance):
            if held and instance == state.instance:
                return state, (SayValid(instance),)
            return state, (SayInvalid(),)
        case ReleaseArrived():
            return replace(state, phase=OwnerPhase.RELEASED), (Unpin(),) if held else ()
        case Expired():
            return (replace(state, phase=OwnerPhase.LAPSED), (Unpin(),)) if held else (state, ())
        case _:
            assert_never(event)


def _asked(state: OwnerState, num_cached: int) -> OwnerStep:
    match state.phase:
        case OwnerPhase.NONE if num_cached > 0:
            held = replace(state, phase=OwnerPhase.HELD, num_pages=num_cached)
            return held, (Pin(num_cached), SayGranted(state.instance, num_cached))
        case OwnerPhase.NONE:
            return state, (SayRefused("none of the pages is here"),)
        case OwnerPhase.HELD:
            return state, (SayGranted(state.instance, state.num_pages),)
        case OwnerPhase.LAPSED | OwnerPhase.RELEASED:
            return state, (SayRefused(f"the lease is {state.phase.value}"),)
        case _:
            assert_never(state.phase)


class ReaderPhase(Enum):
    """Where a pull stands at the worker that wants the pages."""

    IDLE = "idle"
    ASKING = "asking"
    READING = "reading"
    VALIDATING = "validating"
    COMMITTED = "committed"
    DRAINING = "draining"
    """Failed; reads are under way and still change the destination pages."""
    FAILED = "failed"
    """Nothing was taken over and no read is under way. Final: a late grant is given back."""


@dataclass(frozen=True, slots=True)
class ReaderState:
    """One attempt to read up to ``num_wanted`` pages of one owner."""

    num_wanted: int
    phase: ReaderPhase = ReaderPhase.IDLE
    instance: str = ""
    """The process that granted the lease."""
    num_pages: int = 0
    """Pages granted; they may be fewer than wanted."""
    under_way: int = 0
    """Bit ``page`` is set while that page is read."""


@dataclass(frozen=True, slots=True)
class Started:
    pass


@dataclass(frozen=True, slots=True)
class Granted:
    instance: str
    num_pages: int


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The transport is through with a page; ``failed`` says that its bytes are not all there."""

    page: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Valid:
    instance: str


@dataclass(frozen=True, slots=True)
class Invalid:
    pass


@dataclass(frozen=True, slots=True)
class AbortRequested:
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection is gone and with it every read."""

    reason: str


@dataclass(frozen=True, slots=True)
class RenewDue:
    """A part of the lease's time has gone by."""


@dataclass(frozen=True, slots=True)
class Reminded:
    """An answer is overdue: the question or the answer may have been lost."""


ReaderEvent = (
    Started
    | Granted
    | Refused
    | ReadDone
    | Valid
    | Invalid
    | AbortRequested
    | ConnectionClosed
    | RenewDue
    | Reminded
)


@dataclass(frozen=True, slots=True)
class PostAsk:
    num_pages: int


@dataclass(frozen=True, slots=True)
class PostRead:
    page: int


@dataclass(frozen=True, slots=True)
class PostValidate:
    instance: str


@dataclass(frozen=True, slots=True)
class PostRenew:
    instance: str


@dataclass(frozen=True, slots=True)
class PostRelease:
    pass


@dataclass(frozen=True, slots=True)
class Commit:
    """The first ``num_pages`` destination pages hold what was asked for."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class Fail:
    reason: str


@dataclass(frozen=True, slots=True)
class FreeDestination:
    """No read can change the destination pages any more."""


ReaderEffect = (
    PostAsk | PostRead | PostValidate | PostRenew | PostRelease | Commit | Fail | FreeDestination
)
ReaderStep = tuple[ReaderState, tuple[ReaderEffect, ...]]
_WAITING = (ReaderPhase.ASKING, ReaderPhase.READING, ReaderPhase.VALIDATING)


def reader_step(state: ReaderState, event: ReaderEvent) -> ReaderStep:
    """The reader's state after ``event``, and what to do about it, in order."""
    match event:
        case Started():
            if state.phase is ReaderPhase.IDLE:
                return replace(state, phase=ReaderPhase.ASKING), (PostAsk(state.num_wanted),)
            return state, ()
        case Granted(instance, num_pages):
            return _granted(state, instance, num_pages)
        case Refused(reason):
            if state.phase is ReaderPhase.ASKING:
                return _failed(state, f"the owner refused: {reason}")
            return state, ()
        case ReadDone(page, failed):
            return _read(state, page, failed)
        case Valid(instance):
            if state.phase is ReaderPhase.VALIDATING and instance == state.instance:
                return _committed(state)
            return state, ()
        case Invalid():
            if state.phase in (ReaderPhase.READING, ReaderPhase.VALIDATING):
                return _failed(state, "the pages were not pinned all the time")
            return state, ()
        case AbortRequested(reason):
            return _failed(state, reason)
        case ConnectionClosed(reason):
            return _closed(state, f"the connection to the owner was lost: {reason}")
        case RenewDue():
            if state.phase in (ReaderPhase.READING, ReaderPhase.VALIDATING):
                return state, (PostRenew(state.instance),)
            return state, ()
        case Reminded():
            return state, _reminder(state)
        case _:
            assert_never(event)


def _granted(state: ReaderState, instance: str, num_pages: int) -> ReaderStep:
    if state.phase is ReaderPhase.FAILED:
        return state, (PostRelease(),)
    if state.phase is not ReaderPhase.ASKING:
        return state, ()
    if not 0 < num_pages <= state.num_wanted:
        return _failed(state, f"{num_pages} pages were granted, {state.num_wanted} were wanted")
    reading = replace(
        state,
        phase=ReaderPhase.READING,
        instance=instance,
        num_pages=num_pages,
        under_way=(1 << num_pages) - 1,
    )
    return reading, tuple(PostRead(page) for page in range(num_pages))


def _read(state: ReaderState, page: int, failed: bool) -> ReaderStep:
    left = replace(state, under_way=state.under_way & ~(1 << page))
    if state.phase is ReaderPhase.DRAINING:
        return _settled(left) if left.under_way == 0 else (left, ())
    if state.phase is not ReaderPhase.READING:
        return state, ()
    if failed:
        return _failed(left, f"page {page} could not be read")
    if left.under_way == 0:
        return replace(left, phase=ReaderPhase.VALIDATING), (PostValidate(state.instance),)
    return left, ()


def _reminder(state: ReaderState) -> tuple[ReaderEffect, ...]:
    if state.phase is ReaderPhase.ASKING:
        return (PostAsk(state.num_wanted),)
    if state.phase is ReaderPhase.VALIDATING:
        return (PostValidate(state.instance),)
    return ()


def _committed(state: ReaderState) -> ReaderStep:
    done = replace(state, phase=ReaderPhase.COMMITTED)
    return done, (Commit(state.num_pages), PostRelease())


def _failed(state: ReaderState, reason: str) -> ReaderStep:
    if state.phase is ReaderPhase.IDLE:
        return replace(state, phase=ReaderPhase.FAILED), (Fail(reason), FreeDestination())
    if state.phase not in _WAITING:
        return state, ()
    if state.under_way:
        return replace(state, phase=ReaderPhase.DRAINING), (Fail(reason),)
    return _settled(state, Fail(reason))


def _closed(state: ReaderState, reason: str) -> ReaderStep:
    gone = replace(state, under_way=0)
    if state.phase is ReaderPhase.DRAINING:
        return _settled(gone)
    return _failed(gone, reason)


def _settled(state: ReaderState, *effects: ReaderEffect) -> ReaderStep:
    return replace(state, phase=ReaderPhase.FAILED), (*effects, PostRelease(), FreeDestination())

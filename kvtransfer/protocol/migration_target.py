"""The worker that an answer moves to: a pure function ``(state, event) -> (state, effects)``.

    IDLE -> RESERVED -> READY -> ACTIVE
    IDLE, RESERVED, READY --abort, failure, deadline--> RELEASED

It generates only after the gateway's ``Activate``. Until then it may leave at any time, also by a
deadline: a gateway that had decided to commit is told when it activates, and starts the answer
elsewhere. RELEASED is final for a handoff. Its pages go back by the rules of ``receiver``: those a
write may still reach stay in quarantine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from pdmesh.kvtransfer.protocol.migration import Capsule


class Phase(Enum):
    """Where a handoff stands at its target."""

    IDLE = "unknown"
    RESERVED = "waiting for pages and capsule"
    READY = "ready"
    ACTIVE = "active"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class TargetState:
    """One handoff of one answer."""

    phase: Phase = Phase.IDLE
    have_pages: int = 0
    arrived: int = 0
    """Bit ``index`` is set once that round has arrived."""
    capsule: Capsule | None = None
    attempt: int = 0
    """The attempt it was activated as."""

    @property
    def complete(self) -> bool:
        """All rounds and the capsule are here."""
        return self.capsule is not None and self.arrived == (1 << self.capsule.num_rounds) - 1


@dataclass(frozen=True, slots=True)
class ReserveArrived:
    """The source asks for room; ``room`` says whether every page could be promised at once."""

    room: bool
    have_pages: int


@dataclass(frozen=True, slots=True)
class RoundArrived:
    """All writes of a round are in their pages."""

    index: int


@dataclass(frozen=True, slots=True)
class CapsuleArrived:
    capsule: Capsule


@dataclass(frozen=True, slots=True)
class RoundFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class AbortArrived:
    """From the source or the gateway."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """Nothing was heard for too long."""


@dataclass(frozen=True, slots=True)
class ActivateArrived:
    """From the gateway: generate as ``attempt`` from output position ``position``."""

    attempt: int
    position: int


@dataclass(frozen=True, slots=True)
class Reminded:
    """An answer is overdue."""


Event = (
    ReserveArrived
    | RoundArrived
    | CapsuleArrived
    | RoundFailed
    | AbortArrived
    | DeadlinePassed
    | ActivateArrived
    | Reminded
)


@dataclass(frozen=True, slots=True)
class Keep:
    """Hold the promised pages for this handoff."""


@dataclass(frozen=True, slots=True)
class PostGranted:
    have_pages: int


@dataclass(frozen=True, slots=True)
class PostFailed:
    """To the source."""

    reason: str


@dataclass(frozen=True, slots=True)
class PostReady:
    """To the source: pages and capsule up to ``position`` are here.

    Before it is sent, penalties and the grammar are rebuilt from the capsule's tokens.
    """

    position: int


@dataclass(frozen=True, slots=True)
class StartDecoding:
    attempt: int
    capsule: Capsule


@dataclass(frozen=True, slots=True)
class PostActive:
    """To the gateway: this worker generates."""

    attempt: int


@dataclass(frozen=True, slots=True)
class RefuseActivate:
    """To the gateway: nothing of this handoff is here (any more)."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give the promised pages back, by the receiver's rules of quarantine."""


Effect = (
    Keep
    | PostGranted
    | PostFailed
    | PostReady
    | StartDecoding
    | PostActive
    | RefuseActivate
    | Release
)
Step = tuple[TargetState, tuple[Effect, ...]]


def step(state: TargetState, event: Event) -> Step:
    """The state after ``event``, and what to do about it, in order."""
    match event:
        case ReserveArrived(room, have_pages):
            return _asked(state, room, have_pages)
        case RoundArrived(index):
            if state.phase is Phase.RESERVED:
                return _filled(replace(state, arrived=state.arrived | 1 << index))
            return state, ()
        case CapsuleArrived(capsule):
            return _capsule(state, capsule)
        case RoundFailed(reason):
            return _left(state, PostFailed(reason))
        case AbortArrived():
            return _left(state)
        case DeadlinePassed():
            return _left(state, PostFailed("the target heard nothing for too long"))
        case ActivateArrived(attempt, position):
            return _activated(state, attempt, position)
        case Reminded():
            if state.phase is Phase.READY and state.capsule is not None:
                return state, (PostReady(len(state.capsule.output)),)
            return state, ()
        case _:
            assert_never(event)


def _asked(state: TargetState, room: bool, have_pages: int) -> Step:
    match state.phase:
        case Phase.IDLE if room:
            reserved = replace(state, phase=Phase.RESERVED, have_pages=have_pages)
            return reserved, (Keep(), PostGranted(have_pages))
        case Phase.IDLE:
            return replace(state, phase=Phase.RELEASED), (PostFailed("no pages are free"),)
        case Phase.RESERVED:
            return state, (PostGranted(state.have_pages),)
        case Phase.RELEASED:
            return state, (PostFailed("the handoff is over at the target"),)
        case Phase.READY | Phase.ACTIVE:
            return state, ()
        case _:
            assert_never(state.phase)


def _capsule(state: TargetState, capsule: Capsule) -> Step:
    """A source that sends its capsule waits: it is told, also again, how things stand here."""
    match state.phase:
        case Phase.RESERVED:
            return _filled(replace(state, capsule=capsule))
        case Phase.READY:
            return state, (PostReady(len(capsule.output)),)
        case Phase.IDLE | Phase.RELEASED:
            released = replace(state, phase=Phase.RELEASED)
            return released, (PostFailed("the handoff is over at the target"),)
        case Phase.ACTIVE:
            return state, ()
        case _:
            assert_never(state.phase)


def _filled(state: TargetState) -> Step:
    if state.capsule is None or not state.complete:
        return state, ()
    return replace(state, phase=Phase.READY), (PostReady(len(state.capsule.output)),)


def _left(state: TargetState, *tell: Effect) -> Step:
    match state.phase:
        case Phase.IDLE:
            return replace(state, phase=Phase.RELEASED), ()
        case Phase.RESERVED | Phase.READY:
            return replace(state, phase=Phase.RELEASED), (*tell, Release())
        case Phase.ACTIVE | Phase.RELEASED:
            return state, ()
        case _:
            assert_never(state.phase)


def _activated(state: TargetState, attempt: int, position: int) -> Step:
    capsule = state.capsule
    match state.phase:
        case Phase.READY if capsule is not None and position == len(capsule.output):
            active = replace(state, phase=Phase.ACTIVE, attempt=attempt)
            return active, (PostActive(attempt), StartDecoding(attempt, capsule))
        case Phase.ACTIVE:
            if attempt == state.attempt:
                return state, (PostActive(attempt),)
            return state, (RefuseActivate(attempt),)
        case Phase.IDLE:
            return replace(state, phase=Phase.RELEASED), (RefuseActivate(attempt),)
        case Phase.RESERVED | Phase.READY:
            return replace(state, phase=Phase.RELEASED), (RefuseActivate(attempt), Release())
        case Phase.RELEASED:
            return state, (RefuseActivate(attempt),)
        case _:
            assert_never(state.phase)

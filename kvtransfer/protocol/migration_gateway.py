"""The gateway's part: who generates an answer, as a pure function ``(state, event) -> ...``.

One compare-and-set decides a handoff: the first of ``CommitAsked`` and an abort (by the source, by
the loss of the source, by the end of the answer) wins and is never changed. Tokens are taken of the
current attempt only, and only the next positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never


class Decision(Enum):
    """What became of a handoff."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class GatewayState:
    """One answer: its tokens and its owner."""

    owner: str
    """The worker that generates; empty while a new one is sought."""
    attempt: int = 1
    tokens: tuple[int, ...] = ()
    ended: bool = False
    """Finished, cancelled or failed: nobody generates any more."""
    handoff: int = 0
    """The last one offered."""
    decision: Decision = Decision.ABORTED
    """Of the last handoff."""
    target: str = ""
    committed: frozenset[int] = frozenset()
    """Handoffs that were committed; all others below ``handoff`` were aborted."""
    active: bool = True
    """The owner is known to generate (after a commit: it has said so)."""

    def decided(self, handoff: int) -> Decision:
        """What became of any handoff; one never offered counts as aborted."""
        if handoff in self.committed:
            return Decision.COMMITTED
        if handoff == self.handoff:
            return self.decision
        return Decision.ABORTED


@dataclass(frozen=True, slots=True)
class MigrationWanted:
    target: str


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    attempt: int
    position: int
    tokens: tuple[int, ...]
    finished: bool = False


@dataclass(frozen=True, slots=True)
class CommitAsked:
    attempt: int
    handoff: int
    target: str
    position: int
    """Output position of ``tail[0]``."""
    tail: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AbortAsked:
    handoff: int


@dataclass(frozen=True, slots=True)
class ActiveArrived:
    """A worker says that it generates as ``attempt``."""

    attempt: int


@dataclass(frozen=True, slots=True)
class ActivateRefused:
    """A worker cannot generate as ``attempt``."""

    attempt: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream to a worker is gone for good."""

    worker: str


@dataclass(frozen=True, slots=True)
class OwnerFound:
    """After ``Failover``: this worker starts from the prompt and the tokens so far."""

    worker: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A stop string was found, the client left, or no worker is left."""


@dataclass(frozen=True, slots=True)
class Reminded:
    """An answer is overdue."""


Event = (
    MigrationWanted
    | ChunkArrived
    | CommitAsked
    | AbortAsked
    | ActiveArrived
    | ActivateRefused
    | WorkerLost
    | OwnerFound
    | Ended
    | Reminded
)


@dataclass(frozen=True, slots=True)
class PostMigrate:
    """To the owner."""

    worker: str
    handoff: int
    target: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """To the client: the tokens from ``position`` on."""

    position: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """To whoever sent them: all positions below ``position`` are here."""

    attempt: int
    position: int


@dataclass(frozen=True, slots=True)
class PostFenced:
    """To whoever sent tokens of another attempt: only ``attempt`` may."""

    attempt: int


@dataclass(frozen=True, slots=True)
class PostCommitted:
    """To the source."""

    handoff: int


@dataclass(frozen=True, slots=True)
class PostAborted:
    """To the source."""

    handoff: int


@dataclass(frozen=True, slots=True)
class PostActivate:
    """To the target."""

    worker: str
    handoff: int
    attempt: int
    position: int


@dataclass(frozen=True, slots=True)
class AbortTarget:
    worker: str
    handoff: int


@dataclass(frozen=True, slots=True)
class Failover:
    """Start ``attempt`` on another worker from the prompt and the tokens so far."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Finish:
    """To the client: that was all. To the owner: the answer is over."""


Effect = (
    PostMigrate
    | Deliver
    | Acknowledge
    | PostFenced
    | PostCommitted
    | PostAborted
    | PostActivate
    | AbortTarget
    | Failover
    | Finish
)
Step = tuple[GatewayState, tuple[Effect, ...]]


def step(state: GatewayState, event: Event) -> Step:
    """The state after ``event``, and what to do about it, in order."""
    match event:
        case MigrationWanted(target):
            return _wanted(state, target)
        case ChunkArrived():
            return _chunk(state, event)
        case CommitAsked():
            return _commit(state, event)
        case AbortAsked(handoff):
            return _abort(state, handoff)
        case ActiveArrived(attempt):
            if attempt == state.attempt:
                return replace(state, active=True), ()
            return state, (PostFenced(state.attempt),)
        case ActivateRefused(attempt):
            if attempt == state.attempt and not state.active and not state.ended:
                return _failover(state)
            return state, ()
        case WorkerLost(worker):
            return _lost(state, worker)
        case OwnerFound(worker):
            if state.owner == "" and not state.ended:
                return replace(state, owner=worker, active=True), ()
            return state, ()
        case Ended():
            return _ended(state)
        case Reminded():
            return state, _reminder(state)
        case _:
            assert_never(event)


def _wanted(state: GatewayState, target: str) -> Step:
    open_now = state.decision is Decision.OPEN
    if state.ended or not state.owner or not state.active or open_now or target == state.owner:
        return state, ()
    handoff = state.handoff + 1
    offered = replace(state, handoff=handoff, decision=Decision.OPEN, target=target)
    return offered, (PostMigrate(state.owner, handoff, target),)


def _take(state: GatewayState, position: int, tokens: tuple[int, ...]) -> Step:
    """Appends what is new; the caller has made sure that nothing is missing between."""
    new = tokens[len(state.tokens) - position :]
    if not new:
        return state, ()
    taken = replace(state, tokens=state.tokens + new)
    return taken, (Deliver(len(state.tokens), new),)


def _chunk(state: GatewayState, event: ChunkArrived) -> Step:
    if event.attempt != state.attempt:
        return state, (PostFenced(state.attempt),)
    if state.ended or event.position > len(state.tokens):
        return state, (Acknowledge(state.attempt, len(state.tokens)),)
    after, effects = _take(replace(state, active=True), event.position, event.tokens)
    effects = (*effects, Acknowledge(state.attempt, len(after.tokens)))
    if not event.finished:
        return after, effects
    ended, more = _ended(after)
    return ended, effects + more


def _commit(state: GatewayState, event: CommitAsked) -> Step:
    match state.decided(event.handoff):
        case Decision.COMMITTED:
            return state, (PostCommitted(event.handoff),)
        case Decision.ABORTED:
            return state, (PostAborted(event.handoff),)
        case Decision.OPEN:
            pass
    if event.attempt != state.attempt or event.position > len(state.tokens):
        return _abort(state, event.handoff)
    taken, delivered = _take(state, event.position, event.tail)
    done = replace(
        taken,
        owner=event.target,
        attempt=state.attempt + 1,
        decision=Decision.COMMITTED,
        committed=state.committed | {event.handoff},
        active=False,
    )
    return done, (*delivered, PostCommitted(event.handoff), _activate(done))


def _activate(state: GatewayState) -> PostActivate:
    return PostActivate(state.owner, state.handoff, state.attempt, len(state.tokens))


def _abort(state: GatewayState, handoff: int) -> Step:
    match state.decided(handoff):
        case Decision.COMMITTED:
            return state, (PostCommitted(handoff),)
        case Decision.ABORTED:
            return state, (PostAborted(handoff),)
        case Decision.OPEN:
            aborted = replace(state, decision=Decision.ABORTED)
            return aborted, (PostAborted(handoff), AbortTarget(state.target, handoff))
        case _:
            assert_never(state.decision)


def _closed_handoff(state: GatewayState) -> Step:
    if state.decision is not Decision.OPEN:
        return state, ()
    aborted = replace(state, decision=Decision.ABORTED)
    return aborted, (AbortTarget(state.target, state.handoff),)


def _failover(state: GatewayState) -> Step:
    closed, effects = _closed_handoff(state)
    attempt = state.attempt + 1
    sought = replace(closed, owner="", attempt=attempt, active=False)
    return sought, (*effects, Failover(attempt))


def _lost(state: GatewayState, worker: str) -> Step:
    if state.ended:
        return state, ()
    if worker == state.owner:
        return _failover(state)
    if worker == state.target and state.decision is Decision.OPEN:
        return _abort(state, state.handoff)
    return state, ()


def _ended(state: GatewayState) -> Step:
    if state.ended:
        return state, ()
    closed, effects = _closed_handoff(state)
    done = replace(closed, ended=True)
    if state.handoff and not state.active and state.owner == state.target:
        effects = (*effects, AbortTarget(state.target, state.handoff))
    return done, (*effects, Finish())


def _reminder(state: GatewayState) -> tuple[Effect, ...]:
    if state.ended:
        return ()
    if state.decision is Decision.OPEN:
        return (PostMigrate(state.owner, state.handoff, state.target),)
    if state.owner and not state.active:
        return (_activate(state),)
    return ()

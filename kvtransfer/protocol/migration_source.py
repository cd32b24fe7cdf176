"""The worker that an answer leaves: a pure function ``(state, event) -> (state, effects)``.

    DECODING -> ASKING -> COPYING -> STOPPING -> TAIL -> COMMITTING -> RELEASED
    ASKING, COPYING, STOPPING --failure--> DECODING     (it never stood still; no commit was asked)
    TAIL, COMMITTING --failure--> ABORTING --Aborted--> DECODING
                                           --Committed--> RELEASED
    any --gateway lost, fenced--> DISCARDED

There is no timer edge: a reminder repeats the question to the gateway. Steps go on in DECODING,
ASKING, COPYING and, until ``Stopped``, in STOPPING.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from pdmesh.kvtransfer.protocol.migration import FEW_PAGES, MAX_ROUNDS, Answer, Capsule
from pdmesh.kvtransfer.protocol.migration_source_events import (
    Aborted,
    AbortTarget,
    ChunkAcknowledged,
    Committed,
    Effect,
    Event,
    Fenced,
    Free,
    GatewayLost,
    MigrateAsked,
    PostAbort,
    PostCapsule,
    PostCommit,
    PostReserve,
    PostTokens,
    Reminded,
    Resume,
    RoundDone,
    StartRound,
    Stepped,
    StopDecoding,
    Stopped,
    TargetFailed,
    TargetGranted,
    TargetReady,
)
from pdmesh.wire.errors import InternalError

__all__ = [
    "AbortTarget",
    "Aborted",
    "ChunkAcknowledged",
    "Committed",
    "Effect",
    "Event",
    "Fenced",
    "Free",
    "GatewayLost",
    "MigrateAsked",
    "OVER",
    "Phase",
    "PostAbort",
    "PostCapsule",
    "PostCommit",
    "PostReserve",
    "PostTokens",
    "RUNNING",
    "Reminded",
    "Resume",
    "RoundDone",
    "SourceState",
    "StartRound",
    "Step",
    "Stepped",
    "StopDecoding",
    "Stopped",
    "TargetFailed",
    "TargetGranted",
    "TargetReady",
    "step",
]


class Phase(Enum):
    """Where an answer stands at the worker that generates it."""

    DECODING = "decoding"
    ASKING = "asking the target for room"
    COPYING = "copying full pages"
    STOPPING = "waiting for the step under way"
    TAIL = "frozen, copying the last pages"
    COMMITTING = "frozen, waiting for the gateway's decision"
    ABORTING = "frozen, asking the gateway to abort"
    RELEASED = "handed over"
    DISCARDED = "dropped"
    FINISHED = "finished here"


RUNNING = (Phase.DECODING, Phase.ASKING, Phase.COPYING, Phase.STOPPING)
"""Phases in which steps may run."""
OVER = (Phase.RELEASED, Phase.DISCARDED, Phase.FINISHED)


@dataclass(frozen=True, slots=True)
class SourceState:
    """One answer under one attempt at one worker."""

    answer: Answer
    attempt: int
    output: tuple[int, ...] = ()
    acknowledged: int = 0
    """Output positions that the gateway has said it has."""
    full_pages: int = 0
    """Leading pages that are full and complete in every layer."""
    phase: Phase = Phase.DECODING
    handoff: int = 0
    """The last one offered; lower numbers are over."""
    target: str = ""
    copied: int = 0
    """Leading pages that the target has or that a round is about."""
    rounds: int = 0
    capsule: Capsule | None = None
    """What was sent to the target, to send it again."""

    @property
    def tail(self) -> tuple[int, ...]:
        """Tokens that the gateway may not have."""
        return self.output[self.acknowledged :]


Step = tuple[SourceState, tuple[Effect, ...]]


def step(state: SourceState, event: Event) -> Step:
    """The state after ``event``, and what to do about it, in order.

    Raises:
        InternalError: a step ended although the answer stands still.
    """
    match event:
        case Stepped():
            return _stepped(state, event)
        case ChunkAcknowledged(position):
            most = min(position, len(state.output))
            return replace(state, acknowledged=max(state.acknowledged, most)), ()
        case MigrateAsked(handoff, target):
            return _asked(state, handoff, target)
        case Fenced(attempt):
            return _dropped(state) if attempt > state.attempt else (state, ())
        case GatewayLost():
            return _left_alone(state)
        case Reminded():
            return state, _reminder(state)
        case Stopped():
            return _stopped(state, event)
        case (
            TargetGranted() | TargetFailed() | RoundDone() | TargetReady() | Committed() | Aborted()
        ):
            return _of_handoff(state, event) if event.handoff == state.handoff else (state, ())
        case _:
            assert_never(event)


def _of_handoff(
    state: SourceState,
    event: TargetGranted | TargetFailed | RoundDone | TargetReady | Committed | Aborted,
) -> Step:
    match event:
        case TargetGranted(have_pages=have_pages):
            if state.phase is Phase.ASKING:
                return _next_round(replace(state, copied=have_pages))
            return state, ()
        case RoundDone(index=index):
            if state.phase is Phase.COPYING and index == state.rounds - 1:
                return _next_round(state)
            return state, ()
        case TargetReady(position=position):
            if state.phase is Phase.TAIL and position == len(state.output):
                return replace(state, phase=Phase.COMMITTING), (_commit(state),)
            return state, ()
        case TargetFailed():
            return _given_up(state)
        case Committed():
            if state.phase in (Phase.COMMITTING, Phase.ABORTING):
                return replace(state, phase=Phase.RELEASED), (Free(),)
            return state, ()
        case Aborted():
            return _aborted(state)
        case _:
            assert_never(event)


def _stepped(state: SourceState, event: Stepped) -> Step:
    if state.phase in OVER:
        return state, ()
    if state.phase not in RUNNING:
        raise InternalError(f"a step ended while the answer is {state.phase.value}")
    position = len(state.output)
    after = replace(state, output=state.output + event.tokens, full_pages=event.full_pages)
    post = PostTokens(state.attempt, position, event.tokens, event.finished)
    if not event.finished:
        return after, (post,)
    ended = replace(after, phase=Phase.FINISHED)
    if state.phase is Phase.DECODING:
        return ended, (post, Free())
    return ended, (post, PostAbort(state.handoff), AbortTarget(state.handoff), Free())


def _asked(state: SourceState, handoff: int, target: str) -> Step:
    if state.phase in OVER or handoff < state.handoff:
        return state, (PostAbort(handoff),)
    if handoff == state.handoff:
        return state, (PostAbort(handoff),) if state.phase is Phase.DECODING else ()
    if state.phase is not Phase.DECODING:
        return state, (PostAbort(handoff),)
    asking = replace(
        state,
        phase=Phase.ASKING,
        handoff=handoff,
        target=target,
        copied=0,
        rounds=0,
        capsule=None,
    )
    return asking, (PostReserve(handoff, target),)


def _next_round(state: SourceState) -> Step:
    """Copies the pages filled meanwhile, or stops where they are few or the rounds are used up."""
    left = state.full_pages - state.copied
    if left <= FEW_PAGES or state.rounds >= MAX_ROUNDS:
        return replace(state, phase=Phase.STOPPING), (StopDecoding(),)
    copying = replace(state, phase=Phase.COPYING, copied=state.full_pages, rounds=state.rounds + 1)
    return copying, (StartRound(state.handoff, state.rounds, state.copied, left),)


def _stopped(state: SourceState, event: Stopped) -> Step:
    if state.phase is not Phase.STOPPING:
        return state, ()
    capsule = Capsule(
        answer=state.answer,
        output=state.output,
        computed=event.computed,
        num_pages=event.num_pages,
        num_rounds=state.rounds + 1,
        pending_hidden=event.pending_hidden,
    )
    last = StartRound(state.handoff, state.rounds, state.copied, event.num_pages - state.copied)
    frozen = replace(
        state, phase=Phase.TAIL, copied=event.num_pages, rounds=state.rounds + 1, capsule=capsule
    )
    return frozen, (last, PostCapsule(state.handoff, capsule))


def _commit(state: SourceState) -> PostCommit:
    return PostCommit(state.attempt, state.handoff, state.target, state.acknowledged, state.tail)


def _given_up(state: SourceState) -> Step:
    """The target will not do; only the gateway knows whether a commit was decided."""
    told = (PostAbort(state.handoff), AbortTarget(state.handoff))
    match state.phase:
        case Phase.ASKING | Phase.COPYING:
            return replace(state, phase=Phase.DECODING), told
        case Phase.STOPPING:
            return replace(state, phase=Phase.DECODING), (*told, Resume())
        case Phase.TAIL | Phase.COMMITTING:
            return replace(state, phase=Phase.ABORTING), told
        case Phase.DECODING | Phase.ABORTING | Phase.RELEASED | Phase.DISCARDED | Phase.FINISHED:
            return state, ()
        case _:
            assert_never(state.phase)


def _aborted(state: SourceState) -> Step:
    match state.phase:
        case Phase.ASKING | Phase.COPYING:
            return replace(state, phase=Phase.DECODING), (AbortTarget(state.handoff),)
        case Phase.STOPPING | Phase.TAIL | Phase.COMMITTING | Phase.ABORTING:
            decoding = replace(state, phase=Phase.DECODING)
            return decoding, (AbortTarget(state.handoff), Resume())
        case Phase.DECODING | Phase.RELEASED | Phase.DISCARDED | Phase.FINISHED:
            return state, ()
        case _:
            assert_never(state.phase)


def _dropped(state: SourceState) -> Step:
    if state.phase in OVER:
        return state, ()
    dropped = replace(state, phase=Phase.DISCARDED)
    if state.phase in (Phase.DECODING, Phase.COMMITTING, Phase.ABORTING):
        return dropped, (Free(),)
    return dropped, (AbortTarget(state.handoff), Free())


def _left_alone(state: SourceState) -> Step:
    """Nobody asks for the answer any more. A target that may wait for a decision is told, too; one
    that has been activated takes no notice."""
    dropped, effects = _dropped(state)
    if state.phase is Phase.COMMITTING:
        return dropped, (AbortTarget(state.handoff), *effects)
    return dropped, effects


def _reminder(state: SourceState) -> tuple[Effect, ...]:
    match state.phase:
        case Phase.ASKING:
            return (PostReserve(state.handoff, state.target),)
        case Phase.TAIL if state.capsule is not None:
            return (PostCapsule(state.handoff, state.capsule),)
        case Phase.COMMITTING:
            return (_commit(state),)
        case Phase.ABORTING:
            return (PostAbort(state.handoff),)
        case _:
            if state.tail:
                return (
                    PostTokens(
                        state.attempt,
                        state.acknowledged,
                        state.tail,
                        state.phase is Phase.FINISHED,
                    ),
                )
            return ()

"""One transfer as its sender sees it: a pure function ``(state, event) -> (state, effects)``.

    IDLE --Granted--> GRANTED --first write--> SENDING --Finished--> FIN_SENT --ack--> DONE
    IDLE --Leased--> OPENING --Granted--> GRANTED
    any --abort, refusal--> DRAINING --no write under way--> DRAINED

A transport whose receiver checks each write is granted at once; a one-sided one needs the places
of the pages first (``Leased``, then ``Granted`` when they are known).

A transfer aborted before its grant goes straight to DRAINED, which is final: a grant that comes
late finds this tombstone and nothing is ever written for it. A receiver that asks again is told
DRAINED again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from pdmesh.kvtransfer.protocol.units import block_bits
from pdmesh.wire.errors import InternalError
from pdmesh.wire.messages import Fin


class Phase(Enum):
    """Where a transfer stands at its sender."""

    IDLE = "idle"
    OPENING = "waiting for the places of the pages"
    GRANTED = "granted"
    SENDING = "sending"
    FIN_SENT = "waiting for the acknowledgement"
    DONE = "done"
    DRAINING = "draining"
    """Aborted; writes handed to the transport are still under way."""
    DRAINED = "drained"
    """Aborted; nothing is under way and nothing will ever be sent."""


@dataclass(frozen=True, slots=True)
class SenderState:
    """A transfer with ``num_layers`` layers a page."""

    num_layers: int
    phase: Phase = Phase.IDLE
    pushed: int = 0
    """Bit ``page * num_layers + layer`` is set for each write made."""
    in_flight: int = 0
    """Writes whose memory the transport may still read (or, one-sided, write at the peer)."""
    fin: Fin | None = None
    """What FIN said, to say it again."""

    @property
    def num_writes(self) -> int:
        return self.pushed.bit_count()

    @property
    def settled(self) -> bool:
        """The transfer is over and nothing reads the pages any more."""
        return self.phase in (Phase.DONE, Phase.DRAINED) and self.in_flight == 0


@dataclass(frozen=True, slots=True)
class Leased:
    """The lease is here and a connection stands; the receiver has to say where the pages are."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease is here, a connection stands, and writes find their pages."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """A block has been computed: ``layers`` layers of each of ``pages`` pages (of the prompt)."""

    page: int
    layer: int
    pages: int = 1
    layers: int = 1


@dataclass(frozen=True, slots=True)
class WritesDone:
    """The transport is through with ``count`` units, sent or taken off its queue."""

    count: int


@dataclass(frozen=True, slots=True)
class Finished:
    fin: Fin


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The receiver has everything."""


@dataclass(frozen=True, slots=True)
class AbortRequested:
    reason: str


@dataclass(frozen=True, slots=True)
class ReceiverRefused:
    """The receiver wants no more writes."""

    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection is gone and the transport holds no write any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reminded:
    """An answer is overdue: the last message or its answer may have been lost."""


Event = (
    Leased
    | Granted
    | Pushed
    | WritesDone
    | Finished
    | Acknowledged
    | AbortRequested
    | ReceiverRefused
    | ConnectionClosed
    | Reminded
)


@dataclass(frozen=True, slots=True)
class PostOpen:
    pass


@dataclass(frozen=True, slots=True)
class PostWrite:
    page: int
    layer: int
    pages: int = 1
    layers: int = 1


@dataclass(frozen=True, slots=True)
class PostFin:
    fin: Fin


@dataclass(frozen=True, slots=True)
class PostAbort:
    reason: str


@dataclass(frozen=True, slots=True)
class PostDrained:
    pass


@dataclass(frozen=True, slots=True)
class CancelQueued:
    """Take this transfer's writes off the transport's queue and report them as done."""


@dataclass(frozen=True, slots=True)
class Succeed:
    pass


@dataclass(frozen=True, slots=True)
class Fail:
    reason: str


Effect = PostOpen | PostWrite | PostFin | PostAbort | PostDrained | CancelQueued | Succeed | Fail
Step = tuple[SenderState, tuple[Effect, ...]]


def step(state: SenderState, event: Event) -> Step:
    """The state after ``event``, and what to do about it, in order.

    Raises:
        InternalError: the caller pushed a page's layer twice, or after finish, or finished twice.
    """
    match event:
        case Leased():
            if state.phase is Phase.IDLE:
                return replace(state, phase=Phase.OPENING), (PostOpen(),)
            return state, ()
        case Granted():
            return _granted(state)
        case Pushed():
            return _pushed(state, event)
        case WritesDone(count):
            return _writes_done(state, count)
        case Finished(fin):
            return _finished(state, fin)
        case Acknowledged():
            if state.phase is Phase.FIN_SENT:
                return replace(state, phase=Phase.DONE), (Succeed(),)
            return state, ()
        case AbortRequested(reason):
            return _aborted(state, reason, (PostAbort(reason),))
        case ReceiverRefused(reason):
            return _refused(state, f"the receiver refused: {reason}")
        case ConnectionClosed(reason):
            return _closed(state, reason)
        case Reminded():
            return state, _reminder(state)
        case _:
            assert_never(event)


def _granted(state: SenderState) -> Step:
    match state.phase:
        case Phase.IDLE:
            return replace(state, phase=Phase.GRANTED), (PostOpen(),)
        case Phase.OPENING:
            return replace(state, phase=Phase.GRANTED), ()
        case (
            Phase.GRANTED
            | Phase.SENDING
            | Phase.FIN_SENT
            | Phase.DONE
            | Phase.DRAINING
            | Phase.DRAINED
        ):
            return state, ()
        case _:
            assert_never(state.phase)


def _reminder(state: SenderState) -> tuple[Effect, ...]:
    """The message of ``state`` that an answer is due to."""
    if state.phase is Phase.OPENING:
        return (PostOpen(),)
    if state.phase is Phase.FIN_SENT and state.fin is not None:
        return (PostFin(state.fin),)
    return ()


def _pushed(state: SenderState, block: Pushed) -> Step:
    page = block.page
    place = page, block.layer, block.pages, block.layers
    match state.phase:
        case Phase.GRANTED | Phase.SENDING:
            bits = block_bits(state.num_layers, *place)
            if state.pushed & bits:
                raise InternalError(f"page {page}, layer {block.layer} was pushed before")
            sending = replace(
                state,
                phase=Phase.SENDING,
                pushed=state.pushed | bits,
                in_flight=state.in_flight + block.pages * block.layers,
            )
            return sending, (PostWrite(*place),)
        case Phase.DRAINING | Phase.DRAINED:
            return state, ()
        case Phase.IDLE | Phase.OPENING | Phase.FIN_SENT | Phase.DONE:
            raise InternalError(f"page {page} was pushed while the transfer is {state.phase.value}")
        case _:
            assert_never(state.phase)


def _writes_done(state: SenderState, count: int) -> Step:
    if count > state.in_flight:
        raise InternalError(f"{count} writes done, {state.in_flight} were under way")
    left = replace(state, in_flight=state.in_flight - count)
    if left.phase is Phase.DRAINING and left.in_flight == 0:
        return replace(left, phase=Phase.DRAINED), (PostDrained(),)
    return left, ()


def _finished(state: SenderState, fin: Fin) -> Step:
    match state.phase:
        case Phase.GRANTED | Phase.SENDING:
            if fin.num_writes != state.num_writes:
                reason = f"FIN counts {fin.num_writes} writes, {state.num_writes} were made"
                return _aborted(state, reason, (PostAbort(reason),))
            return replace(state, phase=Phase.FIN_SENT, fin=fin), (PostFin(fin),)
        case Phase.DRAINING | Phase.DRAINED:
            return state, ()
        case Phase.IDLE | Phase.OPENING | Phase.FIN_SENT | Phase.DONE:
            raise InternalError(f"finish was called while the transfer is {state.phase.value}")
        case _:
            assert_never(state.phase)


def _aborted(state: SenderState, reason: str, post: tuple[Effect, ...]) -> Step:
    match state.phase:
        case Phase.IDLE:
            return replace(state, phase=Phase.DRAINED), (Fail(reason),)
        case Phase.OPENING | Phase.GRANTED | Phase.SENDING | Phase.FIN_SENT:
            if state.in_flight == 0:
                drained = replace(state, phase=Phase.DRAINED)
                return drained, (Fail(reason), *post, CancelQueued(), PostDrained())
            draining = replace(state, phase=Phase.DRAINING)
            return draining, (Fail(reason), *post, CancelQueued())
        case Phase.DONE | Phase.DRAINING | Phase.DRAINED:
            return state, ()
        case _:
            assert_never(state.phase)


def _refused(state: SenderState, reason: str) -> Step:
    """The receiver waits for DRAINED, whether or not it was said before."""
    if state.phase is Phase.DRAINED:
        return state, (PostDrained(),)
    refused, effects = _aborted(state, reason, ())
    if state.phase is Phase.IDLE:
        effects = (*effects, PostDrained())
    return refused, effects


def _closed(state: SenderState, reason: str) -> Step:
    match state.phase:
        case Phase.DONE | Phase.DRAINED:
            return replace(state, in_flight=0), ()
        case Phase.DRAINING:
            return replace(state, phase=Phase.DRAINED, in_flight=0), ()
        case Phase.IDLE | Phase.OPENING | Phase.GRANTED | Phase.SENDING | Phase.FIN_SENT:
            lost = replace(state, phase=Phase.DRAINED, in_flight=0)
            return lost, (Fail(f"the connection to the receiver was lost: {reason}"),)
        case _:
            assert_never(state.phase)

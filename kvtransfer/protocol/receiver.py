"""One lease as its receiver sees it: a pure function ``(state, event) -> (state, effects)``.

    RESERVED --Opened--> FILLING --all writes and FIN--> COMPLETE --Installed--> INSTALLED
    any --failure, abort, cancel--> QUARANTINED --drained, connection closed, fence--> FREE

Pages leave QUARANTINED only when the sender has said that it will write no more, or its connection
is gone, or the receiver checks each write before it lands (then the fence is immediate). A timer
may start something (a cancel, a reminder, a fence) and never ends a quarantine. A generation stops
a false completion, not a stray write; both rules are needed.

Every write of a generation has its bit: an attempt that follows another has its own generation and
begins with none set. Pages that were complete before a failure may be kept once the lease is FREE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from pdmesh.kvtransfer.protocol.units import block_bits
from pdmesh.wire.messages import Fin


class Phase(Enum):
    """Where a lease stands at its receiver."""

    RESERVED = "reserved"
    """Pages are promised; no sender has opened the lease, so nothing can be written."""
    FILLING = "filling"
    COMPLETE = "complete"
    INSTALLED = "installed"
    QUARANTINED = "quarantined"
    """Failed or cancelled; a write may still land in the pages."""
    FREE = "free"
    """No write can land any more."""


@dataclass(frozen=True, slots=True)
class ReceiverState:
    """A lease of ``num_pages`` x ``num_layers`` writes under one generation."""

    generation: int
    num_pages: int
    num_layers: int
    phase: Phase = Phase.RESERVED
    one_sided: bool = False
    """The sender's writes land without this process checking them first."""
    arrived: int = 0
    """Bit ``page * num_layers + layer`` is set once that write has arrived."""
    fin: Fin | None = None

    @property
    def expected(self) -> int:
        return self.num_pages * self.num_layers

    @property
    def num_arrived(self) -> int:
        return self.arrived.bit_count()

    def has(self, page: int, layer: int, pages: int = 1, layers: int = 1) -> bool:
        """Whether the lease has a place for the whole block."""
        return (
            0 <= page < page + pages <= self.num_pages
            and 0 <= layer < layer + layers <= self.num_layers
        )

    def wants(self, generation: int, page: int, layer: int, pages: int, layers: int) -> bool:
        """Whether a block may be written now: the lease is filling and it has not arrived."""
        return (
            generation == self.generation
            and self.phase is Phase.FILLING
            and self.has(page, layer, pages, layers)
            and not self.arrived & block_bits(self.num_layers, page, layer, pages, layers)
        )

    @property
    def complete_pages(self) -> int:
        """Leading pages of which every layer has arrived: what survives a failure.

        They may be published once the phase is FREE; a further attempt needs only the others.
        """
        whole, pages = (1 << self.num_layers) - 1, 0
        while pages < self.num_pages and self.arrived >> pages * self.num_layers & whole == whole:
            pages += 1
        return pages


@dataclass(frozen=True, slots=True)
class Opened:
    """A sender began to write; ``one_sided`` says how."""

    generation: int
    one_sided: bool


@dataclass(frozen=True, slots=True)
class WriteArrived:
    """A block of units arrived, its checksums right: ``layers`` layers of each of ``pages`` pages.

    ``page`` is counted from the lease's first page.
    """

    generation: int
    page: int
    layer: int
    pages: int = 1
    layers: int = 1


@dataclass(frozen=True, slots=True)
class WriteCorrupt:
    """A write whose checksum was wrong."""

    generation: int
    page: int
    layer: int


@dataclass(frozen=True, slots=True)
class FinArrived:
    fin: Fin


@dataclass(frozen=True, slots=True)
class SenderAborted:
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SenderDrained:
    """The sender will never write again under this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection of the lease's sender is gone, and with it all writes under way."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The owner of the lease wants its pages back."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The owner took over the complete pages."""


@dataclass(frozen=True, slots=True)
class Reminded:
    """DRAINED is overdue: it, or what asked for it, may have been lost."""


@dataclass(frozen=True, slots=True)
class DrainOverdue:
    """Reminders did not help: the sender is cut off."""


Event = (
    Opened
    | WriteArrived
    | WriteCorrupt
    | FinArrived
    | SenderAborted
    | SenderDrained
    | ConnectionClosed
    | Cancelled
    | Installed
    | Reminded
    | DrainOverdue
)


@dataclass(frozen=True, slots=True)
class Store:
    """Copy the write into its pages (a one-sided write is there already)."""

    page: int
    layer: int
    pages: int = 1
    layers: int = 1


@dataclass(frozen=True, slots=True)
class Drop:
    """Ignore the message."""

    why: str


@dataclass(frozen=True, slots=True)
class TellSender:
    """Tell the sender to stop and to say when it has drained."""

    reason: str


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the sender that everything arrived."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand the FIN to whoever waits for the lease."""

    fin: Fin


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell whoever waits for the lease why it failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Free:
    """No write can land in the pages any more."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Close the connection, so that no write over it can land; ``ConnectionClosed`` follows."""

    reason: str


Effect = Store | Drop | TellSender | Acknowledge | Deliver | Fail | Free | Fence
Step = tuple[ReceiverState, tuple[Effect, ...]]


def step(state: ReceiverState, event: Event) -> Step:
    """The state after ``event``, and what to do about it, in order."""
    match event:
        case Opened(generation, one_sided):
            return _opened(state, generation, one_sided)
        case WriteArrived():
            return _write(state, event)
        case WriteCorrupt():
            return _corrupt(state, event)
        case FinArrived(fin):
            return _fin(state, fin)
        case SenderAborted(generation, reason):
            return _aborted(state, generation, reason)
        case SenderDrained(generation):
            return _drained(state, generation)
        case ConnectionClosed(reason):
            return _closed(state, reason)
        case Cancelled():
            return _cancelled(state)
        case Installed():
            if state.phase is Phase.COMPLETE:
                return replace(state, phase=Phase.INSTALLED), ()
            return state, (Drop(f"nothing to install: {state.phase.value}"),)
        case Reminded():
            if state.phase is Phase.QUARANTINED:
                return state, (TellSender("the lease is over"),)
            return state, ()
        case DrainOverdue():
            if state.phase is Phase.QUARANTINED:
                return state, (Fence("the sender did not drain in time"),)
            return state, ()
        case _:
            assert_never(event)


def _opened(state: ReceiverState, generation: int, one_sided: bool) -> Step:
    if generation != state.generation:
        return state, (
            TellSender(f"generation {generation} is not the current {state.generation}"),
        )
    if state.phase is not Phase.RESERVED:
        return state, (TellSender(f"the lease has had its writer: {state.phase.value}"),)
    return replace(state, phase=Phase.FILLING, one_sided=one_sided), ()


def _stale(state: ReceiverState, generation: int) -> str | None:
    """Why a message of ``generation`` means nothing now, or None."""
    if generation != state.generation:
        return f"generation {generation} is not the current {state.generation}"
    if state.phase is not Phase.FILLING:
        return f"the lease is {state.phase.value}"
    return None


def _write(state: ReceiverState, event: WriteArrived) -> Step:
    if why := _stale(state, event.generation):
        return state, (Drop(why),)
    place = event.page, event.layer, event.pages, event.layers
    if not state.has(*place):
        return _fail(state, f"page {event.page}, layer {event.layer} is not part of the lease")
    bits = block_bits(state.num_layers, *place)
    if state.arrived & bits == bits:
        return state, (Drop("it arrived before"),)
    if state.arrived & bits:
        return _fail(state, f"page {event.page}, layer {event.layer} was written twice")
    filled = replace(state, arrived=state.arrived | bits)
    return _complete(filled, (Store(*place),))


def _corrupt(state: ReceiverState, event: WriteCorrupt) -> Step:
    if why := _stale(state, event.generation):
        return state, (Drop(why),)
    return _fail(state, f"checksum of page {event.page}, layer {event.layer} is wrong")


def _fin(state: ReceiverState, fin: Fin) -> Step:
    if fin.generation == state.generation and state.phase in (Phase.COMPLETE, Phase.INSTALLED):
        return state, (Acknowledge(),)
    if why := _stale(state, fin.generation):
        return state, (Drop(why),)
    if fin.num_writes != state.expected:
        return _fail(
            state, f"the sender made {fin.num_writes} writes, the lease needs {state.expected}"
        )
    return _complete(replace(state, fin=fin), ())


def _complete(state: ReceiverState, effects: tuple[Effect, ...]) -> Step:
    if state.fin is None or state.num_arrived != state.expected:
        return state, effects
    done = replace(state, phase=Phase.COMPLETE)
    return done, (*effects, Deliver(state.fin), Acknowledge())


def _aborted(state: ReceiverState, generation: int, reason: str) -> Step:
    if generation == state.generation and state.phase is Phase.RESERVED:
        return _freed(state, Fail(f"the sender gave up: {reason}"))
    if why := _stale(state, generation):
        return state, (Drop(why),)
    return _quarantine(state, (Fail(f"the sender gave up: {reason}"),))


def _drained(state: ReceiverState, generation: int) -> Step:
    if generation != state.generation:
        return state, (Drop(f"generation {generation} is not the current {state.generation}"),)
    match state.phase:
        case Phase.QUARANTINED:
            return replace(state, phase=Phase.FREE), (Free(),)
        case Phase.RESERVED | Phase.FILLING:
            return _freed(state, Fail("the sender stopped writing"))
        case Phase.COMPLETE | Phase.INSTALLED | Phase.FREE:
            return state, (Drop(f"the lease is {state.phase.value}"),)
        case _:
            assert_never(state.phase)


def _closed(state: ReceiverState, reason: str) -> Step:
    match state.phase:
        case Phase.QUARANTINED:
            return replace(state, phase=Phase.FREE), (Free(),)
        case Phase.FILLING:
            return _freed(
                state,
                Fail(
                    f"the connection was lost after {state.num_arrived} of {state.expected}"
                    f" writes: {reason}"
                ),
            )
        case Phase.RESERVED | Phase.COMPLETE | Phase.INSTALLED | Phase.FREE:
            return state, ()
        case _:
            assert_never(state.phase)


def _cancelled(state: ReceiverState) -> Step:
    match state.phase:
        case Phase.RESERVED:
            return _freed(state, Fail("the lease was cancelled"))
        case Phase.FILLING:
            return _fail(state, "the lease was cancelled")
        case Phase.COMPLETE | Phase.INSTALLED:
            return _freed(state)
        case Phase.QUARANTINED | Phase.FREE:
            return state, ()
        case _:
            assert_never(state.phase)


def _fail(state: ReceiverState, reason: str) -> Step:
    return _quarantine(state, (Fail(reason), TellSender(reason)))


def _quarantine(state: ReceiverState, effects: tuple[Effect, ...]) -> Step:
    if state.one_sided:
        return replace(state, phase=Phase.QUARANTINED), effects
    return _freed(state, *effects)


def _freed(state: ReceiverState, *effects: Effect) -> Step:
    return replace(state, phase=Phase.FREE), (*effects, Free())

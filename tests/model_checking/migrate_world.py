"""The world of ``migrate``: its bounds, its messages, and what each role's effects do to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdmesh.kvtransfer.protocol import migration_gateway as g
from pdmesh.kvtransfer.protocol import migration_source as s
from pdmesh.kvtransfer.protocol import migration_target as t
from pdmesh.kvtransfer.protocol.migration import Answer

if TYPE_CHECKING:
    from model_checking.migrate import MigrateModel

ANSWER = Answer("q", ())
PROMPT_PAGES = 2
PAGE_TOKENS = 2
OTHER = {"w0": "w1", "w1": "w0"}
WORKERS = ("w0", "w1")
NONE = -1


@dataclass(frozen=True)
class Bounds:
    """How long the answer is, how many handoffs are offered, what may go wrong how often."""

    tokens: int = 3
    handoffs: int = 1
    losses: int = 0
    duplicates: int = 0
    crashes: int = 0
    cuts: int = 0
    deadlines: int = 1
    """Deadlines that pass at a target."""


@dataclass(frozen=True)
class Rules:
    """What is checked: the real functions, or a variant with a mistake."""

    source: Callable[[s.SourceState, s.Event], s.Step] = s.step
    target: Callable[[t.TargetState, t.Event], t.Step] = t.step
    gateway: Callable[[g.GatewayState, g.Event], g.Step] = g.step
    timeout: bool = False
    """A source whose commit is not answered hears ``Aborted`` from its own clock."""


@dataclass(frozen=True, order=True)
class Letter:
    """A message: to the gateway, to a worker's source role, or to its target role of a handoff."""

    to: str
    role: str
    handoff: int
    event: Any

    def __str__(self) -> str:
        what = type(self.event).__name__
        fields = {k: getattr(self.event, k) for k in self.event.__dataclass_fields__}
        fields.pop("capsule", None)
        said = ", ".join(f"{k}={v}" for k, v in fields.items())
        return f"{what}({said}) at {self.to}"


class Draft:
    """A world being changed."""

    def __init__(self, m: MigrateModel, world: Any) -> None:
        self.m = m
        self.broken = ""
        self.gate, src, tgt, net, copies, rest = world
        self.src, self.tgt = dict(zip(WORKERS, src, strict=True)), list(tgt)
        self.net, self.copies = set(net), set(copies)
        self.twice, self.lost, self.gone = set(rest[0]), set(rest[1]), set(rest[2])
        self.declared = set(rest[3])
        self.budget = list(rest[4])

    def world(self) -> Any:
        net = frozenset(code for code in self.net if not self._void(code))
        return (
            self.gate,
            (self.src["w0"], self.src["w1"]),
            tuple(self.tgt),
            net,
            frozenset(self.copies),
            (
                frozenset(self.twice & net),
                frozenset(self.lost),
                frozenset(self.gone),
                frozenset(self.declared),
                tuple(self.budget),
            ),
        )

    def _void(self, code: int) -> bool:
        """Whether a message can have no effect now or later; phases of a handoff go forward."""
        m = self.m
        letter: Letter = m.letters.states[code]
        if letter.role == "source":
            number = self.src[letter.to]
            return number == NONE or self._void_at_source(letter, number)
        if letter.role == "target":
            return self._void_at_target(letter)
        return self._void_at_gateway(letter)

    def _void_at_source(self, letter: Letter, number: int) -> bool:
        m, event = self.m, letter.event
        state = m.source.states[number]
        if state.phase in s.OVER:
            return True
        match event:
            case s.ChunkAcknowledged(position):
                higher = s.ChunkAcknowledged(position + 1)
                known = Letter(letter.to, "source", 0, higher) in m.letters and (
                    m.letters.number(Letter(letter.to, "source", 0, higher)) in self.net
                )
                return position <= state.acknowledged or known
            case s.Fenced(attempt):
                return attempt <= state.attempt
            case s.MigrateAsked(handoff):
                decided = m.gateway.states[self.gate].decided(handoff)
                return state.handoff >= handoff and decided is not g.Decision.OPEN
            case _:
                return m.source.step(number, event) == (number, ())

    def _void_at_target(self, letter: Letter) -> bool:
        m = self.m
        number = self.tgt[m.slot(letter.to, letter.handoff)]
        phase = m.target.states[number].phase
        match letter.event:
            case "reserve":
                return phase in (t.Phase.READY, t.Phase.ACTIVE)
            case t.CapsuleArrived():
                other = self.src[OTHER[letter.to]]
                waits = other != NONE and m.source.states[other].phase is s.Phase.TAIL
                return phase is t.Phase.ACTIVE or not waits
            case t.AbortArrived():
                return phase in (t.Phase.ACTIVE, t.Phase.RELEASED)
            case t.ActivateArrived(attempt):
                late = m.gateway.states[self.gate].attempt > attempt
                return late and phase in (t.Phase.ACTIVE, t.Phase.RELEASED)
            case _:
                return False

    def _void_at_gateway(self, letter: Letter) -> bool:
        m, event = self.m, letter.event
        gate = m.gateway.states[self.gate]
        number = self.src[WORKERS[letter.handoff]]
        state = None if number == NONE else m.source.states[number]
        idle = state is None or state.phase in s.OVER
        match event:
            case g.ChunkArrived(attempt, position, tokens, finished):
                if attempt != gate.attempt or gate.ended:
                    return idle
                return not finished and position + len(tokens) <= len(gate.tokens)
            case g.ActiveArrived(attempt):
                return gate.active if attempt == gate.attempt else idle
            case g.ActivateRefused(attempt):
                return attempt != gate.attempt or gate.active
            case g.CommitAsked(handoff=handoff) | g.AbortAsked(handoff=handoff):
                if gate.decided(handoff) is g.Decision.OPEN:
                    return False
                return (
                    state is None
                    or idle
                    or state.handoff != handoff
                    or (state.phase is s.Phase.DECODING)
                )
            case _:
                return False

    def send(self, to: str, role: str, handoff: int, event: Any) -> None:
        self.net.add(self.m.letters.number(Letter(to, role, handoff, event)))

    # ---- roles ------------------------------------------------------------------------------

    def gateway(self, event: g.Event, sender: str = "") -> None:
        m = self.m
        before = m.gateway.states[self.gate]
        self.gate, effects = m.gateway.step(self.gate, event)
        after = m.gateway.states[self.gate]
        for handoff in range(1, before.handoff + 1):
            was = before.decided(handoff)
            if was is not g.Decision.OPEN and after.decided(handoff) is not was:
                self.broken = "I11: a decision about a handoff was changed"
        count = len(before.tokens)
        for effect in effects:
            match effect:
                case g.PostMigrate(worker, handoff, target):
                    self.send(worker, "source", 0, s.MigrateAsked(handoff, target))
                case g.Deliver(position, tokens):
                    if position != count or tokens != tuple(range(count, count + len(tokens))):
                        self.broken = f"I10: tokens {tokens} were delivered at {position}"
                    count += len(tokens)
                case g.Acknowledge(_, position) if sender:
                    self.send(sender, "source", 0, s.ChunkAcknowledged(position))
                case g.PostFenced(attempt) if sender:
                    self.send(sender, "source", 0, s.Fenced(attempt))
                case g.PostCommitted(handoff):
                    self.send(
                        sender or m.source_of(handoff, self), "source", 0, s.Committed(handoff)
                    )
                case g.PostAborted(handoff):
                    self.send(sender or m.source_of(handoff, self), "source", 0, s.Aborted(handoff))
                case g.PostActivate(worker, handoff, attempt, position) if worker in WORKERS:
                    self.send(worker, "target", handoff, t.ActivateArrived(attempt, position))
                case g.AbortTarget(worker, handoff) if worker in WORKERS:
                    self.send(worker, "target", handoff, t.AbortArrived())

    def source(self, worker: str, event: s.Event) -> None:
        m = self.m
        if self.src[worker] == NONE:
            return
        before = m.source.states[self.src[worker]]
        self.src[worker], effects = m.source.step(self.src[worker], event)
        cut = worker in self.gone
        number = WORKERS.index(worker)
        for effect in effects:
            match effect:
                case s.PostReserve(handoff, target):
                    self.send(target, "target", handoff, "reserve")
                case s.StartRound(handoff, index, first, count):
                    pages = {(handoff, index, page) for page in range(first, first + count)}
                    self.copies |= pages
                    if not pages:
                        self.round_ends(handoff, index)
                case s.PostCapsule(handoff, capsule):
                    target = m.source.states[self.src[worker]].target
                    self.send(target, "target", handoff, t.CapsuleArrived(capsule))
                case s.PostCommit(attempt, handoff, target, position, tail) if not cut:
                    asked = g.CommitAsked(attempt, handoff, target, position, tail)
                    self.send("gateway", "gateway", number, asked)
                case s.PostAbort(handoff) if not cut:
                    self.send("gateway", "gateway", number, g.AbortAsked(handoff))
                case s.AbortTarget(handoff):
                    self.copies = {copy for copy in self.copies if copy[0] != handoff}
                    self.send(before.target, "target", handoff, t.AbortArrived())
                case s.PostTokens(attempt, position, tokens, finished) if not cut:
                    chunk = g.ChunkArrived(attempt, position, tokens, finished)
                    self.send("gateway", "gateway", number, chunk)

    def target(self, worker: str, handoff: int, event: t.Event) -> None:
        m = self.m
        slot = m.slot(worker, handoff)
        self.tgt[slot], effects = m.target.step(self.tgt[slot], event)
        source = OTHER[worker]
        number = WORKERS.index(worker)
        for effect in effects:
            match effect:
                case t.PostGranted(have_pages):
                    self.send(source, "source", 0, s.TargetGranted(handoff, have_pages))
                case t.PostFailed(reason):
                    self.send(source, "source", 0, s.TargetFailed(handoff, reason))
                case t.PostReady(position):
                    self.send(source, "source", 0, s.TargetReady(handoff, position))
                case t.StartDecoding(attempt, capsule):
                    if any(copy[0] == handoff for copy in self.copies):
                        self.broken = "I4: decoding began with pages missing"
                    seen = len(capsule.output)
                    state = s.SourceState(ANSWER, attempt, capsule.output, seen, m.full_pages(seen))
                    self.src[worker] = m.source.number(state)
                case t.PostActive(attempt) if worker not in self.gone:
                    self.send("gateway", "gateway", number, g.ActiveArrived(attempt))
                case t.RefuseActivate(attempt):
                    self.send("gateway", "gateway", number, g.ActivateRefused(attempt))

    def round_ends(self, handoff: int, index: int) -> None:
        worker = self.m.target_of(handoff, self)
        self.target(worker, handoff, t.RoundArrived(index))
        self.source(OTHER[worker], s.RoundDone(handoff, index))

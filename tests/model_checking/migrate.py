"""Live migration: a gateway and two decode workers run the real machines of all three roles.

An answer of a few tokens (the token at output position i is i, so that a lost or repeated one
shows) is decoded on worker 0 while the gateway offers handoffs between the workers. Pages of a
round land one by one. Messages are lost, repeated and reordered within bounds; a worker crashes and
comes back empty; a stream to the gateway is cut. A third worker stands for any failover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from model_checking.explorer import Machine, Move
from pdmesh.kvtransfer.protocol import migration_gateway as g
from pdmesh.kvtransfer.protocol import migration_source as s
from pdmesh.kvtransfer.protocol import migration_target as t
from pdmesh.kvtransfer.protocol.migration import Answer

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


class MigrateModel:
    """See the module."""

    def __init__(self, bounds: Bounds, rules: Rules | None = None) -> None:
        self.bounds = bounds
        self.rules = rules or Rules()
        self.source = Machine(self.rules.source)
        self.target = Machine(self.rules.target)
        self.gateway = Machine(self.rules.gateway)
        self.letters = Machine(lambda state, event: (state, ()))

    def slot(self, worker: str, handoff: int) -> int:
        return (handoff - 1) * 2 + WORKERS.index(worker)

    def full_pages(self, tokens: int) -> int:
        return PROMPT_PAGES + max(0, tokens - 1) // PAGE_TOKENS

    def num_pages(self, tokens: int) -> int:
        return PROMPT_PAGES + -(-max(0, tokens - 1) // PAGE_TOKENS)

    def target_of(self, handoff: int, draft: Draft) -> str:
        """Who is the target of a handoff: the source knows it, or else the target does."""
        for worker, number in draft.src.items():
            if number != NONE and self.source.states[number].handoff == handoff:
                return self.source.states[number].target
        return next(w for w in WORKERS if draft.tgt[self.slot(w, handoff)] != self.idle)

    def source_of(self, handoff: int, draft: Draft) -> str:
        for worker, number in draft.src.items():
            if number != NONE and self.source.states[number].handoff == handoff:
                return worker
        gate = self.gateway.states[draft.gate]
        return OTHER.get(gate.target, "w0") if handoff == gate.handoff else "w0"

    @property
    def idle(self) -> int:
        return self.target.number(t.TargetState())

    def initial(self) -> Any:
        b = self.bounds
        nothing: frozenset[Any] = frozenset()
        return (
            self.gateway.number(g.GatewayState("w0")),
            (self.source.number(s.SourceState(ANSWER, 1, full_pages=PROMPT_PAGES)), NONE),
            (self.idle,) * (2 * b.handoffs),
            nothing,
            nothing,
            (
                nothing,
                nothing,
                nothing,
                nothing,
                (b.losses, b.duplicates, b.crashes, b.cuts, b.deadlines),
            ),
        )

    def settled(self, world: Any) -> bool:
        gate, src, tgt, _, copies, _ = world
        waiting = (t.Phase.RESERVED, t.Phase.READY)
        whole = self.gateway.states[gate].tokens == tuple(range(self.bounds.tokens))
        return (
            self.gateway.states[gate].ended
            and whole
            and not copies
            and all(n == NONE or self.source.states[n].phase in s.OVER for n in src)
            and not any(self.target.states[n].phase in waiting for n in tgt)
        )

    def broken(self, world: Any) -> str:
        gate, src, tgt, _, _, rest = world
        state = self.gateway.states[gate]
        runs = [
            worker
            for worker, n in zip(WORKERS, src, strict=True)
            if n != NONE and self.source.states[n].phase in s.RUNNING
        ]
        if len(runs) == 2 and not rest[3]:
            return "I9: two workers decode the same answer"
        for worker, n in zip(WORKERS, src, strict=True):
            if n == NONE:
                continue
            one = self.source.states[n]
            decision = state.decided(one.handoff) if one.handoff else g.Decision.ABORTED
            if one.phase is s.Phase.RELEASED and decision is not g.Decision.COMMITTED:
                return f"I11: {worker} gave its pages away without a commit"
            if one.phase in s.RUNNING and decision is g.Decision.COMMITTED:
                return f"I11: {worker} decodes on after it was handed over"
        for handoff in range(1, self.bounds.handoffs + 1):
            for worker in WORKERS:
                phase = self.target.states[tgt[self.slot(worker, handoff)]].phase
                if phase is t.Phase.ACTIVE and handoff not in state.committed:
                    return f"I11: {worker} decodes without a commit"
        return ""

    def _move(self, label: str, draft: Draft, fault: bool = False) -> Move:
        if draft.broken:
            return Move(label, None, fault, draft.broken)
        return Move(label, draft.world(), fault)

    def moves(self, world: Any) -> Iterator[Move]:
        yield from self._letters(world)
        yield from self._gateway_moves(world)
        for worker in WORKERS:
            yield from self._source_moves(world, worker)
        yield from self._target_moves(world)
        for copy in sorted(world[4]):
            draft = Draft(self, world)
            draft.copies.remove(copy)
            handoff, index, page = copy
            if not any(one[:2] == copy[:2] for one in draft.copies):
                draft.round_ends(handoff, index)
            yield self._move(f"page {page} of handoff {handoff} is written", draft)
        yield from self._faults(world)

    def _letters(self, world: Any) -> Iterator[Move]:
        for code in sorted(world[3]):
            letter: Letter = self.letters.states[code]
            draft = Draft(self, world)
            if code in draft.twice:
                draft.twice.remove(code)
            else:
                draft.net.remove(code)
            if letter.role == "gateway":
                draft.gateway(letter.event, WORKERS[letter.handoff])
            elif letter.role == "source":
                draft.source(letter.to, letter.event)
            elif letter.event == "reserve":
                n = draft.src[letter.to]
                room = n == NONE or self.source.states[n].phase in s.OVER
                draft.target(letter.to, letter.handoff, t.ReserveArrived(room, 0))
            else:
                draft.target(letter.to, letter.handoff, letter.event)
            said = f"reserve at {letter.to}" if letter.event == "reserve" else str(letter)
            yield self._move(said, draft)

    def _gateway_moves(self, world: Any) -> Iterator[Move]:
        state = self.gateway.states[world[0]]
        unreachable = world[5][2] & world[5][3]
        wanted = state.handoff < self.bounds.handoffs and state.owner in OTHER
        if wanted and OTHER[state.owner] not in unreachable:
            draft = Draft(self, world)
            draft.gateway(g.MigrationWanted(OTHER[state.owner]))
            if draft.gate != world[0]:
                yield self._move("gateway wants a migration", draft)
        draft = Draft(self, world)
        draft.gateway(g.Reminded())
        if draft.net != world[3]:
            yield self._move("gateway asks again", draft)
        if state.owner == "" and not state.ended:
            draft = Draft(self, world)
            draft.gateway(g.OwnerFound("w2"))
            start = len(state.tokens)
            rest = tuple(range(start, self.bounds.tokens))
            draft.gateway(g.ChunkArrived(state.attempt, start, rest, finished=True))
            yield self._move("another worker finishes the answer", draft)
        for worker in sorted(world[5][1]):
            draft = Draft(self, world)
            draft.lost.remove(worker)
            draft.declared.add(worker)
            draft.gateway(g.WorkerLost(worker))
            yield self._move(f"gateway sees that {worker} is lost", draft)

    def _source_moves(self, world: Any, worker: str) -> Iterator[Move]:
        number = world[1][WORKERS.index(worker)]
        if number == NONE:
            return
        state = self.source.states[number]
        length = len(state.output)
        if state.phase in s.RUNNING and length < self.bounds.tokens:
            draft = Draft(self, world)
            last = length + 1 == self.bounds.tokens
            draft.source(worker, s.Stepped((length,), self.full_pages(length + 1), last))
            yield self._move(f"{worker} decodes token {length}", draft)
        if state.phase is s.Phase.STOPPING:
            draft = Draft(self, world)
            draft.source(worker, s.Stopped(length, self.num_pages(length)))
            yield self._move(f"{worker} stops after {length} tokens", draft)
        draft = Draft(self, world)
        draft.source(worker, s.Reminded())
        if draft.net != world[3] and not self._answer_due(world, worker):
            yield self._move(f"{worker} asks again", draft)
        if worker in world[5][2] and state.phase not in s.OVER:
            draft = Draft(self, world)
            draft.source(worker, s.GatewayLost())
            yield self._move(f"{worker} sees that the gateway is lost", draft)
        if self.rules.timeout and state.phase is s.Phase.COMMITTING:
            draft = Draft(self, world)
            draft.source(worker, s.Aborted(state.handoff))
            yield self._move(f"{worker} takes the commit for failed", draft)

    def _answer_due(self, world: Any, worker: str) -> bool:
        """Something for or from this worker is on its way: nothing is overdue yet."""
        mine = WORKERS.index(worker)
        for code in world[3]:
            letter: Letter = self.letters.states[code]
            if letter.to == worker and letter.role == "source":
                return True
            if letter.role == "gateway" and letter.handoff == mine:
                return True
        return False

    def _target_moves(self, world: Any) -> Iterator[Move]:
        for slot, number in enumerate(world[2]):
            phase = self.target.states[number].phase
            handoff, worker = slot // 2 + 1, WORKERS[slot % 2]
            if phase not in (t.Phase.RESERVED, t.Phase.READY):
                continue
            draft = Draft(self, world)
            draft.target(worker, handoff, t.Reminded())
            if draft.net != world[3]:
                yield self._move(f"{worker} says again that it is ready", draft)
            draft = Draft(self, world)
            draft.target(worker, handoff, t.DeadlinePassed())
            early = draft.budget[4] > 0
            if early or self._forgotten(world, handoff):
                draft.budget[4] -= early
                yield self._move(f"{worker}'s deadline ends handoff {handoff}", draft, fault=False)

    def _forgotten(self, world: Any, handoff: int) -> bool:
        """The gateway has aborted the handoff: nobody will speak of it any more."""
        return self.gateway.states[world[0]].decided(handoff) is g.Decision.ABORTED

    def _faults(self, world: Any) -> Iterator[Move]:
        twice = world[5][0]
        losses, duplicates, crashes, cuts, _ = world[5][4]
        for code in sorted(world[3]):
            letter = self.letters.states[code]
            said = f"reserve at {letter.to}" if letter.event == "reserve" else str(letter)
            if losses:
                draft = Draft(self, world)
                draft.budget[0] -= 1
                (draft.twice if code in twice else draft.net).remove(code)
                yield self._move(f"FAULT: {said} is lost", draft, fault=True)
            if duplicates and code not in twice:
                draft = Draft(self, world)
                draft.budget[1] -= 1
                draft.twice.add(code)
                yield self._move(f"FAULT: {said} is repeated", draft, fault=True)
        for worker in WORKERS:
            if crashes:
                draft = Draft(self, world)
                draft.budget[2] -= 1
                self._dies(draft, worker)
                yield self._move(f"FAULT: {worker} crashes and starts again", draft, fault=True)
            if cuts:
                draft = Draft(self, world)
                draft.budget[3] -= 1
                draft.gone.add(worker)
                draft.lost.add(worker)
                label = f"FAULT: the stream between the gateway and {worker} is cut"
                yield self._move(label, draft, fault=True)

    def _dies(self, draft: Draft, worker: str) -> None:
        """All it knew is gone; what was on its way to it is lost; both peers will notice."""
        doomed = [copy for copy in draft.copies if worker in (self.target_of(copy[0], draft), "")]
        letters = self.letters.states
        draft.net = {code for code in draft.net if letters[code].to != worker}
        for handoff in {copy[0] for copy in doomed}:
            other = OTHER[worker]
            draft.copies -= set(doomed)
            draft.send(other, "source", 0, s.TargetFailed(handoff, "the target is lost"))
        number = draft.src[worker]
        if number != NONE:
            handoff = self.source.states[number].handoff
            draft.copies = {copy for copy in draft.copies if copy[0] != handoff}
        draft.src[worker] = NONE
        for handoff in range(1, self.bounds.handoffs + 1):
            draft.tgt[self.slot(worker, handoff)] = self.idle
        draft.lost.add(worker)

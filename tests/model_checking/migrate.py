"""Live migration: a gateway and two decode workers run the real machines of all three roles.

An answer of a few tokens (the token at output position i is i, so that a lost or repeated one
shows) is decoded on worker 0 while the gateway offers handoffs between the workers. Pages of a
round land one by one. Messages are lost, repeated and reordered within bounds; a worker crashes and
comes back empty; a stream to the gateway is cut. A third worker stands for any failover.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from model_checking.explorer import Machine, Move
from model_checking.migrate_world import (
    ANSWER,
    NONE,
    OTHER,
    PAGE_TOKENS,
    PROMPT_PAGES,
    WORKERS,
    Bounds,
    Draft,
    Letter,
    Rules,
)
from pdmesh.kvtransfer.protocol import migration_gateway as g
from pdmesh.kvtransfer.protocol import migration_source as s
from pdmesh.kvtransfer.protocol import migration_target as t

__all__ = ["Bounds", "MigrateModel", "Rules"]


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
        for _worker, number in draft.src.items():
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

    def best(self, world: Any) -> bool:
        """Every handoff that was possible was committed, and the answer is whole."""
        state = self.gateway.states[world[0]]
        return state.ended and len(state.committed) == self.bounds.handoffs

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

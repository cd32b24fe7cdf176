"""Pushes: a gateway, a prefill worker and a decode worker run the real sender and receiver.

The gateway reserves at the decode worker (all pages of an attempt at once), hands the lease to the
prefill worker, and gives an attempt up whenever it likes. One-sided writes are on their way for as
long as they like and land past every check; only a closed connection stops them. The network loses
and repeats messages within bounds and keeps no order. Timers are free: a deadline, a reminder, a
fence may come at any moment at which the machines allow them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from model_checking.explorer import Move
from model_checking.push_numbers import Numbers
from model_checking.push_world import (
    ABORT,
    ANSWERED,
    ARRIVED,
    CANCEL,
    DRAINED,
    FIN,
    INCS,
    NAMES,
    NOBODY,
    OPEN,
    PREFILL,
    READY,
    REFUSED,
    REPEATS,
    RUNNING,
    STOP,
    TO_PREFILL,
    WHO,
    WRITE,
    Bounds,
    D,
    Draft,
    P,
    Rules,
)
from pdmesh.kvtransfer.protocol import receiver as r
from pdmesh.kvtransfer.protocol import sender as s

__all__ = ["Bounds", "PushModel", "Rules"]


class PushModel(Numbers):
    """See the module."""

    # ---- the world --------------------------------------------------------------------------

    def initial(self) -> Any:
        b = self.bounds
        none = (-1,) * self.T
        return (
            (READY * 8 + 1,) * b.requests,
            (self.idle,) * self.T,
            none,
            none,
            ((),) * self.T,
            (-1,) * b.pool,
            (),
            (),
            (0, 0, 0, NOBODY, NOBODY, b.losses, b.duplicates, b.crashes, b.pauses),
        )

    def settled(self, world: Any) -> bool:
        g, snd, rcv, _, _, pool, _, writes, rest = world
        return (
            not writes
            and all(code >= ANSWERED * 8 for code in g)
            and all(number < 0 for number in rcv)
            and all(code < 0 for code in pool)
            and all(number == self.idle or self.sender_over(number) for number in snd)
            and not rest[3]
            and not rest[4]
        )

    def best(self, world: Any) -> bool:
        """Every request was answered."""
        return all(code == ANSWERED * 8 for code in world[0])

    def broken(self, world: Any) -> str:
        _, snd, rcv, _, _, pool, net, writes, rest = world
        key = (rcv, pool)
        said = self._fine.get(key)
        if said is None:
            said = self._fine[key] = self._pool_broken(rcv, pool)
        if said:
            return said
        for inc, t, _, _ in writes:
            if inc == rest[0] and self.sender_over(snd[t]):
                return f"the source page of {self.name(t)} was given back under a transfer"
            if self.code(DRAINED, t, inc) in net:
                return f"I3: {self.name(t)} says DRAINED with a write under way"
        return ""

    def _pool_broken(self, rcv: tuple[int, ...], pool: tuple[int, ...]) -> str:
        for t in self.transfers:
            held = sum(1 for code in pool if code >= 0 and self.owner(code) == t)
            if held != (self.N if rcv[t] >= 0 else 0):
                return f"I7: {self.name(t)} holds {held} pages"
            if rcv[t] >= 0:
                phase = self.receiver.states[rcv[t]].phase
                if phase is r.Phase.INSTALLED and not self.whole(pool, t):
                    return f"I5: the pages that {self.name(t)} decodes from are not its own"
        return ""

    def moves(self, world: Any) -> Iterator[Move]:
        down, paused = world[8][3], world[8][4]
        yield from self._gateway(world, down)
        yield from self._network(world, paused)
        yield from self._landings(world)
        if P not in (down, paused):
            yield from self._prefill(world)
        if D not in (down, paused):
            yield from self._decode(world)
        yield from self._faults(world)

    def _move(self, label: str, draft: Draft, fault: bool = False) -> Move:
        if draft.broken:
            return Move(label, None, fault, draft.broken)
        return Move(label, draft.world(), fault)

    def _gateway(self, world: Any, down: int) -> Iterator[Move]:
        for request, code in enumerate(world[0]):
            stage, k = divmod(code, 8)
            t = request * self.K + k - 1
            if stage == READY:
                free = [page for page, held in enumerate(world[5]) if held < 0]
                draft = Draft(self, world)
                if down != D and len(free) >= self.N:
                    self._reserve(draft, t, free)
                    yield self._move(f"gateway reserves {self.name(t)}, sends PREFILL", draft)
                else:
                    draft.g[request] = REFUSED * 8
                    yield self._move(f"gateway refuses {self.name(t)}: no room", draft)
            elif stage == RUNNING:
                draft = Draft(self, world)
                again = k < self.K
                draft.g[request] = READY * 8 + k + 1 if again else REFUSED * 8
                draft.post(CANCEL, t, 0)
                yield self._move(f"gateway gives {self.name(t)} up, sends CANCEL", draft)

    def _reserve(self, draft: Draft, t: int, free: list[int]) -> None:
        """Takes all pages at once, first those that a write is still on its way to."""
        aimed = {write[3] for write in draft.writes}
        pages = sorted(free, key=lambda page: (page not in aimed, page))[: self.N]
        arrived = 0
        if self.rules.shared_counter:
            before = [
                self.receiver.states[n].arrived for n in draft.rcv[t - t % self.K : t] if n >= 0
            ]
            arrived = max(before, default=0)
        state = r.ReceiverState(self.attempt(t), self.N, 1, arrived=arrived)
        draft.rcv[t] = self.receiver.number(state)
        draft.places[t] = tuple(pages)
        for index, page in enumerate(pages):
            draft.pool[page] = self.page_code(t, index)
        draft.g[t // self.K] = self.running(t)
        draft.post(PREFILL, t, 0)

    def addressee(self, kind: int) -> int:
        return P if kind in TO_PREFILL else NOBODY if kind == ARRIVED else D

    def _network(self, world: Any, paused: int) -> Iterator[Move]:
        last = None
        for code in world[6]:
            if code == last:
                continue
            last = code
            kind, t, inc = self.message(code)
            to = self.addressee(kind)
            if to and to == paused:
                continue
            draft = Draft(self, world)
            draft.net.remove(code)
            self._deliver(draft, kind, t, inc)
            name = NAMES[min(kind, WRITE)] + (f" {kind - WRITE}" if kind >= WRITE else "")
            yield self._move(f"{name} {self.name(t)} arrives", draft)

    def _deliver(self, draft: Draft, kind: int, t: int, inc: int) -> None:
        if kind == ARRIVED:
            draft.g[t // self.K] = ANSWERED * 8
        elif kind in (PREFILL, CANCEL):
            draft.sender(t, self.sender_event(kind))
        elif kind in TO_PREFILL:
            if inc == draft.inc:
                draft.sender(t, self.sender_event(kind))
        elif kind == OPEN:
            draft.opened(t, inc)
        else:
            if draft.links[t] == inc:
                draft.receiver(t, self._receiver_event(kind, t))

    def _receiver_event(self, kind: int, t: int) -> r.Event:
        k = self.attempt(t)
        if kind == FIN:
            return r.FinArrived(self._fins[k - 1])
        if kind == ABORT:
            return r.SenderAborted(k, "no")
        if kind == DRAINED:
            return r.SenderDrained(k)
        return r.WriteArrived(k, kind - WRITE, 0)

    def _landings(self, world: Any) -> Iterator[Move]:
        if world[8][3] == D:
            return
        for write in world[7]:
            draft = Draft(self, world)
            draft.land(write)
            _, t, index, page = write
            yield self._move(f"write of {self.name(t)} page {index} lands in page {page}", draft)

    def _prefill(self, world: Any) -> Iterator[Move]:
        if world[8][1]:
            draft = Draft(self, world)
            draft.stale = 0
            for t in self.transfers:
                if draft.snd[t] != self.idle:
                    draft.sender(t, s.ConnectionClosed("closed"))
            yield self._move("prefill sees that the connection is closed", draft)
        for t in self.transfers:
            state = self.sender.states[world[1][t]]
            if state.phase in (s.Phase.GRANTED, s.Phase.SENDING):
                draft = Draft(self, world)
                page = state.num_writes
                if page < self.N:
                    draft.sender(t, s.Pushed(page, 0))
                    yield self._move(
                        f"prefill posts the write of {self.name(t)} page {page}", draft
                    )
                else:
                    draft.sender(t, s.Finished(self._fins[self.attempt(t) - 1]))
                    yield self._move(f"prefill finishes {self.name(t)}, sends FIN", draft)
            if state.phase in (
                s.Phase.OPENING,
                s.Phase.GRANTED,
                s.Phase.SENDING,
                s.Phase.FIN_SENT,
            ):
                draft = Draft(self, world)
                draft.sender(t, s.AbortRequested("deadline"))
                yield self._move(f"prefill's deadline aborts {self.name(t)}", draft)
            kind, reply = REPEATS.get(state.phase, (0, 0))
            if kind and not world[8][1] and not self._under_way(world, t, kind, reply):
                draft = Draft(self, world)
                draft.sender(t, s.Reminded())
                yield self._move(f"prefill repeats {NAMES[kind]} {self.name(t)}", draft)

    def _under_way(self, world: Any, t: int, question: int, answer: int) -> bool:
        """A question or its answer is on its way: nothing is overdue yet."""
        size = self.T * INCS
        return any(
            code // INCS % self.T == t and code // size in (question, answer) for code in world[6]
        )

    def _decode(self, world: Any) -> Iterator[Move]:
        for inc in range(INCS):
            if world[8][2] >> inc & 1:
                draft = Draft(self, world)
                draft.close_at_decode(inc)
                yield self._move(f"decode sees that connection {inc} is closed", draft)
        for t in self.transfers:
            if world[2][t] < 0:
                continue
            phase = self.receiver.states[world[2][t]].phase
            draft = Draft(self, world)
            if phase is r.Phase.QUARANTINED:
                if self._under_way(world, t, STOP, DRAINED):
                    continue
                draft.receiver(t, r.DrainOverdue())
                yield self._move(f"decode fences the sender of {self.name(t)}", draft)
                if not any(write[1] == t for write in world[7]):
                    draft = Draft(self, world)
                    draft.receiver(t, r.Reminded())
                    yield self._move(f"decode asks again to drain {self.name(t)}", draft)
            else:
                draft.receiver(t, r.Cancelled())
                why = "ends" if phase is r.Phase.INSTALLED else "cancels"
                yield self._move(f"decode {why} {self.name(t)}", draft)

    def _faults(self, world: Any) -> Iterator[Move]:
        _, _, down, paused, losses, duplicates, crashes, pauses = world[8][1:]
        for code in sorted(set(world[6])):
            kind, t, _ = self.message(code)
            label = f"{NAMES[min(kind, WRITE)]} {self.name(t)}"
            if losses:
                draft = Draft(self, world)
                draft.losses -= 1
                draft.net.remove(code)
                yield self._move(f"FAULT: {label} is lost", draft, fault=True)
            if duplicates:
                draft = Draft(self, world)
                draft.duplicates -= 1
                draft.net.append(code)
                yield self._move(f"FAULT: {label} is repeated", draft, fault=True)
        if crashes and not down:
            yield self._move("FAULT: prefill crashes", self._prefill_dies(world), fault=True)
            yield self._move("FAULT: decode crashes", self._decode_dies(world), fault=True)
        if pauses and not paused:
            for who in (P, D):
                draft = Draft(self, world)
                draft.pauses -= 1
                draft.paused = who
                yield self._move(f"FAULT: {WHO[who]} is paused", draft, fault=True)
        if down:
            draft = Draft(self, world)
            draft.down = NOBODY
            yield self._move(f"{WHO[down]} starts again", draft)
        if paused:
            draft = Draft(self, world)
            draft.paused = NOBODY
            yield self._move(f"{WHO[paused]} goes on", draft)

    def _prefill_dies(self, world: Any) -> Draft:
        """All that it knew is gone, tombstones too; its writes are still on their way."""
        draft = Draft(self, world)
        draft.crashes -= 1
        draft.down = P
        draft.snd = [self.idle] * self.T
        draft.net = [code for code in draft.net if self.message(code)[0] not in TO_PREFILL]
        if not draft.stale:
            draft.unnoticed |= 1 << draft.inc
        draft.inc, draft.stale = draft.inc + 1, 0
        return draft

    def _decode_dies(self, world: Any) -> Draft:
        """Its memory is gone, and with it what was on its way there."""
        draft = Draft(self, world)
        draft.crashes -= 1
        draft.down = D
        for t in self.transfers:
            draft.forget(t)
        draft.writes = []
        draft.net = [code for code in draft.net if self.message(code)[0] in (*TO_PREFILL, ARRIVED)]
        draft.stale, draft.unnoticed = 1, 0
        return draft

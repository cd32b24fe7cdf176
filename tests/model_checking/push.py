"""Pushes: a gateway, a prefill worker and a decode worker run the real sender and receiver.

The gateway reserves at the decode worker (all pages of an attempt at once), hands the lease to the
prefill worker, and gives an attempt up whenever it likes. One-sided writes are on their way for as
long as they like and land past every check; only a closed connection stops them. The network loses
and repeats messages within bounds and keeps no order. Timers are free: a deadline, a reminder, a
fence may come at any moment at which the machines allow them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from model_checking.explorer import Machine, Move
from pdmesh.kvtransfer.protocol import receiver as r
from pdmesh.kvtransfer.protocol import sender as s
from pdmesh.wire.messages import Fin

READY, RUNNING, ANSWERED, REFUSED = range(4)
(PREFILL, CANCEL, PLACES, DONE, STOP, OPEN, FIN, ABORT, DRAINED, ARRIVED, WRITE) = range(11)
NAMES = (
    "PREFILL CANCEL PLACES DONE ABORT-from-decode OPEN FIN ABORT-from-prefill DRAINED ARRIVED WRITE"
).split()
TO_PREFILL = (PREFILL, CANCEL, PLACES, DONE, STOP)
FROM_PREFILL = (OPEN, FIN, ABORT, DRAINED)
NOBODY, P, D = range(3)
WHO = ("nobody", "prefill", "decode")
INCS = 4
REPEATS = {s.Phase.OPENING: (OPEN, PLACES), s.Phase.FIN_SENT: (FIN, DONE)}


@dataclass(frozen=True)
class Bounds:
    """How large the world is and how often what may go wrong."""

    requests: int = 1
    pages: int = 2
    attempts: int = 2
    pool: int = 2
    losses: int = 0
    duplicates: int = 0
    crashes: int = 0
    pauses: int = 0
    one_sided: bool = True
    symmetry: bool = True
    """Take worlds that differ only in the requests' names for one; labels then mix the names."""


@dataclass(frozen=True)
class Rules:
    """What is checked: the real functions, or a variant with a mistake."""

    sender: Callable[[s.SenderState, s.Event], s.Step] = s.step
    receiver: Callable[[r.ReceiverState, r.Event], r.Step] = r.step
    shared_counter: bool = False
    """Effects of a mistake: notices of any attempt go to the latest one."""


class Draft:
    """A world being changed; ``world()`` is the result."""

    __slots__ = (
        "broken",
        "crashes",
        "down",
        "duplicates",
        "g",
        "inc",
        "links",
        "losses",
        "m",
        "net",
        "paused",
        "pauses",
        "places",
        "pool",
        "rcv",
        "snd",
        "stale",
        "unnoticed",
        "writes",
    )

    def __init__(self, m: PushModel, world: Any) -> None:
        self.m = m
        self.broken = ""
        g, snd, rcv, links, places, pool, net, writes, rest = world
        self.g, self.snd, self.rcv, self.links = list(g), list(snd), list(rcv), list(links)
        self.places, self.pool = list(places), list(pool)
        self.net, self.writes = list(net), list(writes)
        self.inc, self.stale, self.unnoticed, self.down, self.paused = rest[:5]
        self.losses, self.duplicates, self.crashes, self.pauses = rest[5:]

    def world(self) -> Any:
        m = self.m
        self.net = [message for message in self.net if not self._void(message)]
        self.net.sort()
        self.writes.sort()
        for t in m.transfers:
            if self.rcv[t] < 0 and self.snd[t] != m.over:
                self._settle(t)
        if self.inc and not self.unnoticed:
            self._renumber()
        one = self._pack(m.same)
        return one if m.swap is None else min(one, self._pack(m.swap))

    def _pack(self, order: tuple[int, ...]) -> Any:
        """The world with transfer t in the place of transfer ``order[t]``."""
        m = self.m
        if order is m.same:
            pool, net, writes = tuple(self.pool), tuple(self.net), tuple(self.writes)
            g = tuple(self.g)
        else:
            pool = tuple([m.swap_page(code) for code in self.pool])
            net = tuple(sorted([m.swap_message(code) for code in self.net]))
            writes = tuple(sorted([(i, order[t], n, page) for i, t, n, page in self.writes]))
            g = (self.g[1], self.g[0])
        rest = (
            self.inc,
            self.stale,
            self.unnoticed,
            self.down,
            self.paused,
            self.losses,
            self.duplicates,
            self.crashes,
            self.pauses,
        )
        return (
            g,
            tuple([self.snd[t] for t in order]),
            tuple([self.rcv[t] for t in order]),
            tuple([self.links[t] for t in order]),
            tuple([self.places[t] for t in order]),
            pool,
            net,
            writes,
            rest,
        )

    def _settle(self, t: int) -> None:
        """Takes a shortcut where the decode worker has forgotten an attempt for good.

        A sender that has no place to write to, and none on its way, can only be refused; what it
        still does touches nobody. So it counts as over at once.
        """
        m = self.m
        stage, k = divmod(self.g[t // m.K], 8)
        if stage < ANSWERED and (m.attempt(t), RUNNING) > (k, stage):
            return
        phase = m.sender.states[self.snd[t]].phase
        if phase not in m.harmless or any(write[1] == t for write in self.writes):
            return
        mine = [code for code in self.net if code // INCS % m.T == t]
        kinds = {code // INCS // m.T for code in mine}
        if PLACES in kinds or max(kinds, default=0) >= WRITE:
            return
        for code in mine:
            if code // INCS // m.T != ARRIVED:
                self.net.remove(code)
        self.snd[t], self.places[t] = m.over, ()

    def _renumber(self) -> None:
        """No earlier connection is known to anybody: the current one is again the first."""
        m, now = self.m, self.inc
        self.writes = [(0, *write[1:]) for write in self.writes if write[0] == now]
        self.links = [0 if link == now else -1 for link in self.links]
        kept = []
        for code in self.net:
            kind, t, inc = m.message(code)
            if inc == now or kind in (PREFILL, CANCEL, ARRIVED):
                kept.append(m.code(kind, t, 0))
        self.net = sorted(kept)
        self.inc = 0

    def _void(self, code: int) -> bool:
        """Whether a message can have no effect any more, whatever else happens."""
        m = self.m
        t = code // INCS % m.T
        key = (code, self.snd[t], self.rcv[t], self.links[t], self.g[t // m.K])
        void = m.voids.get(key)
        if void is None:
            void = m.voids[key] = m.void(*key)
        return void

    def post(self, kind: int, t: int, inc: int) -> None:
        """A message that is on its way already is not sent again: only a fault makes two.

        One to a process that is down goes nowhere.
        """
        code = self.m.code(kind, t, inc)
        to = self.m.addressee(kind)
        if code not in self.net and (to == NOBODY or to != self.down):
            self.net.append(code)

    # ---- prefill ----------------------------------------------------------------------------

    def sender(self, t: int, event: s.Event) -> None:
        m = self.m
        before = m.sender.states[self.snd[t]].phase
        self.snd[t], effects = m.sender.step(self.snd[t], event)
        for effect in effects:
            if self.stale:
                continue
            match effect:
                case s.PostOpen():
                    self.post(OPEN, t, self.inc)
                case s.PostWrite(page, _):
                    if before is s.Phase.DRAINED:
                        self.broken = "I3: a sender that has drained writes again"
                    if m.bounds.one_sided:
                        self.writes.append((self.inc, t, page, self.places[t][page]))
                    else:
                        self.post(WRITE + page, t, self.inc)
                        self.wrote(self.inc, t)
                case s.PostFin():
                    self.post(FIN, t, self.inc)
                case s.PostAbort():
                    self.post(ABORT, t, self.inc)
                case s.PostDrained():
                    self.post(DRAINED, t, self.inc)

    def wrote(self, inc: int, t: int) -> None:
        """The sender's transport is through with a write."""
        if inc == self.inc and self.m.sender.states[self.snd[t]].in_flight:
            self.sender(t, s.WritesDone(1))

    # ---- decode -----------------------------------------------------------------------------

    def receiver(self, t: int, event: r.Event) -> None:
        m = self.m
        if self.rcv[t] < 0:
            return
        before = m.receiver.states[self.rcv[t]].phase
        self.rcv[t], effects = m.receiver.step(self.rcv[t], event)
        after = m.receiver.states[self.rcv[t]].phase
        if before is r.Phase.QUARANTINED and after is not before:
            if not isinstance(event, r.SenderDrained | r.ConnectionClosed):
                self.broken = "I2: a quarantine ended without DRAINED or a closed connection"
        link = self.links[t]
        for effect in effects:
            match effect:
                case r.Store(page, _) if not m.bounds.one_sided:
                    self._store(t, page)
                case r.TellSender() if link >= 0:
                    self.post(STOP, t, link)
                case r.Acknowledge() if link >= 0:
                    self.post(DONE, t, link)
                case r.Deliver():
                    self._deliver(t)
                case r.Fence():
                    self.close_at_decode(link)
        if after is r.Phase.FREE:
            self.forget(t)

    def forget(self, t: int) -> None:
        self.rcv[t] = self.links[t] = -1
        self.pool = [-1 if code >= 0 and self.m.owner(code) == t else code for code in self.pool]

    def _store(self, t: int, page: int) -> None:
        for number, code in enumerate(self.pool):
            if code >= 0 and self.m.owner(code) == t and self.m.index(code) == page:
                self.pool[number] = self.m.page_code(t, page, t, page)

    def _deliver(self, t: int) -> None:
        self.receiver(t, r.Installed())
        if not self.m.whole(self.pool, t):
            self.broken = "I4: an attempt was complete with a write missing"
        self.post(ARRIVED, t, 0)

    def land(self, write: tuple[int, int, int, int]) -> None:
        """A one-sided write reaches memory, whoever has the page by now."""
        m = self.m
        inc, t, index, page = write
        self.writes.remove(write)
        code = self.pool[page]
        if code < 0:
            self.broken = f"I1: a write of {m.name(t)} landed in a free page"
        elif m.owner(code) != t:
            self.broken = f"I1: a write of {m.name(t)} landed in a page of {m.name(m.owner(code))}"
        else:
            self.pool[page] = m.page_code(t, m.index(code), t, index)
            if self.links[t] == inc:
                self.receiver(m.counted(self, t), r.WriteArrived(m.generation(self, t), index, 0))
        self.wrote(inc, t)

    def close_at_decode(self, inc: int) -> None:
        """The decode worker closes a connection: nothing of it reaches it from now on."""
        m = self.m
        self.writes = [write for write in self.writes if write[0] != inc]
        kept = FROM_PREFILL + TO_PREFILL[2:]
        self.net = [
            code
            for code in self.net
            if m.message(code)[2] != inc or (m.message(code)[0] not in kept and code < m.writes)
        ]
        if inc == self.inc:
            self.stale = 1
        self.unnoticed &= ~(1 << inc)
        for t in m.transfers:
            if self.links[t] == inc:
                self.links[t] = -1
                self.receiver(t, r.ConnectionClosed("closed"))

    def opened(self, t: int, inc: int) -> None:
        """As ``Arrival.open`` and ``TransferReceiver.destination`` do."""
        m = self.m
        if self.rcv[t] < 0:
            self.post(STOP, t, inc)
            return
        if self.links[t] != inc:
            self.rcv[t], effects = m.receiver.step(
                self.rcv[t], r.Opened(m.attempt(t), m.bounds.one_sided)
            )
            if effects:
                self.post(STOP, t, inc)
                return
            self.links[t] = inc
        if m.receiver.states[self.rcv[t]].phase is r.Phase.FILLING:
            self.post(PLACES, t, inc)


class PushModel:
    """See the module."""

    def __init__(self, bounds: Bounds, rules: Rules | None = None) -> None:
        self.bounds = bounds
        self.rules = rules or Rules()
        self.sender = Machine(self.rules.sender)
        self.receiver = Machine(self.rules.receiver)
        self.K, self.N = bounds.attempts, bounds.pages
        self.T = bounds.requests * self.K
        self.transfers = range(self.T)
        self.same = tuple(self.transfers)
        two = bounds.symmetry and bounds.requests == 2
        self.swap = tuple([*range(self.K, self.T), *range(self.K)]) if two else None
        self.idle = self.sender.number(s.SenderState(1))
        self.over = self.sender.number(s.SenderState(1, s.Phase.DRAINED))
        self.harmless = (
            s.Phase.IDLE,
            s.Phase.OPENING,
            s.Phase.FIN_SENT,
            s.Phase.DONE,
            s.Phase.DRAINED,
        )
        self.writes = self.code(WRITE, 0, 0)
        self._over: dict[int, bool] = {}
        self.voids: dict[tuple[int, ...], bool] = {}
        self._fine: dict[Any, str] = {}
        self._events: dict[int, s.Event] = {
            PREFILL: s.Leased() if bounds.one_sided else s.Granted(),
            CANCEL: s.AbortRequested("no"),
            PLACES: s.Granted(),
            DONE: s.Acknowledged(),
            STOP: s.ReceiverRefused("no"),
        }
        self._fins = [self._fin(k) for k in range(1, self.K + 1)]

    def _fin(self, generation: int) -> Fin:
        return Fin(
            lease_id="a",
            generation=generation,
            request_id="q",
            num_writes=self.N,
            first_tokens=(1,),
        )

    # ---- numbers ----------------------------------------------------------------------------

    def attempt(self, t: int) -> int:
        return t % self.K + 1

    def name(self, t: int) -> str:
        return f"{'ABC'[t // self.K]}{self.attempt(t)}"

    def running(self, t: int) -> int:
        return RUNNING * 8 + self.attempt(t)

    def code(self, kind: int, t: int, inc: int) -> int:
        return (kind * self.T + t) * INCS + inc

    def message(self, code: int) -> tuple[int, int, int]:
        rest, inc = divmod(code, INCS)
        return *divmod(rest, self.T), inc

    def page_code(self, t: int, index: int, content_t: int = -1, content: int = 0) -> int:
        held = 0 if content_t < 0 else content_t * self.N + content + 1
        return (t * self.N + index) * 64 + held

    def owner(self, code: int) -> int:
        return code // 64 // self.N

    def index(self, code: int) -> int:
        return code // 64 % self.N

    def swap_page(self, code: int) -> int:
        assert self.swap is not None
        if code < 0:
            return code
        held = code % 64
        if not held:
            return self.page_code(self.swap[self.owner(code)], self.index(code))
        t, index = divmod(held - 1, self.N)
        return self.page_code(self.swap[self.owner(code)], self.index(code), self.swap[t], index)

    def swap_message(self, code: int) -> int:
        assert self.swap is not None
        kind, t, inc = self.message(code)
        return self.code(kind, self.swap[t], inc)

    def sender_over(self, number: int) -> bool:
        over = self._over.get(number)
        if over is None:
            over = self._over[number] = self.sender.states[number].settled
        return over

    def whole(self, pool: list[int] | tuple[int, ...], t: int) -> bool:
        mine = [code for code in pool if code >= 0 and self.owner(code) == t]
        return len(mine) == self.N and all(
            code == self.page_code(t, self.index(code), t, self.index(code)) for code in mine
        )

    def sender_event(self, kind: int) -> s.Event:
        return self._events[kind]

    def void(self, code: int, snd: int, rcv: int, link: int, g: int) -> bool:
        """Whether a message has no effect now and never will: phases only go forward."""
        kind, t, inc = self.message(code)
        if kind == ARRIVED:
            return g != self.running(t)
        before = self.sender.states[snd].phase
        if kind == CANCEL and before is not s.Phase.IDLE:
            return True  # the deadline of the prefill worker does the same at any moment
        if kind in TO_PREFILL[:4]:
            early = before is s.Phase.IDLE or before is s.Phase.OPENING
            same = self.sender.step(snd, self.sender_event(kind)) == (snd, ())
            return same and (not early or kind == PREFILL)
        over = self.sender_over(snd)
        if kind == STOP:
            return before is s.Phase.DONE or (rcv < 0 and over)
        if self.rules.shared_counter:
            return False
        if kind == OPEN:
            phase = None if rcv < 0 else self.receiver.states[rcv].phase
            late = phase in (r.Phase.QUARANTINED, r.Phase.INSTALLED)
            return over if rcv < 0 else late and link == inc
        if rcv < 0:
            return True
        if self.receiver.states[rcv].phase in (r.Phase.QUARANTINED, r.Phase.INSTALLED):
            after, effects = self.receiver.step(rcv, self._receiver_event(kind, t))
            return after == rcv and all(isinstance(one, r.Drop) for one in effects)
        return False

    def counted(self, draft: Draft, t: int) -> int:
        """The attempt that counts a notice of ``t``; one mistake is to take the latest."""
        if not self.rules.shared_counter:
            return t
        last = t - t % self.K + self.K - 1
        return next((x for x in range(last, t, -1) if draft.rcv[x] >= 0), t)

    def generation(self, draft: Draft, t: int) -> int:
        return self.attempt(self.counted(draft, t))

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
            to = self.counted(draft, t)
            if draft.links[to] == inc or self.rules.shared_counter:
                draft.receiver(to, self._receiver_event(kind, to))

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

"""The world of ``push``: its bounds, its state, and what each role's effects do to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdmesh.kvtransfer.protocol import receiver as r
from pdmesh.kvtransfer.protocol import sender as s

if TYPE_CHECKING:
    from model_checking.push_numbers import Numbers

READY, RUNNING, ANSWERED, REFUSED = range(4)
(PREFILL, CANCEL, PLACES, DONE, STOP, OPEN, FIN, ABORT, DRAINED, ARRIVED, WRITE) = range(11)
NAMES = (
    "PREFILL",
    "CANCEL",
    "PLACES",
    "DONE",
    "ABORT-from-decode",
    "OPEN",
    "FIN",
    "ABORT-from-prefill",
    "DRAINED",
    "ARRIVED",
    "WRITE",
)
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
    """Effects of a mistake: a write counts for its request's latest attempt."""


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

    def __init__(self, m: Numbers, world: Any) -> None:
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
        ended = before is r.Phase.QUARANTINED and after is not before
        if ended and not isinstance(event, r.SenderDrained | r.ConnectionClosed):
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

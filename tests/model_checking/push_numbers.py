"""The small numbers of ``push``: messages, pages and states, and which messages are void."""

from __future__ import annotations

from typing import Any

from model_checking.explorer import Machine
from model_checking.push_world import (
    ARRIVED,
    CANCEL,
    DONE,
    INCS,
    OPEN,
    PLACES,
    PREFILL,
    RUNNING,
    STOP,
    TO_PREFILL,
    WRITE,
    Bounds,
    Draft,
    Rules,
)
from pdmesh.kvtransfer.protocol import receiver as r
from pdmesh.kvtransfer.protocol import sender as s
from pdmesh.wire.messages import Fin


class Numbers:
    """Machines, and the numbers that stand for messages, pages and states."""

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
        self.swap = (*range(self.K, self.T), *range(self.K)) if two else None
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

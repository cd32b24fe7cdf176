"""Pulls: an owner of cached pages and two readers run the real machines.

The owner evicts a page that no lease pins and later fills it again, so its contents may change
under a read. Each reader has pages for one attempt; a further attempt uses the same ones, so that a
read that ends late would show. The owner may crash and come back as another process, a reader too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from model_checking.explorer import Machine, Move
from pdmesh.kvtransfer.protocol import pull

READY, RUNNING, ANSWERED, REFUSED = range(4)
(ASK, VALIDATE, RELEASE, GRANT, NO, VALID, INVALID) = range(7)
NAMES = ["LEASE", "VALIDATE", "RELEASE", "GRANT", "REFUSED", "VALID", "INVALID"]
TO_OWNER = (ASK, VALIDATE, RELEASE)
NOTHING, GOOD, BAD = range(3)
LAST = (pull.ReaderPhase.COMMITTED, pull.ReaderPhase.FAILED)


@dataclass(frozen=True)
class Bounds:
    """How large the world is and how often what may go wrong."""

    requests: int = 1
    pages: int = 2
    attempts: int = 2
    losses: int = 0
    duplicates: int = 0
    crashes: int = 0


@dataclass(frozen=True)
class Rules:
    """What is checked: the real functions, or a variant with a mistake."""

    reader: Callable[[pull.ReaderState, pull.ReaderEvent], pull.ReaderStep] = pull.reader_step
    owner: Callable[[pull.OwnerState, pull.OwnerEvent], pull.OwnerStep] = pull.owner_step


class Draft:
    """A world being changed."""

    def __init__(self, m: PullModel, world: Any) -> None:
        self.m = m
        self.broken = ""
        self.g, self.rd, self.ow, self.dest = (list(part) for part in world[:4])
        self.net, self.reads, self.cache = list(world[4]), list(world[5]), list(world[6])
        self.process, self.stale, self.losses, self.duplicates, self.crashes = world[7]

    def world(self) -> Any:
        self.net = sorted(code for code in self.net if not self._void(code))
        rest = (self.process, self.stale, self.losses, self.duplicates, self.crashes)
        return (
            tuple(self.g),
            tuple(self.rd),
            tuple(self.ow),
            tuple(self.dest),
            tuple(self.net),
            tuple(sorted(self.reads)),
            tuple(self.cache),
            rest,
        )

    def _void(self, code: int) -> bool:
        """Whether a message can have no effect that matters any more."""
        m = self.m
        kind, t, _ = m.message(code)
        phase = m.reader.states[self.rd[t]].phase
        if kind in (ASK, VALIDATE):
            return phase in LAST
        if kind == RELEASE:
            return m.owner.states[self.ow[t]].phase is not pull.OwnerPhase.HELD
        done = phase in LAST
        return done and m.reader.step(self.rd[t], m.reader_event(code))[0] == self.rd[t]

    def post(self, kind: int, t: int, process: int = 0) -> None:
        code = self.m.code(kind, t, process)
        if code not in self.net:
            self.net.append(code)

    def reader(self, t: int, event: pull.ReaderEvent) -> None:
        m = self.m
        self.rd[t], effects = m.reader.step(self.rd[t], event)
        request = t // m.K
        for effect in effects:
            match effect:
                case pull.PostAsk():
                    self.post(ASK, t)
                case pull.PostRead(page) if not self.stale >> request & 1:
                    self.reads.append((t, page))
                case pull.PostValidate(process):
                    self.post(VALIDATE, t, int(process))
                case pull.PostRelease():
                    self.post(RELEASE, t)
                case pull.Commit(count):
                    mine = self.dest[request * m.N : request * m.N + count]
                    if any(code != t * 3 + GOOD for code in mine):
                        self.broken = "I6: pages were taken over that the owner had not kept"
                    self.g[request] = ANSWERED * 8
                    self._free(request)
                case pull.Fail():
                    k = m.attempt(t)
                    self.g[request] = READY * 8 + k + 1 if k < m.K else REFUSED * 8
                case pull.FreeDestination():
                    self._free(request)

    def _free(self, request: int) -> None:
        for number in range(request * self.m.N, (request + 1) * self.m.N):
            self.dest[number] = -1

    def owner(self, t: int, event: pull.OwnerEvent) -> None:
        self.ow[t], effects = self.m.owner.step(self.ow[t], event)
        for effect in effects:
            match effect:
                case pull.SayGranted(process, _):
                    self.post(GRANT, t, int(process))
                case pull.SayRefused():
                    self.post(NO, t)
                case pull.SayValid(process):
                    self.post(VALID, t, int(process))
                case pull.SayInvalid():
                    self.post(INVALID, t)


class PullModel:
    """See the module."""

    def __init__(self, bounds: Bounds, rules: Rules | None = None) -> None:
        self.bounds = bounds
        self.rules = rules or Rules()
        self.reader = Machine(self.rules.reader)
        self.owner = Machine(self.rules.owner)
        self.K, self.N = bounds.attempts, bounds.pages
        self.T = bounds.requests * self.K
        self.first = self.reader.number(pull.ReaderState(self.N))
        self.over = self.reader.number(pull.ReaderState(self.N, pull.ReaderPhase.FAILED))

    def attempt(self, t: int) -> int:
        return t % self.K + 1

    def name(self, t: int) -> str:
        return f"{'AB'[t // self.K]}{self.attempt(t)}"

    def code(self, kind: int, t: int, process: int) -> int:
        return (kind * self.T + t) * 4 + process

    def message(self, code: int) -> tuple[int, int, int]:
        rest, process = divmod(code, 4)
        return *divmod(rest, self.T), process

    def reader_event(self, code: int) -> pull.ReaderEvent:
        kind, _, process = self.message(code)
        if kind == GRANT:
            return pull.Granted(str(process), self.N)
        if kind == NO:
            return pull.Refused("no")
        return pull.Valid(str(process)) if kind == VALID else pull.Invalid()

    def initial(self) -> Any:
        b = self.bounds
        return (
            (READY * 8 + 1,) * b.requests,
            (self.first,) * self.T,
            (self.owner.number(pull.OwnerState("0")),) * self.T,
            (-1,) * (b.requests * self.N),
            (),
            (),
            (GOOD,) * self.N,
            (0, 0, b.losses, b.duplicates, b.crashes),
        )

    def settled(self, world: Any) -> bool:
        g, rd, ow, dest, _, reads, _, _ = world
        return (
            not reads
            and all(code >= ANSWERED * 8 for code in g)
            and all(code < 0 for code in dest)
            and all(n == self.first or self.reader.states[n].phase in LAST for n in rd)
            and all(self.owner.states[n].phase is not pull.OwnerPhase.HELD for n in ow)
        )

    def best(self, world: Any) -> bool:
        """Every reader has its pages."""
        return all(code == ANSWERED * 8 for code in world[0])

    def broken(self, world: Any) -> str:
        for t, _ in world[5]:
            if world[3][t // self.K * self.N] // 3 != t:
                return f"a read of {self.name(t)} is under way into pages that it gave back"
        return ""

    def _move(self, label: str, draft: Draft, fault: bool = False) -> Move:
        if draft.broken:
            return Move(label, None, fault, draft.broken)
        return Move(label, draft.world(), fault)

    def moves(self, world: Any) -> Iterator[Move]:
        yield from self._network(world)
        for read in world[5]:
            draft = Draft(self, world)
            draft.reads.remove(read)
            t, page = read
            draft.dest[t // self.K * self.N + page] = t * 3 + world[6][page]
            draft.reader(t, pull.ReadDone(page))
            yield self._move(f"read of {self.name(t)} page {page} ends", draft)
        yield from self._readers(world)
        yield from self._owner(world)
        yield from self._faults(world)

    def _network(self, world: Any) -> Iterator[Move]:
        for code in sorted(set(world[4])):
            kind, t, process = self.message(code)
            draft = Draft(self, world)
            draft.net.remove(code)
            if kind == ASK:
                whole = all(content == GOOD for content in world[6])
                draft.owner(t, pull.LeaseAsked(self.N if whole else 0))
            elif kind == VALIDATE:
                draft.owner(t, pull.ValidateArrived(str(process)))
            elif kind == RELEASE:
                draft.owner(t, pull.ReleaseArrived())
            else:
                draft.reader(t, self.reader_event(code))
            yield self._move(f"{NAMES[kind]} {self.name(t)} arrives", draft)

    def _readers(self, world: Any) -> Iterator[Move]:
        for request, code in enumerate(world[0]):
            stage, k = divmod(code, 8)
            t = request * self.K + k - 1
            mine = slice(request * self.N, (request + 1) * self.N)
            if stage == READY and all(held < 0 for held in world[3][mine]):
                draft = Draft(self, world)
                draft.g[request] = RUNNING * 8 + k
                draft.dest[mine] = [t * 3 + NOTHING] * self.N
                draft.reader(t, pull.Started())
                yield self._move(f"{self.name(t)} starts, sends LEASE", draft)
            if world[7][1] >> request & 1:
                draft = Draft(self, world)
                draft.stale &= ~(1 << request)
                for one in range(request * self.K, (request + 1) * self.K):
                    if draft.rd[one] != self.first:
                        draft.reader(one, pull.ConnectionClosed("closed"))
                yield self._move(f"reader {'AB'[request]} sees that the owner is lost", draft)
        for t, number in enumerate(world[1]):
            phase = self.reader.states[number].phase
            if phase in LAST or number == self.first:
                continue
            draft = Draft(self, world)
            draft.reader(t, pull.AbortRequested("deadline"))
            yield self._move(f"{self.name(t)} is aborted by its deadline", draft)
            waiting = any(self.message(code)[1] == t for code in world[4])
            draft = Draft(self, world)
            draft.reader(t, pull.Reminded())
            if not waiting and draft.net:
                yield self._move(f"{self.name(t)} asks again", draft)

    def _owner(self, world: Any) -> Iterator[Move]:
        held = False
        for t, number in enumerate(world[2]):
            if self.owner.states[number].phase is pull.OwnerPhase.HELD:
                held = True
                draft = Draft(self, world)
                draft.owner(t, pull.Expired())
                yield self._move(f"the lease of {self.name(t)} expires", draft)
        if held:
            return
        for page, content in enumerate(world[6]):
            draft = Draft(self, world)
            draft.cache[page] = BAD if content == GOOD else GOOD
            what = "is evicted and used again" if content == GOOD else "holds the prefix again"
            yield self._move(f"page {page} of the owner {what}", draft)

    def _faults(self, world: Any) -> Iterator[Move]:
        process, _, losses, duplicates, crashes = world[7]
        for code in sorted(set(world[4])):
            kind, t, _ = self.message(code)
            if losses:
                draft = Draft(self, world)
                draft.losses -= 1
                draft.net.remove(code)
                yield self._move(f"FAULT: {NAMES[kind]} {self.name(t)} is lost", draft, True)
            if duplicates:
                draft = Draft(self, world)
                draft.duplicates -= 1
                draft.net.append(code)
                yield self._move(f"FAULT: {NAMES[kind]} {self.name(t)} is repeated", draft, True)
        if not crashes:
            return
        draft = Draft(self, world)
        draft.crashes -= 1
        draft.process = process + 1
        draft.stale = (1 << self.bounds.requests) - 1
        draft.reads = []
        draft.cache = [BAD] * self.N
        draft.ow = [self.owner.number(pull.OwnerState(str(process + 1)))] * self.T
        yield self._move("FAULT: the owner crashes and starts again", draft, True)
        for request in range(self.bounds.requests):
            draft = Draft(self, world)
            draft.crashes -= 1
            self._reader_dies(draft, request)
            yield self._move(f"FAULT: reader {'AB'[request]} crashes and starts again", draft, True)

    def _reader_dies(self, draft: Draft, request: int) -> None:
        mine = range(request * self.K, (request + 1) * self.K)
        draft.reads = [read for read in draft.reads if read[0] not in mine]
        draft.stale &= ~(1 << request)
        stage, k = divmod(draft.g[request], 8)
        for t in mine:
            if draft.rd[t] != self.first:
                draft.rd[t] = self.over
        if stage == RUNNING:
            draft.g[request] = READY * 8 + k + 1 if k < self.K else REFUSED * 8
        for number in range(request * self.N, (request + 1) * self.N):
            draft.dest[number] = -1

"""Where ranks of separate processes meet: connections, agreement on steps, and their messages."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pdmesh.model.parallel.assembly import Agreed, Assembly, Begin, Kind
from pdmesh.model.parallel.exchange import Channel, Message, RankLost
from pdmesh.model.parallel.frames import Hello
from pdmesh.model.parallel.links import Events, Links
from pdmesh.model.parallel.plans import Plan, Plans
from pdmesh.wire.errors import ConfigError, Unavailable
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

LOAD = "load"
"""Channel of the rows that experts were asked for, sent to the leader."""


@dataclass(frozen=True)
class Place:
    """Where one rank stands.

    Attributes:
        rank: its number.
        addresses: "host:port" of every rank's listener, in order.
        group: name of the group, the same on all ranks.
        silence_s: seconds without a sign of life after which a rank is lost.
        step_s: seconds that the others may take to begin a step, and each exchange of it.
    """

    rank: int
    addresses: tuple[str, ...]
    group: str
    silence_s: float = 10.0
    step_s: float = 60.0


class Meeting:
    """One rank's end of its group; the `Transport` of its steps.

    Args:
        place: where the rank stands.
        plans: the placements of experts that it knows.
        digest: of what has to be the same on all ranks.

    Attributes:
        changed: guards everything here, and is notified of every change.
    """

    def __init__(self, place: Place, plans: Plans, digest: str) -> None:
        self.changed = threading.Condition()
        self.closed = False
        self._place = place
        self._plans = plans
        self._assembly = Assembly(place.rank)
        self._messages: dict[tuple[int, Channel], Message] = {}
        self._at: dict[int, int] = {}
        """The step that a rank has sent a message of since its last word."""
        self._owes = False
        self._losses: Counter[int] = Counter()
        self._formed: dict[int, int] = {}
        """How often each connection had ended when all ranks had gathered."""
        hello = Hello(place.group, len(place.addresses), place.rank, digest)
        events = Events(self._connected, self._word, self._learn, self._message, self._lost)
        self._links = Links(hello, place.addresses, events, place.silence_s)

    def start(self, within_s: float) -> None:
        """Connects, and returns when all ranks are there, or when those that are have taken this
        one in, or after ``within_s`` seconds if any is.

        Raises:
            ConfigError: the own address cannot be listened at, a rank is of another group or
                model, or nobody came.
        """
        self._links.start()
        deadline = time.monotonic() + within_s
        everyone = set(range(len(self._place.addresses))) - {self._place.rank}
        with self.changed:
            while missing := everyone - self._assembly.present:
                left = deadline - time.monotonic()
                if left <= 0 or self._assembly.wanted or set(self._links.refusals) & missing:
                    break
                self.changed.wait(min(left, 0.5))
            else:
                self._assembly.form(everyone)
        refused = set(self._links.refusals) & missing
        if not missing or (missing < everyone and not refused):
            if missing:
                names = ",".join(map(str, sorted(missing)))
                event(log, "ranks_missing", logging.WARNING, ranks=names)
            return
        why = self._links.refusals
        named = ", ".join(f"{r} ({why[r]})" if r in why else str(r) for r in sorted(missing))
        self.close()
        raise ConfigError(
            f"rank {self._place.rank} of group {self._place.group!r} lacks rank {named}"
        )

    def gather(
        self, channel: Channel, message: Message, within_s: float, forming: bool = False
    ) -> list[Message]:
        """What each rank says on a channel, in their order; before the first step only.

        Args:
            forming: ranks may come and go meanwhile; whoever comes is told, and when all are there
                they are the members. Otherwise one that goes is lost.

        Raises:
            RankLost: a rank did not say anything within `within_s` seconds, or went.
            Unavailable: the group has been left.
        """
        me, deadline = self._place.rank, time.monotonic() + within_s
        others = [rank for rank in range(len(self._place.addresses)) if rank != me]
        told: dict[int, int] = {}
        while True:
            with self.changed:
                if self.closed:
                    raise Unavailable("this rank has left its expert-parallel group")
                present = self._assembly.present
                new = {r: self._losses[r] for r in present if told.get(r) != self._losses[r]}
                missing = [rank for rank in others if (rank, channel) not in self._messages]
                if not missing and not new:
                    found = {rank: self._messages.pop((rank, channel)) for rank in others}
                    if forming:
                        self._assembly.form(others)
                        self._formed = {rank: self._losses[rank] for rank in others}
                    return [
                        message if rank == me else found[rank] for rank in sorted({me, *others})
                    ]
                left = deadline - time.monotonic()
                gone = () if forming else self.gone
                if gone or left <= 0:
                    raise RankLost((*gone, *missing, *new)[0], str(channel))
                if not new:
                    self.changed.wait(min(left, 0.5))
                    continue
            told |= new
            for rank in new:
                self._links.post(rank, channel, message)

    def close(self) -> None:
        """Leaves the group. Idempotent."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self._links.close()

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that compute together now."""
        with self.changed:
            return tuple(sorted(self._assembly.members))

    @property
    def sent_bytes(self) -> int:
        """To other ranks, in messages."""
        return self._links.sent_bytes

    def losses(self, rank: int) -> int:
        """How often the connection to a rank has ended."""
        with self.changed:
            return self._losses[rank]

    @property
    def gone(self) -> tuple[int, ...]:
        """Ranks that have been lost since all of them gathered; one that is back counts too."""
        with self.changed:
            return tuple(r for r, count in self._formed.items() if self._losses[r] != count)

    def tell(self, ranks: Sequence[int], plan: Plan) -> None:
        """Makes a plan known to others."""
        self._links.tell(ranks, plan)

    def owe(self) -> None:
        """The step failed here: the others have to hear that this rank has left it."""
        with self.changed:
            self._owes = True

    # ---- the next step --------------------------------------------------------------------

    def agree(self, wish: Callable[[], tuple[Kind, int]]) -> Agreed | None:
        """Waits until this rank or another wants something, then for all members.

        Args:
            wish: what this rank wants now, and its rows; called with ``changed`` held.

        Returns:
            The next step; None once the group is left.
        """
        assembly = self._assembly
        while True:
            word: Begin | None = None
            with self.changed:
                self.changed.wait_for(
                    lambda: self.closed or wish()[0] != "idle" or assembly.wanted or self._owes
                )
                if self.closed:
                    return None
                if not assembly.said:
                    word = assembly.begin(*wish(), self._plans.numbers)
                    self._owes = False
            if word is not None:
                self._links.say([r for r in word.members if r != self._place.rank], word)
            agreed, late = self._heard_all()
            if agreed is not None:
                return agreed
            for rank in late:
                event(log, "rank_late", logging.WARNING, rank=rank, seconds=self._place.step_s)
                self._links.drop(rank)

    def _heard_all(self) -> tuple[Agreed | None, tuple[int, ...]]:
        """The step if all have said their word; else who is late. Neither: begin again."""
        assembly, found = self._assembly, None

        def over() -> bool:
            nonlocal found
            if self.closed or not assembly.said:
                return True
            found = assembly.agree()
            return found is not None or not assembly.said

        with self.changed:
            if not self.changed.wait_for(over, self._place.step_s):
                return None, assembly.missing()
            if found is not None:
                step = found.step
                self._messages = {k: m for k, m in self._messages.items() if k[1].step == step}
            return found, ()

    # ---- what the network tells (its threads) ---------------------------------------------

    def _connected(self, rank: int) -> None:
        with self.changed:
            self._assembly.connected(rank)
            told = self._plans.told
            self.changed.notify_all()
        for plan in told:
            self._links.tell([rank], plan)

    def _lost(self, rank: int, why: str) -> None:
        with self.changed:
            self._assembly.lost(rank)
            self._losses[rank] += 1
            self._messages = {k: m for k, m in self._messages.items() if k[0] != rank}
            self._at.pop(rank, None)
            self.changed.notify_all()

    def _word(self, rank: int, header: bytes) -> None:
        try:
            word = msgspec.msgpack.decode(header, type=Begin)
        except msgspec.DecodeError:
            self._links.drop(rank)
            return
        with self.changed:
            self._at.pop(rank, None)
            gone = self._assembly.hear(rank, word)
            self.changed.notify_all()
        for other in gone:
            self._links.drop(other)

    def _learn(self, rank: int, header: bytes) -> None:
        try:
            plan = msgspec.msgpack.decode(header, type=Plan)
            with self.changed:
                self._plans.learn(plan)
                self.changed.notify_all()
        except (msgspec.DecodeError, ConfigError) as error:
            event(log, "plan_refused", logging.WARNING, rank=rank, error=error)

    def _message(self, rank: int, channel: Channel, message: Message) -> None:
        with self.changed:
            if channel.kind == LOAD:
                self._plans.count(*message)
                return
            self._messages[rank, channel] = message
            self._at[rank] = channel.step
            self.changed.notify_all()

    # ---- the transport of one step --------------------------------------------------------

    @property
    def rank(self) -> int:
        """See `Transport`."""
        return self._place.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self._place.addresses)

    def post(self, to: int, channel: Channel, message: Message) -> None:
        """See `Transport`."""
        if to == self._place.rank:
            self._message(to, channel, message)
        else:
            self._links.post(to, channel, message)

    def take(self, source: int, channel: Channel) -> Message:
        """See `Transport`."""
        key = (source, channel)

        def over() -> bool:
            return key in self._messages or self.closed or self._left(source, channel.step)

        with self.changed:
            there = self.changed.wait_for(over, self._place.step_s)
            message = self._messages.pop(key, None)
        if message is not None:
            return message
        if not there:
            self._links.drop(source)
        raise RankLost(source, str(channel))

    def _left(self, source: int, step: int) -> bool:
        """Whether a rank sends nothing more for a step, or is in another one."""
        if source == self._place.rank:
            return False
        return self._assembly.left(source) or self._at.get(source, step) != step

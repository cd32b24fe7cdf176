"""How ranks of separate processes agree on the next step: who takes part, and what is computed.

Pure state; no I/O, no clock. Ranks that work together (the *members*) compute in lock-step: before
each step every member says ``Begin`` to all others, with what it wants, nothing included, and each
waits for all of them. So all know who takes part, how many rows each has, and that nobody is left
out. An idle member says so when it hears that another wants something.

A lost member ends the step that is under way, and the others begin again without it. A rank that
comes (back) is taken in after a step that all members began knowing it. Nothing here decides about
results: experts are read only and the same everywhere, so whoever works together with whomever
computes the same bits, and views of the membership that differ for a moment cost time only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec

Kind = Literal["idle", "forward", "mtp"]
"""What a member wants: a pass of the main model, one of the MTP layer, or nothing."""


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """One member's word for the next step.

    Attributes:
        members: who takes part, the sender included, in ascending order.
        number: of this word; the sender says each once.
        used: for each of the members the number of the last of its words that the sender has used
            for a step, 0 if none.
        ready: ranks that the sender is connected to, itself included.
        plans: numbers of the placements of experts that the sender knows.
        kind, rows: what the sender wants, and how many rows it has.
    """

    members: tuple[int, ...]
    number: int
    used: tuple[int, ...]
    ready: tuple[int, ...]
    plans: tuple[int, ...]
    kind: Kind
    rows: int


@dataclass(frozen=True)
class Agreed:
    """A step that all members take part in.

    Attributes:
        step: which; it stands for the words of all members. Ranks that agreed on other words, of
            which one was taken back, are in another step.
        members: in ascending order.
        kind: what is computed; members that want another kind, or nothing, have no rows in it.
            "idle" where nobody wants anything: then nothing is computed.
        most_rows: the most that a member has.
        plan: the placement of experts, the newest that all members know.
    """

    step: int
    members: tuple[int, ...]
    kind: Kind
    most_rows: int
    plan: int = 0


class Assembly:
    """One rank's view.

    Args:
        rank: the own number.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.members = frozenset([rank])
        self._connected: set[int] = set()
        self._next = frozenset([rank])
        self._number = 0
        self._said: Begin | None = None
        self._heard: dict[int, Begin] = {}
        self._used: dict[int, int] = {}

    # ---- what the network tells -----------------------------------------------------------

    def connected(self, rank: int) -> None:
        """There is a connection to `rank`."""
        self._connected.add(rank)

    def lost(self, rank: int) -> None:
        """The connection to `rank` is gone, and with it what it said."""
        self._connected.discard(rank)
        self._heard.pop(rank, None)
        self._used.pop(rank, None)
        self._next -= {rank}
        if rank in self.members:
            self.members -= {rank}
            self._said = None

    def hear(self, rank: int, begin: Begin) -> tuple[int, ...]:
        """`rank` has said this.

        Returns:
            Ranks whose connections have to be closed: the others go on without them.
        """
        if rank not in self._connected:
            return ()
        self._heard[rank] = begin
        theirs = frozenset(begin.members)
        if rank in self.members:  # whom it cannot reach nobody can work together with
            return tuple(sorted(self.members - set(begin.ready)))
        if self.rank not in theirs or theirs >= self.members:
            return ()
        return (rank,)  # it would take this rank away from its group: once all can, all join

    def form(self, ranks: Iterable[int]) -> None:
        """Take these as members at once: all of them are connected. For the first step."""
        self.members = self._next = frozenset([self.rank, *ranks])
        self._said = None

    @property
    def present(self) -> frozenset[int]:
        """Ranks there is a connection to."""
        return frozenset(self._connected)

    # ---- what the rank does ---------------------------------------------------------------

    @property
    def said(self) -> bool:
        """Whether this rank has said its word for the next step."""
        return self._said is not None

    @property
    def wanted(self) -> bool:
        """Whether another rank waits for this one's word."""
        return any(self._concerns(rank, word) for rank, word in self._heard.items())

    def begin(self, kind: Kind, rows: int, plans: Sequence[int] = (0,)) -> Begin:
        """This rank's word for the next step, to be told to all `members`. Once a step.

        Every rank knows plan 0.
        """
        assert self._said is None
        self._join()
        ready = tuple(sorted(self._connected | {self.rank}))
        members = tuple(sorted(self.members))
        self._number += 1
        used = tuple(self._used.get(member, 0) for member in members)
        known = tuple(sorted(plans))
        self._said = Begin(members, self._number, used, ready, known, kind, rows)
        return self._said

    def agree(self) -> Agreed | None:
        """The step, once all members have said the same members; their words are then used up.

        Where a member has said a larger group, or has used this rank's word for a step that it has
        left already, the word is taken back, and another has to be said.
        """
        said = self._said
        if said is None:
            return None
        theirs = [word for rank, word in self._heard.items() if rank in self.members]
        if any(self._invites(word) or self._spent(said, word) for word in theirs):
            self._said = None
            return None
        words = []
        for rank in said.members:
            word = said if rank == self.rank else self._heard.get(rank)
            if word is None or word.members != said.members:
                return None
            words.append(word)
        for rank in self.members - {self.rank}:
            self._used[rank] = self._heard.pop(rank).number
        self._said = None
        sights = {frozenset(word.ready) for word in words}
        if len(sights) == 1:  # nobody is half there: part of another group would only be torn off
            self._next = self.members | sights.pop()
        kinds = {word.kind for word in words} - {"idle"}
        most = max(word.rows for word in words)
        kind: Kind = "forward" if "forward" in kinds else "mtp" if kinds else "idle"
        plan = max(set.intersection(*(set(word.plans) for word in words)))
        return Agreed(_step(words), said.members, kind, most, plan)

    def left(self, rank: int) -> bool:
        """Whether `rank` has gone on to another step, and sends nothing more for this one."""
        return rank in self._heard or rank not in self._connected

    def missing(self) -> tuple[int, ...]:
        """Members whose word is waited for."""
        said = self._said
        if said is None:
            return ()
        others = sorted(self.members - {self.rank})
        words = {rank: self._heard.get(rank) for rank in others}
        return tuple(r for r, w in words.items() if w is None or w.members != said.members)

    def _join(self) -> None:
        """Who takes part in the step that begins: those agreed on after the last one, or the
        larger group that has taken this rank in."""
        reach = self._connected | {self.rank}
        self.members = self._next & reach if len(self._next) > 1 else frozenset(reach)
        for word in self._heard.values():
            if self._invites(word):
                self.members = frozenset(word.members)
        self._next = self.members

    def _invites(self, word: Begin) -> bool:
        """Whether a word is for a larger group with this rank, all of which it can reach."""
        theirs = frozenset(word.members)
        reach = self._connected | {self.rank}
        return self.rank in theirs and theirs > self.members and theirs <= reach

    def _spent(self, said: Begin, word: Begin) -> bool:
        """Whether the one who said ``word`` has used ``said`` already."""
        if self.rank not in word.members:
            return False
        return word.used[word.members.index(self.rank)] >= said.number

    def _concerns(self, rank: int, word: Begin) -> bool:
        return self._invites(word) or (rank in self.members and self.rank in word.members)


def _step(words: Sequence[Begin]) -> int:
    """A number for these words of these members, of 63 bits."""
    said = msgspec.msgpack.encode([words[0].members, [word.number for word in words]])
    return int.from_bytes(blake2b(said, digest_size=8).digest(), "big") >> 1

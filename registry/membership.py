"""What a router knows of the workers and of the pages they own: pure state, no I/O, no clock.

Fed with rosters (who is alive now) and numbered events; answers queries at once. Applying an event
twice, or one that a snapshot already holds, changes nothing, so a snapshot may be read while events
go on: the last event about a page wins. An event of another epoch than the worker's is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from pdmesh.registry.store import Member, Roster, WorkerState, read_record
from pdmesh.wire.errors import Incompatible, InvalidRequest
from pdmesh.wire.logs import event
from pdmesh.wire.messages import WorkerRecord

log = logging.getLogger(__name__)


class EventsMissing(Exception):
    """An event was not seen: the state must be read afresh."""


@dataclass
class _Entry:
    member: Member
    pages: set[bytes] = field(default_factory=set)
    keep_until: float | None = None
    """Set after an outage: not in the store now, but may be about to register again."""


class Membership:
    """The local view.

    Args:
        grace_s: seconds a known worker stays after an outage of the store without registering.
        lost_s: seconds after which an instance reported lost is taken back if it still renews its
            lease.
    """

    def __init__(self, grace_s: float, lost_s: float) -> None:
        self._grace_s = grace_s
        self._lost_s = lost_s
        self._entries: dict[str, _Entry] = {}
        self._lost: dict[str, float] = {}
        self._foreign: dict[str, int] = {}
        self.incarnation = b""
        self.seq = 0

    def workers(self) -> list[WorkerRecord]:
        """Records of the workers to route to: ready, and not reported lost; by name."""
        return [
            entry.member.record
            for _, entry in sorted(self._entries.items())
            if entry.member.state == "ready" and entry.member.record.instance not in self._lost
        ]

    def draining(self) -> list[WorkerRecord]:
        """Records of the workers that take nothing new but still serve; by name."""
        return [
            entry.member.record
            for _, entry in sorted(self._entries.items())
            if entry.member.state == "draining" and entry.member.record.instance not in self._lost
        ]

    def owned_prefix(self, worker_id: str, hashes: Sequence[bytes]) -> int:
        """How many leading ``hashes`` the worker owns."""
        entry = self._entries.get(worker_id)
        if entry is None:
            return 0
        for count, page in enumerate(hashes):
            if page not in entry.pages:
                return count
        return len(hashes)

    def mark_lost(self, instance: str, now: float) -> None:
        """Takes an instance out of ``workers`` at once."""
        if any(e.member.record.instance == instance for e in self._entries.values()):
            self._lost[instance] = now

    def replace(
        self,
        roster: Roster,
        found: Iterable[tuple[Member, set[bytes]]],
        foreign: Iterable[str] = (),
    ) -> None:
        """A snapshot, read after ``roster`` was: the members with their pages, and the names of
        workers whose record this version cannot use."""
        self._foreign = {name: roster.members[name][0] for name in foreign}
        entries = {member.record.worker_id: _Entry(member, pages) for member, pages in found}
        for worker_id, entry in self._entries.items():
            if worker_id not in entries and entry.keep_until is not None:
                entries[worker_id] = entry
        self._entries = entries
        self.incarnation, self.seq = roster.incarnation, roster.seq
        self._forget_lost()

    def outage_over(self, now: float) -> None:
        """The store is back, perhaps empty: known workers get time to register again."""
        for entry in self._entries.values():
            entry.keep_until = now + self._grace_s

    def check(self, roster: Roster, now: float) -> None:
        """Drops workers that hold no lease.

        Raises:
            EventsMissing: the roster holds what no event told (call it after all events up to
                ``roster.seq``), or it is of another data set.
        """
        if roster.incarnation != self.incarnation or roster.seq < self.seq:
            raise EventsMissing
        for worker_id, entry in list(self._entries.items()):
            listed = roster.members.get(worker_id)
            if listed is not None and entry.member.epoch >= listed[0]:
                entry.keep_until = None
            elif listed is None and (entry.keep_until or entry.member.epoch <= roster.epoch):
                self._drop_unless_kept(worker_id, entry, now)
        for worker_id, (epoch, _) in roster.members.items():
            known = self._entries.get(worker_id)
            seen = self._foreign.get(worker_id, 0) if known is None else known.member.epoch
            if seen < epoch:
                raise EventsMissing
        self._take_back(roster, now)

    def apply(self, seq: int, fields: dict[bytes, bytes]) -> None:
        """One event. Raises EventsMissing if it is not the one after the last."""
        if seq <= self.seq:
            return
        if seq != self.seq + 1:
            raise EventsMissing
        self.seq = seq
        op, worker_id, epoch = fields[b"op"], fields[b"worker"].decode(), int(fields[b"epoch"])
        if op == b"join":
            self._join(worker_id, epoch, fields)
            return
        entry = self._entries.get(worker_id)
        if entry is None or entry.member.epoch != epoch:
            return
        if op == b"state":
            state = cast("WorkerState", fields[b"state"].decode())
            entry.member = replace(entry.member, state=state)
        elif op == b"publish":
            entry.pages.update(_split(fields))
        elif op == b"evict":
            entry.pages.difference_update(_split(fields))
        elif op == b"leave":
            del self._entries[worker_id]
            self._forget_lost()

    def _join(self, worker_id: str, epoch: int, fields: dict[bytes, bytes]) -> None:
        try:
            record = read_record(fields[b"record"])
        except (InvalidRequest, Incompatible) as error:
            event(log, "worker_ignored", logging.WARNING, worker=worker_id, error=error)
            self._foreign[worker_id] = epoch
            self._entries.pop(worker_id, None)
            return
        state = cast("WorkerState", fields[b"state"].decode())
        known = self._entries.get(worker_id)
        if known is None or known.member.epoch < epoch:
            self._entries[worker_id] = _Entry(Member(record, epoch, state))
            self._forget_lost()

    def _drop_unless_kept(self, worker_id: str, entry: _Entry, now: float) -> None:
        if entry.keep_until is None or now >= entry.keep_until:
            del self._entries[worker_id]
            self._forget_lost()

    def _take_back(self, roster: Roster, now: float) -> None:
        for entry in self._entries.values():
            record = entry.member.record
            since = self._lost.get(record.instance)
            if since is not None and now - since >= self._lost_s:
                event(log, "worker_taken_back", worker=record.worker_id, instance=record.instance)
                del self._lost[record.instance]

    def _forget_lost(self) -> None:
        present = {entry.member.record.instance for entry in self._entries.values()}
        self._lost = {i: since for i, since in self._lost.items() if i in present}


def _split(fields: dict[bytes, bytes]) -> list[bytes]:
    hashes, count = fields[b"hashes"], int(fields[b"count"])
    size = len(hashes) // count
    return [hashes[i * size : (i + 1) * size] for i in range(count)]

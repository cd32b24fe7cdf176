"""The store of a mesh (what ``registry/functions.lua`` does), with outages, losses and wrong pages.

``StoreClient`` is a process's connection to it; the real worker lease and registry view run on it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdmesh.registry.keys import Keys
from pdmesh.registry.layout import Layout, pack_group
from pdmesh.registry.store import Entries, PageCall, Store, StoreUnavailable
from pdmesh.simulation.loop import VirtualLoop
from pdmesh.simulation.partition import PartitionModel
from pdmesh.wire.messages import WorkerRecord

LAYOUT = Layout(4)
_STILL_S = 0.5
"""Of a lease, at most this passes between two calls."""


@dataclass
class _Member:
    epoch: int
    instance: str
    state: str
    record: bytes
    ends: float
    slot: int


class SimStore:
    """The data, and what befalls them.

    Attributes:
        down_until: no call is answered before this time.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.down_until = 0.0
        self._incarnation = b""
        self._seq = 0
        self._epoch = 0
        self._members: dict[str, _Member] = {}
        self._dead: dict[int, int] = {}
        self._free: list[int] = []
        self._next = 0
        self._beat = 0.0
        self._events: list[tuple[int, dict[bytes, bytes]]] = []
        self._parts = [PartitionModel() for _ in range(LAYOUT.partitions)]

    def wipe(self) -> None:
        """All data are lost."""
        self._incarnation = b""
        self._members.clear()
        self._dead.clear()
        self._free.clear()
        self._next = 0
        self._events.clear()
        self._parts = [PartitionModel() for _ in range(LAYOUT.partitions)]

    def confuse(self) -> None:
        """The page lists become wrong: some pages go, some go to workers that lack them."""
        slots = sorted(member.slot for member in self._members.values())
        for part in self._parts:
            rows = [slot for slot in slots if slot in part.rows]
            for bucket in sorted(part.records):
                for mark in sorted(part.records[bucket]):
                    draw = self.rng.random()
                    op = "evict" if draw < 0.3 else "publish" if draw < 0.6 else ""
                    if op and rows:
                        slot = self.rng.choice(rows)
                        row = part.rows[slot]
                        group = pack_group(bucket, [mark])
                        part.call(op, [bucket], [slot, row.epoch, row.seq + 1, group])

    # ---- pages.lua ------------------------------------------------------------------------

    def page_call(self, call: PageCall) -> Any:
        """One function of a partition, at once."""
        return self._parts[call.partition].call(call.name, call.buckets, call.args)

    # ---- functions.lua --------------------------------------------------------------------

    def call(self, name: str, args: list[Any]) -> list[Any]:
        """One function, at once."""
        self._wake()
        self._drop_ended()
        if name == "members":
            self._begin(args[0])
            flat: list[bytes] = []
            for worker, member in self._members.items():
                entry = f"{member.epoch}:{member.state}:{member.slot}"
                flat += [worker.encode(), entry.encode()]
            dead = [part for pair in self._dead.items() for part in pair]
            meta = [self._incarnation, str(self._seq), str(self._epoch), LAYOUT.name.encode()]
            return [*meta, flat, dead]
        if name == "buried":
            same = self._dead.get(args[0]) == args[1]
            return [int(same and self._dead.pop(args[0]) == args[1])]
        if name == "may_sweep":
            return [1]
        worker, rest = args[0], args[1:]
        if name == "register":
            return self._register(worker, *rest)
        known = self._members.get(worker)
        return [b"FENCED", b"0"] if known is None else self._change(name, worker, known, rest)

    def _change(self, name: str, worker: str, member: _Member, rest: list[Any]) -> list[Any]:
        if member.epoch != int(rest[0]) or not self._incarnation:
            return [b"FENCED", str(member.epoch).encode()]
        if name == "renew":
            member.ends = self.loop.time() + int(rest[1]) / 1e3
        elif name == "set_state":
            member.ends = self.loop.time() + int(rest[1]) / 1e3
            if member.state != rest[2]:
                member.state = rest[2]
                self._emit(worker, "state", member.epoch, state=rest[2].encode())
        elif name == "deregister":
            self._leave(worker)
        return [b"OK"]

    def _begin(self, candidate: str) -> None:
        if not self._incarnation:
            self._incarnation = candidate.encode()
            self._seq = 0
            self._events.clear()

    def _register(
        self,
        worker: str,
        instance: str,
        record: bytes,
        ttl_ms: int,
        state: str,
        takeover: int,
        candidate: str,
        layout: str,
        floor: int,
    ) -> list[Any]:
        holder = self._members.get(worker)
        if holder is not None and holder.instance != instance and not takeover:
            return [b"TAKEN", holder.instance.encode()]
        self._begin(candidate)
        slot = self._take_slot(holder)
        self._dead.pop(slot, None)
        self._epoch = max(self._epoch + 1, floor + 1, int(self.loop.time() * 1e6))
        ends = self.loop.time() + ttl_ms / 1e3
        self._members[worker] = _Member(self._epoch, instance, state, record, ends, slot)
        said = {"state": state.encode(), "slot": str(slot).encode(), "record": record}
        self._emit(worker, "join", self._epoch, **said)
        return [b"OK", str(self._epoch).encode(), str(slot).encode(), LAYOUT.name.encode()]

    def _take_slot(self, holder: _Member | None) -> int:
        if holder is not None:
            return holder.slot
        if self._free:
            return self._free.pop(0)
        self._next += 1
        return self._next - 1

    def _leave(self, worker: str) -> None:
        member = self._members.pop(worker)
        self._free.append(member.slot)
        self._dead[member.slot] = member.epoch
        self._emit(worker, "leave", member.epoch)

    def _wake(self) -> None:
        still = self.loop.time() - self._beat - _STILL_S
        for member in self._members.values() if still > 0 else ():
            if member.ends > self._beat:
                member.ends += still
        self._beat = self.loop.time()

    def _drop_ended(self) -> None:
        now = self.loop.time()
        for worker in [name for name, member in self._members.items() if member.ends <= now]:
            self._leave(worker)

    def _emit(self, worker: str, op: str, epoch: int, **fields: bytes) -> None:
        self._seq += 1
        entry = {b"op": op.encode(), b"worker": worker.encode(), b"epoch": str(epoch).encode()}
        entry |= {name.encode(): value for name, value in fields.items()}
        self._events.append((self._seq, entry))

    # ---- plain commands -------------------------------------------------------------------

    def member(self, worker: str) -> list[Any]:
        """epoch, state, slot, record; four None where there is none."""
        found = self._members.get(worker)
        if found is None:
            return [None, None, None, None]
        return [str(found.epoch).encode(), found.state.encode(), found.slot, found.record]

    def read(self, cursors: Mapping[str, str], keys: Keys) -> dict[str, Entries]:
        """What follows the cursors."""
        after = int(cursors[keys.events].partition("-")[0])
        own = [(f"{seq}-0", fields) for seq, fields in self._events[-500:] if seq > after]
        found: dict[str, Entries] = {keys.events: own} if own else {}
        for number, part in enumerate(self._parts):
            key = keys.page_events(number)
            if key in cursors and (events := part.after(cursors[key], 500)):
                found[key] = events
        return found

    def owned(self, record: WorkerRecord) -> int:
        """How many pages the store says that a worker has."""
        member = self._members.get(record.worker_id)
        return 0 if member is None else sum(len(part.owned(member.slot)) for part in self._parts)


class StoreClient(Store):
    """One process's way to the store; each call takes time, or fails after the real timeouts."""

    def __init__(self, store: SimStore, mesh: str = "sim") -> None:
        self.keys = Keys(mesh)
        self.where = "simulated"
        self.layout = LAYOUT
        self._data = store

    @property
    def waits(self) -> bool:
        return True

    async def close(self) -> None:
        """Nothing to close."""

    async def _reach(self) -> None:
        data = self._data
        await asyncio.sleep(data.rng.uniform(0.0004, 0.004))
        if data.down_until > data.loop.time():
            await asyncio.sleep(data.rng.choice((0.001, 2.0)))
            raise StoreUnavailable("the store at simulated does not answer")

    def _early(self) -> bool:
        """Whether a call is done at once, and its answer on its way."""
        data = self._data
        return data.down_until <= data.loop.time() and data.rng.random() < 0.5

    async def call(self, name: str, worker_id: str | None, *args: str | bytes | int) -> list[Any]:
        data, given = self._data, [*([worker_id] if worker_id is not None else []), *args]
        if self._early():
            found = data.call(name, given)
            await asyncio.sleep(data.rng.uniform(0.0004, 0.004))
            return found
        await self._reach()
        return data.call(name, given)

    async def many(self, calls: Sequence[PageCall]) -> list[Any]:
        data = self._data
        if not calls:
            return []
        if self._early():
            found = [data.page_call(call) for call in calls]
            await asyncio.sleep(data.rng.uniform(0.0004, 0.004))
            lost = data.rng.random() < 0.02  # done, but nobody will know
            return [StoreUnavailable("no answer")] * len(calls) if lost else found
        try:
            await self._reach()
        except StoreUnavailable as error:
            return [error] * len(calls)
        return [data.page_call(call) for call in calls]

    async def execute(self, *command: str | bytes | int) -> Any:
        await self._reach()
        assert command[0] == "HMGET"
        return self._data.member(str(command[1]).rsplit(":", 1)[-1])

    async def read(self, cursors: Mapping[str, str], block_ms: int) -> dict[str, Entries]:
        await self._reach()
        found = self._data.read(cursors, self.keys)
        if not found and block_ms:
            await asyncio.sleep(block_ms / 1e3)
            found = self._data.read(cursors, self.keys)
        return found

"""The store of a mesh (what ``registry/functions.lua`` does), with outages, losses and wrong pages.

``StoreClient`` is a process's connection to it; the real worker lease and registry view run on it.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from pdmesh.registry.store import Store, StoreUnavailable
from pdmesh.simulation.loop import VirtualLoop
from pdmesh.wire.messages import WorkerRecord


@dataclass
class _Member:
    epoch: int
    instance: str
    state: str
    record: bytes
    ends: float
    pages: set[bytes] = field(default_factory=set)


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
        self._events: list[tuple[int, dict[bytes, bytes]]] = []

    def wipe(self) -> None:
        """All data are lost."""
        self._incarnation = b""
        self._members.clear()
        self._events.clear()

    def confuse(self) -> None:
        """The page lists become wrong: some hashes go, some go to workers that lack them."""
        names = sorted(self._members)
        for name in names:
            for page in sorted(self._members[name].pages):
                draw = self.rng.random()
                if draw < 0.3:
                    self._pages("evict", "remove", name, [page])
                elif draw < 0.6:
                    self._pages("publish", "add", self.rng.choice(names), [page])

    # ---- functions.lua --------------------------------------------------------------------

    def call(self, name: str, args: list[Any]) -> list[Any]:
        """One function, at once."""
        self._drop_ended()
        if name == "members":
            self._begin(args[0])
            flat: list[bytes] = []
            for worker, member in self._members.items():
                flat += [worker.encode(), f"{member.epoch}:{member.state}".encode()]
            return [self._incarnation, str(self._seq), str(self._epoch), flat]
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
        elif name == "publish":
            self._pages("publish", "add", worker, rest[1:])
        elif name == "evict":
            self._pages("evict", "remove", worker, rest[1:])
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
    ) -> list[Any]:
        holder = self._members.get(worker)
        if holder is not None and holder.instance != instance and not takeover:
            return [b"TAKEN", holder.instance.encode()]
        self._begin(candidate)
        self._epoch = max(self._epoch + 1, int(self.loop.time() * 1e6))
        ends = self.loop.time() + ttl_ms / 1e3
        self._members[worker] = _Member(self._epoch, instance, state, record, ends)
        self._emit(worker, "join", self._epoch, state=state.encode(), record=record)
        return [b"OK", str(self._epoch).encode()]

    def _pages(self, op: str, change: str, worker: str, hashes: list[bytes]) -> None:
        member = self._members[worker]
        for page in hashes:
            if change == "add":
                member.pages.add(page)
            else:
                member.pages.discard(page)
        self._emit(
            worker, op, member.epoch, count=str(len(hashes)).encode(), hashes=b"".join(hashes)
        )

    def _leave(self, worker: str) -> None:
        self._emit(worker, "leave", self._members.pop(worker).epoch)

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
        """epoch, state, record; three None where there is none."""
        found = self._members.get(worker)
        if found is None:
            return [None, None, None]
        return [str(found.epoch).encode(), found.state.encode(), found.record]

    def pages(self, worker: str) -> set[bytes]:
        found = self._members.get(worker)
        return set() if found is None else set(found.pages)

    def events(self, after: int) -> list[tuple[int, dict[bytes, bytes]]]:
        return [pair for pair in self._events[-500:] if pair[0] > after]

    def owned(self, record: WorkerRecord) -> int:
        """How many pages the store says that a worker has."""
        return len(self.pages(record.worker_id))


class StoreClient(Store):
    """One process's way to the store; each call takes time, or fails after the real timeouts."""

    def __init__(self, store: SimStore, mesh: str = "sim") -> None:
        from pdmesh.registry.store import Keys

        self.keys = Keys(mesh)
        self.where = "simulated"
        self._data = store

    async def close(self) -> None:
        """Nothing to close."""

    async def _reach(self) -> None:
        data = self._data
        await asyncio.sleep(data.rng.uniform(0.0004, 0.004))
        if data.down_until > data.loop.time():
            await asyncio.sleep(data.rng.choice((0.001, 2.0)))
            raise StoreUnavailable("the store at simulated does not answer")

    async def call(self, name: str, worker_id: str | None, *args: str | bytes | int) -> list[Any]:
        data, given = self._data, [*([worker_id] if worker_id is not None else []), *args]
        if data.down_until <= data.loop.time() and data.rng.random() < 0.5:
            found = data.call(name, given)  # it is done, and the answer is on its way
            await asyncio.sleep(data.rng.uniform(0.0004, 0.004))
            return found
        await self._reach()
        return data.call(name, given)

    async def execute(self, *command: str | bytes | int) -> Any:
        await self._reach()
        data = self._data
        if command[0] == "HMGET":
            return data.member(str(command[1]).rsplit(":", 1)[-1])
        assert command[0] == "SMEMBERS"
        return data.pages(str(command[1]).rsplit(":", 1)[-1])

    async def events(self, after: int, block_ms: int) -> list[tuple[int, dict[bytes, bytes]]]:
        await self._reach()
        found = self._data.events(after)
        if not found and block_ms:
            await asyncio.sleep(block_ms / 1e3)
            found = self._data.events(after)
        return found

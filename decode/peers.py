"""Calls to other decode workers: one client for each, kept while it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from pdmesh.wire.messages import WorkerRecord
from pdmesh.wire.rpc import Client

T = TypeVar("T")
_IDLE_S = 60.0
"""Longer than any call may take."""


class Peer(Protocol):
    """What is needed of ``wire.rpc.Client``."""

    async def unary(
        self, method: str, request: msgspec.Struct, answer: type[T], timeout: float | None = None
    ) -> T: ...

    async def close(self) -> None: ...


Connect = Callable[[WorkerRecord], Peer]


def connect_decode(record: WorkerRecord) -> Peer:
    """A client of a decode worker's internal service."""
    return Client(record.address, "decode")


class Peers:
    """One client for each instance, closed when it was not used for a minute."""

    def __init__(self, connect: Connect = connect_decode, idle_s: float = _IDLE_S) -> None:
        self._connect = connect
        self._idle_s = idle_s
        self._peers: dict[str, Peer] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, record: WorkerRecord) -> Peer:
        """The client of ``record``'s instance."""
        instance = record.instance
        if instance not in self._peers:
            self._peers[instance] = self._connect(record)
        if instance in self._timers:
            self._timers[instance].cancel()
        loop = asyncio.get_running_loop()
        self._timers[instance] = loop.call_later(self._idle_s, self._drop, instance)
        return self._peers[instance]

    def __len__(self) -> int:
        return len(self._peers)

    def _drop(self, instance: str) -> None:
        self._timers.pop(instance).cancel()
        task = asyncio.get_running_loop().create_task(self._peers.pop(instance).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all; calls under way end with an error."""
        for instance in list(self._peers):
            self._drop(instance)
        if self._closing:
            await asyncio.wait(set(self._closing))

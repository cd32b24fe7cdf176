"""A network between simulated processes: connections, delays, partitions, and RPC over them.

A connection joins two processes and is one ordered stream each way. It ends when an end closes it,
when a process ends (the peer's kernel is told), when a fault cuts it, or when nothing came through
a partition for as long as keepalive allows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from pdmesh.simulation.loop import Process, VirtualLoop, current_process
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import (
    DeadlineExceeded,
    InternalError,
    PdmeshError,
    WorkerLost,
    error_from_wire,
)
from pdmesh.wire.rpc import Client, Method

T = TypeVar("T")

KEEPALIVE_S = 20.0
"""After so long without an answer a connection is given up, as with the real channel options."""
_DELAY_S = (0.0002, 0.003)


@dataclass
class Pair:
    """What lies between two processes' names."""

    factor: float = 1.0
    """How many times slower than usual."""
    cut_until: float = 0.0
    """No message comes through before this time."""


@dataclass(frozen=True)
class Server:
    """A process that answers calls."""

    process: Process
    service: str
    methods: dict[str, Method]


class Network:
    """Who listens where, and how long messages take.

    Attributes:
        problems: what should not have happened, such as a handler that raised what is no
            ``PdmeshError``.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, trace: Callable[..., None]) -> None:
        self.loop = loop
        self.rng = rng
        self.trace = trace
        self.problems: list[str] = []
        self._servers: dict[str, Server] = {}
        self._pairs: dict[frozenset[str], Pair] = {}
        self.connections: list[Connection] = []

    def join(self, process: Process) -> None:
        """From now on peers are told when this process ends."""
        process.ended.append(lambda: self._end(process))

    def serve(
        self, process: Process, address: str, service: str, methods: Sequence[Method]
    ) -> None:
        """``process`` answers calls at ``address``, in place of whoever did before."""
        self._servers[address] = Server(process, service, {m.name: m for m in methods})

    def server(self, address: str) -> Server | None:
        """Who listens at an address."""
        found = self._servers.get(address)
        return found if found is not None and found.process.alive else None

    def pair(self, one: Process, other: Process) -> Pair:
        return self._pairs.setdefault(frozenset((one.name, other.name)), Pair())

    def pair_by_name(self, one: str, other: str) -> Pair:
        return self._pairs.setdefault(frozenset((one, other)), Pair())

    def delay(self, source: Process, target: Process) -> float:
        """Seconds that a message sent now takes, once a partition has healed."""
        pair = self.pair(source, target)
        wait = max(0.0, pair.cut_until - self.loop.time())
        return wait + self.rng.uniform(*_DELAY_S) * pair.factor

    def partition(self, one: str, other: str, seconds: float) -> None:
        """Nothing comes through between two processes for a while."""
        pair = self.pair_by_name(one, other)
        pair.cut_until = max(pair.cut_until, self.loop.time() + seconds)
        if seconds >= KEEPALIVE_S:
            self.loop.call_later(KEEPALIVE_S, self.cut, one, other, "keepalive timed out")

    def cut(self, one: str, other: str, reason: str) -> None:
        """Ends every connection between two processes."""
        for connection in list(self.connections):
            if {process.name for process in connection.ends} == {one, other}:
                connection.break_off(reason)

    def heal(self) -> None:
        """Ends all partitions and slowness."""
        for pair in self._pairs.values():
            pair.factor, pair.cut_until = 1.0, 0.0

    def _end(self, process: Process) -> None:
        for connection in list(self.connections):
            if process in connection.ends:
                connection.peer_ended(process)


class Connection:
    """An ordered stream each way between two processes; subclasses say what is sent."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.network = network
        self.ends = (client, server)
        self.over = False
        self._due = {client: 0.0, server: 0.0}
        network.connections.append(self)

    def deliver(
        self, target: Process, callback: Callable[..., object], *args: Any, extra: float = 0.0
    ) -> float:
        """Calls ``callback`` in ``target``, after everything sent to it before."""
        source = self.ends[0] if target is self.ends[1] else self.ends[1]
        loop = self.network.loop
        due = loop.time() + extra + self.network.delay(source, target)
        due = max(due, self._due[target] + 1e-7)
        self._due[target] = due
        loop.call_at(due, callback, *args, context=target.context)
        return due

    def forget(self) -> None:
        self.over = True
        if self in self.network.connections:
            self.network.connections.remove(self)

    def break_off(self, reason: str) -> None:
        """A fault: both ends learn of it, each in its time."""
        self.forget()
        for end in self.ends:
            self.deliver(end, self.told, end, reason)

    def peer_ended(self, process: Process) -> None:
        """One end's process is no more: the other one's kernel is told."""
        self.forget()
        other = self.ends[0] if process is self.ends[1] else self.ends[1]
        self.deliver(other, self.told, other, "the peer's process ended")

    def told(self, end: Process, reason: str) -> None:
        """``end`` learns that the connection is over."""
        raise NotImplementedError


class _Channel(Connection):
    """Calls of one client to one server process."""

    def __init__(self, network: Network, client: Process, server: Server) -> None:
        super().__init__(network, client, server.process)
        self._methods = server.methods
        self.calls: dict[_Call, None] = {}
        self.tasks: dict[_Call, asyncio.Task[None]] = {}

    def told(self, end: Process, reason: str) -> None:
        if end is self.ends[0]:
            for call in list(self.calls):
                call.fail(WorkerLost(f"{call.where}: {reason}"))
        else:
            for task in list(self.tasks.values()):
                task.cancel()

    def start(self, call: _Call) -> None:
        self.calls[call] = None
        self.deliver(self.ends[1], self._arrive, call)

    def cancel(self, call: _Call) -> None:
        """The client wants no more of a call."""
        self.calls.pop(call, None)
        if not self.over:
            self.deliver(self.ends[1], self._cancelled, call)

    def _cancelled(self, call: _Call) -> None:
        task = self.tasks.get(call)
        if task is not None:
            task.cancel()

    def _arrive(self, call: _Call) -> None:
        if self.over:
            return
        loop = self.network.loop
        task = self.tasks[call] = loop.create_task(
            self._answer(call, self._methods.get(call.method))
        )
        if call.deadline is not None:
            call.timer = loop.call_at(max(loop.time(), call.deadline), task.cancel)

    async def _answer(self, call: _Call, method: Method | None) -> None:
        try:
            if method is None:
                raise InternalError(f"{call.where}: unimplemented")
            request = decode(call.data, method.request)
            if method.unary is not None:
                self._send(call.item, encode(await method.unary(request)))
            else:
                await self._stream(call, method, request)
                self._send(call.end, None)
        except PdmeshError as error:
            self._send(call.end, (type(error).__name__, error.message))
        except asyncio.CancelledError:
            self._send(call.end, ("Unavailable", f"{call.where}: CANCELLED"))
            raise
        except Exception as error:  # noqa: BLE001 - as the real server does; and it is noted
            self.network.problems.append(f"{self.ends[1]} {call.method} raised {error!r}")
            self._send(call.end, ("InternalError", f"{call.method}: {error}"))
        finally:
            self.tasks.pop(call, None)
            if call.timer is not None:
                call.timer.cancel()

    async def _stream(self, call: _Call, method: Method, request: msgspec.Struct) -> None:
        assert method.stream is not None
        messages = method.stream(request)
        try:
            async for message in messages:
                self._send(call.item, encode(message))
                await asyncio.sleep(0)
        finally:
            if isinstance(messages, AsyncGenerator):
                await messages.aclose()

    def _send(self, callback: Callable[..., object], *args: Any) -> None:
        if not self.over:
            self.deliver(self.ends[0], callback, *args)


@dataclass(eq=False)
class _Call:
    """A call as its client sees it."""

    method: str
    where: str
    data: bytes
    deadline: float | None
    timer: asyncio.TimerHandle | None = None
    """Of the server: ends its work at the deadline."""
    items: asyncio.Queue[bytes | PdmeshError | None] = field(default_factory=asyncio.Queue)

    def item(self, data: bytes) -> None:
        self.items.put_nowait(data)

    def end(self, error: tuple[str, str] | None) -> None:
        self.items.put_nowait(None if error is None else error_from_wire(*error))

    def fail(self, error: PdmeshError) -> None:
        self.items.put_nowait(error)


class SimClient(Client):
    """``wire.rpc.Client`` over the simulated network, for the process that makes it."""

    def __init__(self, network: Network, address: str, service: str) -> None:
        self.address = address
        self._service = service
        self._network = network
        process = current_process()
        assert process is not None
        self._process = process
        self._channel_now: _Channel | None = None

    async def unary(
        self, method: str, request: msgspec.Struct, answer: type[T], timeout: float | None = None
    ) -> T:
        call, timers, channel = self._begin(method, request, timeout)
        over = False
        try:
            item = await call.items.get()
            over = item is None or isinstance(item, bytes)
            if item is None:
                raise InternalError(f"{method}: no answer")
            if isinstance(item, PdmeshError):
                raise item
            return decode(item, answer)
        finally:
            self._finish(call, timers, channel, over)

    async def stream(
        self, method: str, request: msgspec.Struct, answer: type[T], timeout: float | None = None
    ) -> AsyncGenerator[T, None]:
        items = self._call(method, request, timeout)
        try:
            async for item in items:
                yield decode(item, answer)
        finally:
            await items.aclose()

    async def _call(
        self, method: str, request: msgspec.Struct, timeout: float | None
    ) -> AsyncGenerator[bytes, None]:
        call, timers, channel = self._begin(method, request, timeout)
        over = False
        try:
            while True:
                item = await call.items.get()
                if item is None:
                    over = True
                    return
                if isinstance(item, PdmeshError):
                    raise item
                yield item
        finally:
            self._finish(call, timers, channel, over)

    def _begin(
        self, method: str, request: msgspec.Struct, timeout: float | None
    ) -> tuple[_Call, list[asyncio.TimerHandle], _Channel | None]:
        loop = self._network.loop
        where = f"{self._service} worker at {self.address}, {method}"
        deadline = None if timeout is None else loop.time() + timeout
        call = _Call(method, where, encode(request), deadline)
        timers = []
        if deadline is not None:
            late = DeadlineExceeded(f"{where}: Deadline Exceeded")
            timers.append(loop.call_at(deadline, call.fail, late))
        return call, timers, self._open(call, timers)

    def _finish(
        self,
        call: _Call,
        timers: list[asyncio.TimerHandle],
        channel: _Channel | None,
        over: bool,
    ) -> None:
        for timer in timers:
            timer.cancel()
        if channel is not None:
            channel.calls.pop(call, None)
            if not over:
                channel.cancel(call)

    def _open(self, call: _Call, timers: list[asyncio.TimerHandle]) -> _Channel | None:
        """Sends the call; None where nobody is there, which the call is told."""
        network, channel = self._network, self._channel_now
        server = network.server(self.address)
        if channel is not None and not channel.over:
            channel.start(call)
            return channel
        if server is None:
            refused = WorkerLost(f"{call.where}: connection refused")
            timers.append(network.loop.call_later(0.001, call.fail, refused))
            return None
        pair = network.pair(self._process, server.process)
        if pair.cut_until - network.loop.time() >= KEEPALIVE_S:
            late = WorkerLost(f"{call.where}: cannot connect")
            timers.append(network.loop.call_later(KEEPALIVE_S, call.fail, late))
            return None
        channel = self._channel_now = _Channel(network, self._process, server)
        channel.start(call)
        return channel

    async def close(self) -> None:
        channel = self._channel_now
        if channel is not None and not channel.over:
            for call in list(channel.calls):
                call.fail(WorkerLost(f"{call.where}: the channel was closed"))
            channel.forget()
            channel.deliver(channel.ends[1], channel.told, channel.ends[1], "closed")

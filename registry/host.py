"""What every worker process does besides its work: serve RPC, hold a lease, drain, end cleanly."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

import grpc
import msgspec

from pdmesh.registry.draining import Drain, Life, Workload
from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.store import end_task
from pdmesh.wire.errors import ConfigError, Unavailable
from pdmesh.wire.handoff import DrainRequest
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Empty, WorkerRecord
from pdmesh.wire.rpc import MAX_INTERNAL_MESSAGE, Method, add_service, server_options

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""Seconds that a stopping worker gives the calls under way, and then the pushes under way."""
SEEN_S = 1.0
"""A worker that ends has refused new work for so long, so that no router still counts on it."""


@dataclass(frozen=True)
class Binding:
    """Where a worker listens: ``port`` 0 lets the system choose."""

    host: str
    port: int


class _Signals:
    """SIGTERM asks for an end after draining; SIGINT, or a second SIGTERM, for one at once."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.now = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._term)
        loop.add_signal_handler(signal.SIGINT, self.stop)

    def _term(self) -> None:
        if self.end.is_set():
            self.now.set()
        self.end.set()

    def stop(self) -> None:
        self.now.set()
        self.end.set()


async def host_worker(
    binding: Binding,
    methods: Sequence[Method],
    loop_body: Callable[[], Coroutine[None, None, None]],
    make_lease: Callable[[str], tuple[WorkerRecord, WorkerLease]],
    finish: Callable[[], Awaitable[None]],
    life: Life | None = None,
    work: Workload | None = None,
    drain_s: float = 30.0,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and deregisters.

    After SIGTERM the worker takes nothing new, hands back what it has not begun, and goes on until
    nothing is left, for ``drain_s`` at most, and for ``SEEN_S`` at least. After SIGINT or a second
    SIGTERM it does not wait.
    While it drains it answers what is no new work. Calls under way then get ``GRACE_S`` seconds to
    end, and are cancelled. If the loop ended by itself nothing can be drained: the worker stops at
    once, and its error is raised.

    The internal service gets the methods ``Drain`` (the first part only: the process stays),
    ``Undrain`` and ``Digests`` (what the worker owns, as the store counts it) besides ``methods``.

    Args:
        binding: where to listen.
        methods: the internal service, ``Status`` among it; its name is the record's role.
        loop_body: the worker's endless loop; if it ends the worker ends.
        make_lease: builds record and lease from the address (``host:port``) that was bound.
        finish: awaited after the server stopped taking calls, before the lease is given back.
        life: told "ready" and "draining" when they begin.
        work: what has to end before a draining worker is empty.
        drain_s: seconds that draining may take.

    Raises:
        ConfigError: the port is taken, or the store refuses the login.
        Exception: what ended the loop.
    """
    server = grpc.aio.server(options=server_options(MAX_INTERNAL_MESSAGE))
    address = bind(server, binding)
    record, lease = make_lease(address)
    life = life or Life()
    drain = Drain(record.worker_id, life, work or Workload(), lease)
    signals = _Signals()
    guarded = [drain.guard(method) for method in methods]
    own = [_digests(lease), *_drain_methods(drain, life, methods, signals)]
    add_service(server, record.role, [*guarded, *own])
    await server.start()
    loop = asyncio.get_running_loop()
    running = loop.create_task(loop_body(), name="worker-loop")
    running.add_done_callback(lambda _: signals.stop())
    try:
        await _until_stopped(lease, signals, record, life, drain, drain_s)
    finally:
        event(log, "stopping", worker=record.worker_id, loop_ended=running.done())
        try:
            await server.stop(grace=0.0 if running.done() else GRACE_S)
            await finish()
        finally:
            running.cancel()
            await asyncio.wait({running})
            await lease.close()
    if not running.cancelled():
        running.result()


def _digests(lease: WorkerLease) -> Method:
    async def answer(_: Empty) -> msgspec.Struct:
        return lease.digests()

    return Method("Digests", Empty, unary=answer)


def _drain_methods(
    drain: Drain, life: Life, methods: Sequence[Method], signals: _Signals
) -> list[Method]:
    status = next((m.unary for m in methods if m.name == "Status"), None)
    if status is None:
        return []

    async def begin(request: DrainRequest) -> msgspec.Struct:
        if life.state == "starting":
            raise Unavailable("the worker is still starting; drain it when it is ready")
        drain.begin(request.reason or "asked to")
        return await status(Empty())

    async def undo(_: Empty) -> msgspec.Struct:
        if signals.end.is_set():
            raise Unavailable("the worker is ending; that cannot be undone")
        if life.state == "draining":
            await drain.undo()
        return await status(Empty())

    return [
        Method("Drain", DrainRequest, unary=begin),
        Method("Undrain", Empty, unary=undo),
    ]


async def _until_stopped(
    lease: WorkerLease,
    signals: _Signals,
    record: WorkerRecord,
    life: Life,
    drain: Drain,
    drain_s: float,
) -> None:
    """Registers (for as long as the store is away this retries), waits for the end, and drains."""
    registering = asyncio.ensure_future(_register(lease, record, life))
    ending = asyncio.ensure_future(signals.end.wait())
    try:
        await asyncio.wait({registering, ending}, return_when=asyncio.FIRST_COMPLETED)
        if registering.done():
            registering.result()
            await ending
            await _empty(drain, signals, record, drain_s)
    finally:
        life.state = "draining"
        ending.cancel()
        await end_task(registering)
        await drain.close()


async def _empty(drain: Drain, signals: _Signals, record: WorkerRecord, drain_s: float) -> None:
    """Drains until nothing is left, time is over, or the worker is told to end at once."""
    if signals.now.is_set():
        await drain.tell()
        return
    loop = asyncio.get_running_loop()
    seen_at = loop.time() + SEEN_S
    emptying = drain.begin("told to end")
    hurry = asyncio.ensure_future(signals.now.wait())
    try:
        await asyncio.wait({emptying, hurry}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        if emptying.done() and (seconds := seen_at - loop.time()) > 0:
            await asyncio.wait({hurry}, timeout=seconds)
    finally:
        hurry.cancel()
    if not emptying.done():
        why = "told to end at once" if signals.now.is_set() else f"{drain_s:g} s are over"
        event(log, "drain_cut", worker=record.worker_id, reason=why, left=drain.left() or 0)


async def _register(lease: WorkerLease, record: WorkerRecord, life: Life) -> None:
    await lease.start()
    await lease.ready()
    life.state = "ready"
    event(log, "ready", worker=record.worker_id, role=record.role, address=record.address)


def bind(server: grpc.aio.Server, binding: Binding) -> str:
    """Binds a gRPC server and returns its ``host:port``.

    Raises:
        ConfigError: the port is taken or the address is not this machine's.
    """
    wanted = f"{binding.host}:{binding.port}"
    try:
        port = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {wanted}: the port is taken or not ours") from error
    if port == 0:
        raise ConfigError(f"cannot listen on {wanted}: the port is taken or not ours")
    return f"{binding.host}:{port}"

"""What every worker process does besides its work: serve RPC, hold its lease, end cleanly."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import grpc

from pdmesh.registry.publisher import WorkerLease
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.logs import event
from pdmesh.wire.messages import WorkerRecord
from pdmesh.wire.rpc import MAX_INTERNAL_MESSAGE, Method, add_service, server_options

log = logging.getLogger(__name__)

DRAIN_S = 2.0
"""Seconds that a stopping worker gives the calls under way, and then the pushes under way."""
_DEREGISTER_S = 2.0


@dataclass(frozen=True)
class Binding:
    """Where a worker listens: ``port`` 0 lets the system choose."""

    host: str
    port: int


@dataclass
class Life:
    """How far a worker is, as it says about itself."""

    state: Literal["starting", "ready", "draining"] = "starting"


async def host_worker(
    binding: Binding,
    methods: Sequence[Method],
    loop_body: Callable[[], Coroutine[None, None, None]],
    make_lease: Callable[[str], tuple[WorkerRecord, WorkerLease]],
    finish: Callable[[], Awaitable[None]],
    life: Life | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and deregisters.

    While routers are told that it drains, Status still answers. Calls under way get ``DRAIN_S``
    seconds to end then, and are cancelled. If the loop ended by itself nothing can be drained: the
    worker stops at once, and its error is raised.

    Args:
        binding: where to listen.
        methods: the internal service; its name is the record's role.
        loop_body: the worker's endless loop; if it ends the worker ends.
        make_lease: builds record and lease from the address (``host:port``) that was bound.
        finish: awaited after the server stopped taking calls, before the lease is given back.
        life: told "ready" and "draining" when they begin.

    Raises:
        ConfigError: the port is taken, or the store refuses the login.
        Exception: what ended the loop.
    """
    server = grpc.aio.server(options=server_options(MAX_INTERNAL_MESSAGE))
    address = bind(server, binding)
    record, lease = make_lease(address)
    add_service(server, record.role, methods)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await server.start()
    work = loop.create_task(loop_body(), name="worker-loop")
    work.add_done_callback(lambda _: stop.set())
    try:
        await _until_stopped(lease, stop, record, life or Life())
    finally:
        event(log, "stopping", worker=record.worker_id, loop_ended=work.done())
        try:
            await server.stop(grace=0.0 if work.done() else DRAIN_S)
            await finish()
        finally:
            work.cancel()
            await asyncio.wait({work})
            await lease.close()
    if not work.cancelled():
        work.result()


async def _until_stopped(
    lease: WorkerLease, stop: asyncio.Event, record: WorkerRecord, life: Life
) -> None:
    """Registers (for as long as the store is away this retries) and waits for the end."""
    registering = asyncio.ensure_future(_register(lease, record, life))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({registering, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if registering.done():
            registering.result()
            await stopping
            life.state = "draining"
            with suppress(TimeoutError):
                await asyncio.wait_for(lease.drain(), _DEREGISTER_S)
    finally:
        life.state = "draining"
        stopping.cancel()
        registering.cancel()
        await asyncio.wait({registering, stopping})


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

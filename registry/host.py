"""What every worker process does besides its work: serve RPC, hold its lease, end cleanly."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from pdmesh.registry.publisher import WorkerLease
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.logs import event
from pdmesh.wire.messages import WorkerRecord
from pdmesh.wire.rpc import MAX_INTERNAL_MESSAGE, Method, add_service, server_options

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Binding:
    """Where a worker listens: ``port`` 0 lets the system choose."""

    host: str
    port: int


async def host_worker(
    binding: Binding,
    methods: Sequence[Method],
    loop_body: Callable[[], Awaitable[None]],
    make_lease: Callable[[str], tuple[WorkerRecord, WorkerLease]],
    finish: Callable[[], Awaitable[None]],
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and deregisters.

    Args:
        binding: where to listen.
        methods: the internal service; its name is the record's role.
        loop_body: the worker's endless loop; if it ends the worker ends.
        make_lease: builds record and lease from the address (``host:port``) that was bound.
        finish: awaited after the server stopped taking calls, before the lease is given back.

    Raises:
        ConfigError: the port is taken.
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
    work = asyncio.ensure_future(loop_body())
    work.add_done_callback(lambda _: stop.set())
    try:
        await _until_stopped(lease, stop, record)
    finally:
        event(log, "stopping", worker=record.worker_id)
        await server.stop(grace=1.0)
        await finish()
        work.cancel()
        await lease.close()
    if not work.cancelled() and work.done():
        work.result()


async def _until_stopped(lease: WorkerLease, stop: asyncio.Event, record: WorkerRecord) -> None:
    """Registers (for as long as the store is away this retries) and waits for the end."""
    registering = asyncio.ensure_future(_register(lease, record))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({registering, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if registering.done():
        registering.result()
        await stopping
        await lease.drain()
    else:
        registering.cancel()
    stopping.cancel()


async def _register(lease: WorkerLease, record: WorkerRecord) -> None:
    await lease.start()
    await lease.ready()
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

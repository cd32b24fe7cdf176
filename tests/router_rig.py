"""A router over the prefill and decode workers of a rig, through gRPC, in one event loop."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import router_fakes as fakes
from worker_rig import SECRET, rig

from pdmesh.router.config import RouterConfig
from pdmesh.router.server import Router
from pdmesh.wire.messages import (
    Empty,
    PrefillRequest,
    ReleaseRequest,
    ReserveRequest,
    StreamRequest,
    WorkerRecord,
    WorkerStatus,
)
from pdmesh.wire.rpc import Method, add_service


async def serve_side(side, role, workers, number=0):
    """One of the rig's workers behind gRPC; returns its server and record."""
    worker, config = side.worker, workers.options.config
    record = WorkerRecord(
        worker_id=f"{role}-{number}",
        instance=getattr(side, "instance", f"{role}-{number}"),
        role=role,
        address="",
        page_format=workers.format,
        model="tiny",
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        capacity_pages=workers.options.pages,
    )

    async def status(_: Empty) -> WorkerStatus:
        return WorkerStatus(
            worker_id=record.worker_id,
            instance=record.instance,
            role=role,
            state="ready",
            page_format=workers.format,
            pool=side.kv.status(),
            queued=worker.queued,
            running=worker.running,
        )

    methods = [Method("Status", Empty, unary=status)]
    if role == "prefill":
        methods.append(Method("Prefill", PrefillRequest, unary=worker.prefill))
    else:
        methods += [
            Method("Reserve", ReserveRequest, unary=worker.reserve),
            Method("Stream", StreamRequest, stream=worker.stream),
            Method("Release", ReleaseRequest, unary=worker.release),
        ]
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    add_service(server, role, methods)
    await server.start()
    return server, fakes.msgspec.structs.replace(record, address=f"127.0.0.1:{port}")


@asynccontextmanager
async def whole_mesh(tmp_path, max_attempts=1, **options):
    """A router over the workers of ``rig(**options)``; yields the rig and a client's stub.

    The rig gets the router as an attribute of that name.
    """
    (tmp_path / "secret").write_bytes(SECRET)
    registry = fakes.FakeRegistry()
    config = RouterConfig(
        model_path=fakes.MODEL_PATH,
        model_name="tiny",
        secret_file=tmp_path / "secret",
        redis_url="redis://unused",
        poll_interval=0.02,
        stop_grace=0.0,
        max_attempts=max_attempts,
    )
    async with rig(**options) as workers:
        servers = []
        for role, sides in (("prefill", workers.prefills), ("decode", workers.decodes)):
            for number, side in enumerate(sides):
                server, record = await serve_side(side, role, workers, number)
                servers.append(server)
                registry.records.append(record)
        router = workers.router = Router(config, registry)
        await router.start()
        channel = fakes.client_channel(router.address)
        try:
            async with asyncio.timeout(60):
                while router.view.polled() < len(servers):
                    await asyncio.sleep(0.002)
            yield workers, fakes.chat_pb2_grpc.ChatServiceStub(channel)
        finally:
            await channel.close()
            await router.stop()
            for server in servers:
                await server.stop(None)

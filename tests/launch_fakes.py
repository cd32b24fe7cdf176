"""``pdmesh`` with real processes but no model: the router echoes, the workers only register.

A program: its arguments are those of ``pdmesh``. Variables: FAKE_CRASH names a process that ends
with exit code 1 at once, FAKE_REFUSE one that finds its settings wrong; FAKE_BUSY names those that
do not finish their three answers before there is a file "idle" in the runtime directory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdmesh.launch import cli, processes, serve
from pdmesh.launch.topology import Topology
from pdmesh.registry.draining import Life, Workload, counted
from pdmesh.registry.host import Binding, host_worker
from pdmesh.registry.publisher import WorkerLease
from pdmesh.router.config import RouterConfig
from pdmesh.router.join import join_method
from pdmesh.wire import chat_pb2, chat_pb2_grpc
from pdmesh.wire.admin import AnswerList, MoveOrder, MoveReport, RunningAnswer
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.ids import new_instance
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Empty, PoolStatus, WorkerRecord, WorkerStatus
from pdmesh.wire.rpc import Method, add_service

FORMAT = PageFormat("tiny", "w", "float32", 64, 7, 1, 576)
log = logging.getLogger("fake")


def told(what: str) -> bool:
    """Whether the test has left a file of this name in the runtime directory."""
    return (Path(os.environ.get("XDG_RUNTIME_DIR", "/")) / what).exists()


def misbehave(name: str) -> None:
    if name == os.environ.get("FAKE_CRASH"):
        sys.stderr.write("RuntimeError: no memory left\n")
        sys.stderr.flush()
        os._exit(1)
    later = name == os.environ.get("FAKE_REFUSE_LATER") and told("refuse")
    if later or name == os.environ.get("FAKE_REFUSE"):
        raise ConfigError("config.json: scoring_func is 'tanh'; it must be sigmoid or softmax")


async def worker(role: str, topology: Topology, name: str, port: int) -> None:
    misbehave(name)
    instance, life = new_instance(), Life()
    named = name in os.environ.get("FAKE_BUSY", "").split()

    def answers_left() -> int:
        return 3 if named and not told("idle") else 0

    async def status(_: Empty) -> WorkerStatus:
        return WorkerStatus(
            worker_id=name,
            instance=instance,
            role=role,
            state=life.state,
            page_format=FORMAT,
            pool=PoolStatus(total=8, free=5, reserved=0, used=1, cached=2, quarantined=0),
            step_limit=512 if role == "prefill" else 32,
            queued=0,
            running=1,
            leases=answers_left(),
            preempted=3,
            parked=2,
            moved_in=4,
            moved_out=5,
            drafted=8,
            accepted=6,
        )

    def lease(address: str) -> tuple[WorkerRecord, WorkerLease]:
        record = WorkerRecord(
            worker_id=name,
            instance=instance,
            role=role,
            address=address,
            page_format=FORMAT,
            model=topology.model_name,
            vocab_size=16,
            max_context=64,
            capacity_pages=8,
            metrics_port=getattr(topology, role).metrics_port,
        )
        event(log, "begins", threads=os.environ.get("OMP_NUM_THREADS"))
        return record, WorkerLease(
            topology.mesh.redis, topology.mesh.name, record, ttl_s=topology.mesh.lease_ttl_s
        )

    async def nothing() -> None:
        pass

    await host_worker(
        Binding(topology.mesh.host, port),
        [Method("Status", Empty, unary=status)],
        asyncio.Event().wait,
        lease,
        nothing,
        life,
        Workload(lambda: counted(answers_left(), "answer")),
        topology.mesh.drain_s,
    )


class Echo(chat_pb2_grpc.ChatServiceServicer):
    """Answers with the last message, a word at a time; "fail" fails, "slow" does not end."""

    async def StreamChat(self, request, context):
        prompt = request.messages[-1].content
        if prompt == "fail":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is bad")
        for word in prompt.split():
            yield chat_pb2.ChatResponse(text=word + " ")
        yield chat_pb2.ChatResponse(text=f"({len(request.messages)} messages)")
        if prompt == "slow":
            await asyncio.sleep(600)
        usage = chat_pb2.Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=2)
        yield chat_pb2.ChatResponse(finish_reason="stop", usage=usage)


class Health(health_pb2_grpc.HealthServicer):
    async def Check(self, request, context):
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


ANSWERS = (
    RunningAnswer(
        request_id="4f1c0d",
        index=0,
        worker_id="decode-0",
        phase="running",
        prompt_tokens=12,
        tokens=7,
        migrations=1,
    ),
    RunningAnswer(
        request_id="4fffff",
        index=1,
        worker_id="decode-1",
        phase="starting",
        prompt_tokens=3,
        tokens=0,
    ),
)


async def answers(_: Empty) -> AnswerList:
    return AnswerList(answers=ANSWERS)


async def move(order: MoveOrder):
    """Every answer but the second of a request can be moved."""
    target = order.target or "decode-1"
    for index in (0, 1) if order.index is None else (order.index,):
        yield MoveReport(index=index, state="moving", source="decode-0", target=target)
        if index == 1:
            reason = f"{target} has no room"
            yield MoveReport(
                index=1, state="failed", source="decode-0", target=target, reason=reason
            )
        else:
            yield MoveReport(
                index=0, state="moved", source="decode-0", target=target, pause_ms=12.3
            )


def router_methods(topology: Topology) -> list[Method]:
    config = RouterConfig(
        model_path=topology.model_path,
        model_name=topology.model_name,
        secret_file=topology.mesh.secret_file,
        redis_url=topology.mesh.redis,
        mesh=topology.mesh.name,
        lease_ttl_s=topology.mesh.lease_ttl_s,
    )
    return [
        join_method(config, lambda: [FORMAT]),
        Method("Answers", Empty, unary=answers),
        Method("MigrateAnswer", MoveOrder, stream=move),
    ]


async def router(topology: Topology, admin_port: int = 0, admin_file=None) -> None:
    misbehave("router")
    server = grpc.aio.server()
    chat_pb2_grpc.add_ChatServiceServicer_to_server(Echo(), server)
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    server.add_insecure_port(f"{topology.mesh.host}:{topology.mesh.port}")
    admin = server.add_insecure_port(f"{topology.mesh.host}:{admin_port}")
    add_service(server, "router", router_methods(topology))
    if admin_file is not None:
        admin_file.write_text(f"{topology.mesh.host}:{admin}")
    await server.start()
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop(None)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", __file__, *arguments]


def main() -> int:
    processes.command = command
    sys.modules["pdmesh.launch.processes"].command = command
    serve._prefill = lambda topology, name, a: worker("prefill", topology, name, a.port or 0)
    serve._decode = lambda topology, name, a: worker("decode", topology, name, a.port or 0)
    serve._router = router
    if len(sys.argv) > 1 and sys.argv[1] == "up":
        from pdmesh.launch import up

        up.command = command
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

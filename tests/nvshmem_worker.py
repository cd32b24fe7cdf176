"""A prefill or a decode worker on a GPU, as one process of an NVSHMEM job; served over gRPC.

Run by test_nvshmem_hand_off.py. PE 0 computes prompts, the other one decodes and listens on NVSHMEM
and on TCP. The address is written to a file when the worker serves.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc
import torch

from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.runner import DecodeRunner
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.worker import DecodeWorker
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvtransfer.nvshmem import NvshmemDialer, NvshmemJob, NvshmemListener
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.kvtransfer.tcp import TcpDialer, TcpListener
from pdmesh.model.served import Placing, load_served_model
from pdmesh.prefill.runner import PrefillRunner
from pdmesh.prefill.scheduler import PrefillScheduler
from pdmesh.prefill.work import PrefillLimits
from pdmesh.prefill.worker import PrefillWorker
from pdmesh.wire.messages import (
    Empty,
    FirstToken,
    PoolStatus,
    PrefillRequest,
    ReleaseRequest,
    ReserveRequest,
    StreamRequest,
    WorkerStatus,
)
from pdmesh.wire.rpc import MAX_INTERNAL_MESSAGE, Method, add_service, server_options

MODEL = Path(__file__).resolve().parent.parent / "model" / "tiny"
SECRET = b"0123456789abcdef"
PAGES = 128


def _nothing(_: object) -> None:
    pass


async def serve(role: str, methods: list[Method], loop_body, ready: Path) -> None:
    server = grpc.aio.server(options=server_options(MAX_INTERNAL_MESSAGE))
    port = server.add_insecure_port("127.0.0.1:0")
    add_service(server, role, methods)
    await server.start()
    ready.write_text(f"127.0.0.1:{port}")
    await loop_body()


def status_of(role: str, fmt, kv: KvManager, problems) -> Method:
    async def status(_: Empty) -> WorkerStatus:
        pool: PoolStatus = kv.status()
        return WorkerStatus(
            worker_id=role, instance=role, role=role, state="ready", page_format=fmt, pool=pool,
            queued=0, running=0, problems=tuple(problems()),
        )  # fmt: skip

    return Method("Status", Empty, unary=status)


def main() -> None:
    rank, size, job_id, ready = sys.argv[1:5]
    job = NvshmemJob(bytes.fromhex(job_id), int(rank), int(size), torch.device("cuda:0"))
    model, fmt = load_served_model(
        MODEL, "tiny", dtype="float32", placing=Placing("cuda:0", "plain"), mtp=True, page_size=64,
        arithmetic="fast", progress=lambda *_: None,
    )  # fmt: skip
    store = job.store(PAGES, fmt.num_layers, fmt.page_size, fmt.latent_width, model.dtype)
    kv = KvManager(PAGES, fmt.page_size, _nothing, _nothing)
    dialers = (NvshmemDialer(job, store), TcpDialer())
    config = model.config

    async def prefill() -> None:
        runner = PrefillRunner(model, store, fmt.page_size, True, fmt.arithmetic)
        limits = PrefillLimits(fmt, config.vocab_size, config.max_position_embeddings, SECRET)
        worker = PrefillWorker(
            runner, kv, store, PrefillScheduler(512, fmt.page_size, 64), limits, dialers=dialers
        )

        async def run(request: PrefillRequest) -> FirstToken:
            return await worker.prefill(request)

        methods = [
            Method("Prefill", PrefillRequest, unary=run),
            status_of("prefill", fmt, kv, worker.check_integrity),
        ]
        await serve("prefill", methods, worker.run, Path(ready))

    async def decode() -> None:
        receiver = TransferReceiver(store, [NvshmemListener(job, fmt), TcpListener(fmt)])
        receiver.start()
        limits = DecodeLimits(
            instance="decode", page_format=fmt, vocab_size=config.vocab_size,
            max_context=config.max_position_embeddings, hidden_size=config.hidden_size,
            secret=SECRET, lease_idle_s=60.0,
        )  # fmt: skip
        worker = DecodeWorker(
            DecodeRunner(model, store, fmt.page_size, 1), kv, store, receiver,
            DecodeScheduler(8), limits, sender=TransferSender(fmt, dialers, store),
        )  # fmt: skip
        methods = [
            Method("Reserve", ReserveRequest, unary=worker.reserve),
            Method("Stream", StreamRequest, stream=worker.stream),
            Method("Release", ReleaseRequest, unary=worker.release),
            status_of("decode", fmt, kv, worker.check_integrity),
        ]
        await serve("decode", methods, worker.run, Path(ready))

    asyncio.run(prefill() if int(rank) == 0 else decode())


if __name__ == "__main__":
    main()

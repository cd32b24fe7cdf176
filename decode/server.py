"""A decode worker as a process: load, register, serve."""

from __future__ import annotations

import torch

from pdmesh.decode.config import DecodeConfig
from pdmesh.decode.leases import DecodeLimits
from pdmesh.decode.runner import DecodeRunner
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.decode.worker import DecodeWorker
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.tcp import TcpListener
from pdmesh.model.page_format import page_format
from pdmesh.model.weights import fingerprint, load_model
from pdmesh.registry.host import Binding, host_worker
from pdmesh.registry.loading import LoadingLog
from pdmesh.registry.publisher import WorkerLease
from pdmesh.wire.ids import new_instance
from pdmesh.wire.messages import (
    Empty,
    ReleaseRequest,
    ReserveRequest,
    StreamRequest,
    WorkerRecord,
    WorkerStatus,
)
from pdmesh.wire.rpc import Method
from pdmesh.wire.secret import read_secret


async def serve_decode(config: DecodeConfig) -> None:
    """Runs one decode worker until SIGTERM.

    Raises:
        ConfigError: checkpoint, secret or port cannot be used.
    """
    torch.set_num_threads(config.threads)
    secret = read_secret(config.secret_file)
    dtype = getattr(torch, config.dtype)
    loading = LoadingLog(config.worker_id, config.model_path)
    model = load_model(
        config.model_path,
        dtype,
        torch.device(config.device),
        mtp=config.mtp,
        progress=loading.progress,
    )
    fmt = page_format(
        model.config, config.model_name, fingerprint(config.model_path), config.dtype, config.mtp
    )
    loading.loaded()
    store = LatentStore(
        config.pages, fmt.num_layers, fmt.page_size, fmt.latent_width, dtype, config.device
    )
    leases: list[WorkerLease] = []
    kv = KvManager(
        config.pages,
        fmt.page_size,
        on_publish=lambda hashes: leases[0].publish(hashes),
        on_evict=lambda hashes: leases[0].evict(hashes),
    )
    instance = new_instance()
    limits = DecodeLimits(
        instance=instance,
        page_format=fmt,
        vocab_size=model.config.vocab_size,
        max_context=model.config.max_position_embeddings,
        hidden_size=model.config.hidden_size,
        secret=secret,
        lease_idle_s=config.lease_idle_s,
    )
    receiver = TransferReceiver(store, [TcpListener(fmt, config.transfer_host)])
    receiver.start()
    scheduler: DecodeScheduler[DecodeSequence] = DecodeScheduler(config.max_batch)
    runner = DecodeRunner(model, store, fmt.page_size)
    worker = DecodeWorker(runner, kv, receiver, scheduler, limits)

    def lease(address: str) -> tuple[WorkerRecord, WorkerLease]:
        record = WorkerRecord(
            worker_id=config.worker_id,
            instance=instance,
            role="decode",
            address=address,
            page_format=fmt,
            model=config.model_name,
            vocab_size=model.config.vocab_size,
            max_context=model.config.max_position_embeddings,
            capacity_pages=config.pages,
        )
        leases.append(
            WorkerLease(
                config.redis_url,
                config.mesh,
                record,
                snapshot=kv.owned_hashes,
                ttl_s=config.lease_ttl_s,
            )
        )
        return record, leases[0]

    async def status(_: Empty) -> WorkerStatus:
        return WorkerStatus(
            worker_id=config.worker_id,
            instance=instance,
            role="decode",
            state="ready",
            page_format=fmt,
            pool=kv.status(),
            queued=worker.queued,
            running=worker.running,
            leases=worker.leases,
            tokens_generated=worker.tokens_generated,
            cancelled=worker.cancelled,
            step_ms=worker.step_ms,
            problems=tuple(worker.check_integrity()),
        )

    methods = [
        Method("Reserve", ReserveRequest, unary=worker.reserve),
        Method("Stream", StreamRequest, stream=worker.stream),
        Method("Release", ReleaseRequest, unary=worker.release),
        Method("Status", Empty, unary=status),
    ]

    async def finish() -> None:
        worker.close()
        receiver.close()

    await host_worker(Binding(config.host, config.port), methods, worker.run, lease, finish)

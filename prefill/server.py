"""A prefill worker as a process: load, register, serve."""

from __future__ import annotations

import torch

from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.store import LatentStore
from pdmesh.model.page_format import page_format
from pdmesh.model.weights import fingerprint, load_model
from pdmesh.prefill.config import PrefillConfig
from pdmesh.prefill.runner import PrefillRunner
from pdmesh.prefill.scheduler import PrefillScheduler
from pdmesh.prefill.work import PrefillLimits
from pdmesh.prefill.worker import PrefillWorker
from pdmesh.registry.host import DRAIN_S, Binding, host_worker
from pdmesh.registry.loading import LoadingLog
from pdmesh.registry.publisher import WorkerLease
from pdmesh.wire.ids import new_instance
from pdmesh.wire.messages import Empty, PrefillRequest, WorkerRecord, WorkerStatus
from pdmesh.wire.rpc import Method
from pdmesh.wire.secret import read_secret


async def serve_prefill(config: PrefillConfig) -> None:
    """Runs one prefill worker until SIGTERM.

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
    limits = PrefillLimits(
        fmt, model.config.vocab_size, model.config.max_position_embeddings, secret
    )
    worker = PrefillWorker(
        PrefillRunner(model, store, fmt.page_size, fmt.mtp_layers > 0),
        kv,
        store,
        PrefillScheduler(config.chunk_tokens, fmt.page_size, config.max_queue),
        limits,
    )
    instance = new_instance()

    def lease(address: str) -> tuple[WorkerRecord, WorkerLease]:
        record = WorkerRecord(
            worker_id=config.worker_id,
            instance=instance,
            role="prefill",
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
            role="prefill",
            state="ready",
            page_format=fmt,
            pool=kv.status(),
            queued=worker.queued,
            running=worker.running,
            leases=worker.finishing,
            tokens_computed=worker.tokens_computed,
            cancelled=worker.cancelled,
            step_ms=worker.step_ms,
            problems=tuple(worker.check_integrity()),
        )

    methods = [
        Method("Prefill", PrefillRequest, unary=worker.prefill),
        Method("Status", Empty, unary=status),
    ]

    async def finish() -> None:
        await worker.close(grace=DRAIN_S)

    await host_worker(Binding(config.host, config.port), methods, worker.run, lease, finish)

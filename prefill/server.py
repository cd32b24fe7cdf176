"""A prefill worker as a process: load, register, serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import msgspec

from pdmesh.kvcache.checksums import page_checksums
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.replicas import ReplicaHints
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.pull_exchange import PrefixExchange
from pdmesh.kvtransfer.transports import make_page_transports
from pdmesh.kvtransfer.weight_holder import HOLDER, MappedWeights, mapped_weights
from pdmesh.model.device.bound import serving, starting
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.rank import DeviceRank
from pdmesh.model.parallel.serving import (
    computing,
    follow,
    join_ranks,
    rank_status,
)
from pdmesh.model.served import (
    served_grammars,
    store_dtype,
)
from pdmesh.model.starting import settle_threads, start_model
from pdmesh.prefill.config import (
    AUTO_CHUNK,
    STEP_PROMPTS,
    PrefillConfig,
    chunk_choices,
    scheduler_on,
    step_rows,
)
from pdmesh.prefill.facts import PrefillStepFacts
from pdmesh.prefill.metrics import PrefillMetrics
from pdmesh.prefill.runner import PrefillRunner
from pdmesh.prefill.sending import page_sender
from pdmesh.prefill.warming import warm_up, warm_up_rank
from pdmesh.prefill.work import PrefillLimits
from pdmesh.prefill.worker import PrefillWorker
from pdmesh.registry.draining import Life, Workload, counted
from pdmesh.registry.host import GRACE_S, Binding, host_worker
from pdmesh.registry.loading import LoadingLog
from pdmesh.registry.memory_metrics import memory_gauges
from pdmesh.registry.metrics import metrics_endpoint, on_loop
from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.pull_metrics import PullMetrics
from pdmesh.registry.replicas import watching_replicas
from pdmesh.registry.transfer_metrics import TransferMetrics
from pdmesh.registry.watchdog import Watchdog, end_process, step_bound_s, watched, while_there
from pdmesh.wire.handoff import ChecksumsRequest, PageChecksums
from pdmesh.wire.ids import new_instance
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Empty, FirstToken, PrefillRequest, WorkerRecord, WorkerStatus
from pdmesh.wire.rpc import Method
from pdmesh.wire.secret import read_secret

log = logging.getLogger(__name__)


async def serve_prefill(config: PrefillConfig) -> None:
    """Runs one prefill worker until SIGTERM.

    Raises:
        ConfigError: checkpoint, secret or a port cannot be used.
    """
    with mapped_weights(config.weights_from, config.device) as shared:
        await _serve(config, shared)


async def _serve(config: PrefillConfig, shared: MappedWeights | None) -> None:
    settle_threads(config.threads)
    secret = read_secret(config.secret_file)
    loading = partial(LoadingLog, config.worker_id, config.model_path)
    chunks = chunk_choices(config.chunk_tokens, config.device, max(1, len(config.ep_ranks)))
    rows = [step_rows(chunk, config.page_size) for chunk in chunks]
    started = start_model(config, "prefill", rows, STEP_PROMPTS, loading, shared)
    chunk, told = chunks[rows.index(started.rows)], config.chunk_tokens != AUTO_CHUNK
    why = started.reason or ("as it was told" if told else f"what a {config.device} device wants")
    event(log, "step chosen", worker=config.worker_id, tokens=chunk, why=why)
    config = replace(config, pages=started.pages, chunk_tokens=chunk)
    model, fmt, ranks, spread = started.model, started.fmt, started.ranks, started.spread
    if ranks.follows:
        await follow(model, fmt, ranks, config.worker_id)
        return
    watchdog = Watchdog(config.step_timeout_s or step_bound_s(config.device))
    with starting(started.memory):
        store = LatentStore(
            config.pages,
            fmt.num_layers,
            fmt.page_size,
            fmt.latent_width,
            store_dtype(fmt),
            config.device,
            shared="shm" in config.transports,
        )
        if isinstance(model, DeviceModel):
            for line in model.ops.describe():
                event(log, "backend", worker=config.worker_id, choice=line)
            if model.device.type == "cuda" and spread is None:
                warm_up(model, store.tensor, config.chunk_tokens)
    leases: list[WorkerLease] = []
    copies = ReplicaHints()
    kv = KvManager(
        config.pages,
        fmt.page_size,
        on_publish=lambda pages: leases[0].publish(pages),
        on_evict=lambda pages: leases[0].evict(pages),
        eviction=config.eviction,
        replicated=copies,
    )
    vocab_size = model.config.vocab_size
    limits = PrefillLimits(
        fmt,
        vocab_size,
        model.config.max_position_embeddings,
        secret,
        served_grammars(config.tokenizer, vocab_size),
    )

    def prepare(own: DeviceRank, between: Callable[[], None]) -> None:
        if spread is not None and own.model.device.type == "cuda":
            warm_up_rank(own, store.tensor, config.chunk_tokens, spread.exchange.modes)

    with starting(started.memory):
        called, rank = await join_ranks(model, fmt, ranks, prepare=prepare)
    watch: AbstractContextManager[None] = watchdog
    if started.memory is not None:
        started.memory.report(config.worker_id)
        watch = started.memory.watching(watchdog)
    sender = page_sender(fmt, store, config.transports)
    worker = PrefillWorker(
        PrefillRunner(called, store, fmt.page_size, fmt.mtp_layers > 0, fmt.arithmetic, watch),
        kv,
        store,
        scheduler_on(config.device, config.chunk_tokens, fmt.page_size, config.max_queue),
        limits,
        sender=sender,
    )
    instance, life = new_instance(), Life()
    exchange = PrefixExchange(
        kv,
        instance,
        fmt,
        make_page_transports(config.transports, store, config.transfer_host),
        timeout_s=config.pull_s,
        on_room=worker.pages_freed,
    )
    worker.fetcher = exchange.fetcher

    def facts() -> WorkerStatus:
        return WorkerStatus(
            worker_id=config.worker_id,
            instance=instance,
            role="prefill",
            state=life.state,
            page_format=fmt,
            pool=kv.status(),
            queued=worker.queued,
            running=worker.running,
            leases=worker.finishing,
            tokens_computed=worker.tokens_computed,
            cancelled=worker.cancelled,
            step_ms=worker.step_ms,
            step_limit=config.chunk_tokens,
            pulled_pages=exchange.fetcher.pages,
            transports=sender.transports,
            ranks=rank_status(called),
        )

    metrics = PrefillMetrics(fmt, config.worker_id, on_loop(asyncio.get_running_loop(), facts))
    exchange.fetcher.observe = PullMetrics(metrics).observe
    sender.observe = TransferMetrics(metrics).observe
    if started.memory is not None:
        memory_gauges(metrics, started.memory.figures)

    def observe(step: PrefillStepFacts) -> None:
        metrics.observe(step)
        exchange.fetcher.computed(step.num_tokens, step.duration_s)

    worker.observe = observe

    def lease(address: str) -> tuple[WorkerRecord, WorkerLease]:
        record = WorkerRecord(
            worker_id=config.worker_id,
            instance=instance,
            role="prefill",
            address=address,
            page_format=fmt,
            model=config.model_name,
            vocab_size=vocab_size,
            max_context=model.config.max_position_embeddings,
            capacity_pages=config.pages,
            metrics_port=config.metrics_port,
        )
        leases.append(
            WorkerLease(
                config.redis_url,
                config.mesh,
                record,
                snapshot=kv.owned_pages,
                ttl_s=config.lease_ttl_s,
            )
        )
        return record, leases[0]

    async def prefill(request: PrefillRequest) -> FirstToken:
        first = await worker.prefill(request)
        metrics.computed(first)
        return first

    async def status(_: Empty) -> WorkerStatus:
        problems = worker.check_integrity() + exchange.check_integrity()
        return msgspec.structs.replace(facts(), problems=tuple(problems))

    async def checksums(request: ChecksumsRequest) -> PageChecksums:
        return await asyncio.to_thread(
            page_checksums, kv, store, request.hashes, mtp_layers=fmt.mtp_layers
        )

    async def finish() -> None:
        await exchange.close()
        await worker.close(grace=GRACE_S)
        if rank is not None:
            await asyncio.to_thread(rank.close)
        if spread is not None and model.device.type == "cuda":
            end_process()  # leaving NVSHMEM's job waits for all ranks, which may be gone

    methods = [
        Method("Prefill", PrefillRequest, unary=prefill),
        Method("Status", Empty, unary=status),
        Method("Checksums", ChecksumsRequest, unary=checksums),
        *exchange.methods(),
    ]
    exchange.start()
    binding = Binding(config.host, config.port)
    work = Workload(lambda: counted(worker.unfinished, "prompt"), worker.hand_back)
    replicas = (
        watching_replicas(
            config.redis_url, config.mesh, lambda: leases[0].layout, kv.coming, copies.learn
        )
        if config.replica_hints
        else contextlib.nullcontext()
    )
    async with metrics_endpoint(metrics.registry, config.host, config.metrics_port), replicas:
        run = partial(watched, partial(computing, worker.run, rank), watchdog)
        if shared is not None:
            run = partial(while_there, run, shared.gone, HOLDER)
        with serving(started.memory):
            await host_worker(binding, methods, run, lease, finish, life, work, config.drain_s)

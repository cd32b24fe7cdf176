"""A decode worker as a process: load, register, serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import msgspec

from pdmesh.decode.capturing import capture, capture_rank
from pdmesh.decode.config import DecodeConfig, step_rows
from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.methods import migration_methods
from pdmesh.decode.metrics import DecodeMetrics
from pdmesh.decode.pulling import PullingReserve
from pdmesh.decode.runner import DecodeRunner
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.decode.worker import DecodeWorker
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.replicas import ReplicaHints
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.pull_exchange import PrefixExchange
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.kvtransfer.transports import make_dialers, make_listeners, make_page_transports
from pdmesh.kvtransfer.weight_holder import HOLDER, MappedWeights, mapped_weights
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.device.bound import serving, starting
from pdmesh.model.device.model import DeviceModel
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
from pdmesh.registry.draining import Life, Workload, counted
from pdmesh.registry.host import Binding, host_worker
from pdmesh.registry.loading import LoadingLog
from pdmesh.registry.memory_metrics import memory_gauges
from pdmesh.registry.metrics import metrics_endpoint, on_loop
from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.pull_metrics import PullMetrics
from pdmesh.registry.replicas import watching_replicas
from pdmesh.registry.transfer_metrics import TransferMetrics
from pdmesh.registry.watchdog import Watchdog, end_process, step_bound_s, watched, while_there
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.ids import new_instance
from pdmesh.wire.logs import event
from pdmesh.wire.messages import (
    Empty,
    Lease,
    ReleaseRequest,
    ReserveRequest,
    StreamRequest,
    WorkerRecord,
    WorkerStatus,
)
from pdmesh.wire.rpc import Method
from pdmesh.wire.secret import read_secret

log = logging.getLogger(__name__)

_MIB = 1 << 20


async def serve_decode(config: DecodeConfig) -> None:
    """Runs one decode worker until SIGTERM.

    Raises:
        ConfigError: checkpoint, secret or a port cannot be used.
    """
    with mapped_weights(config.weights_from, config.device) as shared:
        await _serve(config, shared)


async def _serve(config: DecodeConfig, shared: MappedWeights | None) -> None:
    settle_threads(config.threads)
    secret = read_secret(config.secret_file)
    loading = partial(LoadingLog, config.worker_id, config.model_path)
    rows = (step_rows(config.max_batch, config.draft_tokens),)
    started = start_model(config, "decode", rows, config.max_batch, loading, shared)
    config = replace(config, pages=started.pages)
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
            if spread is None:
                capture(model, store.tensor, config)
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
    instance, life = new_instance(), Life()
    limits = _limits(config, model, fmt, instance, secret)
    listeners = make_listeners(config.transports, fmt, store, config.transfer_host)
    receiver = TransferReceiver(store, listeners)
    receiver.start()
    scheduler: DecodeScheduler[DecodeSequence] = DecodeScheduler(config.max_batch)
    modes = () if spread is None else spread.exchange.modes
    prepare = partial(capture_rank, store.tensor, config, modes)
    with starting(started.memory):
        called, rank = await join_ranks(model, fmt, ranks, prepare=prepare)
    watch: AbstractContextManager[None] = watchdog
    if started.memory is not None:
        started.memory.report(config.worker_id)
        watch = started.memory.watching(watchdog)
    runner = DecodeRunner(called, store, fmt.page_size, config.draft_tokens, watch=watch)
    sender = TransferSender(fmt, make_dialers(config.transports, store), store)
    worker = DecodeWorker(runner, kv, store, receiver, scheduler, limits, sender=sender)
    exchange = PrefixExchange(
        kv,
        instance,
        fmt,
        make_page_transports(config.transports, store, config.transfer_host),
        timeout_s=config.pull_s,
        on_room=worker.pages_freed,
    )
    pulling = PullingReserve(worker, exchange.fetcher)

    def facts() -> WorkerStatus:
        return WorkerStatus(
            worker_id=config.worker_id,
            instance=instance,
            role="decode",
            state=life.state,
            page_format=fmt,
            pool=kv.status(),
            queued=worker.queued,
            running=worker.running,
            leases=worker.leases,
            tokens_generated=worker.tokens_generated,
            cancelled=worker.cancelled,
            preempted=worker.preempted,
            parked=worker.parked,
            drafted=worker.drafted,
            accepted=worker.accepted,
            step_ms=worker.step_ms,
            step_limit=config.max_batch,
            moved_in=worker.adoptions.moved_in,
            moved_out=worker.migrations.moved_out,
            pulled_pages=exchange.fetcher.pages,
            transports=tuple(name for name, _ in receiver.addresses),
            ranks=rank_status(called),
        )

    metrics = DecodeMetrics(
        fmt,
        config.worker_id,
        on_loop(asyncio.get_running_loop(), facts),
        lambda: worker.parked_bytes,
    )
    worker.observe = metrics.observe
    exchange.fetcher.observe = PullMetrics(metrics).observe
    sender.observe = TransferMetrics(metrics).observe
    if started.memory is not None:
        memory_gauges(metrics, started.memory.figures)
    worker.migrations.observe = metrics.moved_out

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

    async def reserve(request: ReserveRequest) -> Lease:
        began = time.monotonic()
        granted = await pulling.reserve(request)
        metrics.reserved(request, granted, time.monotonic() - began)
        return granted

    async def status(_: Empty) -> WorkerStatus:
        problems = worker.check_integrity() + exchange.check_integrity()
        return msgspec.structs.replace(facts(), problems=tuple(problems))

    async def finish() -> None:
        await exchange.close()
        await worker.migrations.close()
        worker.close()
        receiver.close()
        if rank is not None:
            await asyncio.to_thread(rank.close)
        if spread is not None and model.device.type == "cuda":
            end_process()  # leaving NVSHMEM's job waits for all ranks, which may be gone

    methods = [
        Method("Reserve", ReserveRequest, unary=reserve),
        Method("Stream", StreamRequest, stream=worker.stream),
        Method("Release", ReleaseRequest, unary=pulling.release),
        Method("Status", Empty, unary=status),
        *migration_methods(worker),
        *exchange.methods(),
    ]
    exchange.start()
    binding = Binding(config.host, config.port)
    work = Workload(lambda: counted(worker.leases, "answer"), worker.hand_back)
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


def _limits(
    config: DecodeConfig,
    model: DeepseekV3 | DeviceModel,
    fmt: PageFormat,
    instance: str,
    secret: bytes,
) -> DecodeLimits:
    vocab_size = model.config.vocab_size
    return DecodeLimits(
        instance=instance,
        page_format=fmt,
        vocab_size=vocab_size,
        max_context=model.config.max_position_embeddings,
        hidden_size=model.config.hidden_size,
        secret=secret,
        lease_idle_s=config.lease_idle_s,
        growth_tokens=config.growth_tokens,
        max_waiting=config.max_waiting,
        park_bytes=config.park_mb * _MIB,
        grammars=served_grammars(config.tokenizer, vocab_size),
    )

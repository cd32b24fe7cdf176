"""Workers as simulated processes: the real ones, with simulated model, network and store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.methods import migration_methods
from pdmesh.decode.peers import Peers
from pdmesh.decode.pulling import PullingReserve
from pdmesh.decode.runner import DecodeRunner
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.decode.worker import DecodeWorker
from pdmesh.kvcache.checksums import page_checksums
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvtransfer.pull_attempt import Owner
from pdmesh.kvtransfer.pull_exchange import PrefixExchange, RpcOwner
from pdmesh.kvtransfer.pull_reader import Lent
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.prefill.runner import PrefillRunner
from pdmesh.prefill.scheduler import PrefillScheduler
from pdmesh.prefill.work import PrefillLimits
from pdmesh.prefill.worker import PrefillWorker
from pdmesh.registry.draining import Drain, Life, Workload, counted
from pdmesh.registry.publisher import WorkerLease
from pdmesh.simulation.loop import Process
from pdmesh.simulation.memory import GuardedStore
from pdmesh.simulation.model import (
    MAX_CONTEXT,
    PAGE_SIZE,
    VOCAB,
    WIDTH,
    Pages,
    SimDecodeRunner,
    SimPrefillRunner,
)
from pdmesh.simulation.network import Network, SimClient
from pdmesh.simulation.pulls import EagerCosts, SimPageReader, SimPageServer
from pdmesh.simulation.scenario import MeshSpec
from pdmesh.simulation.store import SimStore, StoreClient
from pdmesh.simulation.transport import SimDialer, SimListener, Troubles
from pdmesh.wire.handoff import ChecksumsRequest, PageChecksums
from pdmesh.wire.ids import new_instance
from pdmesh.wire.messages import (
    Empty,
    PageSource,
    PrefillRequest,
    ReleaseRequest,
    ReserveRequest,
    Role,
    StreamRequest,
    WorkerRecord,
    WorkerStatus,
)
from pdmesh.wire.rpc import Method

SECRET = b"simulated secret"


@dataclass(frozen=True)
class Surroundings:
    """What all processes of a run share."""

    mesh: MeshSpec
    network: Network
    store: SimStore
    troubles: Troubles

    @property
    def clock(self) -> Callable[[], float]:
        return self.network.loop.time


@dataclass
class SimWorker:
    """One worker process, and what checks look at."""

    process: Process
    role: Role
    instance: str
    kv: KvManager
    pages: Pages
    drain: Drain
    life: Life
    status: Callable[[], WorkerStatus]
    problems: Callable[[], list[str]]
    left: Callable[[], list[str]]
    """What it still holds, in words; empty when it is at rest."""
    work: asyncio.Task[None]


def start_worker(around: Surroundings, name: str) -> SimWorker:
    """A new process of the worker ``name``, in place of any before."""
    process = Process(name)
    around.network.join(process)
    build = _prefill if name.startswith("prefill") else _decode
    return process.context.run(build, around, process)


def _pages(around: Surroundings, num_pages: int) -> GuardedStore:
    fmt = around.mesh.page_format
    return GuardedStore(num_pages, fmt.num_layers, fmt.page_size, WIDTH)


def _kv(store: GuardedStore, leases: list[WorkerLease]) -> KvManager:
    store.books = KvManager(
        store.num_pages,
        PAGE_SIZE,
        on_publish=lambda pages: leases[0].publish(pages),
        on_evict=lambda pages: leases[0].evict(pages),
    )
    return store.books


def _exchange(
    around: Surroundings,
    process: Process,
    store: GuardedStore,
    kv: KvManager,
    instance: str,
    on_room: Callable[[], None],
) -> PrefixExchange:
    """Lending and fetching of cached pages."""
    mesh, network = around.mesh, around.network

    def owner_at(source: PageSource) -> Owner:
        return RpcOwner(SimClient(network, source.address, source.role))

    def serve(lender: Lent) -> SimPageServer:
        return SimPageServer(around.troubles, process, store, lender)

    reader = SimPageReader(network, around.troubles, process, store, mesh.read_s)
    exchange = PrefixExchange(
        kv,
        instance,
        mesh.page_format,
        [(serve, reader)],
        owner_at=owner_at,
        ttl_s=mesh.loan_s,
        timeout_s=mesh.pull_s,
        on_room=on_room,
        clock=around.clock,
    )
    if mesh.pulling:
        exchange.fetcher.costs = EagerCosts()
    exchange.start()
    return exchange


def _prefill(around: Surroundings, process: Process) -> SimWorker:
    mesh, fmt = around.mesh, around.mesh.page_format
    store = _pages(around, mesh.prefill_pages)
    leases: list[WorkerLease] = []
    kv = _kv(store, leases)
    worker = PrefillWorker(
        cast("PrefillRunner", SimPrefillRunner(store)),
        kv,
        store,
        PrefillScheduler(mesh.chunk_tokens, fmt.page_size, mesh.max_queue),
        PrefillLimits(fmt, VOCAB, MAX_CONTEXT, SECRET),
        clock=around.clock,
        dialers=(SimDialer(around.network, process, around.troubles),),
    )
    instance, life = new_instance(), Life()
    exchange = _exchange(around, process, store, kv, instance, worker.pages_freed)
    worker.fetcher = exchange.fetcher
    worker.observe = lambda step: exchange.fetcher.computed(step.num_tokens, step.duration_s)

    def status() -> WorkerStatus:
        return WorkerStatus(
            worker_id=process.name,
            instance=instance,
            role="prefill",
            state=life.state,
            page_format=fmt,
            pool=kv.status(),
            queued=worker.queued,
            running=worker.running,
            leases=worker.finishing,
        )

    def left() -> list[str]:
        held = {
            "prompts": worker.unfinished,
            "endings": worker.finishing,
            "transfers": worker._sender.num_transfers,
            "loans": exchange.lender.held,
        }
        return _left(process, kv, held)

    async def checksums(request: ChecksumsRequest) -> PageChecksums:
        return await asyncio.to_thread(page_checksums, kv, store, request.hashes)

    methods = [
        Method("Prefill", PrefillRequest, unary=worker.prefill),
        Method("Checksums", ChecksumsRequest, unary=checksums),
        *exchange.methods(),
        _status(status),
    ]
    work = Workload(lambda: counted(worker.unfinished, "prompt"), worker.hand_back)
    drain, task = _host(
        around, process, instance, life, "prefill", methods, kv, leases, work, worker.run
    )
    return SimWorker(
        process,
        "prefill",
        instance,
        kv,
        Pages(store),
        drain,
        life,
        status,
        lambda: worker.check_integrity() + exchange.check_integrity() + store.problems,
        left,
        task,
    )


def _decode(around: Surroundings, process: Process) -> SimWorker:
    mesh, fmt = around.mesh, around.mesh.page_format
    store = _pages(around, mesh.decode_pages)
    leases: list[WorkerLease] = []
    kv = _kv(store, leases)
    instance, life = new_instance(), Life()
    listener = SimListener(around.network, process, fmt, around.troubles, mesh.one_sided)
    receiver = TransferReceiver(store, [listener], call_later=around.network.loop.call_later)
    receiver.start()
    limits = DecodeLimits(
        instance=instance,
        page_format=fmt,
        vocab_size=VOCAB,
        max_context=MAX_CONTEXT,
        hidden_size=WIDTH,
        secret=SECRET,
        lease_idle_s=mesh.lease_idle_s,
        growth_tokens=mesh.growth_tokens,
        max_waiting=mesh.max_waiting,
        park_bytes=mesh.park_pages * store.page_bytes,
    )
    scheduler: DecodeScheduler[DecodeSequence] = DecodeScheduler(mesh.max_batch)
    runner = cast("DecodeRunner", SimDecodeRunner(store, mesh.draft_tokens))
    worker = DecodeWorker(
        runner,
        kv,
        store,
        receiver,
        scheduler,
        limits,
        sender=TransferSender(fmt, [SimDialer(around.network, process, around.troubles)]),
        peers=Peers(lambda record: SimClient(around.network, record.address, record.role)),
    )
    exchange = _exchange(around, process, store, kv, instance, worker._serve_room)
    pulling = PullingReserve(worker, exchange.fetcher, around.clock)

    def status() -> WorkerStatus:
        return WorkerStatus(
            worker_id=process.name,
            instance=instance,
            role="decode",
            state=life.state,
            page_format=fmt,
            pool=kv.status(),
            queued=worker.queued,
            running=worker.running,
            leases=worker.leases,
            preempted=worker.preempted,
            parked=worker.parked,
        )

    def left() -> list[str]:
        held = {
            "leases": worker.leases,
            "queued": worker.queued,
            "running": worker.running,
            "parked bytes": worker.parked_bytes,
            "arrivals": len(receiver._arrivals),
            "transfers": worker._sender.num_transfers,
            "moves": len(worker.migrations._moves),
            "adoptions": len(worker.adoptions._by_lease),
            "loans": exchange.lender.held,
        }
        return _left(process, kv, held)

    methods = [
        Method("Reserve", ReserveRequest, unary=pulling.reserve),
        Method("Stream", StreamRequest, stream=worker.stream),
        Method("Release", ReleaseRequest, unary=pulling.release),
        *migration_methods(worker),
        *exchange.methods(),
        _status(status),
    ]
    work = Workload(lambda: counted(worker.leases, "answer"), worker.hand_back)
    drain, task = _host(
        around, process, instance, life, "decode", methods, kv, leases, work, worker.run
    )
    return SimWorker(
        process,
        "decode",
        instance,
        kv,
        Pages(store),
        drain,
        life,
        status,
        lambda: worker.check_integrity() + exchange.check_integrity() + store.problems,
        left,
        task,
    )


def _status(status: Callable[[], WorkerStatus]) -> Method:
    async def answer(_: Empty) -> msgspec.Struct:
        return status()

    return Method("Status", Empty, unary=answer)


def _left(process: Process, kv: KvManager, held: dict[str, int]) -> list[str]:
    pool = kv.status()
    held |= {
        "pages reserved": pool.reserved,
        "pages used": pool.used,
        "pages in quarantine": pool.quarantined,
        "reservations": kv.num_reservations,
    }
    return [f"{process}: {count} {what}" for what, count in held.items() if count]


def _host(
    around: Surroundings,
    process: Process,
    instance: str,
    life: Life,
    role: Role,
    methods: Sequence[Method],
    kv: KvManager,
    leases: list[WorkerLease],
    work: Workload,
    body: Callable[[], object],
) -> tuple[Drain, asyncio.Task[None]]:
    """What ``registry.host`` does for a process: serve, register, run."""
    loop, fmt = around.network.loop, around.mesh.page_format
    address = f"host:{process.name}"
    record = WorkerRecord(
        worker_id=process.name,
        instance=instance,
        role=role,
        address=address,
        page_format=fmt,
        model="sim",
        vocab_size=VOCAB,
        max_context=MAX_CONTEXT,
        capacity_pages=kv.num_pages,
    )
    lease = WorkerLease(
        "redis://simulated",
        "sim",
        record,
        snapshot=kv.owned_pages,
        ttl_s=around.mesh.lease_ttl_s,
        store=StoreClient(around.store),
    )
    leases.append(lease)
    drain = Drain(process.name, life, work, lease)
    around.network.serve(process, address, role, [drain.guard(method) for method in methods])
    task: asyncio.Task[None] = loop.spawn(process, body())  # type: ignore[arg-type]

    async def register() -> None:
        await lease.start()
        await lease.ready()
        life.state = "ready"

    loop.spawn(process, register())
    return drain, task

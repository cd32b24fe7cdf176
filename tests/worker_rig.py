"""Prefill and decode workers in one event loop: a real model, real pages, real transfers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import torch
from cuda_ipc_rig import FakeDevice, device_store
from model_cases import tiny_model, tokens_of

from pdmesh.decode.drafter import MtpDrafter, SequenceRows
from pdmesh.decode.limits import GIB, DecodeLimits
from pdmesh.decode.methods import migration_methods
from pdmesh.decode.peers import Peers
from pdmesh.decode.runner import DecodeRunner
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.worker import DecodeWorker
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.cuda_ipc import CudaIpcDialer, CudaIpcListener
from pdmesh.kvtransfer.faults import Faults
from pdmesh.kvtransfer.loopback import LoopbackListener
from pdmesh.kvtransfer.nixl import NixlDialer, NixlListener
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.shm import ShmListener
from pdmesh.kvtransfer.tcp import TcpListener
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.page_format import page_format
from pdmesh.model.reference import generate_reference
from pdmesh.model.tree import TokenTree
from pdmesh.prefill.facts import PrefillStepFacts
from pdmesh.prefill.runner import PrefillRunner
from pdmesh.prefill.scheduler import PrefillScheduler
from pdmesh.prefill.work import PrefillLimits
from pdmesh.prefill.worker import PrefillWorker
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import PdmeshError, error_from_wire
from pdmesh.wire.hashes import page_hashes, root_hash
from pdmesh.wire.messages import (
    Fin,
    FirstToken,
    Lease,
    PrefillRequest,
    ReleaseRequest,
    ReserveRequest,
    StreamRequest,
    TokenChunk,
    WorkerRecord,
)
from pdmesh.wire.rpc import Method
from pdmesh.wire.sampling import SamplingParams

PAGE = 64
SECRET = b"k" * 32
PATIENCE = 60.0
"""Seconds after which a test gives up; never reached when all is well."""
DEVICE = FakeDevice()
LISTENERS = {
    "tcp": TcpListener,
    "shm": ShmListener,
    "nixl": NixlListener,
    "cuda_ipc": lambda fmt: CudaIpcListener(fmt, DEVICE),
}
DIALERS = {"nixl": NixlDialer, "cuda_ipc": lambda store: CudaIpcDialer(DEVICE)}
MODEL = tiny_model()
VOCAB = MODEL.config.vocab_size
WITHOUT_MTP = DeepseekV3(MODEL.config, mtp=False).requires_grad_(False).eval()
WITHOUT_MTP.load_state_dict(
    {name: value for name, value in MODEL.state_dict().items() if not name.startswith("mtp.")}
)


def reference(prompt, max_tokens):
    return generate_reference(MODEL, prompt, max_tokens)


def prompt_of(length, seed=0):
    return tokens_of(length, 1000 * length + seed, VOCAB)


class Gate:
    """A runner whose steps can be held, let through one by one, and made to fail."""

    def __init__(self, runner):
        self._runner = runner
        self._held = False
        self._permits = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)
        self.batches: list[int] = []
        """Rows' owners in each step that began."""
        self.failure: Exception | None = None
        """What the next step raises."""
        self.poison: list[int] | None = None
        """Steps with a sequence that begins so fail."""
        self.before: list[Callable[[list[SequenceRows]], None]] = []
        """Called with the rows of each step, on its thread."""

    def hold(self):
        self._held = True

    def let_go(self):
        self._held = False
        self._permits.release(1000)

    def let_one_through(self):
        self._permits.release()

    async def step_begins(self):
        """Waits for the next step not yet waited for to begin."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=PATIENCE)

    def step(self, rows):
        self.batches.append(len(rows))
        for call in self.before:
            call(rows)
        held = self._held
        self._entered.release()
        assert not held or self._permits.acquire(timeout=PATIENCE)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if self.poison and any(r.tokens[: len(self.poison)] == self.poison for r in rows):
            raise RuntimeError("poison")
        return self._runner.step(rows)


class ScriptedDrafts(MtpDrafter):
    """Drafts the true continuation where it is known, but for every third output position."""

    truth: dict[tuple[int, ...], list[int]]
    vocab_size = VOCAB

    def propose(self, sequences, count):
        trees = super().propose(sequences, count)
        return [self._scripted(s, tree) for s, tree in zip(sequences, trees, strict=True)]

    def _scripted(self, s, tree):
        known = self.truth.get(tuple(s.tokens[:PAGE]), [])
        tokens = list(tree.tokens)
        for depth in range(1, len(tokens)):
            place = s.sampling.position + depth - 1
            if place < len(known):
                wrong = place % 3 == 2
                tokens[depth] = (known[place] + 1) % self.vocab_size if wrong else known[place]
        return TokenTree(tuple(tokens), tree.parents)


@dataclass
class Options:
    mtp: bool = True
    drafts: int = 1
    branches: int = 1
    transport: str = "tcp"
    pages: int = 64
    chunk_tokens: int = 128
    max_queue: int = 100
    max_batch: int = 8
    lease_idle_s: float = 60.0
    growth_tokens: int = 0
    max_waiting: int = 100
    park_bytes: int = GIB
    prefills: int = 1
    decodes: int = 1
    one_sided: bool = False
    stall_after: int | None = None
    page_size: int = PAGE
    arithmetic: str = "fast"
    grammars: object = None
    served: DeepseekV3 | None = None
    """Another model than ``MODEL``; with its MTP layer where ``mtp`` says so."""
    truth: dict = field(default_factory=dict)
    drafter: type[MtpDrafter] = ScriptedDrafts

    @property
    def model(self):
        return self.served or (MODEL if self.mtp else WITHOUT_MTP)

    @property
    def config(self):
        return self.model.config


class Side:
    """What both kinds of workers have: pages and a gate before the compute thread."""

    def __init__(self, fmt, options):
        self.evicted: list[bytes] = []
        self.unfinished: list[str] = []
        """Pages that were shared before all their layers were written."""
        self._mtp = options.mtp
        size = options.page_size
        self.kv = KvManager(options.pages, size, self._check_published, self.evicted.extend)
        shape = (options.pages, fmt.num_layers, size, fmt.latent_width)
        if options.transport == "cuda_ipc":
            self.store = device_store(*shape)
        else:
            self.store = LatentStore(*shape, torch.float32, shared=options.transport == "shm")
        self.store.tensor.fill_(float("nan"))

    def _check_published(self, pages):
        for page_hash, _ in pages:
            page = self.kv._cache.page_of(page_hash)
            missing = self.store.tensor[page].isnan().any(-1)
            if self._mtp:
                missing[-1, 0] = False  # empty in the first page of a sequence
            if missing.any():
                self.unfinished.append(f"page {page} lacks {missing.nonzero().tolist()[:3]}")


class PrefillSide(Side):
    def __init__(self, fmt, options):
        super().__init__(fmt, options)
        size, tokens = options.page_size, options.chunk_tokens
        self.facts: list[PrefillStepFacts] = []
        self.skipped = 0.0
        """Seconds that the worker's clock is ahead."""
        self.gate = Gate(
            PrefillRunner(options.model, self.store, size, options.mtp, options.arithmetic)
        )
        scheduler = PrefillScheduler(tokens, size, options.max_queue, join_tokens=tokens)
        config = options.config
        limits = PrefillLimits(
            fmt, config.vocab_size, config.max_position_embeddings, SECRET, options.grammars
        )
        self.worker = PrefillWorker(
            self.gate,
            self.kv,
            self.store,
            scheduler,
            limits,
            dialers=[DIALERS[options.transport](self.store)]
            if options.transport in DIALERS
            else (),
            observe=self.facts.append,
            clock=lambda: time.monotonic() + self.skipped,
        )

    def busy(self):
        return [self.worker.queued, self.worker.running, self.worker.finishing]


class DecodeSide(Side):
    def __init__(self, fmt, options, number=0, connect=None):
        super().__init__(fmt, options)
        self.instance = f"decode{number or ''}"
        if options.transport in LISTENERS:
            self.listener = LISTENERS[options.transport](fmt)
        else:
            self.listener = LoopbackListener(
                fmt, Faults(stall_after=options.stall_after), one_sided=options.one_sided
            )
        self.receiver = TransferReceiver(self.store, [self.listener])
        self.receiver.start()
        drafter = options.drafter(options.model, self.store, options.page_size, options.branches)
        drafter.truth, drafter.vocab_size = options.truth, options.config.vocab_size
        runner = DecodeRunner(
            options.model, self.store, options.page_size, options.drafts, drafter=drafter
        )
        self.gate = Gate(runner)
        limits = DecodeLimits(
            instance=self.instance,
            page_format=fmt,
            vocab_size=options.config.vocab_size,
            max_context=options.config.max_position_embeddings,
            hidden_size=options.config.hidden_size,
            secret=SECRET,
            lease_idle_s=options.lease_idle_s,
            growth_tokens=options.growth_tokens,
            max_waiting=options.max_waiting,
            park_bytes=options.park_bytes,
            grammars=options.grammars,
        )
        scheduler = DecodeScheduler(options.max_batch)
        self.worker = DecodeWorker(
            self.gate,
            self.kv,
            self.store,
            self.receiver,
            scheduler,
            limits,
            peers=Peers(connect) if connect else None,
        )
        self.methods = {method.name: method for method in migration_methods(self.worker)}
        self.methods["Release"] = Method("Release", ReleaseRequest, unary=self.worker.release)

    def busy(self):
        migrations = self.worker.migrations
        sending = self.worker._sender.num_transfers
        return [
            self.worker.queued,
            self.worker.running,
            self.worker.leases,
            len(migrations._moves) + len(migrations._tasks) + len(migrations._frozen),
            len(self.worker.adoptions._by_lease) + len(self.worker.adoptions._tasks),
            sending,
        ]


class InProcessPeer:
    """Calls another worker of the rig as gRPC does: encoded, each in a task of its own."""

    def __init__(self, rig, instance):
        self._rig, self._instance = rig, instance

    async def unary(self, method, request, answer, timeout=None):
        self._rig.calls.append((method, self._instance))
        if self._rig.on_call is not None:
            await self._rig.on_call(method, request, self._instance)
        return await self._rig.call(self._instance, method, request, answer, timeout)

    async def close(self):
        pass


@dataclass
class Answer:
    """A finished request; ``chunks`` are those of decode."""

    first: FirstToken
    lease: Lease
    chunks: list[TokenChunk] = field(default_factory=list)

    @property
    def tokens(self):
        return [self.first.token_ids[0], *(t for c in self.chunks for t in c.token_ids)]

    @property
    def logprobs(self):
        return [*self.first.logprobs, *(p for c in self.chunks for p in c.logprobs)]

    @property
    def finish(self):
        return self.chunks[-1].finish if self.chunks else None


class Rig:
    """Workers, and the router's part in a request, step by step."""

    def __init__(self, options):
        self.options = options
        self.format = page_format(
            options.config,
            "tiny",
            "weights",
            "float32",
            options.mtp,
            options.page_size,
            options.arithmetic,
        )
        self.prefills = [PrefillSide(self.format, options) for _ in range(options.prefills)]
        self.calls: list[tuple[str, str]] = []
        """(method, instance) of what decode workers asked each other."""
        self.on_call = None
        """Awaited with (method, request, instance) before such a call; may raise."""
        self.decodes = [
            DecodeSide(self.format, options, i, lambda record: InProcessPeer(self, record.instance))
            for i in range(options.decodes)
        ]
        self.loops = [
            asyncio.ensure_future(side.worker.run()) for side in (*self.prefills, *self.decodes)
        ]

    def record(self, number):
        """What a decode worker registers."""
        side = self.decodes[number]
        return WorkerRecord(
            worker_id=side.instance,
            instance=side.instance,
            role="decode",
            address="",
            page_format=self.format,
            model="tiny",
            vocab_size=self.options.config.vocab_size,
            max_context=self.options.config.max_position_embeddings,
            capacity_pages=self.options.pages,
        )

    async def call(self, instance, method, request, answer, timeout=PATIENCE):
        """A unary call to a decode worker; errors come back as over the wire."""
        side = next(side for side in self.decodes if side.instance == instance)
        handler = side.methods[method]
        request = decode(encode(request), handler.request)
        try:
            result = await asyncio.wait_for(
                asyncio.ensure_future(handler.unary(request)), timeout or PATIENCE
            )
        except PdmeshError as error:
            raise error_from_wire(type(error).__name__, error.message) from error
        return decode(encode(result), answer)

    @property
    def prefill(self):
        return self.prefills[0]

    @property
    def decode(self):
        return self.decodes[0]

    def hashes(self, prompt, tenant=""):
        root = root_hash(SECRET, self.format.fingerprint(), tenant)
        return tuple(page_hashes(SECRET, root, prompt, self.options.page_size))

    async def reserve(self, prompt, max_tokens=8, decode=0, deadline_ms=60_000, **fields):
        request = ReserveRequest(
            request_id=fields.pop("request_id", "r"),
            attempt=1,
            num_prompt_tokens=len(prompt),
            hashes=self.hashes(prompt),
            max_tokens=max_tokens,
            deadline_ms=deadline_ms,
            **fields,
        )
        return await self.decodes[decode].worker.reserve(request)

    def prefill_request(self, prompt, lease, sampling=None, **fields):
        return PrefillRequest(
            request_id=fields.pop("request_id", "r"),
            attempt=1,
            token_ids=tuple(prompt),
            sampling=sampling or SamplingParams(max_tokens=8),
            lease=lease,
            deadline_ms=60_000,
            **fields,
        )

    async def compute(self, prompt, lease, sampling=None, prefill=0, **fields):
        request = self.prefill_request(prompt, lease, sampling, **fields)
        return await self.prefills[prefill].worker.prefill(request)

    def stream_request(self, prompt, lease, first, sampling=None, **fields):
        answer = fields.pop("answer", 0)
        return StreamRequest(
            lease_id=(lease.lease_id, *lease.forks)[answer],
            generation=lease.generation,
            request_id=fields.pop("request_id", "r"),
            attempt=1,
            token_ids=tuple(prompt),
            first_token=first.token_ids[answer],
            sample_index=answer,
            sampling=sampling or SamplingParams(max_tokens=8),
            **fields,
        )

    async def read(self, prompt, lease, first, sampling=None, decode=0, **fields):
        request = self.stream_request(prompt, lease, first, sampling, **fields)
        chunks = []
        async with aclosing(self.decodes[decode].worker.stream(request)) as stream:
            async for chunk in stream:
                chunks.append(chunk)
        return chunks

    async def release(self, lease, reason="finished", decode=0, answer=0):
        lease_id = (lease.lease_id, *lease.forks)[answer]
        await self.decodes[decode].worker.release(ReleaseRequest(lease_id=lease_id, reason=reason))

    async def ask(self, prompt, max_tokens=8, prefill=0, decode=0, eos=(), **sampling):
        """One request as the router makes it."""
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        lease = await self.reserve(prompt, max_tokens, decode)
        try:
            first = await self.compute(prompt, lease, params, prefill)
            answer = Answer(first, lease)
            if max_tokens > 1:
                answer.chunks = await self.read(
                    prompt, lease, first, params, decode, eos_token_ids=tuple(eos)
                )
            return answer
        finally:
            await self.release(lease, decode=decode)

    async def arrive(self, lease, token, hidden):
        """Delivers the pages a lease lacks, with any contents, and a FIN of one's own making."""
        sender = self.prefill.worker._sender
        transfer = await asyncio.to_thread(sender.open, lease)
        layers = self.format.num_layers
        for page in range(lease.cached_pages, lease.num_pages):
            for layer in range(layers):
                transfer.push(page, layer, self.prefill.store.read(0, layer))
        fin = Fin(
            lease_id=lease.lease_id,
            generation=lease.generation,
            request_id="r",
            num_writes=(lease.num_pages - lease.cached_pages) * layers,
            first_tokens=token if isinstance(token, tuple) else (token,),
            last_hidden=hidden,
        )
        await asyncio.to_thread(transfer.finish, fin)

    async def told_of_failure(self):
        """Waits until the prefill worker knows that what it pushes is not wanted."""
        await until(
            lambda: all(work.transfer.failure for work in self.prefill.worker._work.values())
        )

    def problems(self):
        """What is not at rest."""
        found = []
        for side in (*self.prefills, *self.decodes):
            pool, name = side.kv.status(), type(side).__name__
            problems = side.worker.check_integrity() + side.unfinished
            found += [f"{name}: {problem}" for problem in problems]
            if pool.free + pool.cached != pool.total or side.kv.num_reservations:
                found.append(f"{name}: {pool}, {side.kv.num_reservations} reservations")
            if any(side.busy()):
                found.append(f"{name}: busy {side.busy()}")
        return found

    async def close(self):
        for side in (*self.prefills, *self.decodes):
            side.gate.let_go()
        for loop in self.loops:
            loop.cancel()
        await asyncio.wait(self.loops)
        for side in self.prefills:
            await side.worker.close(grace=1.0)
        for side in self.decodes:
            await side.worker.migrations.close()
            side.worker.close()
            side.receiver.close()

    async def rest(self):
        """Waits until nothing is in use; what stays is a leak."""
        await until(lambda: not self.problems(), self.problems)


async def until(condition, explain=lambda: "it never happened"):
    """Waits for a condition that other tasks or threads bring about."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE
    while not condition():
        assert loop.time() < end, explain()
        await asyncio.sleep(0.002)


@asynccontextmanager
async def rig(**options):
    """A rig that is at rest in the end, with its loops alive."""
    made = Rig(Options(**options))
    try:
        yield made
        for side in (*made.prefills, *made.decodes):
            side.gate.let_go()
        await made.rest()
        assert not any(loop.done() for loop in made.loops)
    finally:
        await made.close()

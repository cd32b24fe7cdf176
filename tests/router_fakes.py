"""A router over fake workers in this process: real gRPC on both sides, no model, no store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import msgspec

from pdmesh.router.config import RouterConfig
from pdmesh.router.server import Router
from pdmesh.wire import chat_pb2, chat_pb2_grpc
from pdmesh.wire.errors import Cancelled, Overloaded, Preempted
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.ids import new_instance
from pdmesh.wire.messages import (
    Empty,
    FirstToken,
    Lease,
    PoolStatus,
    PrefillRequest,
    ReleaseRequest,
    ReserveRequest,
    Role,
    StreamRequest,
    TokenChunk,
    TokenLogprobs,
    WorkerRecord,
    WorkerStatus,
)
from pdmesh.wire.rpc import (
    MAX_INTERNAL_MESSAGE,
    Method,
    add_service,
    channel_options,
    server_options,
)

MODEL_PATH = Path(__file__).resolve().parent.parent / "model" / "tiny"
FORMAT = PageFormat(
    model="tiny",
    weights="w0",
    dtype="float32",
    page_size=64,
    num_layers=2,
    mtp_layers=0,
    latent_width=8,
)
HUGE = 8_000_000


def depth(owned: set[bytes], hashes: Sequence[bytes]) -> int:
    """How many leading hashes are owned."""
    return next((i for i, page in enumerate(hashes) if page not in owned), len(hashes))


class FakeRegistry:
    """Membership and ownership that a test sets by hand."""

    def __init__(self) -> None:
        self.records: list[WorkerRecord] = []
        self.owned: dict[str, set[bytes]] = {}
        self.lost: list[str] = []
        self.drained: set[str] = set()
        """Ids of workers that the registry says are draining."""
        self.warm = True
        self.stored: dict[str, int] = {}
        """Leading pages of every prompt that workers have, by the store's word alone."""
        self.lookups = 0

    async def lookup(self, hashes: Sequence[bytes]) -> dict[str, int]:
        self.lookups += 1
        return self.stored

    def workers(self) -> list[WorkerRecord]:
        here = [r for r in self.records if r.instance not in self.lost]
        return [r for r in here if r.worker_id not in self.drained]

    def draining(self) -> list[WorkerRecord]:
        here = [r for r in self.records if r.instance not in self.lost]
        return [r for r in here if r.worker_id in self.drained]

    def owned_prefixes(self, hashes: Sequence[bytes]) -> dict[str, int]:
        return {worker_id: depth(pages, hashes) for worker_id, pages in self.owned.items()}

    def mark_lost(self, instance: str) -> None:
        self.lost.append(instance)


def answer_token(answer: Sequence[int], position: int) -> int:
    """The token at an output position; the last one repeats for ever."""
    return answer[min(position, len(answer) - 1)]


@dataclass
class FakeWorker:
    """What both roles share. ``fail`` maps a method to the errors its next calls raise."""

    worker_id: str
    role: Role
    answer: list[int] = field(default_factory=lambda: [300])
    """Token at each output position, whatever the prompt."""
    answers: list[list[int]] = field(default_factory=list)
    """The same for each sample index, where the answers of a request differ."""
    fail: dict[str, list[Exception]] = field(default_factory=dict)
    hold: dict[str, asyncio.Event] = field(default_factory=dict)
    """Methods that wait, once called, until the event is set."""
    reached: dict[str, asyncio.Event] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    requests: list[msgspec.Struct] = field(default_factory=list)
    state: str = "ready"
    page_format: PageFormat = FORMAT
    max_context: int = HUGE
    capacity_pages: int = HUGE
    queued: int = 0
    polls: int = 0
    instance: str = field(default_factory=new_instance)
    server: grpc.aio.Server | None = None
    dead: bool = False
    address: str = ""

    def methods(self) -> list[Method]:
        raise NotImplementedError

    def token(self, index: int, position: int) -> int:
        answer = self.answers[index] if self.answers else self.answer
        return answer_token(answer, position)

    def seen(self, kind):
        return [r for r in self.requests if isinstance(r, kind)]

    def wait_in(self, method: str) -> asyncio.Event:
        """Makes a method wait; returns an event that is set when a call gets there."""
        self.hold[method] = asyncio.Event()
        return self.reached.setdefault(method, asyncio.Event())

    async def enter(self, method: str, request: msgspec.Struct) -> None:
        self.requests.append(request)
        if self.fail.get(method):
            raise self.fail[method].pop(0)
        if method in self.reached:
            self.reached[method].set()
        if method in self.hold:
            try:
                await self.hold[method].wait()
            except asyncio.CancelledError:
                self.cancelled.append(method)
                raise

    async def start(self) -> WorkerRecord:
        self.server = grpc.aio.server(options=server_options(MAX_INTERNAL_MESSAGE))
        port = self.server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        status = Method("Status", Empty, unary=self.status)
        add_service(self.server, self.role, [*self.methods(), status])
        await self.server.start()
        return self.record()

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            instance=self.instance,
            role=self.role,
            address=self.address,
            page_format=self.page_format,
            model="tiny",
            vocab_size=4096,
            max_context=self.max_context,
            capacity_pages=self.capacity_pages,
        )

    async def status(self, _: Empty) -> WorkerStatus:
        self.polls += 1
        return WorkerStatus(
            worker_id=self.worker_id,
            instance=self.instance,
            role=self.role,
            state=self.state,
            page_format=self.page_format,
            pool=PoolStatus(total=9, free=9, reserved=0, used=0, cached=0, quarantined=0),
            queued=self.queued,
            running=0,
        )

    async def die(self) -> None:
        """Stops at once, like a killed process: connections break, calls end."""
        self.dead = True
        await self.server.stop(None)


@dataclass
class FakePrefill(FakeWorker):
    cached_tokens: int = 0
    compute_ms: float = 2.0
    most_tokens: int = 99
    """First tokens in an answer at most."""

    def methods(self) -> list[Method]:
        return [Method("Prefill", PrefillRequest, unary=self.prefill)]

    async def prefill(self, request: PrefillRequest) -> FirstToken:
        await self.enter("Prefill", request)
        first = request.sample_index
        tokens = [
            self.token(index, request.output_offset) for index in range(first, first + request.n)
        ]
        return FirstToken(
            token_ids=tuple(tokens[: self.most_tokens]),
            logprobs=tuple(e for t in tokens if (e := logprobs(t, request.sampling.logprobs))),
            cached_tokens=self.cached_tokens,
            computed_tokens=len(request.token_ids) - self.cached_tokens,
            pushed_pages=1,
            queue_ms=1.0,
            compute_ms=self.compute_ms,
        )


@dataclass
class FakeDecode(FakeWorker):
    leases: set[str] = field(default_factory=set)
    released: list[ReleaseRequest] = field(default_factory=list)
    chunk: int = 1
    """Tokens in a chunk."""
    die_at: int | None = None
    """Output position before which the process is killed."""
    end_at: int | None = None
    """Output position before which the stream ends without a finish."""
    stale: bool = False
    """Sends every chunk twice, and chunks of an earlier attempt in between."""
    gap_at: int | None = None
    eos_at: int | None = None
    streamed: int = 0
    full: bool = False
    """No room: reservations wait, or are refused."""
    queue_full: bool = False
    """No room to wait either."""
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: there is room for those that wait."""
    waiting: list[ReserveRequest] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    """Tickets of reservations taken out of the line."""
    turns: dict[str, asyncio.Task] = field(default_factory=dict)
    preempt_at: list[int] = field(default_factory=list)
    """Output positions before which one sequence gives its pages up."""
    fail_answer: dict[int, tuple[int, Exception]] = field(default_factory=dict)
    """For a sample index, an output position and the error that its stream ends with there."""
    forks: int | None = None
    """Forks in a lease, whatever was asked for."""

    def methods(self) -> list[Method]:
        return [
            Method("Reserve", ReserveRequest, unary=self.reserve),
            Method("Stream", StreamRequest, stream=self.stream),
            Method("Release", ReleaseRequest, unary=self.release),
        ]

    async def reserve(self, request: ReserveRequest) -> Lease:
        await self.enter("Reserve", request)
        if self.full:
            await self.wait_for_room(request)
        lease = f"{self.worker_id}-{len(self.requests)}"
        count = request.n - 1 if self.forks is None else self.forks
        forks = tuple(f"{lease}/{i + 1}" for i in range(count))
        self.leases.update((lease, *forks))
        return Lease(
            lease_id=lease,
            forks=forks,
            generation=1,
            instance=self.instance,
            cached_pages=0,
            num_pages=1,
            transports=(),
            page_format=self.page_format,
        )

    async def wait_for_room(self, request: ReserveRequest) -> None:
        if not request.wait_ms or self.queue_full:
            raise Overloaded("no pages")
        self.waiting.append(request)
        turn = self.turns[request.ticket] = asyncio.ensure_future(self.freed.wait())
        try:
            await asyncio.wait({turn}, timeout=request.wait_ms / 1e3)
        finally:
            self.waiting.remove(request)
            del self.turns[request.ticket]
            left = turn.cancelled()
            turn.cancel()
        if left:
            raise Cancelled("withdrawn")
        if not self.freed.is_set():
            raise Overloaded("no pages in time")

    async def release(self, request: ReleaseRequest) -> Empty:
        if "Release" in self.hold:
            self.reached["Release"].set()
            await self.hold["Release"].wait()
        if self.fail.get("Release"):
            raise self.fail["Release"].pop(0)
        if request.lease_id in self.turns:
            self.withdrawn.append(request.lease_id)
            self.turns[request.lease_id].cancel()
            return Empty()
        self.released.append(request)
        self.leases.discard(request.lease_id)
        return Empty()

    async def stream(self, request: StreamRequest) -> AsyncIterator[TokenChunk]:
        await self.enter("Stream", request)
        try:
            position = request.output_offset + 1
            end = request.output_offset + request.sampling.max_tokens
            while position < end:
                if self.die_at is not None and position >= self.die_at:
                    asyncio.get_running_loop().create_task(self.die())
                    await asyncio.Event().wait()
                if self.preempt_at and position >= self.preempt_at[0]:
                    self.preempt_at.pop(0)
                    raise Preempted("pages were needed")
                where, error = self.fail_answer.get(request.sample_index, (HUGE, None))
                if position >= where:
                    del self.fail_answer[request.sample_index]
                    raise error
                if self.end_at is not None and position >= self.end_at:
                    return
                if self.gap_at is not None and position >= self.gap_at:
                    position += 1
                for chunk in self.chunks(request, position, end):
                    self.streamed += len(chunk.token_ids)
                    yield chunk
                    if chunk.finish is not None:
                        return
                position += self.chunk
                if "Token" in self.reached and position > request.output_offset + 3:
                    self.reached["Token"].set()
                    await self.hold["Token"].wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append("Stream")
            raise

    def chunks(self, request: StreamRequest, position: int, end: int) -> list[TokenChunk]:
        stop = min(position + self.chunk, end)
        ids, finish = [], None
        for p in range(position, stop):
            if self.eos_at is not None and p >= self.eos_at:
                finish = "stop"
                break
            ids.append(self.token(request.sample_index, p))
        if finish is None and stop == end:
            finish = "length"
        done = position - request.output_offset
        chunk = TokenChunk(
            attempt=request.attempt,
            position=position,
            token_ids=tuple(ids),
            logprobs=tuple(entry for t in ids if (entry := logprobs(t, request.sampling.logprobs))),
            finish=finish,
            drafted=2 * done,
            accepted=done,
            transfer_ms=3.0,
        )
        if not self.stale:
            return [chunk]
        old = TokenChunk(attempt=request.attempt - 1, position=position, token_ids=(7, 7, 7))
        again = msgspec.structs.replace(chunk, finish=None)
        return [old, again, chunk]


def logprobs(token: int, count: int | None) -> TokenLogprobs | None:
    if count is None:
        return None
    return TokenLogprobs(
        logprob=-float(token),
        top_ids=tuple(range(count)),
        top_logprobs=tuple(-float(i) for i in range(count)),
    )


@dataclass
class Mesh:
    """A started router, its workers and a client."""

    router: Router
    registry: FakeRegistry
    prefill: list[FakePrefill]
    decode: list[FakeDecode]
    channel: grpc.aio.Channel

    @property
    def stub(self):
        return chat_pb2_grpc.ChatServiceStub(self.channel)

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    async def chat(self, request=None, timeout: float = 60, **sampling):
        """One whole answer."""
        request = request or ask(**sampling)
        return Answer([r async for r in self.stub.StreamChat(request, timeout=timeout)])

    async def error(self, request, timeout: float = 60) -> grpc.aio.AioRpcError:
        """The error that a request ends with."""
        try:
            answer = await self.chat(request, timeout)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError(f"served: {answer.text!r}")

    async def at_rest(self) -> None:
        """Waits until nothing is booked, or leased by a worker that lives; fails if that does not
        come. One that died has no leases, though others may still have promised some in its name.
        """
        try:
            async with asyncio.timeout(60):
                await self.router.clients.background.finish()
                while self.bookings() or any(w.leases for w in self.decode if not w.dead):
                    await asyncio.sleep(0.005)
        except TimeoutError:
            leases = {w.worker_id: w.leases for w in self.decode if w.leases and not w.dead}
            raise AssertionError(f"{self.bookings()} bookings, leases {leases}") from None
        for worker in self.workers:
            assert self.router.view.in_flight(worker.instance) == 0

    def bookings(self) -> float:
        value = self.router.metrics.value
        return sum(
            abs(n)
            for n in (
                value("pdmesh_num_requests_running"),
                value("pdmesh_worker_in_flight", role="prefill"),
                value("pdmesh_worker_in_flight", role="decode"),
            )
        )

    def outcome(self, name: str) -> float:
        return self.router.metrics.value("pdmesh_requests_total", outcome=name)


@dataclass
class Answer:
    responses: list[chat_pb2.ChatResponse]

    @property
    def text(self) -> str:
        return "".join(r.text for r in self.responses)

    @property
    def ids(self) -> list[int]:
        return [t for r in self.responses for t in r.token_ids]

    def of(self, index: int) -> Answer:
        """The responses of one of several answers."""
        return Answer([r for r in self.responses if r.index == index])

    @property
    def last(self) -> chat_pb2.ChatResponse:
        return self.responses[-1]

    @property
    def usage(self) -> chat_pb2.Usage:
        return self.last.usage

    @property
    def reason(self) -> str:
        return self.last.finish_reason


def ask(text: str = "Hi there", **sampling) -> chat_pb2.ChatRequest:
    request_id = sampling.pop("request_id", "")
    return chat_pb2.ChatRequest(
        messages=[chat_pb2.Message(role="user", content=text)],
        sampling=chat_pb2.Sampling(**sampling),
        request_id=request_id,
    )


def client_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options())


@asynccontextmanager
async def mesh(
    tmp_path: Path,
    *,
    prefill: int = 1,
    decode: int = 2,
    kind: type[FakeDecode] = FakeDecode,
    **config,
) -> AsyncIterator[Mesh]:
    """A router with that many fake workers, started and stopped."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"k" * 32)
    registry = FakeRegistry()
    prefills = [FakePrefill(f"prefill-{i}", "prefill") for i in range(prefill)]
    decodes = [kind(f"decode-{i}", "decode") for i in range(decode)]
    for worker in (*prefills, *decodes):
        registry.records.append(await worker.start())
    defaults = {
        "model_path": MODEL_PATH,
        "model_name": "tiny",
        "secret_file": secret,
        "redis_url": "redis://unused",
        "max_context": 4096,
        "poll_interval": 0.02,
        "stop_grace": 0.0,
    }
    router = Router(RouterConfig(**(defaults | config)), registry)
    await router.start()
    channel = client_channel(router.address)
    running = Mesh(router, registry, prefills, decodes, channel)
    try:
        async with asyncio.timeout(60):
            while router.view.polled() < len(running.workers):
                await asyncio.sleep(0.002)
        yield running
    finally:
        await channel.close()
        await router.stop()
        for worker in running.workers:
            await worker.server.stop(None)

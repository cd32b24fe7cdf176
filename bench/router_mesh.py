"""The processes around a router under measurement: workers that only stream, and a client.

Workers and client are processes of their own, so that the router's process has the router's work
only. ``measure`` runs in the router's process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import grpc  # noqa: E402 - the path is set above
from router_load import TOKENS, Load, Streamed  # noqa: E402

from pdmesh.decode.framing import Framer  # noqa: E402
from pdmesh.router.config import RouterConfig  # noqa: E402
from pdmesh.router.server import Router, settle  # noqa: E402
from pdmesh.router.view import Registry  # noqa: E402
from pdmesh.wire import chat_pb2, chat_pb2_grpc  # noqa: E402
from pdmesh.wire.hashes import PageFormat  # noqa: E402
from pdmesh.wire.messages import (  # noqa: E402
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
    WorkerRecord,
    WorkerStatus,
)
from pdmesh.wire.rpc import (  # noqa: E402
    MAX_INTERNAL_MESSAGE,
    Method,
    add_service,
    channel_options,
    server_options,
)

MODEL = ROOT / "model" / "tiny"
FORMAT = PageFormat("tiny", "bench", "float32", 64, 2, 0, 8)
LARGE = 8_000_000


class Listed:
    """A registry that knows a fixed list of workers, none of which owns a page."""

    def __init__(self, records: Sequence[WorkerRecord]) -> None:
        self._records = list(records)

    def workers(self) -> list[WorkerRecord]:
        return self._records

    def draining(self) -> list[WorkerRecord]:
        return []

    @property
    def warm(self) -> bool:
        return True

    async def lookup(self, hashes: Sequence[bytes]) -> dict[str, int]:
        return self.owned_prefixes(hashes)

    def owned_prefixes(self, hashes: Sequence[bytes]) -> dict[str, int]:
        return {}

    def mark_lost(self, instance: str) -> None:
        raise SystemExit(f"the router lost {instance}: the measurement is void")


# ---- workers ------------------------------------------------------------------------------


@dataclass(eq=False)
class _Worker:
    """Answers at once; its streams get a token every step, as those of a decode worker do."""

    worker_id: str
    role: Role
    step_ms: float
    instance: str = ""
    leases: int = 0
    queues: dict[asyncio.Queue[TokenChunk], list[int]] = field(default_factory=dict)
    """Of each stream, with its attempt, the next position and the last."""
    server: grpc.aio.Server = field(init=False)

    async def start(self) -> WorkerRecord:
        self.instance = f"instance-of-{self.worker_id}"
        self.server = grpc.aio.server(options=server_options(MAX_INTERNAL_MESSAGE))
        port = self.server.add_insecure_port("127.0.0.1:0")
        methods = [
            Method("Status", Empty, unary=self.status),
            Method("Prefill", PrefillRequest, unary=self.prefill),
            Method("Reserve", ReserveRequest, unary=self.reserve),
            Method("Release", ReleaseRequest, unary=self.release),
            Method("Stream", StreamRequest, stream=self.stream),
        ]
        add_service(self.server, self.role, methods)
        await self.server.start()
        return WorkerRecord(
            worker_id=self.worker_id,
            instance=self.instance,
            role=self.role,
            address=f"127.0.0.1:{port}",
            page_format=FORMAT,
            model="tiny",
            vocab_size=4096,
            max_context=LARGE,
            capacity_pages=LARGE,
        )

    async def status(self, _: Empty) -> WorkerStatus:
        return WorkerStatus(
            worker_id=self.worker_id,
            instance=self.instance,
            role=self.role,
            state="ready",
            page_format=FORMAT,
            pool=PoolStatus(total=LARGE, free=LARGE, reserved=0, used=0, cached=0, quarantined=0),
            queued=0,
            running=0,
        )

    async def prefill(self, request: PrefillRequest) -> FirstToken:
        return FirstToken(
            token_ids=(TOKENS[0],), cached_tokens=0, computed_tokens=1, pushed_pages=1
        )

    async def reserve(self, request: ReserveRequest) -> Lease:
        self.leases += 1
        return Lease(
            lease_id=f"{self.worker_id}-{self.leases}",
            generation=1,
            instance=self.instance,
            cached_pages=0,
            num_pages=1,
            transports=(),
            page_format=FORMAT,
        )

    async def release(self, request: ReleaseRequest) -> Empty:
        return Empty()

    async def stream(self, request: StreamRequest) -> AsyncIterator[TokenChunk]:
        queue: asyncio.Queue[TokenChunk] = asyncio.Queue()
        end = request.sampling.max_tokens
        if self.step_ms:
            self.queues[queue] = [request.attempt, 1, end]
        else:
            for position in range(1, end):
                queue.put_nowait(_chunk(request.attempt, position, end))
        try:
            framer = Framer(queue)
            while True:
                chunk, _ = await framer.next()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self.queues.pop(queue, None)

    async def run(self) -> None:
        """Steps for ever."""
        due = time.perf_counter()
        while True:
            due += self.step_ms / 1e3
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            for queue, state in self.queues.items():
                attempt, position, end = state
                if position < end:
                    queue.put_nowait(_chunk(attempt, position, end))
                    state[1] += 1


def _chunk(attempt: int, position: int, end: int) -> TokenChunk:
    return TokenChunk(
        attempt=attempt,
        position=position,
        token_ids=(TOKENS[position % len(TOKENS)],),
        finish="length" if position == end - 1 else None,
        transfer_ms=1.0,
        step_ms=1.0,
    )


def _workers(pipe: Connection, count: int, step_ms: float) -> None:
    """A process: one prefill worker and ``count`` decode workers."""

    async def serve() -> None:
        workers = [_Worker("prefill-0", "prefill", 0.0)]
        workers += [_Worker(f"decode-{i}", "decode", step_ms) for i in range(count)]
        pipe.send([await worker.start() for worker in workers])
        steps = [asyncio.create_task(worker.run()) for worker in workers[1:] if step_ms]
        await asyncio.to_thread(pipe.recv)
        for step in steps:
            step.cancel()
        await asyncio.gather(*(worker.server.stop(None) for worker in workers))

    asyncio.run(serve())


# ---- client -------------------------------------------------------------------------------


def _client(pipe: Connection) -> None:
    """A process: asks for answers when told to, and counts what comes."""

    async def one(
        stub: chat_pb2_grpc.ChatServiceStub, load: Load, stream: int, gaps: list[float]
    ) -> tuple[int, int, str]:
        count = messages = 0
        for answer in range(load.answers):
            prompt = load.prompt(stream, answer)
            request = chat_pb2.ChatRequest(
                messages=[chat_pb2.Message(role="user", content=prompt)],
                sampling=chat_pb2.Sampling(max_tokens=load.tokens, ignore_eos=True),
            )
            last, texts = 0.0, []
            async for response in stub.StreamChat(request, timeout=600):
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                last = now
                count += len(response.token_ids)
                texts.append(response.text)
            messages += len(texts)
        return count, messages, "".join(texts)

    async def ask() -> None:
        address, load = await asyncio.to_thread(pipe.recv)
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            stub = chat_pb2_grpc.ChatServiceStub(channel)
            while load is not None:
                gaps: list[float] = []
                asked = [one(stub, load, stream, gaps) for stream in range(load.streams)]
                counts = await asyncio.gather(*asked)
                gap = statistics.median(gaps or [0.0]) * 1e3
                tokens, messages = (sum(c[i] for c in counts) for i in (0, 1))
                pipe.send((tokens, messages, gap, counts[0][2]))
                _, load = await asyncio.to_thread(pipe.recv)

    asyncio.run(ask())


# ---- the router ---------------------------------------------------------------------------


async def measure(
    loads: Sequence[Load],
    workers: int,
    registry: Callable[[Sequence[WorkerRecord]], Registry] = Listed,
    warm_up: int = 8,
) -> list[Streamed]:
    """Runs loads, one after another, through a router of this process.

    Args:
        loads: of the client, all of one pace.
        workers: decode workers, all in one process.
        registry: what the router knows of the workers, made of their records.
        warm_up: answers of the same length that are not counted, before.

    Raises:
        SystemExit: an answer was cut short.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    mine, clients = spawn.Pipe()
    processes = [
        spawn.Process(target=_workers, args=(theirs, workers, loads[0].step_ms), daemon=True),
        spawn.Process(target=_client, args=(clients,), daemon=True),
    ]
    for process in processes:
        process.start()
    theirs.close()  # so that the end of a process ends the measurement
    clients.close()
    with tempfile.TemporaryDirectory() as directory:
        secret = Path(directory) / "secret"
        secret.write_bytes(b"k" * 32)
        records = await asyncio.to_thread(ours.recv)
        config = RouterConfig(
            model_path=MODEL,
            model_name="tiny",
            secret_file=secret,
            redis_url="redis://unused",
            max_context=LARGE,
            stop_grace=0.0,
        )
        router = Router(config, registry(records))
        await router.start()
        while router.view.polled() < len(records):
            await asyncio.sleep(0.01)
        try:
            settle()
            done = []
            for load in loads:
                mine.send((router.address, load.warm_up(warm_up)))
                await asyncio.to_thread(mine.recv)
                wall, cpu = time.perf_counter(), time.process_time()
                mine.send((router.address, load))
                tokens, messages, gap, text = await asyncio.to_thread(mine.recv)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                done.append(Streamed(tokens, messages, wall, cpu, gap, text))
            mine.send((router.address, None))
            ours.send(None)
        finally:
            await router.stop()
            await asyncio.to_thread(_ended, processes)
    for load, got in zip(loads, done, strict=True):
        if got.tokens != load.streams * load.answers * load.tokens:
            raise SystemExit(f"{got.tokens} tokens came for {load}")
    return done


def _ended(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.terminate()
            process.join()

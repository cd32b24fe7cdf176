"""A real mesh for tests: the processes that ``pdmesh up`` starts, and a small client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import redis
from child_path import python_path
from prometheus_client.parser import text_string_to_metric_families
from redis.exceptions import RedisError

from pdmesh.registry.keys import Keys
from pdmesh.registry.layout import unpack_row
from pdmesh.registry.metrics import LABELS
from pdmesh.registry.store import read_members
from pdmesh.wire import chat_pb2, chat_pb2_grpc
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.messages import Empty, WorkerStatus
from pdmesh.wire.rpc import Client, channel_options

ROOT = Path(__file__).resolve().parent.parent
START_S = 120
"""Generous: a loaded machine with two cores starts four Python processes that import torch."""
SMALL_STEPS = """
[prefill]
threads = 1
[decode]
threads = 1
max_batch = 8
"""
"""Few graphs to capture, and kernels of few numbers of rows to compile."""


@dataclass
class Mesh:
    """A running ``pdmesh up``."""

    process: subprocess.Popen
    state_dir: Path
    info: dict = field(default_factory=dict)
    workers: int = 3
    instances: set[str] = field(default_factory=set)
    """Every instance that ``statuses`` has met."""

    @property
    def address(self) -> str:
        return self.info["address"]

    def pids(self) -> dict[str, int]:
        """Process ids by process name, as they are now."""
        return json.loads((self.state_dir / "mesh.json").read_text())["pids"]

    @asynccontextmanager
    async def watch(self):
        """Yields a function that asks all registered workers, or those named, for their status."""
        members = await read_members(self.info["redis_url"], self.info["name"])
        records = [member.record for member in members if member.state == "ready"]
        clients = {r.worker_id: Client(r.address, r.role) for r in records}

        async def statuses(*names: str) -> list[WorkerStatus]:
            answers = [
                await clients[name].unary("Status", Empty(), WorkerStatus, timeout=30)
                for name in names or clients
            ]
            self.instances |= {answer.instance for answer in answers}
            return answers

        try:
            yield statuses
        finally:
            for client in clients.values():
                await client.close()

    async def statuses(self) -> list[WorkerStatus]:
        """What every registered worker says about itself."""
        async with self.watch() as statuses:
            return await statuses()

    async def problems(self, patience: float = 90) -> list[str]:
        """What is not at rest: pages in use or quarantine, leases, failed integrity checks, a
        worker that is missing or in excess, anything in the store that belongs to a dead one.

        Waits while work is still ending; what stays for ``patience`` seconds is a leak.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                statuses = await self.statuses()
                found = [problem for status in statuses for problem in problems_of(status)]
                if len(statuses) != self.workers:
                    found.append(f"{len(statuses)} workers, not {self.workers}")
                found += self._stale_keys(statuses)
            except (PdmeshError, RedisError) as error:
                found = [str(error)]
            if not found or time.monotonic() >= deadline:
                return found
            await asyncio.sleep(0.2)

    def _stale_keys(self, statuses: list[WorkerStatus]) -> list[str]:
        """What the store holds of workers and instances that are not among ``statuses``.

        The event log is history and may name them.
        """
        keys = Keys(self.info["name"])
        meta, leases, roster, events, gone, free = (key.encode() for key in keys.shared)
        alive = {s.worker_id.encode(): s.instance.encode() for s in statuses}
        owned = {keys.worker(s.worker_id).encode() for s in statuses}
        shared = {meta, leases, roster, gone, free}
        dead = [instance.encode() for instance in self.instances - {s.instance for s in statuses}]
        found = []
        with redis.Redis.from_url(self.info["redis_url"]) as store:
            slots = {entry.rpartition(b":")[2] for entry in store.hvals(roster)}
            for key in set(store.scan_iter()) - {events}:
                held = contents(store, key)
                if key.endswith(b"}:dg"):
                    rows = dict(zip(held[::2], held[1::2], strict=True))
                    found += [
                        f"slot {slot!r} of no worker has pages in {key!r}"
                        for slot, row in rows.items()
                        if unpack_row(row).pages and slot not in slots
                    ]
                elif b":ctl}:" in key and key not in owned | shared:
                    found.append(f"{key!r} belongs to no worker")
                if key in (leases, roster) and not set(held[::2]) <= alive.keys():
                    found.append(f"{key!r} names {set(held[::2]) - alive.keys()}")
                found += [
                    f"{key!r} names the dead instance {instance!r}"
                    for instance in dead
                    if any(instance in value for value in (key, *held))
                ]
            for worker_id, instance in alive.items():
                holder = store.hget(keys.worker(worker_id.decode()), "instance")
                if holder != instance:
                    found.append(f"{worker_id!r} is {instance!r}, the store says {holder!r}")
        return found

    def log(self) -> str:
        """The logs of all processes, for a failure message."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in sorted(self.state_dir.rglob("*.log"))
        )


def problems_of(status: WorkerStatus) -> list[str]:
    """What is not at rest in one worker."""
    found = [*status.problems]
    found += [f"{n} pages {name}" for name in POOL_AT_REST if (n := getattr(status.pool, name))]
    found += [f"{n} {name}" for name in WORKER_AT_REST if (n := getattr(status, name))]
    if status.state != "ready":
        found.append(f"is {status.state}")
    return [f"{status.worker_id}: {problem}" for problem in found]


POOL_AT_REST = ("used", "reserved", "quarantined")
WORKER_AT_REST = ("running", "queued", "leases")


def contents(store: redis.Redis, key: bytes) -> list[bytes]:
    """All that a key holds; names and values of a hash or sorted set take turns."""
    kind = store.type(key)
    if kind == b"hash":
        return [part for pair in store.hgetall(key).items() for part in pair]
    if kind == b"zset":
        pairs = store.zrange(key, 0, -1, withscores=True)
        return [part for name, score in pairs for part in (name, str(score).encode())]
    if kind == b"set":
        return list(store.smembers(key))
    return [store.get(key) or b""] if kind == b"string" else []


@contextmanager
def running_mesh(
    *arguments: str,
    topology: str = "",
    program: Sequence[str] = ("-m", "pdmesh.launch.cli"),
    variables: Mapping[str, str] | None = None,
):
    """Starts a mesh of its own name and directory, and stops it; yields a ``Mesh``.

    ``program`` may be another than pdmesh's own, and gets ``variables`` in its environment.
    """
    with tempfile.TemporaryDirectory(prefix="pdmesh-test-") as folder:
        environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": folder,
            "PYTHONPATH": python_path(),
            **(variables or {}),
        }
        command = [sys.executable, "-P", *program, "up", *arguments]
        if topology:
            path = Path(folder) / "mesh.toml"
            path.write_text(topology)
            command += ["--topology", str(path)]
        output = Path(folder) / "up.log"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
        mesh = Mesh(process, Path(folder))
        try:
            _wait_ready(mesh, Path(folder), output)
            yield mesh
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def _wait_ready(mesh: Mesh, folder: Path, output: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if mesh.process.poll() is not None:
            break
        for path in folder.rglob("mesh.json"):
            mesh.info, mesh.state_dir = json.loads(path.read_text()), path.parent
            return
        time.sleep(0.1)
    raise AssertionError(f"the mesh did not start:\n{output.read_text()}\n{mesh.log()}")


def scrape(endpoint: str) -> dict[str, float]:
    """The samples of a worker's metrics endpoint (host:port) that have only a worker's labels."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels.keys() - set(LABELS)
    }


@dataclass
class Answer:
    """One finished stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finish: str = ""
    usage: chat_pb2.Usage | None = None
    timing: chat_pb2.Timing | None = None
    first_token_s: float = 0.0
    total_s: float = 0.0
    token_times: list[float] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with each message."""

    @property
    def started(self) -> bool:
        """Whether a token has come."""
        return bool(self.token_ids)


@asynccontextmanager
async def chat_stub(address: str):
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        yield chat_pb2_grpc.ChatServiceStub(channel)


@asynccontextmanager
async def asking(stub, prompt: list[int] | str, **rest):
    """Has an answer streamed meanwhile; yields its task and the answer as far as it has come."""
    answer = Answer()
    task = asyncio.ensure_future(ask(stub, prompt, into=answer, **rest))
    try:
        yield task, answer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def first_token(task: asyncio.Future, answer: Answer) -> None:
    """Waits for an answer's first token; raises what ends the answer before."""
    await grown(task, answer, 1)


async def grown(task: asyncio.Future, answer: Answer, count: int) -> None:
    """Waits until an answer has so many tokens; raises what ends the answer before."""
    while len(answer.token_ids) < count:
        answer.news.clear()
        news = asyncio.ensure_future(answer.news.wait())
        await asyncio.wait({task, news}, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        if task.done() and len(answer.token_ids) < count:
            await task
            raise AssertionError(f"the answer ended with {len(answer.token_ids)} tokens")


async def ask(
    stub,
    prompt: list[int] | str,
    timeout: float = 240,
    tenant: str = "",
    request_id: str = "",
    into: Answer | None = None,
    leave_after: int | None = None,
    **sampling,
) -> Answer:
    """Streams one answer to token ids or to a user message.

    Args:
        into: where the answer grows, for those who watch it.
        leave_after: the client leaves once it has so many tokens.
    """
    request = chat_pb2.ChatRequest(
        sampling=chat_pb2.Sampling(**{"temperature": 0.0, **sampling}),
        tenant=tenant,
        request_id=request_id,
    )
    if isinstance(prompt, str):
        request.messages.add(role="user", content=prompt)
    else:
        request.prompt_token_ids.extend(prompt)
    answer, began = into or Answer(), time.monotonic()
    call = stub.StreamChat(request, timeout=timeout)
    async for response in call:
        now = time.monotonic() - began
        if response.token_ids and not answer.token_ids:
            answer.first_token_s = now
        answer.text += response.text
        answer.token_ids += response.token_ids
        answer.token_times += [now] * len(response.token_ids)
        answer.logprobs += response.logprobs
        if response.finish_reason:
            answer.finish = response.finish_reason
            answer.usage, answer.timing = response.usage, response.timing
        answer.news.set()
        if leave_after is not None and len(answer.token_ids) >= leave_after:
            call.cancel()
            break
    answer.total_s = time.monotonic() - began
    return answer

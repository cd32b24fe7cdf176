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
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from pdmesh.registry.client import RegistryView
from pdmesh.wire import chat_pb2, chat_pb2_grpc
from pdmesh.wire.messages import Empty, WorkerStatus
from pdmesh.wire.rpc import Client, channel_options

ROOT = Path(__file__).resolve().parent.parent
START_S = 120
"""Generous: a loaded machine with two cores starts four Python processes that import torch."""


@dataclass
class Mesh:
    """A running ``pdmesh up``."""

    process: subprocess.Popen
    state_dir: Path
    info: dict = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.info["address"]

    def pids(self) -> dict[str, int]:
        """Process ids by process name, as they are now."""
        return json.loads((self.state_dir / "mesh.json").read_text())["pids"]

    async def statuses(self) -> list[WorkerStatus]:
        """What every registered worker says about itself."""
        view = RegistryView(self.info["redis_url"], self.info["name"])
        await view.start()
        try:
            answers = []
            for record in view.workers():
                client = Client(record.address, record.role)
                answers.append(await client.unary("Status", Empty(), WorkerStatus, timeout=30))
                await client.close()
            return answers
        finally:
            await view.close()

    async def problems(self) -> list[str]:
        """What is not at rest: pages in use or quarantine, leases, failed integrity checks.

        Waits while work is still ending; what stays for 20 s is a leak.
        """
        found: list[str] = []
        for _ in range(100):
            found = []
            for status in await self.statuses():
                pool = status.pool
                found += [f"{status.worker_id}: {problem}" for problem in status.problems]
                for name in ("used", "reserved", "quarantined"):
                    if getattr(pool, name):
                        found.append(f"{status.worker_id}: {getattr(pool, name)} pages {name}")
                for name in ("running", "queued", "leases"):
                    if getattr(status, name):
                        found.append(f"{status.worker_id}: {getattr(status, name)} {name}")
            if not found:
                break
            await asyncio.sleep(0.2)
        return found

    def log(self) -> str:
        """The logs of all processes, for a failure message."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in sorted(self.state_dir.rglob("*.log"))
        )


@contextmanager
def running_mesh(*arguments: str, topology: str = ""):
    """Starts a mesh of its own name and directory, and stops it; yields a ``Mesh``."""
    with tempfile.TemporaryDirectory(prefix="pdmesh-test-") as folder:
        environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": folder,
            "PYTHONPATH": str(ROOT / ".pythonpath"),
        }
        command = [sys.executable, "-P", "-m", "pdmesh.launch.cli", "up", *arguments]
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


@asynccontextmanager
async def chat_stub(address: str):
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        yield chat_pb2_grpc.ChatServiceStub(channel)


async def ask(
    stub, prompt: list[int] | str, timeout: float = 120, tenant: str = "", **sampling
) -> Answer:
    """Streams one answer to token ids or to a user message."""
    request = chat_pb2.ChatRequest(
        sampling=chat_pb2.Sampling(**sampling),
        tenant=tenant,
    )
    if isinstance(prompt, str):
        request.messages.add(role="user", content=prompt)
    else:
        request.prompt_token_ids.extend(prompt)
    answer, began = Answer(), time.monotonic()
    async for response in stub.StreamChat(request, timeout=timeout):
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
    answer.total_s = time.monotonic() - began
    return answer

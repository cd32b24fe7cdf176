"""``pdmesh up``: a whole mesh on this machine, for as long as the command runs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from pdmesh.launch.checks import check_host, check_model, check_together
from pdmesh.launch.crew import Plan, say
from pdmesh.launch.machine import check_machine
from pdmesh.launch.mode import with_mode
from pdmesh.launch.ports import claim_port, claim_ports
from pdmesh.launch.processes import command, environment, router_name
from pdmesh.launch.ranks import whole_groups
from pdmesh.launch.runtime import claim
from pdmesh.launch.settings import check_text
from pdmesh.launch.supervisor import Supervisor
from pdmesh.launch.topology import Topology, load_topology
from pdmesh.registry.store import end_task

_SILENT_S = "5"
"""Seconds until the chat asks its default question where standard input says nothing."""


def up(arguments: argparse.Namespace) -> int:
    """Starts a mesh, keeps it up until it is stopped, and ends all of it."""
    check_text(arguments.prompt, "--prompt")
    topology = _settings(arguments)
    with topology.blamed("model", "path"):
        check_model(topology.model_path, weights=not topology.model.random_weights)
    with topology.blamed("mesh", "host"):
        check_host(topology.mesh.host)
    check_together(topology)
    topology, lines = check_machine(topology)
    for line in lines:
        say(f"pdmesh: {line}")
    name, default = topology.mesh.name, Topology().mesh.name
    explicit = name != default or arguments.name is not None
    with claim(name, explicit) as (taken, run_dir), _ports(topology) as (ports, metrics):
        run_dir.prepare()
        topology = replace(topology, mesh=replace(topology.mesh, name=taken))
        where = ", ".join(map(str, ports))
        say(f"pdmesh: starting mesh {taken} on port {where}; logs in {run_dir.logs}")
        ask = arguments.chat or arguments.prompt is not None
        session = _Session(
            Supervisor(Plan(topology, ports[0], run_dir, metrics, ports[1:])),
            ask,
            arguments.prompt,
        )
        return asyncio.run(session.run())


@contextlib.contextmanager
def _ports(topology: Topology) -> Iterator[tuple[list[int], dict[str, int]]]:
    """The public ports, and those of the metrics by process name."""
    host = topology.mesh.host
    with contextlib.ExitStack() as claimed:
        with topology.blamed("mesh", "port"):
            port = claimed.enter_context(claim_port(host, topology.mesh.port))
        routers = topology.router
        metrics = {router_name(0): routers.metrics_port}
        taken = {port, routers.metrics_port}

        def take(first: int, count: int) -> list[int]:
            ports = claimed.enter_context(claim_ports(host, first, count, taken))
            taken.update(ports)
            return ports

        more = take(port + 1, routers.workers - 1)
        if routers.metrics_port:
            with topology.blamed("router", "metrics_port"):
                ports = take(routers.metrics_port + 1, routers.workers - 1)
            metrics |= {router_name(1 + index): found for index, found in enumerate(ports)}
        for role, section in (("prefill", topology.prefill), ("decode", topology.decode)):
            if not section.metrics_port:
                continue
            with topology.blamed(role, "metrics_port"):
                ports = take(section.metrics_port, section.workers)
            metrics |= {f"{role}-{index}": found for index, found in enumerate(ports)}
        yield [port, *more], metrics


def _settings(arguments: argparse.Namespace) -> Topology:
    a = arguments
    topology = load_topology(a.topology)
    topology = topology.changed("mesh", "--name", name=a.name)
    topology = topology.changed("mesh", "--redis", redis=a.redis)
    topology = topology.changed("mesh", "--port", port=a.port)
    topology = topology.changed("mesh", "--host", host=a.host)
    topology = topology.changed("mesh", "--drain-s", drain_s=a.drain_s)
    topology = topology.changed("mesh", "--transports", transports=a.transports)
    topology = topology.changed("model", "--model", path=a.model)
    topology = topology.changed("model", "--no-mtp", mtp=False if a.no_mtp else None)
    topology = with_mode(topology, a)
    shared = True if a.share_weights else None
    topology = topology.changed("model", "--share-weights", share_weights=shared)
    topology = topology.changed("prefill", "--prefill", workers=a.prefill)
    topology = topology.changed("decode", "--draft-tokens", draft_tokens=a.draft_tokens)
    topology = topology.changed("router", "--routers", workers=a.routers)
    topology = topology.changed("decode", "--decode", workers=a.decode)
    topology = topology.changed("prefill", "--prefill-ep", ep=a.prefill_ep)
    topology = topology.changed("decode", "--decode-ep", ep=a.decode_ep)
    topology = topology.changed("prefill", "--prefill-tp", tp=a.prefill_tp)
    topology = topology.changed("decode", "--decode-tp", tp=a.decode_tp)
    for role in ("prefill", "decode"):
        count = getattr(a, f"{role}_virtual_ranks")
        topology = topology.changed(role, f"--{role}-virtual-ranks", virtual_ranks=count)
    return whole_groups(topology)


class _Session:
    """The supervisor, the signals, and the chat if one is wanted."""

    def __init__(self, supervisor: Supervisor, ask: bool, prompt: str | None) -> None:
        self._supervisor = supervisor
        self._ask = ask
        self._prompt = prompt
        self._chat: subprocess.Popen[str] | None = None
        self._stopping = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal(number))
        work = asyncio.ensure_future(self._work())
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else 0
        finally:
            stopped.cancel()
            await end_task(work)
            if self._watching is not None:
                await end_task(self._watching)
            await self._end()

    async def _work(self) -> int:
        await self._supervisor.start()
        watching = self._watching = asyncio.ensure_future(self._supervisor.watch())
        try:
            if not self._ask:
                say("pdmesh: Ctrl-C stops it; talk to it with: pdmesh chat")
                await watching
            chatting = asyncio.ensure_future(self._talk())
            await asyncio.wait({watching, chatting}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                chatting.cancel()
                watching.result()
            return await chatting
        finally:
            watching.cancel()

    async def _talk(self) -> int:
        """The chat is a process of its own, with our standard input: Ctrl-C stops its answer."""
        prompt = self._prompt
        self._chat = subprocess.Popen(
            command("chat", "--address", self._supervisor.address, "--input-timeout", _SILENT_S),
            stdin=None if prompt is None else subprocess.PIPE,
            env=environment("", 1),
            text=True,
        )
        if prompt is not None:
            assert self._chat.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._chat.stdin.write(prompt)
                self._chat.stdin.close()
        while (code := self._chat.poll()) is None:
            await asyncio.sleep(0.05)
        return code if code >= 0 else 128 - code

    async def _end(self) -> None:
        if self._chat is not None and self._chat.poll() is None:
            self._chat.terminate()
            self._chat.wait()
        say("pdmesh: stopping")
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._supervisor.kill)
        await self._supervisor.stop()

    def _on_signal(self, number: signal.Signals) -> Callable[[], None]:
        def handle() -> None:
            chatting = self._chat is not None and self._chat.poll() is None
            if number is signal.SIGINT and chatting and sys.stdin.isatty():
                return  # the terminal sent it to the chat too, which decides
            self._stopping.set()

        return handle

"""Starts a mesh on this machine, watches over its processes, and ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdmesh.launch.processes import Child, mesh_specs
from pdmesh.launch.restart import restart_delay
from pdmesh.launch.runtime import MeshInfo, RunDir
from pdmesh.launch.topology import Topology
from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.store import Member, StoreUnavailable, check_store, read_members
from pdmesh.wire.errors import ConfigError, PdmeshError, Unavailable
from pdmesh.wire.rpc import channel_options
from pdmesh.wire.secret import read_secret

_TICK_S = 0.2
_PROGRESS_S = 3.0
_STOP_S = 10.0
_CONFIG_EXIT = 2


def say(text: str) -> None:
    """One line of progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Plan:
    """What to start and where."""

    topology: Topology
    port: int
    run_dir: RunDir
    metrics_ports: Mapping[str, int] = field(default_factory=dict)
    """Of the workers' metrics, by worker name; none for those it does not name."""


class Supervisor:
    """The processes of one mesh. All methods run on the main thread's event loop.

    The kernel ties a child to the thread that started it, so that a killed supervisor leaves no
    process behind; that thread must be the main one.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        topology = plan.topology
        with topology.blamed("mesh", "secret_file"):
            secret = plan.run_dir.secret(topology.mesh.secret_file)
            read_secret(secret)
        self.address = f"{topology.mesh.host}:{plan.port}"
        self._children = [
            Child(spec, plan.run_dir.log(spec.name))
            for spec in mesh_specs(topology, plan.port, secret, plan.metrics_ports)
        ]
        self._store = None if topology.mesh.redis else EmbeddedStore(plan.run_dir.log("store"))
        self._redis_url = topology.mesh.redis
        self._announced: dict[str, float] = {}
        self._began = time.monotonic()

    async def start(self) -> None:
        """Starts everything and returns when the mesh answers.

        Raises:
            ConfigError: a setting is wrong; the mesh cannot start.
            Unavailable: the store cannot be reached, or a process dies again and again.
        """
        await self._start_store()
        now = time.monotonic()
        for child in self._children:
            child.start(self._redis_url, now)
            say(f"  {child.spec.name:<12} starting")
        while not all(child.ready for child in self._children if not child.given_up):
            await self.watch_once()
            await asyncio.sleep(_TICK_S)
        self._publish()
        took = time.monotonic() - self._began
        say(f"pdmesh: ready at {self.address} after {took:.1f} s")

    async def watch(self) -> None:
        """Restarts what dies, until cancelled.

        Raises:
            Unavailable: what is left cannot serve.
        """
        while True:
            before = self._pids()
            await self.watch_once()
            if self._pids() != before:
                self._publish()
            await asyncio.sleep(_TICK_S)

    async def watch_once(self) -> None:
        """Looks at every process once: restarts the dead, notices the ready."""
        self._watch_store()
        now = time.monotonic()
        for child in self._children:
            if not child.given_up:
                self._watch_child(child, now)
        if not all(child.ready or child.given_up for child in self._children):
            await self._notice_ready()
            self._report_progress(time.monotonic())

    async def stop(self) -> None:
        """Ends all processes: asks first, and after 10 s no longer asks."""
        self._plan.run_dir.forget()
        for child in self._children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while any(c.running for c in self._children) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.kill()
        if self._store is not None:
            self._store.stop()

    def kill(self) -> None:
        """Ends all processes but the store at once."""
        for child in self._children:
            child.signal(signal.SIGKILL)
            if child.process is not None:
                child.process.wait()

    async def _start_store(self) -> None:
        if self._store is None:
            with self._plan.topology.blamed("mesh", "redis"):
                try:
                    await check_store(self._redis_url)
                except StoreUnavailable as error:
                    raise ConfigError(f"{error}; start it, or give no store at all") from error
            await self._check_names()
            return
        began = time.monotonic()
        self._redis_url = self._store.start()
        took = time.monotonic() - began
        say(f"  {'store':<12} ready in {took:.1f} s at 127.0.0.1:{self._store.port}")

    async def _check_names(self) -> None:
        """An outside store may hold another mesh of this name, alive or just ended."""
        topology = self._plan.topology
        ours = {child.spec.name for child in self._children}
        deadline = time.monotonic() + topology.mesh.lease_ttl_s + 1.0
        while True:
            found = await read_members(self._redis_url, topology.mesh.name)
            taken = [m.record for m in found if m.record.worker_id in ours]
            if not taken:
                return
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"a mesh named {topology.mesh.name!r} lives in this store already "
                    f"({taken[0].worker_id} at {taken[0].address}); choose another --name"
                )
            await asyncio.sleep(_TICK_S)

    def _watch_store(self) -> None:
        if self._store is None or self._store.alive:
            return
        say(f"  {'store':<12} ended; starting it again")
        self._store.start()

    def _watch_child(self, child: Child, now: float) -> None:
        if child.running:
            return
        if child.process is not None:
            self._on_death(child, now)
        elif now >= child.start_at:
            child.start(self._redis_url, now)

    def _on_death(self, child: Child, now: float) -> None:
        assert child.process is not None
        code, name = child.process.wait(), child.spec.name
        child.process, child.ready = None, False
        words = child.last_words()
        if code == _CONFIG_EXIT and not child.proven:
            raise ConfigError(words.removeprefix("pdmesh: "))
        child.deaths.append(now)
        delay = restart_delay(child.deaths, now)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if delay is None:
            self._give_up(child, how, words)
            return
        child.start_at = now + delay
        self._announced.pop(name, None)
        say(f"  {name:<12} ended ({how}); starting it again in {delay:.1f} s ({child.log})")

    def _give_up(self, child: Child, how: str, words: str) -> None:
        child.given_up = True
        reason = f"{child.spec.name} ended {len(child.deaths)} times ({how}); it said last: {words}"
        peers = [c for c in self._children if c.spec.role == child.spec.role and not c.given_up]
        if not peers:
            raise Unavailable(f"{reason}; its log is {child.log}")
        say(f"  {child.spec.name:<12} given up: {reason}")

    async def _notice_ready(self) -> None:
        members: dict[str, Member] = {}
        with contextlib.suppress(PdmeshError):
            found = await read_members(self._redis_url, self._plan.topology.mesh.name)
            members = {member.record.worker_id: member for member in found}
        for child in self._children:
            if child.ready or not child.running:
                continue
            if child.spec.role == "router":
                if await _serving(self.address):
                    self._on_ready(child, self.address)
                continue
            member = members.get(child.spec.name)
            if member and member.state == "ready" and member.record.instance != child.replaced:
                child.replaced = member.record.instance
                self._on_ready(child, member.record.address)

    def _on_ready(self, child: Child, address: str) -> None:
        child.ready = child.proven = True
        child.address = address
        took = time.monotonic() - child.started
        say(f"  {child.spec.name:<12} ready in {took:.1f} s at {address}")

    def _report_progress(self, now: float) -> None:
        for child in self._children:
            if child.ready or not child.running:
                continue
            if now - max(child.started, self._announced.get(child.spec.name, 0.0)) >= _PROGRESS_S:
                self._announced[child.spec.name] = now
                say(f"  {child.spec.name:<12} {child.progress()}")

    def _pids(self) -> dict[str, int]:
        pids = {c.spec.name: c.process.pid for c in self._children if c.process is not None}
        if self._store is not None and self._store.pid is not None:
            pids["store"] = self._store.pid
        return pids

    def _publish(self) -> None:
        self._plan.run_dir.write(
            MeshInfo(
                name=self._plan.topology.mesh.name,
                address=self.address,
                redis_url=self._redis_url,
                model=self._plan.topology.model_name,
                supervisor_pid=os.getpid(),
                pids=self._pids(),
                logs=str(self._plan.run_dir.logs),
            )
        )


async def _serving(address: str) -> bool:
    """Whether the router's public health check says SERVING."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=1.0)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

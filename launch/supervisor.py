"""Starts a mesh on this machine, watches over its processes, and ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from pdmesh.launch.changes import Changes
from pdmesh.launch.control import ControlServer
from pdmesh.launch.crew import TICK_S, Crew, Plan, say
from pdmesh.launch.processes import Child, physical
from pdmesh.launch.runtime import HolderInfo, MeshInfo
from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.store import StoreUnavailable, check_store, read_members
from pdmesh.wire.control import JoinInfo
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.secret import read_secret


class Supervisor:
    """One mesh: its store, its crew, and the socket through which it is changed while it runs."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        topology = plan.topology
        with topology.blamed("mesh", "secret_file"):
            self._secret = plan.run_dir.secret(topology.mesh.secret_file)
            read_secret(self._secret)
        self._crew = Crew(plan, self._secret)
        self.address = self._crew.address
        self._store = None if topology.mesh.redis else EmbeddedStore(plan.run_dir.log("store"))
        self._changes = Changes(self._crew, self._publish)
        self._control = ControlServer(self._changes, plan.run_dir.control)
        self._published: MeshInfo | None = None
        self._began = time.monotonic()

    async def start(self) -> None:
        """Starts everything and returns when the mesh answers.

        Raises:
            ConfigError: a setting is wrong; the mesh cannot start.
            Unavailable: the store cannot be reached, or a process dies again and again.
        """
        await self._start_store()
        self._crew.start()
        while not self._crew.settled:
            await self.watch_once()
            await asyncio.sleep(TICK_S)
        await self._control.start()
        self._publish()
        took = time.monotonic() - self._began
        say(f"pdmesh: ready at {self.address} after {took:.1f} s")

    async def watch(self) -> None:
        """Restarts what dies, until cancelled.

        Raises:
            Unavailable: what is left cannot serve.
        """
        while True:
            await self.watch_once()
            self._publish()
            await asyncio.sleep(TICK_S)

    async def watch_once(self) -> None:
        """Looks at every process once: restarts the dead, notices the ready."""
        self._watch_store()
        await self._crew.watch_once()

    async def stop(self) -> None:
        """Ends all processes."""
        self._plan.run_dir.forget()
        await self._changes.close()
        await self._control.close()
        await self._crew.stop()
        if self._store is not None:
            self._store.stop()

    def kill(self) -> None:
        """Ends all processes but the store at once."""
        self._crew.kill()

    async def _start_store(self) -> None:
        url = self._crew.redis_url
        if self._store is None:
            with self._plan.topology.blamed("mesh", "redis"):
                try:
                    await check_store(url)
                except StoreUnavailable as error:
                    raise ConfigError(
                        f"{str(error).rstrip('.')}; start it, or give no store at all"
                    ) from error
            await self._check_names()
            return
        began = time.monotonic()
        self._crew.redis_url = self._store.start()
        took = time.monotonic() - began
        say(f"  {'store':<12} ready in {took:.1f} s at 127.0.0.1:{self._store.port}")

    async def _check_names(self) -> None:
        """An outside store may hold another mesh of this name, alive or just ended."""
        topology = self._plan.topology
        ours = self._crew.known()
        deadline = time.monotonic() + topology.mesh.lease_ttl_s + 1.0
        while True:
            found = await read_members(self._crew.redis_url, topology.mesh.name)
            taken = [m.record for m in found if m.record.worker_id in ours]
            if not taken:
                return
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"a mesh named {topology.mesh.name!r} lives in this store already "
                    f"({taken[0].worker_id} at {taken[0].address}); choose another --name"
                )
            await asyncio.sleep(TICK_S)

    def _watch_store(self) -> None:
        if self._store is None or self._store.alive:
            return
        say(f"  {'store':<12} ended; starting it again")
        self._store.start()

    # ---- what other commands read ---------------------------------------------------------

    def _publish(self) -> None:
        """Writes ``mesh.json`` where it says something new."""
        info = self._info()
        if info != self._published:
            self._plan.run_dir.write(info)
            self._published = info

    def _info(self) -> MeshInfo:
        topology, pids = self._plan.topology, self._crew.pids()
        if self._store is not None and self._store.pid is not None:
            pids["store"] = self._store.pid
        routers = self._crew.routers()
        metrics = self._plan.metrics_ports
        ports = sorted(port for child in routers if (port := metrics.get(child.spec.name, 0)))
        admins = [_text(self._plan.run_dir.admin_file(child.spec.name)) for child in routers]
        return MeshInfo(
            name=topology.mesh.name,
            address=routers[0].address,
            redis_url=self._crew.redis_url,
            model=topology.model_name,
            supervisor_pid=os.getpid(),
            pids=pids,
            logs=str(self._plan.run_dir.logs),
            control=self._control.path,
            router_admin=admins[0],
            addresses=tuple(sorted(child.address for child in routers)),
            router_admins=tuple(sorted(filter(None, admins))),
            router_metrics=tuple(f"{topology.mesh.host}:{port}" for port in ports),
            not_ready=not_ready(self._crew.known()),
            holders=holders_info(self._crew.holders(), topology.model.precision),
            join=self._join_info(),
        )

    def _join_info(self) -> JoinInfo:
        mesh, model = self._plan.topology.mesh, self._plan.topology.model
        return JoinInfo(
            mesh=mesh.name,
            redis_url=self._crew.redis_url,
            model_name=self._plan.topology.model_name,
            dtype=model.dtype,
            arithmetic=model.arithmetic,
            page_size=model.page_size,
            mtp=model.mtp,
            lease_ttl_s=mesh.lease_ttl_s,
            random=self._plan.topology.random,
            model_path=str(self._plan.topology.model_path.absolute()),
            secret_file=str(self._secret.absolute()),
        )


def not_ready(workers: Mapping[str, Child]) -> dict[str, str]:
    """What the workers do that are not ready: starting, restarting or given up."""
    states = {name: state_of(child) for name, child in workers.items()}
    return {name: state for name, state in states.items() if state != "ready"}


def state_of(child: Child) -> str:
    """Ready, starting, restarting or given up."""
    if child.ready and child.running:
        return "ready"
    return "given up" if child.given_up else "restarting" if child.deaths else "starting"


def holders_info(holders: Mapping[str, Child], precision: str) -> tuple[HolderInfo, ...]:
    """The processes that hold weights, given by device."""
    return tuple(
        HolderInfo(
            name=child.spec.name,
            device=physical(device),
            precision=precision,
            socket=str(child.spec.socket),
            state=state_of(child),
        )
        for device, child in holders.items()
    )


def _text(path: Path) -> str:
    """What a file says; empty if there is none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return ""

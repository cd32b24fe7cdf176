"""The router and the workers of a mesh: starts them, watches over them, lets some go."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.launch.ports import claim_ports
from pdmesh.launch.processes import (
    Child,
    WorkerRole,
    device_of,
    holder_specs,
    router_name,
    router_spec,
    worker_spec,
)
from pdmesh.launch.ranks import group_sizes, more_places, rank_places
from pdmesh.launch.readiness import ended, holds, serving
from pdmesh.launch.restart import Death, restart_delay
from pdmesh.launch.runtime import RunDir
from pdmesh.launch.scaling import index_of, next_name
from pdmesh.launch.topology import Topology
from pdmesh.registry.roster import Member
from pdmesh.registry.store import read_members
from pdmesh.wire.errors import ConfigError, PdmeshError, Unavailable

TICK_S = 0.2
STOP_S = 10.0
"""Longest wait for a process that was told to end."""
_ROUTER_S = 2.0
_PROGRESS_S = 3.0
_REPEAT_S = 15.0
"""After which a line about a process that starts is said again unchanged."""
_CONFIG_EXIT = 2


def say(text: str) -> None:
    """One line of progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Plan:
    """What to start and where."""

    topology: Topology
    port: int
    """Of the first router."""
    run_dir: RunDir
    metrics_ports: Mapping[str, int] = field(default_factory=dict)
    """Of the metrics, by process name; none for those it does not name."""
    more_ports: Sequence[int] = ()
    """Of the second router and so on."""


class Crew:
    """All processes of a mesh but the store. All methods run on the main thread's event loop.

    The kernel ties a child to the thread that started it, so that a killed supervisor leaves no
    process behind; that thread must be the main one.
    """

    def __init__(self, plan: Plan, secret: Path) -> None:
        topology = plan.topology
        self._plan = plan
        self._secret = secret
        self._looked: dict[str, float] = {}
        self._announced: dict[str, tuple[str, float]] = {}
        self._ports = dict(plan.metrics_ports)
        self._claims = contextlib.ExitStack()
        self._places = self._claims.enter_context(rank_places(topology))
        self.redis_url = topology.mesh.redis
        self.children: list[Child] = []
        for index, port in enumerate((plan.port, *plan.more_ports)):
            self._enlist_router(router_name(index), port)
        self.address = self.children[0].address
        self._holders = holder_specs(topology, plan.run_dir.path)
        self.children += [Child(s, plan.run_dir.log(s.name)) for s in self._holders.values()]
        counts: dict[WorkerRole, int] = {
            "prefill": topology.prefill.workers,
            "decode": topology.decode.workers,
        }
        for role, count in counts.items():
            for index in range(count):
                self._enlist(role, f"{role}-{index}")

    def _enlist_router(self, name: str, port: int) -> None:
        run_dir, topology = self._plan.run_dir, self._plan.topology
        metrics, admin = self._ports.get(name, 0), run_dir.admin_file(name)
        spec = router_spec(topology, name, port, self._secret, admin, metrics)
        address = f"{topology.mesh.host}:{port}"
        self.children.append(Child(spec, run_dir.log(name), address=address))

    def _enlist(self, role: WorkerRole, name: str) -> Child:
        metrics = self._ports.get(name, 0)
        place = self._places.get(name)
        holder = self._holders.get(device_of(self._plan.topology, name))
        spec = worker_spec(self._plan.topology, role, name, self._secret, metrics, place, holder)
        self.children.append(Child(spec, self._plan.run_dir.log(name)))
        return self.children[-1]

    # ---- who there is ---------------------------------------------------------------------

    def workers(self) -> dict[str, Child]:
        """The workers that run, start, or start again, by name."""
        return {n: c for n, c in self.known().items() if not c.given_up}

    def known(self) -> dict[str, Child]:
        """As ``workers``, and those that were given up."""
        return {
            child.spec.name: child
            for child in self.children
            if child.spec.role in ("prefill", "decode") and not child.leaving
        }

    def holders(self) -> dict[str, Child]:
        """The processes that hold weights, by device."""
        children = {child.spec.name: child for child in self.children}
        return {device: children[spec.name] for device, spec in self._holders.items()}

    def routers(self) -> list[Child]:
        """The routers, those that answer first."""
        found = [child for child in self.children if child.spec.role == "router"]
        return sorted(found, key=lambda child: not (child.ready and child.running))

    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {c.spec.name: c.process.pid for c in self.children if c.process is not None}

    @property
    def group_sizes(self) -> dict[str, int]:
        """Workers that share their experts, for the roles whose workers do."""
        return group_sizes(self._plan.topology)

    @property
    def settled(self) -> bool:
        """Whether every process is ready, or was given up."""
        return all(child.ready or child.given_up for child in self.children)

    # ---- coming and going -----------------------------------------------------------------

    def start(self) -> None:
        """Starts every process."""
        now = time.monotonic()
        for child in self.children:
            if self._start(child, now):
                say(f"  {child.spec.name:<12} starting")
            else:
                say(f"  {child.spec.name:<12} will start when {child.spec.needs} is ready")

    def _start(self, child: Child, now: float) -> bool:
        """Starts a process, unless another one that it needs has to be ready first."""
        needed = [other for other in self.children if other.spec.name == child.spec.needs]
        if not all(other.ready and other.running for other in needed):
            return False
        child.start(self.redis_url, now)
        return True

    def add(self, role: WorkerRole, name: str = "", after: str = "") -> Child:
        """Starts one more worker, under the lowest free index if no name is given.

        ``after`` is the instance that had the name before.
        """
        name = name or next_name([c.spec.name for c in self.children if not c.given_up], role)
        self.children = [c for c in self.children if c.spec.name != name]
        self._claim_metrics(role, name)
        self._claim_place(role, name)
        child = self._enlist(role, name)
        child.late, child.replaced = True, after
        self._start(child, time.monotonic())
        return child

    async def until_ready(self, child: Child, keep: bool = False) -> None:
        """Waits until a worker that was added is ready.

        Raises:
            Unavailable: it cannot start; it is forgotten, unless it is to be kept as one that was
                given up.
        """
        while not child.ready:
            if child.given_up:
                if not keep:
                    self.forget(child)
                raise Unavailable(
                    f"{child.spec.name} cannot start; it said last: {child.last_words()}"
                    f" ({child.log})"
                )
            await asyncio.sleep(TICK_S)

    async def retire(self, child: Child, tell: Callable[[str], None]) -> None:
        """Lets a worker finish what it has, and end."""
        child.leaving = True
        child.signal(signal.SIGTERM)
        bound = self._plan.topology.mesh.drain_s + STOP_S
        deadline, told = time.monotonic() + bound, ""
        while child.running and time.monotonic() < deadline:
            if (left := child.left()) != told:
                told = left
                tell(f"{child.spec.name} draining: {left} left")
            await asyncio.sleep(TICK_S)
        self.forget(child)

    def forget(self, child: Child) -> None:
        """Ends a process at once and forgets it."""
        child.leaving = True
        child.signal(signal.SIGKILL)
        if child.process is not None:
            child.process.wait()
        self.children = [other for other in self.children if other is not child]

    def _claim_metrics(self, role: WorkerRole, name: str) -> None:
        topology = self._plan.topology
        first = (topology.prefill if role == "prefill" else topology.decode).metrics_port
        if not first or name in self._ports:
            return
        taken = {self._plan.port, *self._plan.more_ports, *self._ports.values()}
        with contextlib.suppress(ConfigError):  # without metrics rather than not at all
            claim = claim_ports(topology.mesh.host, first, 1, taken)
            self._ports[name] = self._claims.enter_context(claim)[0]

    def _claim_place(self, role: WorkerRole, name: str) -> None:
        """A place among ranks for a worker of a group that there was not before."""
        if role not in self.group_sizes or name in self._places:
            return
        taken = {address for place in self._places.values() for address in place.addresses}
        more = more_places(self._plan.topology, role, index_of(name), taken)
        self._places |= self._claims.enter_context(more)

    async def stop(self) -> None:
        """Ends all processes, the router first: asks, and after 10 s no longer asks."""
        deadline = time.monotonic() + STOP_S
        routers = [c for c in self.children if c.spec.role == "router"]
        for child in routers:
            child.signal(signal.SIGTERM)
        await ended(routers, time.monotonic() + _ROUTER_S)
        holders = [c for c in self.children if c.spec.role == "weights"]
        workers = [c for c in self.children if c not in holders]
        for child in workers:
            child.signal(signal.SIGTERM if child in routers else signal.SIGINT)
        await ended(workers, deadline)
        for child in holders:  # last: a worker that loses its weights ends at once
            child.signal(signal.SIGTERM)
        await ended(holders, deadline)
        self.kill()
        self._claims.close()

    def kill(self) -> None:
        """Ends all processes at once."""
        for child in self.children:
            child.signal(signal.SIGKILL)
            if child.process is not None:
                child.process.wait()

    # ---- watching -------------------------------------------------------------------------

    async def watch_once(self) -> None:
        """Looks at every process once: restarts the dead, notices the ready.

        Raises:
            ConfigError: a setting is wrong; the mesh cannot start.
            Unavailable: what is left cannot serve.
        """
        now = time.monotonic()
        for child in self.children:
            if not (child.given_up or child.leaving):
                self._watch(child, now)
        if not self.settled:
            await self._notice_ready()
            self._report_progress(time.monotonic())

    def _watch(self, child: Child, now: float) -> None:
        if child.running:
            return
        if child.process is not None:
            self._on_death(child, now)
        elif now >= child.start_at:
            self._start(child, now)

    def _on_death(self, child: Child, now: float) -> None:
        assert child.process is not None
        code, name, ready = child.process.wait(), child.spec.name, child.ready
        child.process, child.ready = None, False
        words = child.last_words()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if code == _CONFIG_EXIT and not child.proven:
            if child.late:
                child.given_up = True
                return
            raise ConfigError(words.removeprefix("pdmesh: "))
        child.deaths.append(Death(now, ready))
        delay = restart_delay(child.deaths, now)
        if delay is None:
            self._give_up(child, how, words)
            return
        child.start_at = now + delay
        self._looked.pop(name, None)
        self._announced.pop(name, None)
        say(f"  {name:<12} ended ({how}); starting it again in {delay:.1f} s ({child.log})")

    def _give_up(self, child: Child, how: str, words: str) -> None:
        child.given_up = True
        reason = f"{child.spec.name} ended {len(child.deaths)} times ({how}); it said last: {words}"
        peers = [
            c
            for c in self.children
            if c.spec.role == child.spec.role and not (c.given_up or c.spec.follows)
        ]
        if not peers:
            raise Unavailable(f"{reason}; its log is {child.log}")
        say(f"  {child.spec.name:<12} given up: {reason}")

    async def _notice_ready(self) -> None:
        members: dict[str, Member] = {}
        with contextlib.suppress(PdmeshError):
            found = await read_members(self.redis_url, self._plan.topology.mesh.name)
            members = {member.record.worker_id: member for member in found}
        for child in self.children:
            if child.ready or not child.running:
                continue
            if child.spec.role == "router":
                if await serving(child.address):
                    self._on_ready(child, child.address)
                continue
            if child.spec.socket is not None:
                assert child.process is not None
                if holds(child.spec.socket, child.process.pid):
                    self._on_ready(child, str(child.spec.socket))
                continue
            if child.spec.follows:
                if child.following:
                    self._on_ready(child, self._places[child.spec.name].own)
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
        for child in self.children:
            if child.ready or not child.running:
                continue
            name = child.spec.name
            if now - max(child.started, self._looked.get(name, 0.0)) < _PROGRESS_S:
                continue
            self._looked[name], text = now, child.progress()
            said, said_at = self._announced.get(name, ("", 0.0))
            if text != said or now - said_at >= _REPEAT_S:
                self._announced[name] = text, now
                say(f"  {name:<12} {text}")

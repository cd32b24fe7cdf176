"""Changes to a running mesh, one at a time: scaling, and replacing workers one after the other.

A change belongs to the supervisor: it goes on when the command that asked for it is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import cast

from pdmesh.launch.crew import Crew, say
from pdmesh.launch.processes import Child, WorkerRole
from pdmesh.launch.scaling import plan_restart, plan_scale, role_of
from pdmesh.registry.store import end_task
from pdmesh.wire.control import Progress, RestartRequest, ScaleRequest
from pdmesh.wire.errors import ConfigError, InternalError, PdmeshError, Unavailable

_End = PdmeshError | None


class Changes:
    """Scales and restarts the workers of a crew.

    Args:
        publish: called when a change is over, before whoever asked for it hears so.
    """

    def __init__(self, crew: Crew, publish: Callable[[], None]) -> None:
        self._crew = crew
        self._publish = publish
        self._task: asyncio.Task[None] | None = None
        self._what = ""
        self._lines: asyncio.Queue[str | _End] = asyncio.Queue()

    async def scale(self, request: ScaleRequest) -> AsyncGenerator[Progress, None]:
        """Starts what is missing, then drains and stops what is too much.

        Workers that share their experts come and go by whole groups.

        Raises:
            ConfigError: a target is out of range, or makes no whole groups.
            Unavailable: another change is under way, or a new worker cannot start; then those
                that were started with it are stopped again.
        """
        asked = {"prefill": request.prefill, "decode": request.decode}
        targets = {cast("WorkerRole", r): n for r, n in asked.items() if n is not None}
        if not targets:
            raise ConfigError("say how many workers of which role, e.g. decode=3")
        plan_scale(self._crew.workers(), targets, self._crew.group_sizes)
        what = "scaling to " + " ".join(f"{role}={count}" for role, count in targets.items())
        async for line in self._run(what, lambda: self._scale(targets)):
            yield line

    async def restart(self, request: RestartRequest) -> AsyncGenerator[Progress, None]:
        """Replaces workers: starts another, waits until it is ready, drains and stops the old one.

        One that shares its experts drains and ends first, since nobody else can have its place; the
        others of its group serve meanwhile, and the next one ends when it is back.

        Raises:
            ConfigError: a worker is not one of this mesh's.
            Unavailable: another change is under way, or a new worker cannot start; the rest of
                the old ones stay.
        """
        names = plan_restart(self._crew.known(), request.workers)
        what = f"replacing {', '.join(names)}"
        async for line in self._run(what, lambda: self._restart(names)):
            yield line

    async def close(self) -> None:
        """Gives up the change under way."""
        if self._task is not None:
            await end_task(self._task)

    # ---- one change -----------------------------------------------------------------------

    async def _run(
        self, what: str, change: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[Progress, None]:
        if self._task is not None and not self._task.done():
            raise Unavailable(
                f"another change is under way ({self._what}); try again when it is over"
            )
        self._what = what
        lines = self._lines = asyncio.Queue()
        self._tell(what)
        self._task = asyncio.get_running_loop().create_task(self._guarded(change, lines))
        while isinstance(line := await lines.get(), str):
            yield Progress(text=line)
        if line is not None:
            raise line

    async def _guarded(
        self, change: Callable[[], Awaitable[None]], lines: asyncio.Queue[str | _End]
    ) -> None:
        end: _End = Unavailable("the mesh is stopping")
        try:
            await change()
            end = None
            self._publish()
        except PdmeshError as error:
            self._publish()
            say(f"pdmesh: {self._what} failed: {error}")
            end = error
        except Exception as error:
            end = InternalError(f"{self._what} failed: {error}")
            raise
        finally:
            lines.put_nowait(end)

    def _tell(self, text: str) -> None:
        say(f"pdmesh: {text}")
        self._lines.put_nowait(text)

    async def _scale(self, targets: dict[WorkerRole, int]) -> None:
        sizes = self._crew.group_sizes
        plan = plan_scale(self._crew.workers(), targets, sizes)
        new = []
        for name in plan.start:
            role = cast("WorkerRole", role_of(name))
            new.append(self._add(role, name if role in sizes else ""))
        try:
            for child in new:
                await self._ready(child)
        except PdmeshError:
            for child in new:
                self._crew.forget(child)
            raise
        old = [self._crew.workers()[name] for name in plan.stop]
        await asyncio.gather(*(self._retire(child) for child in old))
        self._tell(self._summary())

    async def _restart(self, names: list[str]) -> None:
        for name in names:
            old = self._crew.known().get(name)
            if old is None:
                continue
            role = cast("WorkerRole", role_of(name))
            if role in self._crew.group_sizes:
                await self._renew(role, old)
                continue
            new = self._add(role)
            await self._ready(new)
            await self._retire(old)
            self._tell(f"{name} is replaced by {new.spec.name}")
        self._tell(self._summary())

    async def _renew(self, role: WorkerRole, old: Child) -> None:
        """Another process in the place of one that shares its experts."""
        others = [
            child
            for child in self._crew.workers().values()
            if child.spec.role == role and not child.spec.follows and child is not old
        ]
        if not others and not old.spec.follows:
            self._tell(f"no other {role} worker: new requests fail until {old.spec.name} is back")
        await self._retire(old)
        new = self._add(role, old.spec.name, old.replaced)
        await self._crew.until_ready(new, keep=True)
        self._tell(f"{new.spec.name} is renewed, and back in its group, at {new.address}")

    def _add(self, role: WorkerRole, name: str = "", after: str = "") -> Child:
        child = self._crew.add(role, name, after)
        self._tell(f"{child.spec.name} starting")
        return child

    async def _ready(self, child: Child) -> None:
        await self._crew.until_ready(child)
        self._tell(f"{child.spec.name} ready at {child.address}")

    async def _retire(self, child: Child) -> None:
        self._tell(f"{child.spec.name} draining")
        await self._crew.retire(child, self._tell)
        self._tell(f"{child.spec.name} stopped")

    def _summary(self) -> str:
        names = list(self._crew.workers())
        counts = {role: sum(role_of(n) == role for n in names) for role in ("prefill", "decode")}
        return "done: " + " ".join(f"{role}={count}" for role, count in counts.items())

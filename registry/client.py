"""The router's view of the registry: kept up to date in the background, answered without I/O."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from pdmesh.registry.membership import EventsMissing, Membership
from pdmesh.registry.store import Member, Roster, Store, StoreUnavailable, end_task
from pdmesh.wire.errors import ConfigError, Incompatible, InvalidRequest
from pdmesh.wire.logs import event
from pdmesh.wire.messages import WorkerRecord

log = logging.getLogger(__name__)

_POLL_S = 0.25
_RETRY_S = 0.25
_FIRST_SNAPSHOT_S = 3.0


class RegistryView:
    """Live workers and the pages they own.

    If the store goes away the last membership stays in force, and the view recovers by itself when
    it returns, also when it returns empty.

    Args:
        url: Redis URL.
        mesh: name of the mesh; two meshes may share a store.
        grace_s: seconds a known worker stays after an outage without registering again.
        lost_s: seconds until an instance reported lost is taken back if it still renews its lease.
        clock: seconds, monotone.
        store: takes the place of the one at ``url``.

    Raises:
        ConfigError: the URL is wrong.
    """

    def __init__(
        self,
        url: str,
        mesh: str,
        *,
        grace_s: float = 10.0,
        lost_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
        store: Store | None = None,
    ) -> None:
        self._store = store or Store(url, mesh)
        self._clock = clock
        self._state = Membership(grace_s, lost_s)
        self._connected = False
        self._loaded = asyncio.Event()
        self._failure: ConfigError | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether the store answered last time."""
        return self._connected

    async def start(self) -> None:
        """Begins to follow the store; returns with the first snapshot, or after 3 s without one.

        Raises:
            ConfigError: the store refuses the login, or cannot serve pdmesh.
        """
        self._task = asyncio.create_task(self._follow(), name="registry-view")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_SNAPSHOT_S):
                await self._loaded.wait()
        if self._failure is not None:
            await self.close()
            raise self._failure

    async def close(self) -> None:
        """Stops following and closes the connections."""
        if self._task is not None:
            await end_task(self._task)
        await self._store.close()

    def workers(self) -> list[WorkerRecord]:
        """Ready workers with a lease, by name."""
        return self._state.workers()

    def draining(self) -> list[WorkerRecord]:
        """Workers with a lease that take nothing new, by name."""
        return self._state.draining()

    def owned_prefix(self, worker_id: str, hashes: Sequence[bytes]) -> int:
        """How many leading ``hashes`` the worker has published; a hint, never a promise."""
        return self.owned_prefixes(hashes).get(worker_id, 0)

    def owned_prefixes(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """The same for each worker that has published the first of ``hashes``."""
        names = [record.worker_id for record in (*self.workers(), *self.draining())]
        owned = {name: self._state.owned_prefix(name, hashes) for name in names}
        return {name: pages for name, pages in owned.items() if pages}

    def mark_lost(self, instance: str) -> None:
        """Stops routing to an instance at once, until another instance registers in its place.

        An instance that goes on renewing its lease for ``lost_s`` is alive and comes back too.
        """
        self._state.mark_lost(instance, self._clock())

    async def _follow(self) -> None:
        while True:
            try:
                await self._snapshot()
                while True:
                    await self._advance()
            except EventsMissing:
                event(log, "registry_events_missing", seq=self._state.seq)
            except StoreUnavailable as error:
                await self._pause(error)
            except ConfigError as error:
                if not self._loaded.is_set():
                    self._failure = error
                    self._loaded.set()
                    return
                await self._pause(error)

    async def _pause(self, error: Exception) -> None:
        if self._connected or not self._loaded.is_set():
            event(log, "registry_lost", logging.WARNING, store=self._store.where, error=error)
        self._connected = False
        await asyncio.sleep(_RETRY_S)

    async def _snapshot(self) -> None:
        roster = await self._store.roster()
        if self._loaded.is_set() and (
            not self._connected or roster.incarnation != self._state.incarnation
        ):
            self._state.outage_over(self._clock())
        found: list[tuple[Member, set[bytes]]] = []
        foreign: list[str] = []
        for worker_id in roster.members:
            try:
                member = await self._store.member(worker_id)
            except (InvalidRequest, Incompatible) as error:
                event(log, "worker_ignored", logging.WARNING, worker=worker_id, error=error)
                foreign.append(worker_id)
                continue
            if member is not None:
                found.append((member, await self._store.pages(worker_id)))
        self._state.replace(roster, found, foreign)
        if not self._connected:
            event(log, "registry_connected", store=self._store.where, workers=len(found))
        self._connected = True
        self._loaded.set()

    async def _advance(self) -> None:
        """Waits for events, then compares with the roster; one round of the loop."""
        await self._apply_events(block_ms=int(_POLL_S * 1000))
        roster = await self._store.roster()
        await self._catch_up(roster)
        self._state.check(roster, self._clock())

    async def _apply_events(self, block_ms: int) -> bool:
        events = await self._store.events(self._state.seq, block_ms)
        for seq, fields in events:
            self._state.apply(seq, fields)
        return bool(events)

    async def _catch_up(self, roster: Roster) -> None:
        if roster.incarnation != self._state.incarnation:
            raise EventsMissing
        while self._state.seq < roster.seq:
            if not await self._apply_events(block_ms=0):
                raise EventsMissing

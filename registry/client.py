"""The router's view of the registry: kept up to date in the background, answered without I/O."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence

from pdmesh.registry.feed import EventsMissing
from pdmesh.registry.index import PrefixIndex
from pdmesh.registry.keeping import bury, sweep
from pdmesh.registry.membership import Membership
from pdmesh.registry.partitions import Partitions
from pdmesh.registry.roster import Member, Roster
from pdmesh.registry.store import Entries, Store, StoreUnavailable, end_task
from pdmesh.registry.ticker import Ticker
from pdmesh.wire.errors import ConfigError, Incompatible, InvalidRequest
from pdmesh.wire.hashes import PageHash
from pdmesh.wire.logs import event
from pdmesh.wire.messages import WorkerRecord

log = logging.getLogger(__name__)

_POLL_S = 0.25
_RETRY_S = 0.25
_FIRST_SNAPSHOT_S = 3.0
_CHECK_S = 1.0
_CHECKS_OF_ALL = 16
"""Turns of a check in which every partition has its turn."""
_SWEEP_S = 600.0
_ASK_SWEEP_S = 60.0
_TIDIED = 4096
"""Pages of the local index that are cleared of fenced owners in a round."""
LOOKUP_S = 0.003
_MOST_LOOKUPS = 8


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
        index: makes the index of one partition.

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
        index: Callable[[], PrefixIndex] = PrefixIndex,
    ) -> None:
        self._store = store or Store(url, mesh)
        self._clock = clock
        self._state = Membership(grace_s, lost_s)
        self._make_index = index
        self._pages = Partitions(self._store, self._store.layout, index)
        self._check = Ticker(_CHECK_S, clock())
        self._sweep = Ticker(_ASK_SWEEP_S, clock(), secrets.randbelow(1000) / 1000)
        self._connected = False
        self._loaded = asyncio.Event()
        self._failure: ConfigError | None = None
        self._task: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._lookups: set[asyncio.Task[dict[str, int]]] = set()
        self._memo: tuple[Sequence[PageHash], dict[str, int]] | None = None

    @property
    def connected(self) -> bool:
        """Whether the store answered last time."""
        return self._connected

    @property
    def warm(self) -> bool:
        """Whether the local index is complete and follows the store."""
        return self._connected and self._loaded.is_set() and self._pages.behind == 0

    async def start(self) -> None:
        """Begins to follow the store; returns when all is read, or after 3 s.

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
        if self._keeping is not None:  # looked up now: the task above may have begun it last
            await end_task(self._keeping)
        for lookup in list(self._lookups):
            lookup.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
        await self._store.close()

    def workers(self) -> list[WorkerRecord]:
        """Ready workers with a lease, by name."""
        return self._state.workers()

    def draining(self) -> list[WorkerRecord]:
        """Workers with a lease that take nothing new, by name."""
        return self._state.draining()

    def owned_prefix(self, worker_id: str, hashes: Sequence[PageHash]) -> int:
        """How many leading ``hashes`` the worker has published; a hint, never a promise."""
        return self.owned_prefixes(hashes).get(worker_id, 0)

    def owned_prefixes(self, hashes: Sequence[PageHash]) -> dict[str, int]:
        """The same for each worker that has published the first of ``hashes``.

        The answer for the tuple asked last is remembered until something changes.
        """
        if self._memo is None or self._memo[0] is not hashes or not isinstance(hashes, tuple):
            self._memo = (hashes, self._pages.prefixes(hashes, self._state.owners()))
        return self._memo[1]

    async def lookup(
        self, hashes: Sequence[PageHash], budget_s: float = LOOKUP_S
    ) -> dict[str, int]:
        """As ``owned_prefixes``, asked of the store: for use while the view is not warm.

        Whatever goes wrong, or takes longer than ``budget_s``, is no hit.
        """
        if not hashes or len(self._lookups) >= _MOST_LOOKUPS:
            return {}
        asking = asyncio.create_task(self._pages.lookup(hashes, self._state.owners()))
        self._lookups.add(asking)
        asking.add_done_callback(self._looked_up)
        await asyncio.wait({asking}, timeout=budget_s)  # a late answer is let come: no reconnect
        if not asking.done() or asking.cancelled() or asking.exception() is not None:
            return {}
        return asking.result()

    def mark_lost(self, instance: str) -> None:
        """Stops routing to an instance at once, until another instance registers in its place.

        An instance that goes on renewing its lease for ``lost_s`` is alive and comes back too.
        """
        self._state.mark_lost(instance, self._clock())

    def _looked_up(self, task: asyncio.Task[dict[str, int]]) -> None:
        self._lookups.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            event(log, "lookup_failed", logging.DEBUG, error=error)

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
        found: list[Member] = []
        foreign: list[str] = []
        for worker_id in roster.members:
            try:
                member = await self._store.member(worker_id)
            except (InvalidRequest, Incompatible) as error:
                event(log, "worker_ignored", logging.WARNING, worker=worker_id, error=error)
                foreign.append(worker_id)
                continue
            if member is not None:
                found.append(member)
        other_data = roster.incarnation != self._state.incarnation
        self._state.replace(roster, found, foreign)
        self._memo = None
        if roster.layout != self._pages.layout:
            self._pages = Partitions(self._store, roster.layout, self._make_index)
        elif other_data:
            self._pages.forget()
        elif not self._connected:
            await self._pages.check(roster.layout.partitions)
        if not self._connected:
            event(log, "registry_connected", store=self._store.where, workers=len(found))
        self._connected = True

    async def _advance(self) -> None:
        """Reads what is cold, waits for events, then compares with the roster; one round."""
        if self._pages.cold:
            if not await self._pages.load():
                await asyncio.sleep(_RETRY_S)
            self._memo = None
        if self._pages.cold == 0:
            self._loaded.set()
        found = await self._read(0 if self._pages.cold else int(_POLL_S * 1000))
        if not found and not self._store.waits:
            await asyncio.sleep(_POLL_S)
        if self._check.left(self._clock()) == 0:
            self._check.hit(self._clock())
            await self._pages.check(-(-self._pages.layout.partitions // _CHECKS_OF_ALL))
        roster = await self._store.roster()
        await self._catch_up(roster)
        self._state.check(roster, self._clock())
        self._memo = None
        self._pages.tidy(_TIDIED)
        self._keep(roster)

    async def _read(self, block_ms: int) -> bool:
        """Applies what the streams hold. Whether there was anything about the membership."""
        events = self._store.keys.events
        cursors = {events: f"{self._state.seq}-0", **self._pages.cursors()}
        found = await self._store.read(cursors, block_ms)
        entries: Entries = found.pop(events, [])
        self._memo = None
        self._pages.take(found)
        for entry_id, fields in entries:
            self._state.apply(int(entry_id.partition("-")[0]), fields)
        return bool(entries)

    async def _catch_up(self, roster: Roster) -> None:
        if roster.incarnation != self._state.incarnation:
            raise EventsMissing
        while self._state.seq < roster.seq:
            if not await self._read(block_ms=0):
                raise EventsMissing

    def _keep(self, roster: Roster) -> None:
        due = self._sweep.left(self._clock()) == 0
        if (roster.dead or due) and (self._keeping is None or self._keeping.done()):
            if due:
                self._sweep.hit(self._clock())
            self._keeping = asyncio.create_task(self._clean(roster), name="registry-keeping")

    async def _clean(self, roster: Roster) -> None:
        """Fences who left; now and then one router of the mesh removes dead records."""
        try:
            await bury(self._store, roster.layout, roster.dead)
            if (await self._store.call("may_sweep", None, int(_SWEEP_S * 1000)))[0]:
                removed = await sweep(self._store, roster.layout)
                event(log, "registry_swept", records=removed)
        except (StoreUnavailable, ConfigError) as error:
            event(log, "registry_not_swept", logging.DEBUG, error=error)

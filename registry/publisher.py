"""A worker's lease: registration, renewal, and the pages it tells the routers about."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterable

from pdmesh.registry.store import Store, StoreUnavailable, WorkerState, end_task
from pdmesh.wire.codec import encode
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.logs import event
from pdmesh.wire.messages import WorkerRecord

log = logging.getLogger(__name__)

_BATCH = 512
_RETRY_S = 0.5
_CLOSE_S = 2.0


class _Fenced(Exception):
    """The store knows another epoch of this worker, or none."""


class _Pending:
    """The last word about each page not yet sent; filled from any thread.

    Only the last operation on a page counts, so the size is bounded by the distinct pages. Beyond
    ``limit`` (more than the last snapshot held) all is dropped and ``overflowed`` set; the owner
    then sends everything afresh.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._room = limit
        self._lock = threading.Lock()
        self._owned: dict[bytes, bool] = {}
        self.overflowed = False

    def add(self, hashes: Iterable[bytes], owned: bool) -> None:
        with self._lock:
            for page in hashes:
                self._owned.pop(page, None)
                self._owned[page] = owned
            if len(self._owned) > self._room:
                self._owned.clear()
                self.overflowed = True

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """(published, evicted), in order; leaves nothing."""
        with self._lock:
            owned, self._owned = self._owned, {}
        return [p for p, own in owned.items() if own], [p for p, own in owned.items() if not own]

    def restore(self, published: list[bytes], evicted: list[bytes]) -> None:
        """Puts back what could not be sent, unless a later word about it came meanwhile."""
        with self._lock:
            later, self._owned = self._owned, dict.fromkeys(published, True)
            self._owned.update(dict.fromkeys(evicted, False))
            for page, own in later.items():
                self._owned.pop(page, None)
                self._owned[page] = own

    def begin(self, snapshot: Callable[[], list[bytes]]) -> bool:
        """Forgets all but ``snapshot()``, which needs no room. Whether words had been dropped.

        What is added between the two is in the snapshot or kept, so nothing is missed.
        """
        with self._lock:
            self._owned.clear()
            before, self.overflowed = self.overflowed, False
        owned = snapshot()
        with self._lock:
            later, self._owned = self._owned, dict.fromkeys(owned, True)
            self._owned.update(later)
            self._room = self._limit + len(owned)
        return before


class WorkerLease:
    """Keeps one worker registered while the process lives.

    ``publish`` and ``evict`` may be called from any thread and never block. If the store fences
    the worker (its lease ended, or the data were lost) or the queue overflows, the worker
    registers under a new epoch, in the state it was in, and publishes ``snapshot()`` again.

    Args:
        url: Redis URL.
        mesh: name of the mesh.
        record: what routers learn about the worker; kept as the attribute ``record``.
        snapshot: hashes of all pages now owned, parents first; called on the event loop's thread.
        ttl_s: seconds the lease lasts without renewal; it is renewed five times as often.
        queue_limit: pages that may wait to be sent.
        store: takes the place of the one at ``url``.

    Raises:
        ConfigError: the URL is wrong.
    """

    def __init__(
        self,
        url: str,
        mesh: str,
        record: WorkerRecord,
        *,
        snapshot: Callable[[], list[bytes]] = list,
        ttl_s: float = 5.0,
        queue_limit: int = 65_536,
        store: Store | None = None,
    ) -> None:
        self._store = store or Store(url, mesh)
        self.record = record
        self._snapshot = snapshot
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._renew_s = ttl_s / 5
        self._pending = _Pending(queue_limit)
        self._state: WorkerState = "joining"
        self._told: WorkerState = "joining"
        self._epoch = 0
        self._lost = False
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    @property
    def epoch(self) -> int:
        """The epoch under which the worker is registered; 0 before ``start``."""
        return self._epoch

    @property
    def connected(self) -> bool:
        """Whether the last call to the store succeeded."""
        return self._epoch > 0 and not self._lost

    async def start(self) -> None:
        """Registers, taking the name over from a process before, and starts to renew.

        While the store does not answer it tries again and says so in the log.

        Raises:
            ConfigError: the store refuses the login, or cannot serve pdmesh.
        """
        self._loop = asyncio.get_running_loop()
        while True:
            try:
                await self._register(takeover=True)
                break
            except StoreUnavailable as error:
                self._note_lost(error)
                await asyncio.sleep(_RETRY_S)
        self._task = asyncio.create_task(self._run(), name="worker-lease")
        self._task.add_done_callback(_report)

    async def ready(self) -> None:
        """Tells routers to use the worker."""
        await self._set_state("ready")

    async def drain(self) -> None:
        """Tells routers to send no more requests."""
        await self._set_state("draining")

    def publish(self, hashes: Iterable[bytes]) -> None:
        """The worker now owns these pages (parents before children)."""
        self._enqueue(hashes, owned=True)

    def evict(self, hashes: Iterable[bytes]) -> None:
        """The worker no longer owns these pages."""
        self._enqueue(hashes, owned=False)

    async def close(self) -> None:
        """Stops renewing and removes the worker's keys, if the store answers within 2 s."""
        if self._task is not None:
            await end_task(self._task)
        try:
            if self._epoch:
                async with asyncio.timeout(_CLOSE_S):
                    await self._call("deregister", self._epoch)
        except _Fenced:
            pass
        except (StoreUnavailable, ConfigError, TimeoutError) as error:
            event(log, "deregister_failed", logging.WARNING, error=error)
        finally:
            await self._store.close()

    def _enqueue(self, hashes: Iterable[bytes], owned: bool) -> None:
        self._pending.add(hashes, owned)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self._renew_s * (0.5 + secrets.randbelow(500) / 1000)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._wake.wait()
            self._wake.clear()
            try:
                async with self._changing:
                    if loop.time() >= due:
                        due = loop.time() + self._renew_s
                        await self._call("renew", self._epoch, self._ttl_ms)
                    await self._tell_state()
                    await self._flush()
                self._note_back()
            except _Fenced as error:
                event(log, "lease_fenced", logging.WARNING, epoch=self._epoch, current=error)
                await self._register_again()
            except (StoreUnavailable, ConfigError) as error:
                self._note_lost(error)
                await asyncio.sleep(min(_RETRY_S, self._renew_s))

    async def _flush(self) -> None:
        if self._pending.overflowed:
            raise _Fenced("queue overflow")
        published, evicted = self._pending.take()
        try:
            for start in range(0, len(evicted), _BATCH):
                await self._call("evict", self._epoch, *evicted[start : start + _BATCH])
            for start in range(0, len(published), _BATCH):
                await self._call("publish", self._epoch, *published[start : start + _BATCH])
        except BaseException:
            self._pending.restore(published, evicted)
            raise

    async def _register_again(self) -> None:
        try:
            async with self._changing:
                await self._register(takeover=False)
            self._note_back()
        except (StoreUnavailable, ConfigError) as error:
            self._note_lost(error)
            await asyncio.sleep(_RETRY_S)

    async def _register(self, takeover: bool) -> None:
        record = self.record
        state = self._state
        dropped = self._pending.begin(self._snapshot)
        try:
            answer = await self._store.call(
                "register",
                record.worker_id,
                record.instance,
                encode(record),
                self._ttl_ms,
                state,
                int(takeover),
                secrets.token_hex(8),
            )
        except BaseException:
            self._pending.overflowed |= dropped
            raise
        if answer[0] == b"TAKEN":
            raise StoreUnavailable(
                f"another process (instance {answer[1].decode()}) runs as {record.worker_id!r}; "
                "give each worker its own name"
            )
        self._epoch, self._told = int(answer[1]), state
        self._wake.set()
        event(log, "registered", worker=record.worker_id, epoch=self._epoch, state=state)

    async def _set_state(self, state: WorkerState) -> None:
        """Keeps the state; what the store cannot be told now, the background task tells later."""
        self._state = state
        try:
            async with self._changing:
                await self._tell_state()
        except _Fenced:
            await self._register_again()
        except StoreUnavailable as error:
            self._note_lost(error)

    async def _tell_state(self) -> None:
        state = self._state
        if self._told != state:
            await self._call("set_state", self._epoch, self._ttl_ms, state)
            self._told = state

    async def _call(self, name: str, epoch: int, *args: str | bytes | int) -> None:
        answer = await self._store.call(name, self.record.worker_id, epoch, *args)
        if answer[0] != b"OK":
            raise _Fenced(answer[1].decode())

    def _note_lost(self, error: Exception) -> None:
        if not self._lost:
            event(log, "registry_lost", logging.WARNING, store=self._store.where, error=error)
        self._lost = True

    def _note_back(self) -> None:
        if self._lost:
            event(log, "registry_back", store=self._store.where, epoch=self._epoch)
        self._lost = False


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("lease task ended", exc_info=error)

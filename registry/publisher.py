"""A worker's lease: registration, renewal, and the pages it tells the store about."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence

from pdmesh.registry.layout import Layout, unpack_row
from pdmesh.registry.ledger import Fenced, Ledger, Words, digests
from pdmesh.registry.roster import WorkerState
from pdmesh.registry.store import Store, StoreUnavailable, end_task, read_registered
from pdmesh.registry.ticker import Ticker
from pdmesh.wire.codec import encode
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import OwnedPage
from pdmesh.wire.logs import event
from pdmesh.wire.messages import WorkerRecord
from pdmesh.wire.registry import IndexDigests

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_CLOSE_S = 2.0
_AUDIT_S = 30.0


class WorkerLease:
    """Keeps one worker registered while the process lives.

    ``publish`` and ``evict`` may be called from any thread and never block. If the store fences
    the worker (its lease ended, or data were lost), if its records differ from what it was told, or
    if the queue overflows, the worker registers under a new epoch, in the state it was in, and
    publishes ``snapshot()`` again. The epoch belongs to the records in the store alone; the
    instance, which requests and transfers name, stays.

    Args:
        url: Redis URL.
        mesh: name of the mesh.
        record: what routers learn about the worker; kept as the attribute ``record``.
        snapshot: all pages now owned, parents first; called on the event loop's thread.
        ttl_s: seconds the lease lasts without renewal; it is renewed five times as often.
        queue_limit: pages that may wait to be sent.
        audit_s: seconds between comparisons of the store's digests with the worker's; jittered.
        clock: seconds; the event loop's by default. It may jump.
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
        snapshot: Callable[[], Sequence[OwnedPage]] = list,
        ttl_s: float = 5.0,
        queue_limit: int = 65_536,
        audit_s: float = _AUDIT_S,
        clock: Callable[[], float] | None = None,
        store: Store | None = None,
    ) -> None:
        self._store = store or Store(url, mesh)
        self.record = record
        self._snapshot = snapshot
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._renew_s = ttl_s / 5
        self._audit_s = audit_s
        self._clock = clock
        self._now: Callable[[], float] = clock or (lambda: 0.0)
        self._words = Words(queue_limit)
        self._ledger = Ledger(Layout(1), 0, 0)
        self._backlog = 0
        self._state: WorkerState = "joining"
        self._told: WorkerState | None = "joining"
        self._floor = 0
        self._doubt = ""
        self._lost: set[str] = set()
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changing = asyncio.Lock()

    @property
    def epoch(self) -> int:
        """The epoch under which the worker is registered; 0 before ``start``."""
        return self._ledger.epoch

    @property
    def layout(self) -> Layout:
        """How the pages of the mesh are spread, once registered."""
        return self._ledger.layout

    @property
    def connected(self) -> bool:
        """Whether the last call to the store succeeded."""
        return self.epoch > 0 and not self._lost

    @property
    def settled(self) -> bool:
        """Whether the store has confirmed all that it was to be told."""
        return not self._doubt and len(self._words) == 0 and self._ledger.settled

    def digests(self) -> IndexDigests:
        """What the worker owns by its own books, in the form in which the store counts it."""
        ledger, parts = self._ledger, digests(self._ledger.layout, self._snapshot())
        return IndexDigests(
            slot=ledger.slot,
            epoch=ledger.epoch,
            settled=self.settled,
            counts=tuple(count for count, _ in parts),
            xors=tuple(xor for _, xor in parts),
        )

    async def start(self) -> None:
        """Registers, taking the name over from a process before, and starts to renew.

        While the store does not answer it tries again and says so in the log.

        Raises:
            ConfigError: the store refuses the login, or cannot serve pdmesh.
        """
        self._loop = asyncio.get_running_loop()
        self._now = self._clock or self._loop.time
        while True:
            try:
                await self._register(takeover=True)
                break
            except StoreUnavailable as error:
                self._note_lost(error)
                await asyncio.sleep(_RETRY_S)
        self._note_back()
        for body, name in ((self._renew(), "lease-renew"), (self._tell(), "lease-tell")):
            task = asyncio.create_task(body, name=name)
            task.add_done_callback(_report)
            self._tasks.append(task)

    async def ready(self) -> None:
        """Tells routers to use the worker."""
        await self._set_state("ready")

    async def drain(self) -> None:
        """Tells routers to send no more requests."""
        await self._set_state("draining")

    def publish(self, pages: Iterable[OwnedPage]) -> None:
        """The worker now owns these pages (parents before children)."""
        self._enqueue(pages, owned=True)

    def evict(self, pages: Iterable[OwnedPage]) -> None:
        """The worker no longer owns these pages."""
        self._enqueue(pages, owned=False)

    async def close(self) -> None:
        """Stops renewing and removes what the store holds of it, if that answers within 2 s."""
        await self.stop()
        try:
            if self.epoch:
                async with asyncio.timeout(_CLOSE_S):
                    with contextlib.suppress(TimeoutError, StoreUnavailable):
                        async with asyncio.timeout(_CLOSE_S / 2):
                            await self._retire()
                    await self._call("deregister", self.epoch)
        except Fenced:
            pass
        except (StoreUnavailable, ConfigError, TimeoutError) as error:
            event(log, "deregister_failed", logging.WARNING, error=error)
        finally:
            await self._store.close()

    async def stop(self) -> None:
        """Stops renewing and telling, as the death of the process would."""
        for task in self._tasks:
            await end_task(task)

    def _enqueue(self, pages: Iterable[OwnedPage], owned: bool) -> None:
        self._words.add(pages, owned, self._backlog)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _renew(self) -> None:
        ticker = Ticker(self._renew_s, self._now(), secrets.randbelow(500) / 1000)
        while True:
            await asyncio.sleep(min(ticker.left(self._now()), self._renew_s))
            if ticker.left(self._now()) > 0:
                continue
            ticker.hit(self._now())
            epoch = self.epoch
            try:
                await self._call("renew", epoch, self._ttl_ms)
            except Fenced as error:
                if epoch == self.epoch:
                    self._doubt = str(error)
                    self._wake.set()
            except (StoreUnavailable, ConfigError) as error:
                self._note_lost(error)
            else:
                self._note_back()

    async def _register(self, takeover: bool) -> None:
        record = self.record
        state = self._state
        dropped = self._words.begin(self._snapshot)
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
                self._store.layout.name,
                max(self._floor, self.epoch),
            )
            epoch, slot, layout = read_registered(answer, record.worker_id)
        except BaseException:
            self._words.overflowed |= dropped
            raise
        self._ledger = Ledger(layout, slot, epoch)
        self._told, self._doubt = state, ""
        self._wake.set()
        event(log, "registered", worker=record.worker_id, epoch=epoch, slot=slot, state=state)

    async def _register_again(self) -> None:
        try:
            async with self._changing:
                await self._register(takeover=False)
            self._note_back()
        except (StoreUnavailable, ConfigError) as error:
            self._note_lost(error)
            await asyncio.sleep(_RETRY_S)

    async def _set_state(self, state: WorkerState) -> None:
        """Keeps the state; what the store cannot be told now, the background task tells later."""
        self._state = state
        try:
            async with self._changing:
                await self._tell_state()
        except Fenced:
            await self._register_again()
        except StoreUnavailable as error:
            self._note_lost(error, "pages")
        finally:
            if self._told != self._state:
                self._wake.set()

    async def _tell_state(self) -> None:
        state = self._state
        if self._told != state:
            self._told = None  # without an answer the store may have heard it or not
            await self._call("set_state", self.epoch, self._ttl_ms, state)
            self._told = state

    async def _call(self, name: str, epoch: int, *args: str | bytes | int) -> None:
        answer = await self._store.call(name, self.record.worker_id, epoch, *args)
        if answer[0] != b"OK":
            raise Fenced(f"{answer[0].decode()} {answer[1].decode()}", int(answer[1]))

    async def _tell(self) -> None:
        audit = Ticker(self._audit_s, self._now(), secrets.randbelow(500) / 1000)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(audit.left(self._now()), self._audit_s)):
                    await self._wake.wait()
            self._wake.clear()
            try:
                async with self._changing:
                    if self._doubt:
                        raise Fenced(self._doubt)
                    await self._tell_state()
                    await self._flush()
                    if audit.left(self._now()) == 0:
                        audit.hit(self._now())
                        await self._audit()
            except Fenced as error:
                self._floor = max(self._floor, error.epoch)
                self._doubt = str(error)
                event(log, "lease_fenced", logging.WARNING, epoch=self.epoch, reason=error)
                await self._register_again()
                self._wake.set()
            except (StoreUnavailable, ConfigError) as error:
                self._note_lost(error, "pages")
                await asyncio.sleep(min(_RETRY_S, self._renew_s))
                self._wake.set()
            else:
                self._note_back("pages")

    async def _flush(self) -> None:
        """Sends all that waits, one batch at a time to each partition.

        A partition that does not answer is tried again later and holds up no other.
        """
        failed: dict[int, StoreUnavailable] = {}
        while True:
            if self._words.overflowed:
                raise Fenced("queue overflow")
            self._ledger.add(self._words.take())
            self._backlog = self._ledger.waiting
            calls = self._ledger.calls(besides=failed)
            if not calls:
                break
            answers = await self._store.many(calls)
            troubles: list[Fenced] = []
            for call, answer in zip(calls, answers, strict=True):
                if isinstance(answer, StoreUnavailable):
                    failed[call.partition] = answer
                    continue
                try:
                    self._ledger.answered(call, answer)
                except Fenced as error:
                    troubles.append(error)
            if troubles:
                raise max(troubles, key=lambda trouble: trouble.epoch)
        if failed:
            raise next(iter(failed.values()))

    async def _retire(self) -> None:
        """Takes all pages out of the store."""
        self._words.take()
        self._words.overflowed = False
        self._ledger.retire()
        await self._flush()

    async def _audit(self) -> None:
        calls = self._ledger.audit_calls()
        for call, answer in zip(calls, await self._store.many(calls), strict=True):
            if isinstance(answer, StoreUnavailable):
                continue
            difference = self._ledger.differs(call, unpack_row(answer) if answer else None)
            if difference:
                raise Fenced(difference)

    def _note_lost(self, error: Exception, what: str = "lease") -> None:
        if not self._lost:
            event(log, "registry_lost", logging.WARNING, store=self._store.where, error=error)
        self._lost.add(what)

    def _note_back(self, what: str = "lease") -> None:
        if self._lost == {what}:
            event(log, "registry_back", store=self._store.where, epoch=self.epoch)
        self._lost.discard(what)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("lease task ended", exc_info=error)

"""Calls to workers. A lease taken here is given back here, whatever happens in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from pdmesh.router.failure import AttemptFailed, blame
from pdmesh.router.leases import HeldLease, Releaser, Reserved, release_all
from pdmesh.wire.errors import DeadlineExceeded, PdmeshError, Unavailable, WorkerLost
from pdmesh.wire.handoff import ContinueRequest, DecideRequest, MigrateRequest, StreamItem
from pdmesh.wire.ids import new_request_id
from pdmesh.wire.logs import event
from pdmesh.wire.messages import (
    Empty,
    FirstToken,
    Lease,
    PrefillRequest,
    ReleaseRequest,
    ReserveRequest,
    StreamRequest,
    TokenChunk,
    WorkerRecord,
    WorkerStatus,
)
from pdmesh.wire.rpc import Client

log = logging.getLogger(__name__)
T = TypeVar("T")

RESERVE_TIMEOUT = 10.0
"""Seconds; a reservation is a matter of counting pages."""
STATUS_TIMEOUT = 2.0
RELEASE_TIMEOUT = 5.0
RELEASE_WAITS = (0.1, 0.5, 2.0, 5.0)
"""Seconds between tries to give a lease back. One that a sender has open, and that nobody releases,
ends at its deadline, which may be far."""
MIGRATE_TIMEOUT = 2.0
DECIDE_TIMEOUT = 2.0
DECIDE_WAITS = (0.05, 0.2, 0.8, 2.0)
"""Seconds between tries to tell a source what became of a handoff; it asks as well."""

PRUNE_LOOKS = 8
"""Looks at the mesh in which an instance has to be missing before its channel is closed."""
STREAM_AHEAD = 512
"""Bytes that a worker may send in a call before the router reads them: enough for one answer, and
for a few chunks of tokens. The rest waits at the worker, which merges it."""

_ITEM = cast("type[StreamItem]", StreamItem)


async def within(seconds: float, event: asyncio.Event) -> None:
    """Waits for the event, but not for longer."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()


def _connect(address: str, service: str) -> Client:
    return Client(address, service, ahead=STREAM_AHEAD)


class Background:
    """Work that outlives the request which began it, such as a release."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending = asyncio.Event()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts ``work`` and keeps hold of it until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def pause(self, seconds: float) -> bool:
        """Waits before another try; False, at once, where there is no time for one any more."""
        await within(seconds, self._ending)
        return not self._ending.is_set()

    async def finish(self) -> None:
        """Waits for everything that was started. What failed is not tried again from now on."""
        self._ending.set()
        while self._tasks:
            await asyncio.wait(self._tasks)


@dataclass(frozen=True)
class DecodeClient:
    """One decode worker."""

    record: WorkerRecord
    client: Client
    background: Background

    @asynccontextmanager
    async def reserve(self, request: ReserveRequest) -> AsyncGenerator[Reserved, None]:
        """Pages for all answers of a request; on leaving, those still held are released.

        A reservation that is cancelled while it is on its way is released when its answer comes;
        one that waits for room is withdrawn first. Its call is not cut: a lease that is granted at
        that moment would be lost on its way.

        Raises:
            AttemptFailed: the worker has no room, or is gone.
        """
        if request.wait_ms:
            request = msgspec.structs.replace(request, ticket=new_request_id())
        answer = self.background.spawn(
            self.client.unary(
                "Reserve", request, Lease, timeout=RESERVE_TIMEOUT + request.wait_ms / 1e3
            )
        )
        try:
            with blame(self.record):
                lease = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self.background.spawn(self._withdraw(answer, request))
            raise
        async with AsyncExitStack() as stack:
            held = self._held(lease, request.request_id)
            stack.push_async_exit(partial(release_all, held))
            if lease.instance != self.record.instance:
                raise AttemptFailed(
                    self.record, WorkerLost(f"{self.record.address} is another process now")
                )
            if len(held) != request.n:
                raise AttemptFailed(
                    self.record,
                    Unavailable(
                        f"{self.record.worker_id} promised {len(held)} answers, not {request.n}"
                    ),
                )
            yield Reserved(lease, held)

    def _held(self, lease: Lease, request_id: str) -> tuple[HeldLease, ...]:
        return tuple(
            HeldLease(lease_id, lease.generation, self.record.instance, self._releaser(request_id))
            for lease_id in (lease.lease_id, *lease.forks)
        )

    async def _withdraw(self, answer: asyncio.Task[Lease], request: ReserveRequest) -> None:
        if request.ticket and not answer.done():
            await self._release(request.ticket, "cancelled", request.request_id)
            await asyncio.wait({answer}, timeout=RELEASE_TIMEOUT)
            answer.cancel()  # for a worker that did not hear of it
        await self._release_late(answer, request.request_id)

    async def _release_late(self, answer: asyncio.Task[Lease], request_id: str) -> None:
        try:
            lease = await answer
        except (PdmeshError, asyncio.CancelledError):
            return
        for held in self._held(lease, request_id):
            await held.release("cancelled", RELEASE_TIMEOUT)

    def _releaser(self, request_id: str) -> Releaser:
        def release(lease_id: str, reason: str) -> asyncio.Task[None]:
            return self.background.spawn(self._release(lease_id, reason, request_id))

        return release

    async def _release(self, lease_id: str, reason: str, request_id: str) -> None:
        """Tries more than once: a worker, or the way to it, may have stood still for a while."""
        request = ReleaseRequest(lease_id=lease_id, reason=reason)
        with self.client.kept():
            for wait in (*RELEASE_WAITS, None):
                try:
                    await self.client.unary("Release", request, Empty, timeout=RELEASE_TIMEOUT)
                    return
                except PdmeshError as error:
                    failure = error
                passing = isinstance(failure, (Unavailable, DeadlineExceeded))
                if not passing or wait is None or not await self.background.pause(wait):
                    break
        event(  # the lease's deadline ends it at the worker
            log,
            "release_failed",
            logging.WARNING,
            request=request_id,
            worker=self.record.worker_id,
            lease=lease_id,
            error=failure.message,
        )

    def stream(self, request: StreamRequest, timeout: float) -> AsyncGenerator[StreamItem, None]:
        """The tokens after the first. Closing the iterator cancels the work.

        Raises:
            AttemptFailed: the worker is gone, lost the pages, or ended without a finish.
        """
        return self._items("Stream", request, timeout)

    def continued(
        self, request: ContinueRequest, timeout: float
    ) -> AsyncGenerator[StreamItem, None]:
        """The tokens of an answer that another worker handed over, as those of ``stream``.

        Raises:
            AttemptFailed: the worker is gone, or has nothing of the answer (any more).
        """
        return self._items("Continue", request, timeout)

    async def _items(
        self, method: str, request: msgspec.Struct, timeout: float
    ) -> AsyncGenerator[StreamItem, None]:
        with blame(self.record):
            items = self.client.stream(method, request, _ITEM, timeout=timeout)
            async with aclosing(items) as stream:
                async for item in stream:
                    yield item
                    if isinstance(item, TokenChunk) and item.finish is not None:
                        return
            raise WorkerLost(f"{self.record.worker_id} ended the stream before the answer")

    async def migrate(self, request: MigrateRequest) -> None:
        """Offers a handoff. Raises PdmeshError; DeadlineExceeded leaves open whether it came."""
        await self.client.unary("Migrate", request, Empty, timeout=MIGRATE_TIMEOUT)

    async def decide(self, request: DecideRequest) -> None:
        """Tells the source what became of a handoff, in several tries; gives up in silence."""
        with self.client.kept():
            for wait in (*DECIDE_WAITS, None):
                try:
                    await self.client.unary("Decide", request, Empty, timeout=DECIDE_TIMEOUT)
                    return
                except WorkerLost:
                    return  # with its stream, so it lets go by itself
                except (Unavailable, DeadlineExceeded):
                    if wait is None:
                        return
                except PdmeshError:
                    return  # it is over there
                await asyncio.sleep(wait)

    def adopted(self, lease_id: str, generation: int, request_id: str) -> HeldLease:
        """The lease of an answer that this worker has made ready to go on with."""
        releaser = self._releaser(request_id)
        return HeldLease(lease_id, generation, self.record.instance, releaser)


@dataclass(frozen=True)
class PrefillClient:
    """One prefill worker."""

    record: WorkerRecord
    client: Client

    async def run(self, request: PrefillRequest, timeout: float) -> FirstToken:
        """Computes the prompt, pushes its pages to the lease, returns the first token.

        Raises:
            AttemptFailed: the worker is full or gone, or the pages did not arrive.
        """
        with blame(self.record):
            return await self.client.unary("Prefill", request, FirstToken, timeout=timeout)


class WorkerClients:
    """One channel to each worker instance; ``connect`` opens one to an address and a service."""

    def __init__(self, connect: Callable[[str, str], Client] = _connect) -> None:
        self.background = Background()
        self._connect = connect
        self._clients: dict[str, Client] = {}
        self._absent: dict[str, int] = {}
        """How often in a row an instance was not among the living."""

    def decode(self, record: WorkerRecord) -> DecodeClient:
        return DecodeClient(record, self._client(record), self.background)

    def prefill(self, record: WorkerRecord) -> PrefillClient:
        return PrefillClient(record, self._client(record))

    async def status(self, record: WorkerRecord, timeout: float = STATUS_TIMEOUT) -> WorkerStatus:
        """What a worker says about itself. Raises WorkerLost or DeadlineExceeded."""
        client = self._client(record)
        return await client.unary("Status", Empty(), WorkerStatus, timeout=timeout)

    async def prune(self, alive: Iterable[str], busy: Callable[[str], bool]) -> None:
        """Closes channels to instances that are gone and have no request of ours.

        A lease may still have to be released there, so a channel is closed when the instance has
        been gone for a while and no call is under way: closing would cut it.
        """
        gone = self._clients.keys() - set(alive)
        self._absent = {instance: self._absent.get(instance, 0) + 1 for instance in gone}
        for instance in gone:
            if self._absent[instance] < PRUNE_LOOKS:
                continue
            if not busy(instance) and not self._clients[instance].calls:
                await self._clients.pop(instance).close()

    async def close(self) -> None:
        """Finishes pending releases, then closes all channels."""
        await self.background.finish()
        while self._clients:
            await self._clients.popitem()[1].close()

    def _client(self, record: WorkerRecord) -> Client:
        client = self._clients.get(record.instance)
        if client is None:
            client = self._clients[record.instance] = self._connect(record.address, record.role)
        return client

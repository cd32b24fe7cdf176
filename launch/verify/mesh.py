"""The mesh under test: its router, its workers, and the processes where they are this machine's."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from pdmesh.registry.store import read_members
from pdmesh.wire import chat_pb2, chat_pb2_grpc
from pdmesh.wire.admin import AnswerList, AnswerPhase, MoveOrder, MoveReport, RunningAnswer
from pdmesh.wire.errors import ConfigError, PdmeshError, Unavailable
from pdmesh.wire.handoff import ChecksumsRequest, PageChecksums
from pdmesh.wire.hashes import page_hashes, root_hash
from pdmesh.wire.messages import Empty, WorkerRecord, WorkerStatus
from pdmesh.wire.rpc import Client, channel_options

MOVE_TIMEOUT_S = 30.0
REST_S = 20.0
"""Patience for pages, leases and quarantine to be given back."""
_CALL_S = 10.0


@dataclass(frozen=True)
class Place:
    """Where a mesh is found."""

    name: str
    address: str
    """Of the router's public service."""
    admin: str
    """Of its internal service."""
    redis_url: str
    secret: bytes = b""
    """Key of the page hashes; without it pages are not compared."""
    pids: Callable[[], dict[str, int]] = dict
    """Process ids by name as they are now, where they are this machine's."""


class MeshUnderTest:
    """A running mesh."""

    def __init__(self, place: Place, records: Sequence[WorkerRecord], stub: Any) -> None:
        self.place = place
        self.records = list(records)
        self.stub = stub
        self._names = {record.worker_id for record in records}
        self._router = Client(place.admin, "router")
        self._clients: dict[str, Client] = {}

    @property
    def decode(self) -> list[WorkerRecord]:
        return [record for record in self.records if record.role == "decode"]

    async def refresh(self) -> None:
        """Reads again which workers there are."""
        self.records = [m.record for m in await read_members(self.place.redis_url, self.place.name)]

    async def model(self) -> chat_pb2.ModelCard:
        """What is served.

        Raises:
            Unavailable: the router does not answer, or serves nothing.
        """
        try:
            answer = await self.stub.ListModels(chat_pb2.ListModelsRequest(), timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the router at {self.place.address}: {error.details()}") from error
        if not answer.models:
            raise Unavailable(f"the router at {self.place.address} serves no model")
        card: chat_pb2.ModelCard = answer.models[0]
        return card

    def whole(self) -> bool:
        """Whether all workers of the beginning were there when ``refresh`` looked last."""
        return self._names <= {record.worker_id for record in self.records}

    async def holder(self, request_id: str) -> str | None:
        """Name of the decode worker that generates the first answer of a request, if one does."""
        answer = await self._running(request_id)
        return None if answer is None else answer.worker_id

    async def phase(self, request_id: str) -> AnswerPhase | None:
        """How far that answer is; None if it is over."""
        answer = await self._running(request_id)
        return None if answer is None else answer.phase

    async def _running(self, request_id: str) -> RunningAnswer | None:
        answers = await self._router.unary("Answers", Empty(), AnswerList, timeout=_CALL_S)
        return next((a for a in answers.answers if a.request_id == request_id), None)

    async def move(self, request_id: str, target: str = "") -> list[MoveReport]:
        """Has the running answers of a request moved; how each of them went.

        Raises:
            InvalidRequest: it is over, or was never there.
        """
        order = MoveOrder(request_id=request_id, target=target)
        reports = self._router.stream("MigrateAnswer", order, MoveReport, timeout=MOVE_TIMEOUT_S)
        return [report async for report in reports if report.state != "moving"]

    async def statuses(self) -> list[WorkerStatus]:
        """What every worker says about itself; those that do not answer are left out."""
        found = await asyncio.gather(
            *(self._call(r, "Status", Empty(), WorkerStatus) for r in self.records)
        )
        return [status for status in found if status is not None]

    async def page_checksums(
        self, tokens: Sequence[int], tenant: str
    ) -> dict[str, tuple[int, ...]]:
        """Of the leading pages of ``tokens`` that each decode worker has cached, by its name."""
        found: dict[str, tuple[int, ...]] = {}
        for record in self.decode:
            fmt, key = record.page_format, self.place.secret
            root = root_hash(key, fmt.fingerprint(), tenant)
            request = ChecksumsRequest(hashes=tuple(page_hashes(key, root, tokens, fmt.page_size)))
            answer = await self._call(record, "Checksums", request, PageChecksums)
            found[record.worker_id] = answer.checksums if answer is not None else ()
        return found

    async def unrest(self, patience: float = REST_S) -> list[str]:
        """What is not given back after ``patience`` seconds, one sentence each."""
        deadline = asyncio.get_running_loop().time() + patience
        while True:
            found = await self._unrest()
            if not found or asyncio.get_running_loop().time() >= deadline:
                return found
            await asyncio.sleep(0.2)

    async def _unrest(self) -> list[str]:
        statuses = await self.statuses()
        found = [sentence for status in statuses for sentence in at_work(status)]
        silent = {r.worker_id for r in self.records} - {s.worker_id for s in statuses}
        return found + [f"{name} does not answer" for name in sorted(silent)]

    async def _call(
        self, record: WorkerRecord, method: str, request: Any, answer: type[Any]
    ) -> Any | None:
        client = self._clients.get(record.instance)
        if client is None:
            client = self._clients[record.instance] = Client(record.address, record.role)
        try:
            return await client.unary(method, request, answer, timeout=_CALL_S)
        except PdmeshError:
            return None

    async def close(self) -> None:
        """Closes every channel."""
        for client in (self._router, *self._clients.values()):
            await client.close()


def at_work(status: WorkerStatus) -> list[str]:
    """What a worker still holds, or finds wrong with itself."""
    pool = status.pool
    counts = {
        "pages in use": pool.used,
        "pages reserved": pool.reserved,
        "pages in quarantine": pool.quarantined,
        "leases": status.leases,
        "sequences running": status.running,
        "requests queued": status.queued,
    }
    found = [f"{count} {what}" for what, count in counts.items() if count]
    return [f"{status.worker_id}: {sentence}" for sentence in (*found, *status.problems)]


@asynccontextmanager
async def mesh_under_test(place: Place) -> AsyncIterator[MeshUnderTest]:
    """Connects to a mesh.

    Raises:
        ConfigError: the router has no internal service, or the mesh no worker.
    """
    if not place.admin:
        raise ConfigError(f"mesh {place.name!r} has no router that takes orders to move answers")
    records = [member.record for member in await read_members(place.redis_url, place.name)]
    if not records:
        raise ConfigError(f"mesh {place.name!r} has no workers")
    async with grpc.aio.insecure_channel(place.address, options=channel_options()) as channel:
        stub = chat_pb2_grpc.ChatServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        mesh = MeshUnderTest(place, records, stub)
        try:
            yield mesh
        finally:
            await mesh.close()


def new_tenant() -> str:
    """A tenant that shares no page with any other."""
    return f"verify-{secrets.token_hex(8)}"

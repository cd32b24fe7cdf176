"""Reservations that first bring cached prompt pages from other workers, so that fewer are sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from pdmesh.kvtransfer.pull_fetcher import PrefixFetcher
from pdmesh.wire.errors import Cancelled, DeadlineExceeded
from pdmesh.wire.messages import Empty, Lease, ReleaseRequest, ReserveRequest


class Reserving(Protocol):
    """What is needed of ``DecodeWorker``."""

    async def reserve(self, request: ReserveRequest) -> Lease: ...

    async def release(self, request: ReleaseRequest) -> Empty: ...


class PullingReserve:
    """``reserve`` and ``release`` of a decode worker, with pulls before a lease is granted.

    Args:
        clock: seconds, monotone.
    """

    def __init__(
        self,
        worker: Reserving,
        fetcher: PrefixFetcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._fetcher = fetcher
        self._clock = clock
        self._pulling: dict[str, asyncio.Event] = {}

    async def reserve(self, request: ReserveRequest) -> Lease:
        """See ``DecodeWorker.reserve``; the time of a pull counts as waited.

        Raises:
            Cancelled: the reservation was withdrawn meanwhile.
            DeadlineExceeded: its deadline came meanwhile.
        """
        if request.sources and request.deadline_ms > 0:
            request = await self._pulled(request)
        return await self._worker.reserve(request)

    async def release(self, request: ReleaseRequest) -> Empty:
        """See ``DecodeWorker.release``."""
        withdrawn = self._pulling.get(request.lease_id)
        if withdrawn is not None:
            withdrawn.set()
        return await self._worker.release(request)

    async def _pulled(self, request: ReserveRequest) -> ReserveRequest:
        began = self._clock()
        await self._pull(request)
        took_ms = int((self._clock() - began) * 1e3)
        if took_ms >= request.deadline_ms:
            raise DeadlineExceeded("the deadline of the request has passed while pages were pulled")
        return msgspec.structs.replace(
            request,
            waited_ms=request.waited_ms + took_ms,
            wait_ms=max(0, request.wait_ms - took_ms),
            deadline_ms=request.deadline_ms - took_ms,
        )

    async def _pull(self, request: ReserveRequest) -> None:
        """Pulls; a withdrawal by the request's ticket ends it."""
        within_s = request.deadline_ms / 1e3
        fetch = self._fetcher.fetch(request.hashes, request.sources, within_s=within_s)
        fetching = asyncio.ensure_future(fetch)
        withdrawn = asyncio.Event()
        if request.ticket:
            self._pulling[request.ticket] = withdrawn
        leaving = asyncio.ensure_future(withdrawn.wait())
        try:
            await asyncio.wait({fetching, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if withdrawn.is_set():
                raise Cancelled("the reservation was withdrawn while pages were pulled")
            await fetching
        finally:
            self._pulling.pop(request.ticket, None)
            fetching.cancel()
            leaving.cancel()
            await asyncio.wait({fetching, leaving})

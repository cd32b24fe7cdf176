"""Reads of lent pages between devices of a host: the reader maps the owner's pool and copies.

A connection a read: the owner's side answers it with the handle of its pool, as soon as its device
is through with all that was queued before, so that what a lent page was to hold is in it. Whatever
happens to the page later is not seen here: whether the copies may be used, the owner says
afterwards, once the reader's device has ended them.
"""

from __future__ import annotations

import logging
import socket

import msgspec

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.device_memory import DeviceError, DeviceMemory, ExportedPool, Lane, copies
from pdmesh.kvtransfer.pull_exchange import Transport
from pdmesh.kvtransfer.pull_local import CONNECT_S, LocalPageReader, LocalPageServer, shut
from pdmesh.kvtransfer.pull_reader import Lent, ReadOrder, ReadStopped, Stop
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import ConfigError, InvalidRequest, TransferFailed
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

_ANSWER_BYTES = 4096
_PAGES_AT_A_TIME = 32
"""A read that is to stop waits for the copies of so many."""


class _LentPool(msgspec.Struct, frozen=True, array_like=True):
    pool: ExportedPool
    page_bytes: int


class CudaIpcPageServer(LocalPageServer):
    """Lets readers of this host and user map the pages of ``store``, which ``memory`` has."""

    name = "cuda_ipc"

    def __init__(self, store: LatentStore, memory: DeviceMemory, lent: Lent) -> None:
        super().__init__()
        self._store = store
        self._memory = memory
        self._where = b""

    def start(self) -> str:
        try:
            pool = self._memory.export(self._store)
        except DeviceError as error:
            raise ConfigError(f"cuda_ipc cannot lend the pages: {error}") from error
        self._where = encode(_LentPool(pool, self._store.page_bytes))
        return self._begin("pull-cuda-ipc")

    def _answer(self, sock: socket.socket) -> None:
        self._memory.settle()
        sock.send(self._where, socket.MSG_DONTWAIT)


class CudaIpcPageReader(LocalPageReader):
    """Copies pages of the pools of ``CudaIpcPageServer``s into ``store``, which ``memory`` has."""

    name = "cuda_ipc"

    def __init__(self, store: LatentStore, memory: DeviceMemory) -> None:
        super().__init__()
        self._store = store
        self._memory = memory
        self._unmapped: set[str] = set()
        """Addresses whose pool cannot be mapped."""

    def reaches(self, address: str) -> bool:
        """Whether it is of this host and user, and has not refused to be mapped."""
        return address not in self._unmapped and super().reaches(address)

    def read(self, order: ReadOrder, stop: Stop) -> None:
        try:
            lent = self._asked(order.address, stop)
            self._check(lent, order)
            self._read(lent.pool, order, stop)
        except OSError as error:  # the owner is gone, or a device refused
            self._reached.discard(order.address)
            if stop.asked:
                raise ReadStopped("the read was stopped") from error
            raise TransferFailed(
                f"the pages of the worker of this host cannot be read: {error.strerror or error}"
            ) from error

    def _asked(self, address: str, stop: Stop) -> _LentPool:
        sock = self._connected(address, CONNECT_S)
        with sock, stop.calling(lambda: shut(sock)):
            data = sock.recv(_ANSWER_BYTES)
        try:
            return decode(data, _LentPool)
        except InvalidRequest:
            raise OSError("what answers lends no pages") from None

    def _check(self, lent: _LentPool, order: ReadOrder) -> None:
        size = self._store.page_bytes
        if lent.page_bytes != size:
            raise OSError(f"a page has {size} bytes here and {lent.page_bytes} there")
        if len(order.page_ids) != len(order.destinations):
            raise TransferFailed(
                f"{len(order.page_ids)} pages were lent, {len(order.destinations)} were asked for"
            )
        if not all(page >= 0 and (page + 1) * size <= lent.pool.size for page in order.page_ids):
            raise TransferFailed("a lent page is outside of the owner's pool")

    def _read(self, pool: ExportedPool, order: ReadOrder, stop: Stop) -> None:
        try:
            address = self._memory.open(pool)
        except DeviceError as error:
            self._unmapped.add(order.address)
            facts = {"transport": self.name, "address": order.address, "reason": str(error)}
            event(log, "transport_left_out", logging.WARNING, **facts)
            raise
        try:
            lane = self._memory.lane()
            try:
                self._memory.settle()  # this side's pages may still be written by older work
                self._copy(lane, address, order, stop)
            finally:
                # A device that fails here does nothing more for this process, whose pages these
                # are; any other end has waited for the copies.
                lane.record().wait()
                lane.close()
        finally:
            self._memory.close(pool, address)

    def _copy(self, lane: Lane, owner: int, order: ReadOrder, stop: Stop) -> None:
        size, mine = self._store.page_bytes, self._store.tensor.data_ptr()
        for start in range(0, len(order.page_ids), _PAGES_AT_A_TIME):
            if stop.asked:
                raise ReadStopped("the read was stopped")
            part = slice(start, start + _PAGES_AT_A_TIME)
            pages = order.destinations[part], order.page_ids[part]
            lane.copy(list(copies(mine, owner, size, size, *pages)))
            lane.record().wait()


def cuda_ipc_transport(store: LatentStore, memory: DeviceMemory) -> Transport:
    """Reads between devices of this host; ``memory`` has the pages of ``store``."""
    return (
        lambda lender: CudaIpcPageServer(store, memory, lender),
        CudaIpcPageReader(store, memory),
    )

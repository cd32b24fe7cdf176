"""Reads of lent pages within a host and a user: the reader maps the owner's pool and copies.

A connection a read: the owner's side answers it with its memory (a descriptor that can be read
only), its size, and nothing more; it learns nothing of what is read. So whatever happens to a lent
page meanwhile is not seen here: whether the copies may be used, the owner says afterwards.

Little-endian, from the owner: magic (4), version (4), bytes of a page (8), number of pages (8).
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Sequence

from pdmesh.kvcache.store import LatentStore, copy_bytes
from pdmesh.kvtransfer.pull_exchange import Transport
from pdmesh.kvtransfer.pull_local import CONNECT_S, LocalPageReader, LocalPageServer, shut
from pdmesh.kvtransfer.pull_reader import Lent, ReadOrder, ReadStopped, Stop, fill_page
from pdmesh.wire.errors import ConfigError, TransferFailed

_MAGIC = b"PDPM"
_VERSION = 1
_ANSWER = struct.Struct("<4sIQQ")


class ShmPageServer(LocalPageServer):
    """Gives the memory of ``store``, which is ``shared``, to readers of this host and user."""

    name = "shm"

    def __init__(self, store: LatentStore, lent: Lent) -> None:
        super().__init__()
        self._where = _ANSWER.pack(_MAGIC, _VERSION, store.page_bytes, store.num_pages)
        self._memory_fd = store.memory_fd
        self._fd = -1

    def start(self) -> str:
        if self._memory_fd is None:
            raise ConfigError("the pages are not in shared memory, so shm cannot lend them")
        try:
            self._fd = os.open(f"/proc/self/fd/{self._memory_fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cannot lend pages on this host: {error}") from error
        return self._begin("pull-shm")

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _answer(self, sock: socket.socket) -> None:
        socket.send_fds(sock, [self._where], [self._fd], socket.MSG_DONTWAIT)


class ShmPageReader(LocalPageReader):
    """Copies pages of the pools of ``ShmPageServer``s into ``store``."""

    name = "shm"

    def __init__(self, store: LatentStore) -> None:
        super().__init__()
        self._store = store

    def read(self, order: ReadOrder, stop: Stop) -> None:
        try:
            fd = self._memory(order.address, stop)
        except OSError as error:
            self._reached.discard(order.address)
            if stop.asked:
                raise ReadStopped("the read was stopped") from error
            raise TransferFailed(
                f"the pages of the worker of this host cannot be read: {error.strerror or error}"
            ) from error
        try:
            self._copy(fd, order, stop)
        finally:
            os.close(fd)

    def _memory(self, address: str, stop: Stop) -> int:
        """The owner's memory as a descriptor; whoever called closes it."""
        sock = self._connected(address, CONNECT_S)
        with sock, stop.calling(lambda: shut(sock)):
            data, fds, _, _ = socket.recv_fds(sock, _ANSWER.size, 1)
        try:
            self._check(data, fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds[0]

    def _check(self, data: bytes, fds: Sequence[int]) -> None:
        if len(data) != _ANSWER.size or len(fds) != 1:
            raise OSError("its memory did not come along")
        magic, version, page_bytes, pages = _ANSWER.unpack(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise OSError("what answers lends no pages")
        if page_bytes != self._store.page_bytes:
            raise OSError(f"a page has {self._store.page_bytes} bytes here and {page_bytes} there")
        if os.fstat(fds[0]).st_size < pages * page_bytes:
            raise OSError("its memory is smaller than it says")

    def _copy(self, fd: int, order: ReadOrder, stop: Stop) -> None:
        size, whole = self._store.page_bytes, os.fstat(fd).st_size
        if len(order.page_ids) != len(order.destinations):
            raise TransferFailed(
                f"{len(order.page_ids)} pages were lent, {len(order.destinations)} were asked for"
            )
        if not all(page >= 0 and (page + 1) * size <= whole for page in order.page_ids):
            raise TransferFailed("a lent page is outside of the owner's pool")
        with mmap.mmap(fd, whole, access=mmap.ACCESS_READ) as pool, memoryview(pool) as view:
            for page, place in zip(order.page_ids, order.destinations, strict=True):
                if stop.asked:
                    raise ReadStopped("the read was stopped")
                with view[page * size : (page + 1) * size] as source:
                    _fill(self._store, place, source)


def _fill(store: LatentStore, place: int, source: memoryview) -> None:
    fill_page(store, place, lambda target: copy_bytes(target, source))


def shm_transport(store: LatentStore) -> Transport:
    """Reads within this host; ``store`` is ``shared``."""
    return lambda lender: ShmPageServer(store, lender), ShmPageReader(store)

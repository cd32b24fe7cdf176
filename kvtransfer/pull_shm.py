"""Reads of lent pages within a host and a user: the reader maps the owner's pool and copies.

A connection a read: the owner's side answers it with its memory (a descriptor that can be read
only), its size, and nothing more; it learns nothing of what is read. So whatever happens to a lent
page meanwhile is not seen here: whether the copies may be used, the owner says afterwards.

Little-endian, from the owner: magic (4), version (4), bytes of a page (8), number of pages (8).
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

from pdmesh.kvcache.store import LatentStore, copy_bytes
from pdmesh.kvtransfer.pull_exchange import Transport
from pdmesh.kvtransfer.pull_reader import Lent, ReadOrder, ReadStopped, Stop, fill_page
from pdmesh.kvtransfer.shm import host_and_user, peer_uid, socket_name
from pdmesh.wire.errors import ConfigError, TransferFailed
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

_MAGIC = b"PDPM"
_VERSION = 1
_ANSWER = struct.Struct("<4sIQQ")
_CONNECT_S = 2.0


class ShmPageServer:
    """Gives the memory of ``store``, which is ``shared``, to readers of this host and user."""

    name = "shm"

    def __init__(self, store: LatentStore, lent: Lent) -> None:
        self._answer = _ANSWER.pack(_MAGIC, _VERSION, store.page_bytes, store.num_pages)
        self._memory_fd = store.memory_fd
        self._fd = -1
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        if self._memory_fd is None:
            raise ConfigError("the pages are not in shared memory, so shm cannot lend them")
        token = f"pull-{secrets.token_hex(16)}"
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(socket_name(token))
            server.listen()
            self._fd = os.open(f"/proc/self/fd/{self._memory_fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            server.close()
            raise ConfigError(f"cannot lend pages on this host: {error}") from error
        self._socket = server
        self._thread = threading.Thread(
            target=self._serve, args=(server,), name="pull-shm", daemon=True
        )
        self._thread.start()
        return f"{host_and_user()}:{token}"

    def close(self) -> None:
        if self._socket is None or self._thread is None:
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        os.close(self._fd)
        self._socket = None

    def _serve(self, server: socket.socket) -> None:
        """Until the socket is shut: an answer fits the buffer of its connection."""
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            with sock:
                if peer_uid(sock) != os.getuid():
                    event(log, "read_refused", logging.WARNING, reason="another user asks")
                    continue
                with suppress(OSError):
                    socket.send_fds(sock, [self._answer], [self._fd], socket.MSG_DONTWAIT)


class ShmPageReader:
    """Copies pages of the pools of ``ShmPageServer``s into ``store``."""

    name = "shm"

    def __init__(self, store: LatentStore) -> None:
        self._store = store
        self._reached: set[str] = set()

    def reaches(self, address: str) -> bool:
        """Whether it is of this host and user, and somebody there answers this process."""
        if address in self._reached:
            return True
        if not address.startswith(f"{host_and_user()}:"):
            return False
        try:
            self._connected(address, 0.0).close()
        except OSError:
            return False
        self._reached.add(address)
        return True

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

    def close(self) -> None:
        pass

    def _connected(self, address: str, timeout_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(socket_name(address.rpartition(":")[2]))
            if peer_uid(sock) != os.getuid():
                raise OSError("it belongs to another user")
        except BaseException:
            sock.close()
            raise
        return sock

    def _memory(self, address: str, stop: Stop) -> int:
        """The owner's memory as a descriptor; whoever called closes it."""
        sock = self._connected(address, _CONNECT_S)
        with sock, stop.calling(lambda: _shut(sock)):
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


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

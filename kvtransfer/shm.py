"""The shared-memory transport: within a host and a user, one copy from page to page.

The receiver's pool is an anonymous file (memfd). Its descriptor goes to the sender over a Unix
socket with an abstract name, so neither leaves a name behind, whatever kills a process. An address
names the boot of the host, the user and the socket; a sender asks there for the memory and maps it
before it calls the address reachable, so that containers that share a host but not this are told
apart and use the next transport.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from pdmesh.kvtransfer.checks import SAMPLED
from pdmesh.kvtransfer.frames import BadFrame, Hello, Kind, Welcome, pack
from pdmesh.kvtransfer.shm_link import ShmLink, ShmReceiverLink
from pdmesh.kvtransfer.stream_link import MAX_QUEUED_BYTES
from pdmesh.kvtransfer.stream_server import HANDSHAKE_SECONDS, StreamListener, introduce
from pdmesh.kvtransfer.transport import Endpoint, ReceiverEndpoint
from pdmesh.wire.codec import encode
from pdmesh.wire.errors import ConfigError, TransferFailed
from pdmesh.wire.hashes import PageFormat

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ShmListener(StreamListener):
    """Accepts senders of this host and user. The store must be ``shared``.

    Args:
        page_format: format of the pages that are received here.
        check_every: one unit in so many carries a checksum, and all of a prompt's last page; 1:
            every unit.
    """

    name = "shm"

    def __init__(self, page_format: PageFormat, check_every: int = SAMPLED) -> None:
        super().__init__(page_format)
        self._check_every = check_every
        self._fd = -1
        self._size = 0

    def _bind(self, endpoint: ReceiverEndpoint) -> tuple[socket.socket, str]:
        store = endpoint.store
        if store.memory_fd is None:
            raise ConfigError("the pages are not in shared memory, so shm cannot offer them")
        self._fd, self._size = store.memory_fd, store.num_pages * store.page_bytes
        return listen_here()

    def _welcome(self, sock: socket.socket, hello: Hello) -> Welcome:
        if peer_uid(sock) != os.getuid():
            raise BadFrame("another user asks for the pages")
        return Welcome(check_every=self._check_every, store_bytes=self._size)

    def _greeted(self, sock: socket.socket, welcome: Welcome) -> None:
        data = b"".join(pack(Kind.WELCOME, encode(welcome)))
        sent = socket.send_fds(sock, [data], [self._fd])
        sock.sendall(data[sent:])

    def _link(
        self, sock: socket.socket, endpoint: ReceiverEndpoint, peer: str, hello: Hello
    ) -> ShmReceiverLink:
        link = ShmReceiverLink(sock, endpoint, self._page_format.page_layer_bytes, peer)
        link.check_every = self._check_every
        return link


class LocalDialer:
    """Reaches listeners of this host and user.

    Args:
        max_queued_bytes: bytes of writes that may wait on one connection before a push blocks.
    """

    def __init__(self, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_queued_bytes = max_queued_bytes
        self._reached: set[str] = set()

    def reaches(self, address: str) -> bool:
        """Whether it is of this host and user, and somebody there lets this process connect."""
        if address in self._reached:
            return True
        if not address.startswith(f"{host_and_user()}:"):
            return False
        try:
            connect_here(address).close()
        except TransferFailed:
            return False
        self._reached.add(address)
        return True


class ShmDialer(LocalDialer):
    """Maps the pools of ``ShmListener`` addresses. Arguments: see ``LocalDialer``."""

    name = "shm"

    def dial(self, address: str, page_format: PageFormat, endpoint: Endpoint) -> ShmLink:
        sock = connect_here(address)
        try:
            stream = FdStream(sock)
            try:
                welcome = introduce(
                    sock, "the decode worker of this host", page_format, b"", stream
                )
                pool = _mapped(stream.fds, welcome.store_bytes)
            finally:
                for fd in stream.fds:
                    os.close(fd)
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        unit = page_format.page_layer_bytes
        link = ShmLink(sock, endpoint, unit, "this host", self._max_queued_bytes)
        link.check_every = welcome.check_every
        link.pool = np.frombuffer(pool, np.uint8)
        link.num_pages = len(link.pool) // (unit * page_format.num_layers)
        link.start()
        return link


class FdStream:
    """A socket as a byte stream; collects the descriptors that come along."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.fds: list[int] = []

    def readinto(self, buffer: memoryview, /) -> int:
        data, fds, _, _ = socket.recv_fds(self._sock, len(buffer), 1)
        self.fds += fds
        buffer[: len(data)] = data
        return len(data)


def listen_here() -> tuple[socket.socket, str]:
    """A socket that processes of this host and user can connect to, and its address.

    Raises:
        ConfigError: there can be none.
    """
    token = secrets.token_hex(16)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(socket_name(token))
        server.listen()
    except OSError as error:
        server.close()
        raise ConfigError(f"cannot listen for pages on this host: {error}") from error
    return server, f"{host_and_user()}:{token}"


def connect_here(address: str) -> socket.socket:
    """A connection to an address of this host and user, with the timeout of a handshake.

    Raises:
        TransferFailed: nobody answers there, or another user does.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(HANDSHAKE_SECONDS)
    try:
        sock.connect(socket_name(address.rpartition(":")[2]))
        if peer_uid(sock) != os.getuid():
            raise OSError("it belongs to another user")
    except OSError as error:
        sock.close()
        raise TransferFailed(
            f"the decode worker of this host cannot be reached: {error.strerror or error}"
        ) from error
    return sock


def _mapped(fds: list[int], size: int) -> mmap.mmap:
    """The receiver's memory.

    Raises:
        TransferFailed: it did not come along, is smaller than was said, or cannot be mapped.
    """
    try:
        if not fds or os.fstat(fds[0]).st_size < size:
            raise OSError("its memory did not come along")
        pool = mmap.mmap(fds[0], size)
    except (OSError, ValueError) as error:
        raise TransferFailed(
            f"the pages of the decode worker of this host cannot be mapped: {error}"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pool.madvise(mmap.MADV_HUGEPAGE)
    return pool


def host_and_user() -> str:
    """Which boot of which host, and which user."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{boot}:{os.getuid()}"


def socket_name(token: str) -> str:
    return f"\0pdmesh-kv-{token}"


def peer_uid(sock: socket.socket) -> int:
    return _credentials(sock)[1]


def peer_pid(sock: socket.socket) -> int:
    """Process that made the connection; 0 if it is not to be seen from here."""
    return _credentials(sock)[0]


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", found)

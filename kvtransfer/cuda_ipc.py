"""The CUDA IPC transport: between processes of a host pages go from device memory to device memory.

The receiver's pool is one allocation of its device. Its handle goes to the sender over a Unix
socket; the sender maps it, once a connection, and copies pages into it on a stream of its own. Both
may use the same GPU, or two that can reach each other's memory. An address names the boot of the
host, the user and the socket, as of ``shm``; whether the memory can be mapped shows when the sender
tries, and what cannot is left to the next transport, with one line in the log.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.checks import SAMPLED
from pdmesh.kvtransfer.cuda_driver import CudaMemory
from pdmesh.kvtransfer.cuda_ipc_link import CudaIpcLink, CudaIpcReceiverLink
from pdmesh.kvtransfer.device_memory import DeviceError, DeviceMemory, ExportedPool
from pdmesh.kvtransfer.frames import BadFrame, Hello, Kind, Welcome, pack
from pdmesh.kvtransfer.shm import (
    FdStream,
    LocalDialer,
    connect_here,
    listen_here,
    peer_pid,
    peer_uid,
)
from pdmesh.kvtransfer.stream_server import StreamListener, introduce
from pdmesh.kvtransfer.transport import Endpoint, ReceiverEndpoint
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import ConfigError, InvalidRequest, TransferFailed
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

_ANY = 1 << 62
_PEER = "the decode worker of this host"


def device_memory(store: LatentStore) -> DeviceMemory:
    """The device that has the pages of ``store``, if they can be shared.

    Raises:
        DeviceError: they are not in a CUDA device's memory, or there is no driver for it.
    """
    device = store.tensor.device
    if device.type != "cuda":
        raise DeviceError("the pages are in the memory of the CPU; add --device cuda")
    return CudaMemory(device.index or 0)


class CudaIpcListener(StreamListener):
    """Accepts senders of this host and user that can map the pages.

    Args:
        page_format: format of the pages that are received here.
        memory: the device that has the pages.
        check_every: one unit in so many carries a checksum, and all of a prompt's last page; 1:
            every unit.
    """

    name = "cuda_ipc"

    def __init__(
        self, page_format: PageFormat, memory: DeviceMemory, check_every: int = SAMPLED
    ) -> None:
        super().__init__(page_format)
        self._memory = memory
        self._check_every = check_every
        self._pool: ExportedPool | None = None
        self._ends: dict[socket.socket, tuple[int, int]] = {}
        """Of connections that are just made: how the end of the sender's copies is heard of."""

    def _bind(self, endpoint: ReceiverEndpoint) -> tuple[socket.socket, str]:
        try:
            self._pool = self._memory.export(endpoint.store)
        except DeviceError as error:
            raise ConfigError(f"cuda_ipc cannot offer the pages: {error}") from error
        return listen_here()

    def _welcome(self, sock: socket.socket, hello: Hello) -> Welcome:
        pool = self._pool
        assert pool is not None
        if peer_uid(sock) != os.getuid():
            raise BadFrame("another user asks for the pages")
        pid = peer_pid(sock)
        # Whose end cannot be watched is told no place to write to, so there is nothing to wait for.
        watched = os.pidfd_open(pid) if pid else os.eventfd(1, os.EFD_CLOEXEC)
        self._ends[sock] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), watched
        return Welcome(0, self._check_every, pool.size, agent=encode(pool) if pid else b"")

    def _greeted(self, sock: socket.socket, welcome: Welcome) -> None:
        data = b"".join(pack(Kind.WELCOME, encode(welcome)))
        try:
            sent = socket.send_fds(sock, [data], [self._ends[sock][0]])
            sock.sendall(data[sent:])
        except OSError:
            for fd in self._ends.pop(sock):
                os.close(fd)
            raise

    def _link(
        self, sock: socket.socket, endpoint: ReceiverEndpoint, peer: str, hello: Hello
    ) -> CudaIpcReceiverLink:
        link = CudaIpcReceiverLink(sock, endpoint, self._page_format.page_layer_bytes, peer)
        link.check_every = self._check_every
        link.memory = self._memory
        link.rest_fd, link.process_fd = self._ends.pop(sock)
        return link


class CudaIpcDialer(LocalDialer):
    """Maps the pools of ``CudaIpcListener`` addresses.

    Args:
        memory: the device that has the pages that are pushed.
        max_queued_bytes: bytes of writes that may wait on one connection before a push blocks;
            what waits are addresses.
    """

    name = "cuda_ipc"

    def __init__(self, memory: DeviceMemory, max_queued_bytes: int = _ANY) -> None:
        super().__init__(max_queued_bytes)
        self._memory = memory
        self._unmapped: dict[str, str] = {}
        """Why the pool of an address cannot be mapped; that is tried once."""

    def dial(self, address: str, page_format: PageFormat, endpoint: Endpoint) -> CudaIpcLink:
        if (reason := self._unmapped.get(address)) is not None:
            raise TransferFailed(reason)
        sock = connect_here(address)
        stream = FdStream(sock)
        try:
            welcome = introduce(sock, _PEER, page_format, b"", stream)
            sock.settimeout(None)
            pool, rest_fd = self._pool(address, welcome), _only(stream.fds)
            link = CudaIpcLink(
                sock, endpoint, page_format.page_layer_bytes, "this host", self._max_queued_bytes
            )
            link.check_every = welcome.check_every
            link.num_pages = pool.size // (page_format.page_layer_bytes * page_format.num_layers)
            link.memory, link.pool, link.rest_fd = self._memory, pool, rest_fd
            link.address = self._mapped(address, pool)
            try:
                link.start()
            except DeviceError as error:
                self._memory.close(pool, link.address)
                raise TransferFailed(f"cuda_ipc cannot copy: {error}") from error
        except BaseException:
            for fd in stream.fds:
                with suppress(OSError):
                    os.eventfd_write(fd, 1)  # nothing was copied
                os.close(fd)
            sock.close()
            raise
        return link

    def _pool(self, address: str, welcome: Welcome) -> ExportedPool:
        """The receiver's pool.

        Raises:
            TransferFailed: it shares none with this process.
        """
        if not welcome.agent:
            raise self._left_out(address, "this process is in a PID namespace that it cannot see")
        try:
            return decode(welcome.agent, ExportedPool)
        except InvalidRequest as error:
            raise TransferFailed(f"{_PEER} does not say where its pages are: {error}") from error

    def _mapped(self, address: str, pool: ExportedPool) -> int:
        try:
            return self._memory.open(pool)
        except DeviceError as error:
            raise self._left_out(address, str(error)) from error

    def _left_out(self, address: str, why: str) -> TransferFailed:
        """Remembers that the pages at an address cannot be mapped from here, and says it once."""
        reason = self._unmapped[address] = f"cuda_ipc cannot map the pages of {_PEER}: {why}"
        facts = {"transport": self.name, "address": address, "reason": reason}
        event(log, "transport_left_out", logging.WARNING, **facts)
        return TransferFailed(reason)


def _only(fds: list[int]) -> int:
    if len(fds) != 1:
        raise TransferFailed(f"{_PEER} sent {len(fds)} descriptors with its welcome, not one")
    return fds[0]

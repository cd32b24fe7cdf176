"""Where a process that holds weights is asked for them: a Unix socket with a path.

Who connects and sends a byte is told what is held (`HeldWeights`), with the descriptor of the
memory where there is one, and keeps the connection: its end says to either side that the other is
gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from torch import Tensor

from pdmesh.kvtransfer.held_memory import HeldMemory, Offered, held_memory
from pdmesh.kvtransfer.shm import FdStream, peer_pid, peer_uid
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import ConfigError, InvalidRequest, Unavailable
from pdmesh.wire.held_weights import HeldWeights
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

TELLING_S = 10.0
"""Seconds that either side waits for the other to say, or to take, what is held."""
HOLDER = "the process that holds the weights"
_LENGTH = struct.Struct("!Q")
_MOST = 1 << 30


class WeightHolder:
    """Tells processes of this user what is held, until it is stopped.

    Args:
        path: of the socket. One that a dead process left there is taken away.
        held: what is told.
        offered: the memory.

    Raises:
        ConfigError: there can be no socket at this path.
    """

    def __init__(self, path: Path, held: HeldWeights, offered: Offered) -> None:
        body = encode(held)
        self._message = _LENGTH.pack(len(body)) + body
        self._offered = offered
        self._selector = selectors.DefaultSelector()
        self._readers: set[socket.socket] = set()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = path
        try:
            _take_away(path)
            self._server.bind(str(path))
            path.chmod(0o600)
            self._server.listen()
        except OSError as error:
            for sock in (self._server, self._wake, self._woken):
                sock.close()
            self._selector.close()
            raise ConfigError(
                f"cannot offer weights at {path}: {error.strerror or error}; give the path of a "
                "socket in a folder that exists and can be written"
            ) from error
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def run(self) -> None:
        """Serves until `stop`."""
        while True:
            for key, _ in self._selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._woken:
                    self._close()
                    return
                if sock is self._server:
                    self._accept()
                else:
                    self._heard(sock, key.data)

    def stop(self) -> None:
        """Ends `run`, from any thread or signal handler. Who has mapped the weights notices."""
        with suppress(OSError):
            self._wake.send(b"x")

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:
            return
        self._selector.register(sock, selectors.EVENT_READ, 0)

    def _heard(self, sock: socket.socket, pid: int) -> None:
        asked = b""
        with suppress(OSError):
            asked = sock.recv(1)
        if asked and not pid:
            self._tell(sock)
        elif not asked:
            self._selector.unregister(sock)
            sock.close()
            if pid:
                self._readers.discard(sock)
                event(log, "weights unmapped", by=pid, processes=len(self._readers))

    def _tell(self, sock: socket.socket) -> None:
        pid = peer_pid(sock)
        try:
            if peer_uid(sock) != os.getuid():
                raise OSError("another user asks for the weights")
            sock.settimeout(TELLING_S)
            fds = [] if self._offered.fd is None else [self._offered.fd]
            sent = socket.send_fds(sock, [self._message], fds)
            if rest := self._message[sent:]:  # a reader that has it all may be gone already
                sock.sendall(rest)
        except OSError as error:
            event(log, "weights not told", logging.WARNING, pid=pid, reason=error)
            self._selector.unregister(sock)
            sock.close()
            return
        self._selector.modify(sock, selectors.EVENT_READ, pid)
        self._readers.add(sock)
        event(log, "weights mapped", by=pid, processes=len(self._readers))

    def _close(self) -> None:
        self._path.unlink(missing_ok=True)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._wake.close()
        self._offered.close()


class MappedWeights:
    """What another process holds, as this one maps it. A context: in the end nothing is mapped.

    Args:
        path: of the holder's socket.
        memory: of the device that is computed on.

    Attributes:
        held: what the holder says.

    Raises:
        Unavailable: nobody answers there in time.
        ConfigError: another user does, or what it says is not understood.
    """

    def __init__(self, path: Path, memory: HeldMemory) -> None:
        self._memory = memory
        self._fds: list[int] = []
        self.path = path
        self.device = memory.device
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(TELLING_S)
        stream = FdStream(self._socket)
        try:
            self._socket.connect(str(path))
            if peer_uid(self._socket) != os.getuid():
                raise ConfigError(f"the weights at {path} are those of another user")
            self._socket.sendall(b"?")
            (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
            if length > _MOST:
                raise ConfigError(f"what is said at {path} is not about weights")
            self.held = decode(bytes(_read(stream, length)), HeldWeights)
        except BaseException as error:
            self._socket.close()
            _close(stream.fds)
            if isinstance(error, InvalidRequest):
                raise ConfigError(f"what is said at {path} is not understood: {error}") from error
            if isinstance(error, OSError):
                words = error.strerror or error
                raise Unavailable(f"nobody offers weights at {path}: {words}") from error
            raise
        self._fds = stream.fds
        self._socket.setblocking(False)

    def map(self) -> list[Tensor]:
        """The regions, [bytes] uint8 each, to be read only. Once.

        Raises:
            ConfigError: they cannot be mapped.
        """
        try:
            return self._memory.map(self.held.regions, self._fds[0] if self._fds else None)
        finally:
            _close(self._fds)
            self._fds = []

    async def gone(self) -> None:
        """Returns when the holder has ended."""
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while await loop.sock_recv(self._socket, 64):
                pass

    def close(self) -> None:
        """Maps nothing any more; the model is not to be used again."""
        self._memory.close()
        self._socket.close()
        _close(self._fds)
        self._fds = []

    def __enter__(self) -> MappedWeights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _take_away(path: Path) -> None:
    """Removes a socket that nobody listens at any more; leaves anything else where it is.

    Raises:
        OSError: somebody does.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                sock.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError("another process does so already")


@contextmanager
def mapped_weights(path: Path | None, device: str) -> Iterator[MappedWeights | None]:
    """What is offered at a path, for a worker on a device; None without a path.

    Raises:
        Unavailable, ConfigError: as `MappedWeights`, or the device shares no memory.
    """
    if path is None:
        yield None
        return
    with MappedWeights(path, held_memory(device)) as found:
        yield found


def _read(stream: FdStream, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = stream.readinto(view[: 1 << 20])
        if not count:
            raise ConnectionError("it ended")
        view = view[count:]
    return data


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)

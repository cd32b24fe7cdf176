"""What reads within a host and a user share: one socket of the owner, a connection a read."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from contextlib import suppress

from pdmesh.kvtransfer.shm import host_and_user, peer_uid, socket_name
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

CONNECT_S = 2.0


class LocalPageServer(ABC):
    """Answers readers of this host and user, one after the other."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def _begin(self, name: str) -> str:
        """Answers on a thread of that name from now on; returns the address for readers.

        Raises:
            ConfigError: there is no socket to be had.
        """
        token = f"pull-{secrets.token_hex(16)}"
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(socket_name(token))
            server.listen()
        except OSError as error:
            server.close()
            raise ConfigError(f"cannot lend pages on this host: {error}") from error
        self._socket = server
        self._thread = threading.Thread(target=self._serve, args=(server,), name=name, daemon=True)
        self._thread.start()
        return f"{host_and_user()}:{token}"

    def close(self) -> None:
        if self._socket is None or self._thread is None:
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self._socket = None

    @abstractmethod
    def _answer(self, sock: socket.socket) -> None:
        """Tells a reader where the pages are. What is sent fits the buffer of its connection."""

    def _serve(self, server: socket.socket) -> None:
        """Until the socket is shut."""
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
                    self._answer(sock)


class LocalPageReader:
    """Connects to servers of this host and user."""

    def __init__(self) -> None:
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


def shut(sock: socket.socket) -> None:
    """Ends what somebody waits for on a connection."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

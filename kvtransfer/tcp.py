"""The TCP transport: plain sockets and threads, checksums on every page, no library needed."""

from __future__ import annotations

import socket

from pdmesh.kvtransfer.frames import Hello, Welcome
from pdmesh.kvtransfer.stream_link import MAX_QUEUED_BYTES, StreamLink
from pdmesh.kvtransfer.stream_server import HANDSHAKE_SECONDS, StreamListener, introduce
from pdmesh.kvtransfer.tcp_link import WINDOW_BYTES, TcpLink
from pdmesh.kvtransfer.transport import Endpoint, ReceiverEndpoint
from pdmesh.wire.errors import ConfigError, TransferFailed
from pdmesh.wire.hashes import PageFormat

_STALLED_MILLISECONDS = 60_000
"""Sent bytes that stay unacknowledged for so long end a connection."""


class TcpListener(StreamListener):
    """Accepts senders of one page format.

    Args:
        page_format: format of the pages that are received here.
        host: address to listen on.
        port: 0 takes any free port.
        advertise: host that senders are told, where it is not ``host`` (e.g. behind 0.0.0.0).
        window_bytes: bytes of writes that one connection may have under way (and one block more).
    """

    name = "tcp"

    def __init__(
        self,
        page_format: PageFormat,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        super().__init__(page_format)
        self._host, self._port = host, port
        self._advertise = advertise or host
        self._window = window_bytes

    def _bind(self, endpoint: ReceiverEndpoint) -> tuple[socket.socket, str]:
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            server = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen for pages on {self._host}:{self._port}: {error.strerror}"
            ) from error
        port = server.getsockname()[1]
        host = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        return server, f"{host}:{port}"

    def _welcome(self, sock: socket.socket, hello: Hello) -> Welcome:
        set_options(sock)
        return Welcome(window=self._window)

    def _link(
        self, sock: socket.socket, endpoint: ReceiverEndpoint, peer: str, hello: Hello
    ) -> StreamLink:
        unit = self._page_format.page_layer_bytes
        link = TcpLink(sock, endpoint, unit, peer, window=self._window)
        link.receiver = endpoint
        return link


class TcpDialer:
    """Connects to ``TcpListener`` addresses.

    Args:
        max_queued_bytes: bytes of writes that may wait on one connection before a push blocks.
    """

    name = "tcp"

    def __init__(self, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_queued_bytes = max_queued_bytes

    def reaches(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        return bool(host) and port.isdigit()

    def dial(self, address: str, page_format: PageFormat, endpoint: Endpoint) -> TcpLink:
        sock = connect(address)
        try:
            set_options(sock)
            welcome = introduce(sock, address, page_format)
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        unit = page_format.page_layer_bytes
        link = TcpLink(sock, endpoint, unit, address, self._max_queued_bytes, welcome.window)
        link.start()
        return link


def connect(address: str) -> socket.socket:
    """A connection to ``host:port``, with the timeout of a handshake.

    Raises:
        TransferFailed: nobody answers there.
    """
    host, _, port = address.rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_SECONDS)
    except OSError as error:
        raise TransferFailed(
            f"the decode worker at {address} cannot be reached: {error.strerror or error}"
        ) from error


def set_options(sock: socket.socket) -> None:
    """No delay for small frames; a peer that is gone is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_MILLISECONDS)

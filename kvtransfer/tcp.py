"""The TCP transport: plain sockets and threads, checksums on every page, no library needed.

The dialer says which protocol version and page format it has; the listener welcomes or refuses it,
naming what differs on both sides. Bytes that are none of this protocol close their connection, with
one line in the log, and touch nothing else.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from io import BufferedReader
from zlib import crc32

from pdmesh.kvtransfer.frames import (
    HEADER_BYTES,
    BadFrame,
    Header,
    Hello,
    Kind,
    pack,
    read_exactly,
    read_header,
)
from pdmesh.kvtransfer.tcp_link import MAX_QUEUED_BYTES, TcpLink, send_all
from pdmesh.kvtransfer.transport import Endpoint, ReceiverEndpoint, refusal
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import ConfigError, Incompatible, InvalidRequest, TransferFailed
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.logs import event
from pdmesh.wire.messages import PROTOCOL_VERSION

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
MAX_CONNECTIONS = 512
_READ_BUFFER = 1 << 17
_STALLED_MILLISECONDS = 60_000
"""Sent bytes that stay unacknowledged for so long end a connection."""


class TcpListener:
    """Accepts senders of one page format.

    Args:
        page_format: format of the pages that are received here.
        host: address to listen on.
        port: 0 takes any free port.
        advertise: host that senders are told, where it is not ``host`` (e.g. behind 0.0.0.0).
    """

    name = "tcp"

    def __init__(
        self,
        page_format: PageFormat,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
    ) -> None:
        self._page_format = page_format
        self._host, self._port = host, port
        self._advertise = advertise or host
        self._lock = threading.Lock()
        self._pending: set[socket.socket] = set()
        self._links: set[TcpLink] = set()
        self._greeters: set[threading.Thread] = set()
        self._closed = False
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self, endpoint: ReceiverEndpoint) -> str:
        """Listens; returns ``host:port``.

        Raises:
            ConfigError: the address cannot be bound, or pages of this format do not fit the store.
        """
        expected = self._page_format.page_layer_bytes
        if endpoint.page_layer_bytes != expected:
            raise ConfigError(
                f"the page format has {expected} bytes a page and layer,"
                f" the store {endpoint.page_layer_bytes}"
            )
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._socket = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen for pages on {self._host}:{self._port}: {error.strerror}"
            ) from error
        self._thread = threading.Thread(
            target=self._accept, args=(self._socket, endpoint), name="kv-accept", daemon=True
        )
        self._thread.start()
        port = self._socket.getsockname()[1]
        host = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        return f"{host}:{port}"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pending, links = list(self._pending), list(self._links)
            greeters = list(self._greeters)
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        for sock in pending:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for link in links:
            link.close("the receiver is closing")
        for thread in [*greeters, *([self._thread] if self._thread else [])]:
            thread.join()
        for link in links:
            link.join()

    def _accept(self, server: socket.socket, endpoint: ReceiverEndpoint) -> None:
        while True:
            try:
                sock, address = server.accept()
            except OSError:
                if self._closed:
                    return
                continue
            peer = f"{address[0]}:{address[1]}"
            with self._lock:
                full = len(self._pending) + len(self._links) >= MAX_CONNECTIONS
                if self._closed or full:
                    sock.close()
                    continue
                self._pending.add(sock)
                thread = threading.Thread(
                    target=self._greet,
                    args=(sock, peer, endpoint),
                    name=f"kv-greet-{peer}",
                    daemon=True,
                )
                self._greeters.add(thread)
            thread.start()

    def _greet(self, sock: socket.socket, peer: str, endpoint: ReceiverEndpoint) -> None:
        """The handshake of one connection, on a thread of its own: a slow peer delays nobody."""
        link: TcpLink | None = None
        try:
            stream = _prepare(sock)
            reason = self._refusal(stream)
            if reason is None:
                send_all(sock, list(pack(Kind.WELCOME)))
                sock.settimeout(None)
                link = self._adopt(sock, stream, peer, endpoint)
            else:
                send_all(sock, list(pack(Kind.REFUSED, reason.encode())))
                event(log, "connection_refused", logging.WARNING, peer=peer, reason=reason)
                stream.close()
        except (BadFrame, OSError) as error:
            event(log, "connection_refused", logging.WARNING, peer=peer, reason=str(error))
        finally:
            with self._lock:
                self._pending.discard(sock)
                self._greeters.discard(threading.current_thread())
            if link is None:
                sock.close()

    def _refusal(self, stream: BufferedReader) -> str | None:
        header, payload = _handshake_frame(stream)
        if header.kind is not Kind.HELLO:
            raise BadFrame(f"the first frame is {header.kind.name}, not HELLO")
        try:
            hello = decode(payload, Hello)
        except InvalidRequest as error:
            raise BadFrame(str(error)) from None
        return refusal(self._page_format, hello.page_format, hello.protocol)

    def _adopt(
        self,
        sock: socket.socket,
        stream: BufferedReader,
        peer: str,
        endpoint: ReceiverEndpoint,
    ) -> TcpLink:
        link = TcpLink(sock, stream, endpoint, self._page_format.page_layer_bytes, peer)
        link.on_gone = self._forget
        with self._lock:
            self._links.add(link)
            closed = self._closed
        link.start()
        if closed:
            link.close("the receiver is closing")
        return link

    def _forget(self, link: TcpLink) -> None:
        with self._lock:
            self._links.discard(link)


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
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_SECONDS)
        except OSError as error:
            raise TransferFailed(
                f"the decode worker at {address} cannot be reached: {error.strerror or error}"
            ) from error
        try:
            stream = _prepare(sock)
            _introduce(sock, stream, address, page_format)
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        link = TcpLink(
            sock,
            stream,
            endpoint,
            page_format.page_layer_bytes,
            address,
            max_queued_bytes=self._max_queued_bytes,
        )
        link.start()
        return link


def _introduce(
    sock: socket.socket, stream: BufferedReader, address: str, page_format: PageFormat
) -> None:
    hello = encode(Hello(PROTOCOL_VERSION, page_format))
    try:
        send_all(sock, list(pack(Kind.HELLO, hello)))
        header, payload = _handshake_frame(stream)
    except BadFrame as error:
        raise TransferFailed(f"{address} is no page receiver: {error}") from error
    except OSError as error:
        raise TransferFailed(
            f"the decode worker at {address} did not answer: {error.strerror or error}"
        ) from error
    if header.kind is Kind.REFUSED:
        raise Incompatible(f"{address} refused: {payload.decode(errors='replace')}")
    if header.kind is not Kind.WELCOME:
        raise TransferFailed(f"{address} answered a greeting with {header.kind.name}")


def _handshake_frame(stream: BufferedReader) -> tuple[Header, bytes]:
    header = read_header(stream, bytearray(HEADER_BYTES), 0)
    if header is None:
        raise BadFrame("the connection was closed before a greeting")
    payload = bytearray(header.length)
    if payload and not read_exactly(stream, memoryview(payload)):
        raise BadFrame("the connection ended in the middle of a frame")
    if crc32(payload) != header.crc:
        raise BadFrame("the checksum of a greeting is wrong")
    return header, bytes(payload)


def _prepare(sock: socket.socket) -> BufferedReader:
    """Sets the options of a connection, and a timeout for its handshake."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_MILLISECONDS)
    sock.settimeout(HANDSHAKE_SECONDS)
    stream = sock.makefile("rb", buffering=_READ_BUFFER)
    assert isinstance(stream, BufferedReader)
    return stream

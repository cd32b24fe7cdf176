"""What transports over stream sockets share: accepting, the handshake, and the dialer's part of it.

The dialer says which protocol version and page format it has; the listener welcomes or refuses it,
naming what differs on both sides. Bytes that are none of this protocol close their connection, with
one line in the log, and touch nothing else.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

from pdmesh.kvtransfer.checks import checksum
from pdmesh.kvtransfer.frames import (
    HEADER_BYTES,
    BadFrame,
    Header,
    Hello,
    Kind,
    Readable,
    Welcome,
    pack,
    read_exactly,
    read_header,
)
from pdmesh.kvtransfer.stream_link import SocketStream, StreamLink, send_all
from pdmesh.kvtransfer.transport import ReceiverEndpoint, refusal
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import ConfigError, Incompatible, InvalidRequest, TransferFailed
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.logs import event
from pdmesh.wire.messages import PROTOCOL_VERSION

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
MAX_CONNECTIONS = 512
CLOSE_SECONDS = 5.0
"""Wait for a peer that has to let go of this side's memory, when this side ends."""


class StreamListener:
    """Accepts senders of one page format. What it listens on is up to its kind.

    Args:
        page_format: format of the pages that are received here.
    """

    def __init__(self, page_format: PageFormat) -> None:
        self._page_format = page_format
        self._lock = threading.Lock()
        self._pending: set[socket.socket] = set()
        self._links: set[StreamLink] = set()
        self._greeters: set[threading.Thread] = set()
        self._closed = False
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self, endpoint: ReceiverEndpoint) -> str:
        """Listens; returns the address for senders.

        Raises:
            ConfigError: the address cannot be bound, or pages of this format do not fit the store.
        """
        expected, has = self._page_format.page_layer_bytes, endpoint.store.page_layer_bytes
        if has != expected:
            raise ConfigError(
                f"the page format has {expected} bytes a page and layer, the store {has}"
            )
        self._socket, address = self._bind(endpoint)
        self._thread = threading.Thread(
            target=self._accept, args=(self._socket, endpoint), name="kv-accept", daemon=True
        )
        self._thread.start()
        return address

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
            self._end(link)

    def _bind(self, endpoint: ReceiverEndpoint) -> tuple[socket.socket, str]:
        """A listening socket and the address for senders."""
        raise NotImplementedError

    def _welcome(self, sock: socket.socket, hello: Hello) -> Welcome:
        """What the sender is told; may raise BadFrame to refuse it without a word."""
        raise NotImplementedError

    def _greeted(self, sock: socket.socket, welcome: Welcome) -> None:
        """Sends the welcome."""
        send_all(sock, list(pack(Kind.WELCOME, encode(welcome))))

    def _link(
        self, sock: socket.socket, endpoint: ReceiverEndpoint, peer: str, hello: Hello
    ) -> StreamLink:
        raise NotImplementedError

    def _end(self, link: StreamLink) -> None:
        """Waits for a link that was closed."""
        link.join(CLOSE_SECONDS)

    def _accept(self, server: socket.socket, endpoint: ReceiverEndpoint) -> None:
        while True:
            try:
                sock, address = server.accept()
            except OSError:
                if self._closed:
                    return
                continue
            peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "this host"
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
                thread.start()  # whoever closes joins those that it finds

    def _greet(self, sock: socket.socket, peer: str, endpoint: ReceiverEndpoint) -> None:
        """The handshake of one connection, on a thread of its own: a slow peer delays nobody."""
        link: StreamLink | None = None
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            hello = _read_hello(sock)
            if hello is None:  # somebody asked whether this host can be reached
                return
            reason = refusal(self._page_format, hello.page_format, hello.protocol)
            if reason is None:
                self._greeted(sock, self._welcome(sock, hello))
                sock.settimeout(None)
                link = self._adopt(sock, peer, endpoint, hello)
            else:
                send_all(sock, list(pack(Kind.REFUSED, reason.encode())))
                event(log, "connection_refused", logging.WARNING, peer=peer, reason=reason)
        except (BadFrame, OSError) as error:
            event(log, "connection_refused", logging.WARNING, peer=peer, reason=str(error))
        finally:
            with self._lock:
                self._pending.discard(sock)
                self._greeters.discard(threading.current_thread())
            if link is None:
                sock.close()

    def _adopt(
        self, sock: socket.socket, peer: str, endpoint: ReceiverEndpoint, hello: Hello
    ) -> StreamLink:
        link = self._link(sock, endpoint, peer, hello)
        link.on_gone = self._forget
        with self._lock:
            self._links.add(link)
            closed = self._closed
        link.start()
        if closed:
            link.close("the receiver is closing")
        return link

    def _forget(self, link: StreamLink) -> None:
        with self._lock:
            self._links.discard(link)


def _read_hello(sock: socket.socket) -> Hello | None:
    frame = _handshake_frame(SocketStream(sock))
    if frame is None:
        return None
    header, payload = frame
    if header.kind is not Kind.HELLO:
        raise BadFrame(f"the first frame is {header.kind.name}, not HELLO")
    try:
        return decode(payload, Hello)
    except InvalidRequest as error:
        raise BadFrame(str(error)) from None


def introduce(
    sock: socket.socket,
    address: str,
    page_format: PageFormat,
    agent: bytes = b"",
    stream: Readable | None = None,
) -> Welcome:
    """The dialer's side of the handshake; ``stream`` reads from the socket.

    Raises:
        TransferFailed: what answers is no page receiver, or does not answer.
        Incompatible: it refuses, naming why.
    """
    try:
        hello = Hello(PROTOCOL_VERSION, page_format, agent)
        send_all(sock, list(pack(Kind.HELLO, encode(hello))))
        frame = _handshake_frame(stream or SocketStream(sock))
    except BadFrame as error:
        raise TransferFailed(f"{address} is no page receiver: {error}") from error
    except OSError as error:
        raise TransferFailed(
            f"the decode worker at {address} did not answer: {error.strerror or error}"
        ) from error
    if frame is None:
        raise TransferFailed(f"{address} is no page receiver: it closed the connection")
    header, payload = frame
    if header.kind is Kind.REFUSED:
        raise Incompatible(f"{address} refused: {payload.decode(errors='replace')}")
    if header.kind is not Kind.WELCOME:
        raise TransferFailed(f"{address} answered the greeting with {header.kind.name}")
    try:
        return decode(payload, Welcome)
    except InvalidRequest as error:
        raise TransferFailed(f"{address} is no page receiver: {error}") from error


def _handshake_frame(stream: Readable) -> tuple[Header, bytes] | None:
    header = read_header(stream, bytearray(HEADER_BYTES), 0)
    if header is None:
        return None
    payload = bytearray(header.length)
    if header.length and not read_exactly(stream, memoryview(payload)):
        raise BadFrame("the connection ended in the middle of a frame")
    if checksum(memoryview(payload)) != header.crc:
        raise BadFrame("the checksum of a greeting is wrong")
    return header, bytes(payload)

"""Reads of lent pages over TCP: a connection a read, one request, a frame for each page.

Little-endian. A request: magic (4), version (1), length of the loan id (1), zero (2), loan id (64,
UTF-8, padded with zeros), bytes of a page (8), number of pages (4); then the pages, counted from
the start of the prefix (4 each); then CRC-32 of all that (4). The answer to each page: magic (4),
status (1), zero (3), page (4), length (8), CRC-32 of the bytes (4), CRC-32 of the header so far
(4); then the bytes. Status 1 refuses: the bytes say why, and nothing follows.

A page is sent as its place holds it at that moment, without a copy on the CPU, and received into
the reader's own page.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from zlib import crc32

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.pull_reader import (
    Lent,
    ReadOrder,
    ReadStopped,
    Stop,
    WrongBytes,
    fill_page,
    page_view,
)
from pdmesh.wire.errors import ConfigError, InvalidRequest, TransferFailed
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

_MAGIC = b"PDPL"
_VERSION = 1
_REQUEST = struct.Struct("<4sBBH64sQI")
_ANSWER = struct.Struct("<4sB3xIQI")
_CRC = struct.Struct("<I")
_OK, _REFUSED = 0, 1
_MAX_PAGES = 1 << 20
_MAX_REASON_BYTES = 1024
_MAX_ID_BYTES = 64
MAX_CONNECTIONS = 64
"""Readers at a time; more are turned away, and compute instead."""
CONNECT_S = 2.0
STALLED_S = 10.0
"""A peer that moves no byte for so long is given up."""


class TcpPageServer:
    """Serves the pages of ``store`` that ``lent`` knows; a thread for each connection.

    Args:
        host: address to listen on.
        port: 0 takes any free port.
        advertise: host that readers are told, where it is not ``host``.
    """

    name = "tcp"

    def __init__(
        self,
        store: LatentStore,
        lent: Lent,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
    ) -> None:
        self._store = store
        self._lent = lent
        self._host, self._port = host, port
        self._advertise = advertise or host
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._socket = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot serve pages on {self._host}:{self._port}: {error.strerror}"
            ) from error
        self._thread = threading.Thread(
            target=self._accept, args=(self._socket,), name="pull-accept", daemon=True
        )
        self._thread.start()
        host = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        return f"{host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sockets, threads = list(self._open), list(self._open.values())
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in [*threads, *([self._thread] if self._thread else [])]:
            thread.join()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                sock, address = server.accept()
            except OSError:
                if self._closed:
                    return
                continue
            with self._lock:
                if self._closed or len(self._open) >= MAX_CONNECTIONS:
                    sock.close()
                    continue
                thread = threading.Thread(
                    target=self._serve,
                    args=(sock, f"{address[0]}:{address[1]}"),
                    name="pull-serve",
                    daemon=True,
                )
                self._open[sock] = thread
                thread.start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            _prepare(sock)
            self._answer(sock)
        except (InvalidRequest, TransferFailed) as error:
            event(log, "read_refused", logging.WARNING, peer=peer, reason=error.message)
            reason = error.message.encode()[:_MAX_REASON_BYTES]
            with suppress(OSError):
                _send(sock, _header(_REFUSED, 0, reason), reason)
        except OSError as error:
            event(log, "read_ended", peer=peer, reason=str(error))
        finally:
            with self._lock:
                del self._open[sock]
            sock.close()

    def _answer(self, sock: socket.socket) -> None:
        loan_id, pages = _read_request(sock, self._store.page_bytes)
        for page in pages:
            place = self._lent.lent_page(loan_id, page)
            if place is None:
                raise InvalidRequest(f"page {page} is not lent by loan {loan_id!r}")
            data = page_view(self._store, place)
            _send(sock, _header(_OK, page, data), data)


class TcpPageReader:
    """Reads pages from ``TcpPageServer``s into ``store``."""

    name = "tcp"

    def __init__(self, store: LatentStore) -> None:
        self._store = store

    def reaches(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        return bool(host) and port.isdigit()

    def read(self, order: ReadOrder, stop: Stop) -> None:
        host, _, port = order.address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as sock:
                _prepare(sock)
                with stop.calling(lambda: _shut(sock)):
                    self._read(sock, order)
        except OSError as error:
            if stop.asked:
                raise ReadStopped("the read was stopped") from error
            raise TransferFailed(
                f"pages cannot be read from {order.address}: {error.strerror or error}"
            ) from error

    def close(self) -> None:
        pass

    def _read(self, sock: socket.socket, order: ReadOrder) -> None:
        pages = range(order.first_page, order.first_page + len(order.destinations))
        _send(sock, _request(order.loan_id, self._store.page_bytes, pages))
        for page, place in zip(pages, order.destinations, strict=True):
            crc = self._read_header(sock, page)

            def arrive(view: memoryview, page: int = page, crc: int = crc) -> None:
                _fill(sock, view)
                if crc32(view) != crc:
                    raise WrongBytes(f"the checksum of page {page} is wrong")

            fill_page(self._store, place, arrive)

    def _read_header(self, sock: socket.socket, page: int) -> int:
        """Returns the checksum of the bytes that follow."""
        header = bytearray(_ANSWER.size + _CRC.size)
        _fill(sock, memoryview(header))
        magic, status, number, length, crc = _ANSWER.unpack_from(header)
        if magic != _MAGIC or _CRC.unpack_from(header, _ANSWER.size) != (crc32(header[:-4]),):
            raise WrongBytes("the answer to a read is no page")
        if status == _REFUSED and length <= _MAX_REASON_BYTES:
            reason = bytearray(length)
            _fill(sock, memoryview(reason))
            raise TransferFailed(f"the owner refused: {reason.decode(errors='replace')}")
        if status != _OK or number != page or length != self._store.page_bytes:
            raise TransferFailed(f"page {number} of {length} bytes came, not page {page}")
        return int(crc)


def _request(loan_id: str, page_bytes: int, pages: Sequence[int]) -> bytes:
    raw_id = loan_id.encode()
    if len(raw_id) > _MAX_ID_BYTES:
        raise TransferFailed(f"loan id {loan_id!r} is longer than {_MAX_ID_BYTES} bytes")
    head = _REQUEST.pack(_MAGIC, _VERSION, len(raw_id), 0, raw_id, page_bytes, len(pages))
    body = head + struct.pack(f"<{len(pages)}I", *pages)
    return body + _CRC.pack(crc32(body))


def _read_request(sock: socket.socket, page_bytes: int) -> tuple[str, tuple[int, ...]]:
    head = bytearray(_REQUEST.size)
    _fill(sock, memoryview(head))
    magic, version, id_bytes, _, raw_id, size, count = _REQUEST.unpack(head)
    if magic != _MAGIC or version != _VERSION:
        raise InvalidRequest(f"not a request for pages: it starts with {bytes(head[:5])!r}")
    if count > _MAX_PAGES:
        raise InvalidRequest(f"a request for {count} pages; {_MAX_PAGES} are allowed")
    rest = bytearray(4 * count + _CRC.size)
    _fill(sock, memoryview(rest))
    if _CRC.unpack_from(rest, 4 * count) != (crc32(memoryview(rest)[:-4], crc32(head)),):
        raise InvalidRequest("the checksum of a request for pages is wrong")
    if size != page_bytes:
        raise InvalidRequest(f"a page has {page_bytes} bytes here and {size} there")
    loan_id = raw_id[:id_bytes].decode(errors="replace")
    return loan_id, struct.unpack_from(f"<{count}I", rest)


def _header(status: int, page: int, data: memoryview | bytes) -> bytes:
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    fields = _ANSWER.pack(_MAGIC, status, page, size, crc32(data))
    return fields + _CRC.pack(crc32(fields))


def _send(sock: socket.socket, *parts: bytes | memoryview) -> None:
    """Sends all parts with as few system calls as the kernel allows, without a copy."""
    views = [memoryview(part).cast("B") for part in parts]
    while views:
        sent = sock.sendmsg(views)
        while views and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if sent:
            views[0] = views[0][sent:]


def _fill(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < view.nbytes:
        got = sock.recv_into(view[done:])
        if not got:
            raise OSError("the connection was closed")
        done += got


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(STALLED_S)


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

"""One established TCP connection: a thread that writes a queue, a thread that reads frames."""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader

from pdmesh.kvtransfer.frames import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    BadFrame,
    read_exactly,
    read_header,
    to_frame,
    to_message,
)
from pdmesh.kvtransfer.transport import Endpoint, Message, Write
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 1 << 30
"""Bytes of writes that may wait on one connection before ``push`` blocks. They are views of pages
in the sender's pool, not copies."""
_BATCH_BYTES = 1 << 20
_BATCH_FRAMES = 64


class TcpLink:
    """A ``Link`` over a connected socket whose handshake is done; ``start`` runs its threads."""

    one_sided = False

    def __init__(
        self,
        sock: socket.socket,
        stream: BufferedReader,
        endpoint: Endpoint,
        page_layer_bytes: int,
        peer: str,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self.peer = peer
        self._sock = sock
        self._stream = stream
        self._endpoint = endpoint
        self._page_layer_bytes = page_layer_bytes
        self._max_queued = max_queued_bytes
        self.on_gone: Callable[[TcpLink], None] | None = None
        """Called after ``on_closed`` of the endpoint."""
        self._changed = threading.Condition()
        self._queue: deque[Message] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._reason = ""
        self._writer = threading.Thread(target=self._write, name=f"kv-write-{peer}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"kv-read-{peer}", daemon=True)

    @property
    def closed(self) -> bool:
        return self._closed

    def start(self) -> None:
        """Starts to send and to deliver."""
        self._writer.start()
        self._reader.start()

    def send(self, message: Message) -> None:
        with self._changed:
            if self._closed:
                return
            self._queue.append(message)
            self._queued_bytes += _size(message)
            self._changed.notify_all()

    def cancel(self, lease_id: str, generation: int) -> int:
        with self._changed:
            kept: deque[Message] = deque()
            taken = 0
            for message in self._queue:
                mine = (message.lease_id, message.generation) == (lease_id, generation)
                if mine and isinstance(message, Write):
                    taken += 1
                    self._queued_bytes -= _size(message)
                else:
                    kept.append(message)
            self._queue = kept
            self._changed.notify_all()
            return taken

    def wait_room(self, size: int, stop: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._queued_bytes == 0
                    or self._queued_bytes + size <= self._max_queued
                    or stop()
                )
            )

    def close(self, reason: str) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._reason = reason
            self._queue.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Waits until ``on_closed`` has been called, after ``close``."""
        if threading.current_thread() not in (self._reader, self._writer):
            self._reader.join()

    def _take_batch(self) -> list[Message]:
        batch: list[Message] = []
        size = 0
        while self._queue and len(batch) < _BATCH_FRAMES and size < _BATCH_BYTES:
            message = self._queue.popleft()
            size += _size(message)
            batch.append(message)
        self._queued_bytes -= size
        self._changed.notify_all()
        return batch

    def _write(self) -> None:
        reason = "the writing thread ended"
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or bool(self._queue))
                    if self._closed:
                        return
                    batch = self._take_batch()
                parts = [part for message in batch for part in to_frame(message)]
                send_all(self._sock, parts)
                writes = [message for message in batch if isinstance(message, Write)]
                if writes:
                    self._endpoint.on_sent(self, writes)
        except OSError as error:
            reason = _words(error)
        finally:
            self.close(reason)

    def _read(self) -> None:
        reason = "the reading thread ended"
        try:
            self._read_frames()
            reason = "the peer closed the connection"
        except BadFrame as error:
            reason = str(error)
            if not self._closed:
                event(log, "connection_closed", logging.WARNING, peer=self.peer, reason=reason)
        except OSError as error:
            reason = _words(error)
        finally:
            self.close(reason)
            self._writer.join()
            self._stream.close()
            self._sock.close()
            self._endpoint.on_closed(self, self._reason)
            if self.on_gone is not None:
                self.on_gone(self)

    def _read_frames(self) -> None:
        buffer = bytearray(HEADER_BYTES)
        staging = memoryview(bytearray(self._page_layer_bytes))
        while True:
            header = read_header(self._stream, buffer, self._page_layer_bytes)
            if header is None:
                return
            if header.length > len(staging):
                staging = memoryview(bytearray(min(header.length, MAX_CONTROL_BYTES)))
            payload = staging[: header.length]
            if header.length and not read_exactly(self._stream, payload):
                raise BadFrame("the connection ended in the middle of a frame")
            self._endpoint.on_message(self, to_message(header, payload))


def send_all(sock: socket.socket, parts: list[bytes | memoryview]) -> None:
    """Sends all parts in order with as few system calls as the kernel allows, without a copy."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    start = 0
    while start < len(views):
        sent = sock.sendmsg(views[start : start + 256])
        while start < len(views) and sent >= views[start].nbytes:
            sent -= views[start].nbytes
            start += 1
        if sent:
            views[start] = views[start][sent:]


def _size(message: Message) -> int:
    if isinstance(message, Write) and message.data is not None:
        return message.data.nbytes
    return 0


def _words(error: OSError) -> str:
    return (error.strerror or str(error) or type(error).__name__).lower()

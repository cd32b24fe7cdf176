"""One established stream connection: a thread that writes a queue, a thread that reads frames.

What a write is on the way differs: ``TcpLink`` sends the bytes, ``ShmLink`` and ``NixlLink`` put
them into their pages and send a notice.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.frames import (
    HEADER_BYTES,
    BadFrame,
    Credit,
    Header,
    Kind,
    read_exactly,
    read_header,
    to_frame,
    to_message,
    unpack_credit,
)
from pdmesh.kvtransfer.transport import Endpoint, Message, Write
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 1 << 30
"""Bytes of writes that may wait on one connection before ``push`` blocks. They are views of pages
in the sender's pool, not copies."""
_BATCH_FRAMES = 64


class SocketStream:
    """A socket as a byte stream, without a buffer: payloads go straight to where they belong."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def readinto(self, buffer: memoryview, /) -> int:
        return self._sock.recv_into(buffer)


class StreamLink:
    """A ``Link`` over a connected socket whose handshake is done; ``start`` runs its threads.

    Args:
        window: a write waits while so many bytes are sent and not credited; 0: none waits.
    """

    one_sided = False
    asks_places = False
    check_every = 1
    batch_bytes = 1 << 20
    """Bytes of writes that are posted together."""

    def __init__(
        self,
        sock: socket.socket,
        endpoint: Endpoint,
        page_layer_bytes: int,
        peer: str,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        window: int = 0,
    ) -> None:
        self.peer = peer
        self._sock = sock
        self._stream = SocketStream(sock)
        self._endpoint = endpoint
        self._page_layer_bytes = page_layer_bytes
        self._max_queued = max_queued_bytes
        self._window = window
        self.on_gone: Callable[[StreamLink], None] | None = None
        """Called after ``on_closed`` of the endpoint."""
        self._changed = threading.Condition()
        self._queue: deque[Message | Credit] = deque()
        self._queued_bytes = 0
        self._uncredited = 0
        self._closed = False
        self._reason = ""
        self._writer = threading.Thread(target=self._write, name=f"kv-write-{peer}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"kv-read-{peer}", daemon=True)

    @property
    def closed(self) -> bool:
        return self._closed

    def takes_from(self, store: LatentStore) -> bool:
        return False

    def start(self) -> None:
        """Starts to send and to deliver."""
        self._writer.start()
        self._reader.start()

    def send(self, message: Message | Credit) -> None:
        with self._changed:
            if self._closed:
                return
            self._queue.append(message)
            self._queued_bytes += _size(message)
            self._changed.notify_all()

    def cancel(self, lease_id: str, generation: int) -> int:
        with self._changed:
            kept: deque[Message | Credit] = deque()
            taken = 0
            for message in self._queue:
                mine = (message.lease_id, message.generation) == (lease_id, generation)
                if mine and isinstance(message, Write):
                    taken += message.units
                    self._queued_bytes -= message.nbytes
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
        if self._begin_close(reason):
            self._shut()

    def join(self, timeout: float | None = None) -> None:
        """Waits until ``on_closed`` has been called, after ``close``."""
        if threading.current_thread() not in (self._reader, self._writer):
            self._reader.join(timeout)

    def _begin_close(self, reason: str) -> bool:
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._reason = reason
            self._queue.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
            return True

    def _shut(self) -> None:
        """Ends the connection of a link that has just closed."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _post(self, batch: list[Message | Credit]) -> None:
        """Sends a batch in order. Here: of an end that writes nothing."""
        send_all(self._sock, [part for message in batch for part in to_frame(message)])

    def _posted(self, batch: Sequence[Message | Credit]) -> None:
        """A batch was sent, and the memory of its writes is let go."""
        writes = [message for message in batch if isinstance(message, Write)]
        if writes:
            self._endpoint.on_sent(self, writes)

    def _rest(self) -> None:
        """The link is closed and nothing is posted any more (thread that writes)."""

    def _take(self, header: Header) -> None:
        """Receives the payload of a WRITE."""
        raise BadFrame("a WRITE frame is not expected here")

    def _deliver(self, message: Message) -> None:
        self._endpoint.on_message(self, message)

    def _has_credit(self) -> bool:
        first = self._queue[0]
        return not isinstance(first, Write) or not self._window or self._uncredited < self._window

    def _take_batch(self) -> list[Message | Credit]:
        batch: list[Message | Credit] = []
        size = 0
        while self._queue and self._has_credit():
            if len(batch) == _BATCH_FRAMES or size >= self.batch_bytes:
                break
            message = self._queue.popleft()
            size += _size(message)
            self._uncredited += _size(message)
            batch.append(message)
        self._queued_bytes -= size
        self._changed.notify_all()
        return batch

    def _write(self) -> None:
        reason = "the writing thread ended"
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or (bool(self._queue) and self._has_credit())
                    )
                    if self._closed:
                        return
                    batch = self._take_batch()
                self._post(batch)
                self._posted(batch)
        except OSError as error:
            reason = words(error)
        finally:
            self.close(reason)
            self._rest()

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
            reason = words(error)
        finally:
            self.close(reason)
            self._writer.join()
            self._release()
            self._sock.close()
            self._endpoint.on_closed(self, self._reason)
            if self.on_gone is not None:
                self.on_gone(self)

    def _release(self) -> None:
        """Lets go of what the link holds besides its socket; nothing is sent any more."""

    def _read_frames(self) -> None:
        buffer = bytearray(HEADER_BYTES)
        while True:
            header = read_header(self._stream, buffer, self._page_layer_bytes)
            if header is None:
                return
            if header.kind is Kind.WRITE:
                self._take(header)
                continue
            payload = memoryview(bytearray(header.length))
            if header.length and not read_exactly(self._stream, payload):
                raise BadFrame("the connection ended in the middle of a frame")
            if header.kind is Kind.CREDIT:
                self._credited(unpack_credit(payload))
            else:
                self._deliver(to_message(header, payload))

    def _credited(self, count: int) -> None:
        with self._changed:
            self._uncredited = max(0, self._uncredited - count)
            self._changed.notify_all()


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


def _size(message: Message | Credit) -> int:
    return message.nbytes if isinstance(message, Write) else 0


def words(error: OSError) -> str:
    """What went wrong, in words."""
    return (error.strerror or str(error) or type(error).__name__).lower()

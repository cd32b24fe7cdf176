"""A transport within one process, which can be told to misbehave.

Used where prefill and decode run in one process, and to test what a network can do to a transfer:
messages delayed, dropped, repeated, reordered or corrupted, a stall, a lost connection. In
one-sided mode writes land in the receiver's memory without its check, as with RDMA: the sender
learned the pages' places when it opened the lease, writes that were posted cannot be called back,
and nothing but a drained sender or a closed connection says that no write will land any more.
"""

from __future__ import annotations

import heapq
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.checks import checksum
from pdmesh.kvtransfer.faults import Faults, Parcel, flipped, repeated
from pdmesh.kvtransfer.transport import (
    Destination,
    Endpoint,
    Link,
    Message,
    Open,
    ReceiverEndpoint,
    Write,
    refusal,
)
from pdmesh.wire.errors import Incompatible, TransferFailed
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import PROTOCOL_VERSION

_listeners: dict[str, LoopbackListener] = {}
_listeners_lock = threading.Lock()


class _Connection:
    """Both directions of one connection. ``step`` delivers one message, outside of the lock."""

    def __init__(self, listener: LoopbackListener, sender: Endpoint) -> None:
        self.listener = listener
        self.faults = listener.faults
        self.changed = threading.Condition()
        self.closed = False
        self.sender_link = LoopbackLink(self, towards_receiver=True)
        self.receiver_link = LoopbackLink(self, towards_receiver=False)
        self._sender = sender
        self._receiver = listener.endpoint
        self._to_receiver: list[Parcel] = []
        self._to_sender: deque[Message] = deque()
        self._sent = 0
        self._delivered = 0
        self._stalled = False
        self._reason = ""
        self._close_told = False
        self._places: dict[tuple[str, int], Destination] = {}
        self.pump: threading.Thread | None = None

    def submit(self, message: Message, towards_receiver: bool) -> None:
        if isinstance(message, Open) and self.listener.one_sided:
            self._open_at_once(message)
            return
        with self.changed:
            if self.closed:
                return
            if towards_receiver:
                self._enqueue(message)
            else:
                self._to_sender.append(message)
            self.changed.notify_all()

    def cancel(self, lease_id: str, generation: int) -> int:
        """Takes queued writes back; posted one-sided writes cannot be."""
        if self.listener.one_sided:
            return 0
        with self.changed:
            kept: list[Parcel] = []
            taken = 0
            for item in self._to_receiver:
                write = item.message
                mine = (write.lease_id, write.generation) == (lease_id, generation)
                if mine and isinstance(write, Write) and not item.repeat:
                    taken += write.units
                else:
                    kept.append(item)
            heapq.heapify(kept)
            self._to_receiver = kept
            return taken

    def close(self, reason: str) -> None:
        with self.changed:
            if self.closed:
                return
            self.closed = True
            self._reason = reason
            self._to_receiver.clear()
            self._to_sender.clear()
            self.changed.notify_all()

    def resume(self) -> None:
        with self.changed:
            self._stalled = False
            self.faults = replace(self.faults, stall_after=None)
            self.changed.notify_all()

    def step(self) -> bool:
        """Delivers one message or tells of the end; False when there is nothing to do now."""
        with self.changed:
            if self.closed:
                if self._close_told:
                    return False
                self._close_told = True
                work = self._tell_closed
            else:
                chosen = self._next()
                if chosen is None:
                    return False
                work = chosen
        work()
        return True

    def run(self) -> None:
        """Delivers until the connection is closed (the pump thread)."""
        while True:
            if self.step():
                continue
            with self.changed:
                if self.closed and self._close_told:
                    return
                self.changed.wait_for(self._has_work)

    def _has_work(self) -> bool:
        ready = bool(self._to_receiver) and not self._stalled
        return self.closed or ready or bool(self._to_sender)

    def _open_at_once(self, message: Open) -> None:
        self._receiver.on_message(self.receiver_link, message)
        key = (message.lease_id, message.generation)
        place = self._receiver.destination(self.receiver_link, *key)
        if place is not None:
            self._places[key] = place

    def _enqueue(self, message: Message) -> None:
        number = self._sent
        self._sent += 1
        place = None
        if isinstance(message, Write):
            assert message.pieces
            message = replace(message, crcs=_checksums(message))
            place = self._places.get((message.lease_id, message.generation))
        if number in self.faults.drop:
            self._dropped(message)
            return
        overtaken_by = self.faults.delay.get(number)
        due = float(number) if overtaken_by is None else number + overtaken_by + 0.5
        item = Parcel(due, number, message, number in self.faults.corrupt, destination=place)
        heapq.heappush(self._to_receiver, item)
        if number in self.faults.duplicate:
            late = 0.25 if self.listener.one_sided else 3.0
            heapq.heappush(self._to_receiver, repeated(item, due + late))

    def _dropped(self, message: Message) -> None:
        """A lost write uses nobody's memory any more: the sender is told as if it were sent."""
        if isinstance(message, Write):
            lost = replace(message, pieces=())
            heapq.heappush(self._to_receiver, Parcel(self._sent - 0.5, self._sent, lost))

    def _next(self) -> Callable[[], None] | None:
        if self._to_sender:
            message = self._to_sender.popleft()
            return lambda: self._sender.on_message(self.sender_link, message)
        if self.faults.stall_after is not None and self._delivered >= self.faults.stall_after:
            self._stalled = True
        if self._stalled or not self._to_receiver:
            return None
        item = heapq.heappop(self._to_receiver)
        self._delivered += 1
        return lambda: self._deliver(item)

    def _deliver(self, item: Parcel) -> None:
        message = item.message
        if isinstance(message, Write):
            self._deliver_write(item, message)
        else:
            self._receiver.on_message(self.receiver_link, message)
        after = self.faults.disconnect_after
        if after is not None and self._delivered >= after:
            self.close("the connection was cut")

    def _deliver_write(self, item: Parcel, write: Write) -> None:
        if write.pieces:
            pieces = flipped(write.pieces) if item.corrupt else write.pieces
            if not self.listener.one_sided:
                self._receiver.on_message(self.receiver_link, replace(write, pieces=pieces))
            elif item.destination is not None:
                place = item.destination
                if not item.repeat:
                    first = place.index(write.page)
                    for page_id, piece in zip(place.page_ids[first:], pieces, strict=False):
                        self._receiver.land(page_id, write.layer, piece)
                self._receiver.on_message(self.receiver_link, replace(write, pieces=()))
        if not item.repeat:
            self._sender.on_sent(self.sender_link, [write])

    def _tell_closed(self) -> None:
        self._receiver.on_closed(self.receiver_link, self._reason)
        self._sender.on_closed(self.sender_link, self._reason)
        self.listener.forget(self)


def _checksums(write: Write) -> tuple[int, ...]:
    return tuple(
        checksum(piece[start : start + len(piece) // write.layers])
        for piece in write.pieces
        for start in range(0, len(piece), len(piece) // write.layers)
    )


class LoopbackLink:
    """One end of a loopback connection. An opening gets its answer at once."""

    asks_places = False
    check_every = 1

    def __init__(self, connection: _Connection, *, towards_receiver: bool) -> None:
        self._connection = connection
        self._towards_receiver = towards_receiver

    @property
    def one_sided(self) -> bool:
        return self._connection.listener.one_sided

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def takes_from(self, store: LatentStore) -> bool:
        return False

    def send(self, message: Message) -> None:
        self._connection.submit(message, self._towards_receiver)

    def cancel(self, lease_id: str, generation: int) -> int:
        return self._connection.cancel(lease_id, generation)

    def wait_room(self, size: int, stop: Callable[[], bool]) -> None:
        """The queue has no bound: it holds views of memory of this very process."""

    def close(self, reason: str) -> None:
        self._connection.close(reason)


class LoopbackListener:
    """Accepts senders of this process.

    Args:
        page_format: format of the pages that are received here.
        faults: what goes wrong on every connection.
        one_sided: writes land without the receiver's check.
        manual: nothing is delivered but by ``deliver``; for deterministic tests.
    """

    name = "loopback"

    def __init__(
        self,
        page_format: PageFormat,
        faults: Faults | None = None,
        *,
        one_sided: bool = False,
        manual: bool = False,
    ) -> None:
        self.page_format = page_format
        self.faults = faults or Faults()
        self.one_sided = one_sided
        self.endpoint: ReceiverEndpoint
        self._manual = manual
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._address = f"loopback:{secrets.token_hex(8)}"

    def start(self, endpoint: ReceiverEndpoint) -> str:
        self.endpoint = endpoint
        with _listeners_lock:
            _listeners[self._address] = self
        return self._address

    def close(self) -> None:
        with _listeners_lock:
            _listeners.pop(self._address, None)
        pumps = [connection.pump for connection in self._all()]
        self.disconnect("the receiver is closing")
        if self._manual:
            self.run_until_idle()
        for pump in pumps:
            if pump is not None and pump is not threading.current_thread():
                pump.join()

    def connect(self, sender: Endpoint) -> Link:
        """A new connection; returns the sender's end."""
        connection = _Connection(self, sender)
        with self._lock:
            self._connections.append(connection)
        if not self._manual:
            connection.pump = threading.Thread(
                target=connection.run, name="kv-loopback", daemon=True
            )
            connection.pump.start()
        return connection.sender_link

    def deliver(self) -> bool:
        """Delivers the next message of the first connection that has one; False if none has."""
        return any(connection.step() for connection in self._all())

    def run_until_idle(self) -> None:
        """Delivers all there is to deliver."""
        while self.deliver():
            pass

    def resume(self) -> None:
        """Ends the stall of every connection."""
        for connection in self._all():
            connection.resume()

    def disconnect(self, reason: str = "the connection was cut") -> None:
        """Cuts every connection; undelivered messages are lost."""
        for connection in self._all():
            connection.close(reason)

    def forget(self, connection: _Connection) -> None:
        """Drops a closed connection."""
        with self._lock:
            self._connections.remove(connection)

    def _all(self) -> Sequence[_Connection]:
        with self._lock:
            return list(self._connections)


class LoopbackDialer:
    """Connects to ``LoopbackListener`` addresses of this process."""

    name = "loopback"

    def reaches(self, address: str) -> bool:
        with _listeners_lock:
            return address in _listeners

    def dial(self, address: str, page_format: PageFormat, endpoint: Endpoint) -> Link:
        with _listeners_lock:
            listener = _listeners.get(address)
        if listener is None:
            raise TransferFailed(f"nobody listens on {address} in this process")
        if reason := refusal(listener.page_format, page_format, PROTOCOL_VERSION):
            raise Incompatible(f"{address} refused: {reason}")
        return listener.connect(endpoint)

"""A page transport over the simulated network: writes that the receiver checks, or one-sided ones.

A write leaves the sender's memory some time after it was queued; only then it is read, and its
checksum taken, as a socket or a network card would. One-sided writes land in the receiver's memory
without its process, even while that is paused, and cannot be called back once posted; the lease's
place is known to the sender when the receiver has answered its opening.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from zlib import crc32

from pdmesh.kvcache.store import LatentStore
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
from pdmesh.simulation.loop import Process
from pdmesh.simulation.network import Connection, Network
from pdmesh.wire.errors import Incompatible, TransferFailed
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from pdmesh.simulation.pulls import SimPageServer

NAME = "simulated"
_SEND_S = (0.00005, 0.002)
"""From one message's leaving to the next."""


@dataclass
class Troubles:
    """What goes wrong on page connections; probabilities are for each write.

    Attributes:
        flip: a bit changes on the way.
        cut: the connection is lost.
        stall: nothing is taken for ``stall_s`` seconds.
    """

    flip: float = 0.0
    cut: float = 0.0
    stall: float = 0.0
    stall_s: float = 3.0
    listeners: dict[str, SimListener] = field(default_factory=dict)
    page_servers: dict[str, SimPageServer] = field(default_factory=dict)


class PageConnection(Connection):
    """Both ends of one connection."""

    def __init__(
        self,
        network: Network,
        sender: tuple[Process, Endpoint],
        receiver: tuple[Process, ReceiverEndpoint],
        troubles: Troubles,
        one_sided: bool,
    ) -> None:
        super().__init__(network, sender[0], receiver[0])
        self.troubles = troubles
        self.one_sided = one_sided
        self.sender_link = SimLink(self, 0)
        self.receiver_link = SimLink(self, 1)
        self._sender = sender[1]
        self._receiver = receiver[1]
        self._queue: deque[Message] = deque()
        self._places: dict[tuple[str, int], Destination | None] = {}
        self._pumping = False
        self._landed_by = 0.0

    # ---- sending --------------------------------------------------------------------------

    def submit(self, message: Message, end: int) -> None:
        if end == 1:
            if not self.over:
                self.deliver(self.ends[0], self._at_sender, message)
            return
        self._queue.append(message)
        self._pump()

    def take_back(self, lease_id: str, generation: int) -> int:
        """Queued writes of a transfer leave the queue; returns their units."""
        key = lease_id, generation
        kept: deque[Message] = deque()
        taken = 0
        for message in self._queue:
            if isinstance(message, Write) and _key(message) == key:
                taken += message.units
            else:
                kept.append(message)
        self._queue = kept
        return taken

    def _pump(self) -> None:
        if self._pumping or not self._queue or self.sender_link.closed:
            return
        message = self._queue[0]
        if isinstance(message, Write) and self.one_sided and _key(message) not in self._places:
            return  # the receiver has not answered yet
        self._pumping = True
        rng, wait = self.network.rng, self.network.rng.uniform(*_SEND_S)
        if isinstance(message, Write) and rng.random() < self.troubles.stall:
            wait += self.troubles.stall_s
        self.network.loop.call_later(wait, self._send_next, context=self.ends[0].context)

    def _send_next(self) -> None:
        self._pumping = False
        if self._queue and not self.sender_link.closed:
            message = self._queue.popleft()
            if isinstance(message, Write):
                self._send_write(message)
            elif not self.over:
                self.deliver(self.ends[1], self._at_receiver, message)
        self._pump()

    def _send_write(self, write: Write) -> None:
        assert write.pieces
        rng, loop, sender = self.network.rng, self.network.loop, self.ends[0]
        pieces = [bytearray(piece) for piece in write.pieces]
        crcs = tuple(
            crc32(piece[start : start + len(piece) // write.layers])
            for piece in pieces
            for start in range(0, len(piece), len(piece) // write.layers)
        )
        if rng.random() < self.troubles.flip:
            piece = rng.choice(pieces)
            piece[rng.randrange(len(piece))] ^= 1 << rng.randrange(8)
            self.network.trace("flip", lease=write.lease_id, page=write.page, layer=write.layer)
        copy = replace(write, pieces=tuple(memoryview(bytes(p)) for p in pieces), crcs=crcs)
        if not self.over:
            if self.one_sided:
                self._post(write, copy)
            else:
                self.deliver(self.ends[1], self._at_receiver, copy)
                wait = rng.uniform(*_SEND_S)
                loop.call_later(wait, self._through, write, context=sender.context)
        if rng.random() < self.troubles.cut:
            self.network.trace("connection cut", ends=f"{sender}-{self.ends[1]}")
            self.break_off("the connection was cut")

    def _post(self, write: Write, copy: Write) -> None:
        """The write is under way: it lands, the receiver hears of it, the sender gets the memory
        back."""
        network = self.network
        place = self._places[_key(write)]
        land = network.loop.time() + network.delay(*self.ends)
        self._landed_by = max(self._landed_by, land)
        network.loop.call_at(land, self._land, copy, place, context=_NOBODY)
        told = replace(copy, pieces=())
        notice = self.deliver(self.ends[1], self._at_receiver, told, extra=self._lag(land))
        network.loop.call_at(
            max(land, notice) + 1e-6, self._through, write, context=self.ends[0].context
        )

    def _lag(self, land: float) -> float:
        return max(0.0, land - self.network.loop.time())

    def _land(self, write: Write, place: Destination | None) -> None:
        if place is None or self.receiver_link.closed or not self.ends[1].alive:
            return
        first = place.index(write.page)
        for page_id, piece in zip(place.page_ids[first:], write.pieces, strict=False):
            self._receiver.land(page_id, write.layer, piece)

    def _through(self, write: Write) -> None:
        if not self.sender_link.closed:
            self._sender.on_sent(self.sender_link, [write])

    # ---- receiving ------------------------------------------------------------------------

    def _at_receiver(self, message: Message) -> None:
        if self.receiver_link.closed:
            return
        self._receiver.on_message(self.receiver_link, message)
        if isinstance(message, Open) and self.one_sided:
            key = _key(message)
            place = self._receiver.destination(self.receiver_link, *key)
            if not self.over:
                self.deliver(self.ends[0], self._granted, key, place)

    def _granted(self, key: tuple[str, int], place: Destination | None) -> None:
        self._places[key] = place
        self._pump()

    def _at_sender(self, message: Message) -> None:
        if not self.sender_link.closed:
            self._sender.on_message(self.sender_link, message)

    # ---- the end --------------------------------------------------------------------------

    def shut(self, end: int, reason: str) -> None:
        """One end closes."""
        link = (self.sender_link, self.receiver_link)[end]
        if link.closed:
            return
        link.closed = True
        self._queue.clear()
        loop, mine = self.network.loop, self.ends[end]
        loop.call_soon(self._tell, end, reason, context=mine.context)
        if not self.over:
            self.forget()
            other = self.ends[1 - end]
            self.deliver(other, self.told, other, reason, extra=self._lag(self._landed_by))

    def told(self, end: Process, reason: str) -> None:
        side = self.ends.index(end)
        late = self._landed_by - self.network.loop.time()
        if side == 1 and late > 0:  # what is under way may still land
            self.network.loop.call_later(late + 1e-6, self.told, end, reason, context=end.context)
            return
        link = (self.sender_link, self.receiver_link)[side]
        if not link.closed:
            link.closed = True
            self._queue.clear()
            self._tell(side, reason)

    def _tell(self, end: int, reason: str) -> None:
        if end == 0:
            self._sender.on_closed(self.sender_link, reason)
        else:
            self._receiver.on_closed(self.receiver_link, reason)


class SimLink:
    """One end of a connection. Its other end says where pages are by ways of its own."""

    asks_places = False
    check_every = 1

    def __init__(self, connection: PageConnection, end: int) -> None:
        self._connection = connection
        self._end = end
        self.closed = False

    @property
    def one_sided(self) -> bool:
        return self._connection.one_sided

    def takes_from(self, store: LatentStore) -> bool:
        return False

    def send(self, message: Message) -> None:
        if not self.closed:
            self._connection.submit(message, self._end)

    def cancel(self, lease_id: str, generation: int) -> int:
        return self._connection.take_back(lease_id, generation)

    def wait_room(self, size: int, stop: Callable[[], bool]) -> None:
        """The queue has no bound."""

    def close(self, reason: str) -> None:
        self._connection.shut(self._end, reason)


class SimListener:
    """Accepts senders at one process."""

    name = NAME

    def __init__(
        self,
        network: Network,
        process: Process,
        page_format: PageFormat,
        troubles: Troubles,
        one_sided: bool,
    ) -> None:
        self.network = network
        self.process = process
        self.page_format = page_format
        self.troubles = troubles
        self.one_sided = one_sided
        self.endpoint: ReceiverEndpoint
        self.address = f"sim:{process.name}:{len(troubles.listeners)}"

    def start(self, endpoint: ReceiverEndpoint) -> str:
        self.endpoint = endpoint
        self.troubles.listeners[self.address] = self
        return self.address

    def close(self) -> None:
        self.troubles.listeners.pop(self.address, None)
        for connection in list(self.network.connections):
            if isinstance(connection, PageConnection) and connection.ends[1] is self.process:
                connection.shut(1, "the receiver is closing")


class SimDialer:
    """Connects one process to listeners."""

    name = NAME

    def __init__(self, network: Network, process: Process, troubles: Troubles) -> None:
        self._network = network
        self._process = process
        self._troubles = troubles

    def reaches(self, address: str) -> bool:
        return address.startswith("sim:")

    def dial(self, address: str, page_format: PageFormat, endpoint: Endpoint) -> Link:
        listener = self._troubles.listeners.get(address)
        if listener is None or not listener.process.alive:
            raise TransferFailed(f"nobody listens on {address}")
        pair = self._network.pair(self._process, listener.process)
        if listener.process.paused or pair.cut_until > self._network.loop.time():
            raise TransferFailed(f"{address} does not answer")
        if reason := refusal(listener.page_format, page_format, PROTOCOL_VERSION):
            raise Incompatible(f"{address} refused: {reason}")
        connection = PageConnection(
            self._network,
            (self._process, endpoint),
            (listener.process, listener.endpoint),
            self._troubles,
            listener.one_sided,
        )
        return connection.sender_link


def _key(message: Message) -> tuple[str, int]:
    return message.lease_id, message.generation


_NOBODY = contextvars.Context()
"""The network card's: it goes on while a process is paused."""

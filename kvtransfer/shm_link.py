"""One established connection within a host: the sender copies into the receiver's pages itself.

The stream (a Unix socket) carries control messages and notices of landed blocks. This process
cannot stop a sender that has its memory mapped, so an end of the connection means something only
when it comes from the sender's side: that side ends the stream only while it copies nothing, the
kernel ends it once the whole process is gone, and the receiver's side waits for that. A sender that
is stopped keeps the pages in quarantine until it runs again or is killed.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pdmesh.kvtransfer.checks import checked_units, checksum
from pdmesh.kvtransfer.frames import BadFrame, Credit, to_frame
from pdmesh.kvtransfer.stream_link import MAX_QUEUED_BYTES, StreamLink, send_all
from pdmesh.kvtransfer.transport import (
    Destination,
    Drained,
    Endpoint,
    FinMessage,
    Message,
    Places,
    Write,
)

Bytes = npt.NDArray[np.uint8]
_EMPTY: Bytes = np.empty(0, np.uint8)


class PlacedLink(StreamLink):
    """A sender's end that knows where the pages of its leases are."""

    one_sided = True
    asks_places = True
    num_pages = 0
    """Pages of the receiver's pool."""

    def __init__(
        self,
        sock: socket.socket,
        endpoint: Endpoint,
        page_layer_bytes: int,
        peer: str,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        super().__init__(sock, endpoint, page_layer_bytes, peer, max_queued_bytes)
        self._places: dict[tuple[str, int], Destination] = {}

    def _deliver(self, message: Message) -> None:
        if isinstance(message, Places):
            place = message.destination
            if not all(0 <= page < self.num_pages for page in place.page_ids):
                raise BadFrame("a page is outside of the receiver's pool")
            self._places[message.lease_id, message.generation] = place
        super()._deliver(message)

    def _post(self, batch: list[Message | Credit]) -> None:
        for message in batch:
            frame: Message | Credit = message
            if isinstance(message, Write):
                place = self._places[message.lease_id, message.generation]
                frame = replace(message, pieces=(), device=None, crcs=self._put(message, place))
            elif isinstance(message, FinMessage | Drained):
                self._places.pop((message.lease_id, message.generation), None)
            send_all(self._sock, list(to_frame(frame)))

    def _put(self, write: Write, place: Destination) -> tuple[int, ...]:
        """Puts a block into its pages; returns the checksums that its notice has to carry."""
        raise NotImplementedError

    def _crcs(self, write: Write, place: Destination) -> tuple[int, ...]:
        size = self._page_layer_bytes
        return tuple(
            checksum(write.pieces[page][layer * size : (layer + 1) * size])
            for page, layer in checked_units(write, place, self.check_every)
        )


class ShmLink(PlacedLink):
    """The sender's end. ``pool`` is the receiver's memory, mapped here."""

    pool: Bytes = _EMPTY

    def start(self) -> None:
        self._copying = threading.Lock()
        super().start()

    def close(self, reason: str) -> None:
        if self._begin_close(reason):
            with self._copying:  # after this nothing is copied any more
                self._shut()

    def _put(self, write: Write, place: Destination) -> tuple[int, ...]:
        crcs = self._crcs(write, place)
        unit = self._page_layer_bytes
        first = place.index(write.page)
        for page_id, piece in zip(place.page_ids[first:], write.pieces, strict=False):
            start = (page_id * place.num_layers + write.layer) * unit
            with self._copying:
                if self._closed:
                    raise OSError("the connection is closed")
                source = np.frombuffer(piece, np.uint8)
                np.copyto(self.pool[start : start + source.size], source)
        return crcs

    def _release(self) -> None:
        self.pool = _EMPTY


class ShmReceiverLink(StreamLink):
    """The receiver's end: it is closed when the sender has ended the stream, and not before."""

    one_sided = True
    asks_places = True

    def _shut(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _release(self) -> None:
        """Waits for the sender's end, whatever it still says."""
        with suppress(OSError):
            while self._sock.recv(1 << 16):
                pass

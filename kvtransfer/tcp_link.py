"""One established TCP connection: blocks go from the sender's pages straight into the receiver's.

The bytes of a block are received into their pages only while the lease wants them: each read of the
socket, which does not block, happens behind the gate of the lease (``Landing.fill``), so a lease
that is over takes no further byte, and whoever ends it waits for one such read at most. What is not
wanted where it belongs (of another lease or generation, repeated, out of place) goes through memory
of the connection and the receiver decides.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

from pdmesh.kvtransfer.checks import checksum
from pdmesh.kvtransfer.frames import (
    CRC_BYTES,
    BadFrame,
    Credit,
    Header,
    landed,
    pack_crcs,
    read_exactly,
    to_frame,
    unpack_crcs,
    write_header,
)
from pdmesh.kvtransfer.stream_link import StreamLink, send_all
from pdmesh.kvtransfer.transport import Landing, Message, ReceiverEndpoint, Verdict, Write

WINDOW_BYTES = 64 << 20
"""Bytes of writes that a receiver lets one connection have under way."""
_FLUSH_BYTES = 1 << 18
"""Bytes whose checksums are computed, while they are in the processor's cache, before a send."""
_READ_BYTES = 1 << 20


class TcpLink(StreamLink):
    """A ``Link`` that sends the bytes of its writes."""

    receiver: ReceiverEndpoint | None = None
    """Who gives writes their places, at the receiving end."""
    _owed = 0
    """Bytes taken in and not yet credited to the sender."""

    def _post(self, batch: list[Message | Credit]) -> None:
        parts: list[bytes | memoryview] = []
        size = 0
        for message in batch:
            if not isinstance(message, Write):
                parts += to_frame(message)
                continue
            crcs: list[int] = []
            parts.append(write_header(message))
            for part in self._runs(message.pieces):
                crcs += self._checksums(part)
                parts.append(part)
                size += part.nbytes
                if size >= _FLUSH_BYTES:
                    send_all(self._sock, parts)
                    parts, size = [], 0
            parts.append(pack_crcs(crcs))
        send_all(self._sock, parts)

    def _runs(self, pieces: Sequence[memoryview]) -> list[memoryview]:
        """The pieces, cut into runs of whole units."""
        step = max(1, _FLUSH_BYTES // self._page_layer_bytes) * self._page_layer_bytes
        return [
            piece[start : start + step] for piece in pieces for start in range(0, len(piece), step)
        ]

    def _checksums(self, run: memoryview) -> list[int]:
        size = self._page_layer_bytes
        return [checksum(run[start : start + size]) for start in range(0, len(run), size)]

    def _take(self, header: Header) -> None:
        write = landed(header)
        if self.receiver is None:
            raise BadFrame("a WRITE frame towards the sender")
        landing = self.receiver.landing(self, write)
        unit = self._page_layer_bytes
        if landing is None:
            staging = memoryview(bytearray(header.units * unit))
            size = header.layers * unit
            pieces = tuple(staging[i * size : (i + 1) * size] for i in range(header.pages))
            self._fill(staging)
            self._deliver(landed(header, self._read_crcs(header), pieces))
        else:
            found: list[int] = []
            for view in landing.views:
                self._receive(landing, view, found)
            self._deliver(landed(header, verdict=_compared(found, self._read_crcs(header))))
        self._credit(header.units * unit)

    def _receive(self, landing: Landing, view: memoryview, found: list[int]) -> None:
        """Fills one page's part of a block, and appends its units' checksums to ``found``.

        They are computed while the bytes are in the processor's cache.
        """
        unit, done, summed = self._page_layer_bytes, 0, 0
        while done < len(view):
            try:
                got = landing.fill(self._recv, view[done : done + _READ_BYTES])
            except BlockingIOError:
                self._wait_readable()
                continue
            if got is None:  # the lease is over: nobody looks at the rest
                self._fill(memoryview(bytearray(len(view) - done)))
                return
            if got == 0:
                raise BadFrame("the connection ended in the middle of a frame")
            done += got
            while summed + unit <= done:
                found.append(checksum(view[summed : summed + unit]))
                summed += unit

    def _recv(self, view: memoryview) -> int:
        return self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)

    def _wait_readable(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.poll()

    def _fill(self, view: memoryview) -> None:
        if not read_exactly(self._stream, view):
            raise BadFrame("the connection ended in the middle of a frame")

    def _read_crcs(self, header: Header) -> tuple[int, ...]:
        data = memoryview(bytearray(header.units * CRC_BYTES))
        self._fill(data)
        return unpack_crcs(data)

    def _credit(self, size: int) -> None:
        self._owed += size
        if self._window and self._owed * 4 >= self._window:
            self.send(Credit(self._owed))
            self._owed = 0


def _compared(found: Sequence[int], stated: Sequence[int]) -> Verdict:
    for number, crc in enumerate(stated):
        if number >= len(found) or found[number] != crc:
            return Verdict(number)
    return Verdict()

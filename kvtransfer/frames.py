"""Messages of the TCP transport as bytes: a fixed header with its own checksum, then a payload.

Little-endian: magic (4), frame version (1), kind (1), length of the lease id (2), lease id (64,
UTF-8, padded with zeros), generation (4), page (4), layer (4), payload length (4), CRC-32 of the
payload (4), CRC-32 of the header so far (4). A header that is wrong in any way cannot be trusted to
say where the next one starts, so it ends the connection; a wrong payload checksum of a write ends
only that transfer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, assert_never
from zlib import crc32

import msgspec

from pdmesh.kvtransfer.transport import (
    Abort,
    Done,
    Drained,
    FinMessage,
    Message,
    Open,
    Write,
    checksum,
)
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import InvalidRequest, TransferFailed
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import Fin

MAGIC = b"PDKV"
FRAME_VERSION = 1
MAX_CONTROL_BYTES = 1 << 20
"""Longest payload of a frame that is no write."""
MAX_LEASE_ID_BYTES = 64
_MAX_REASON_BYTES = 1024
_FIELDS = struct.Struct("<4sBBH64sIIIII")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECK.size


class Kind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    OPEN = 4
    WRITE = 5
    FIN = 6
    ABORT = 7
    DRAINED = 8
    DONE = 9


class BadFrame(TransferFailed):
    """Bytes that are no frame of this protocol; the connection cannot go on."""


class Hello(msgspec.Struct, frozen=True):
    """First frame of a dialer."""

    protocol: int
    page_format: PageFormat


@dataclass(frozen=True, slots=True)
class Header:
    """A frame's header, checked."""

    kind: Kind
    lease_id: str
    generation: int
    page: int
    layer: int
    length: int
    crc: int


class Readable(Protocol):
    """A blocking byte stream."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


def read_exactly(stream: Readable, view: memoryview) -> bool:
    """Fills ``view``; False if the stream ended before its first byte.

    Raises:
        BadFrame: the stream ended in the middle.
    """
    done = 0
    while done < len(view):
        got = stream.readinto(view[done:])
        if not got:
            if done == 0:
                return False
            raise BadFrame("the connection ended in the middle of a frame")
        done += got
    return True


def read_header(stream: Readable, buffer: bytearray, page_layer_bytes: int) -> Header | None:
    """The next header, read into ``buffer`` (HEADER_BYTES long), or None at the stream's end.

    Raises:
        BadFrame: it is none, or announces a payload of a length that its kind cannot have.
    """
    view = memoryview(buffer)
    if not read_exactly(stream, view[: len(MAGIC)]):
        return None
    if buffer[: len(MAGIC)] != MAGIC:
        raise BadFrame(f"not a page transfer connection: it starts with {bytes(buffer[:4])!r}")
    if not read_exactly(stream, view[len(MAGIC) :]):
        raise BadFrame("the connection ended in the middle of a frame")
    return parse_header(buffer, page_layer_bytes)


def parse_header(buffer: bytearray | bytes, page_layer_bytes: int) -> Header:
    """The header in ``buffer``.

    Raises:
        BadFrame: see ``read_header``.
    """
    (stated,) = _CHECK.unpack_from(buffer, _FIELDS.size)
    if crc32(memoryview(buffer)[: _FIELDS.size]) != stated:
        raise BadFrame("the checksum of a frame header is wrong")
    _, version, kind_number, id_bytes, raw_id, *numbers = _FIELDS.unpack_from(buffer)
    if version != FRAME_VERSION:
        raise BadFrame(f"frame version {version}, this side speaks {FRAME_VERSION}")
    try:
        kind = Kind(kind_number)
        lease_id = raw_id[:id_bytes].decode()
    except ValueError as error:
        raise BadFrame(f"a frame header makes no sense: {error}") from None
    header = Header(kind, lease_id, *numbers)
    wrong = (
        header.length != page_layer_bytes
        if kind is Kind.WRITE
        else header.length > MAX_CONTROL_BYTES
    )
    if wrong:
        raise BadFrame(f"a {kind.name} frame of {header.length} bytes")
    return header


def pack(
    kind: Kind,
    payload: bytes | memoryview = b"",
    lease_id: str = "",
    generation: int = 0,
    place: tuple[int, int] = (0, 0),
) -> tuple[bytes, bytes | memoryview]:
    """Header and payload of a frame; ``place`` is (page, layer)."""
    raw_id = lease_id.encode()
    if len(raw_id) > MAX_LEASE_ID_BYTES:
        raise InvalidRequest(f"lease id {lease_id!r} is longer than {MAX_LEASE_ID_BYTES} bytes")
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    fields = _FIELDS.pack(
        MAGIC, FRAME_VERSION, kind, len(raw_id), raw_id, generation, *place, size, crc32(payload)
    )
    return fields + _CHECK.pack(crc32(fields)), payload


def to_frame(message: Message) -> tuple[bytes, bytes | memoryview]:
    """Header and payload of a message."""
    lease_id, generation = message.lease_id, message.generation
    match message:
        case Open():
            return pack(Kind.OPEN, b"", lease_id, generation)
        case Write(page=page, layer=layer, data=data):
            return pack(Kind.WRITE, data or b"", lease_id, generation, (page, layer))
        case FinMessage(fin):
            return pack(Kind.FIN, encode(fin), lease_id, generation)
        case Abort(reason=reason):
            text = reason.encode()[:_MAX_REASON_BYTES]
            return pack(Kind.ABORT, text, lease_id, generation)
        case Drained():
            return pack(Kind.DRAINED, b"", lease_id, generation)
        case Done():
            return pack(Kind.DONE, b"", lease_id, generation)
        case _:
            assert_never(message)


def to_message(header: Header, payload: memoryview) -> Message:
    """The message of a frame. The checksum of a write is left to its receiver.

    Raises:
        BadFrame: the payload is wrong, or the frame belongs to the handshake.
    """
    lease_id, generation = header.lease_id, header.generation
    if header.kind is Kind.WRITE:
        return Write(lease_id, generation, header.page, header.layer, payload, header.crc)
    if checksum(payload) != header.crc:
        raise BadFrame(f"the checksum of a {header.kind.name} frame is wrong")
    match header.kind:
        case Kind.OPEN:
            return Open(lease_id, generation)
        case Kind.FIN:
            return FinMessage(_fin(header, payload))
        case Kind.ABORT:
            return Abort(lease_id, generation, bytes(payload).decode(errors="replace"))
        case Kind.DRAINED:
            return Drained(lease_id, generation)
        case Kind.DONE:
            return Done(lease_id, generation)
        case Kind.HELLO | Kind.WELCOME | Kind.REFUSED:
            raise BadFrame(f"a {header.kind.name} frame after the handshake")
        case _:
            assert_never(header.kind)


def _fin(header: Header, payload: memoryview) -> Fin:
    try:
        fin = decode(bytes(payload), Fin)
    except InvalidRequest as error:
        raise BadFrame(str(error)) from None
    if (fin.lease_id, fin.generation) != (header.lease_id, header.generation):
        raise BadFrame(f"a FIN frame of lease {header.lease_id} speaks of {fin.lease_id}")
    return fin

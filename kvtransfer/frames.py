"""Messages between two workers as bytes: a fixed header with its own checksum, then a payload.

Little-endian: magic (4), frame version (1), kind (1), length of the lease id (2), lease id (64,
UTF-8, padded with zeros), generation (4), block: page, layer, pages, layers (4 each), payload
length (4), CRC-32 of the payload (4), CRC-32 of the header so far (4). The payload of a WRITE is
the block and then the CRC-32 of each of its units (4 each); its own checksum is not used. A header
that is wrong in any way cannot be trusted to say where the next one starts, so it ends the
connection; a wrong checksum of a unit ends only that transfer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar, assert_never

import msgspec

from pdmesh.kvtransfer.checks import checksum
from pdmesh.kvtransfer.transport import (
    Abort,
    Destination,
    Done,
    Drained,
    FinMessage,
    Message,
    Open,
    Places,
    Verdict,
    Write,
)
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import InvalidRequest, TransferFailed
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import Fin

T = TypeVar("T")

MAGIC = b"PDKV"
FRAME_VERSION = 2
MAX_CONTROL_BYTES = 1 << 20
"""Longest payload of a frame that is no write."""
MAX_BLOCK_BYTES = 1 << 23
"""Most bytes in a block of several units."""
MAX_DEVICE_BLOCK_BYTES = 1 << 27
"""The same where the bytes do not go over the connection: copies of one block between devices."""
MAX_LEASE_ID_BYTES = 64
CRC_BYTES = 4
_MAX_REASON_BYTES = 1024
_FIELDS = struct.Struct("<4sBBH64sIIIIIII")
_CHECK = struct.Struct("<I")
_CREDIT = struct.Struct("<Q")
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
    LANDED = 10
    """A block that the sender has put into its pages itself; the payload is its checksums."""
    PLACES = 11
    CREDIT = 12
    """So many bytes of writes have been taken in; the sender may have as many more under way."""


class BadFrame(TransferFailed):
    """Bytes that are no frame of this protocol; the connection cannot go on."""


class Hello(msgspec.Struct, frozen=True):
    """First frame of a dialer."""

    protocol: int
    page_format: PageFormat
    agent: bytes = b""
    """What the receiver's library needs to know of the sender's."""


class Welcome(msgspec.Struct, frozen=True):
    """Answer of a listener that takes the dialer."""

    window: int = 0
    """Bytes of writes that may be under way, at least one write; 0: any number."""
    check_every: int = 1
    """One unit in so many carries a checksum."""
    store_bytes: int = 0
    """Size of the receiver's pool, where the sender writes into it."""
    base: int = 0
    """Its address in the receiver."""
    agent: bytes = b""


@dataclass(frozen=True, slots=True)
class Credit:
    """Receiver to sender, between the links: so many bytes of writes have been taken in."""

    count: int
    lease_id: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """A frame's header, checked."""

    kind: Kind
    lease_id: str
    generation: int
    page: int
    layer: int
    pages: int
    layers: int
    length: int
    crc: int

    @property
    def units(self) -> int:
        return self.pages * self.layers


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


def read_header(stream: Readable, buffer: bytearray, unit_bytes: int) -> Header | None:
    """The next header, read into ``buffer`` (HEADER_BYTES long), or None at the stream's end.

    Raises:
        BadFrame: it is none, or announces a payload of a length that its kind cannot have.
    """
    view = memoryview(buffer)
    start = 0
    while start < HEADER_BYTES:
        got = stream.readinto(view[start:])
        if not got:
            if start == 0:
                return None
            raise BadFrame("the connection ended in the middle of a frame")
        start += got
        if start >= len(MAGIC) and not buffer.startswith(MAGIC):
            break
    if not buffer.startswith(MAGIC):
        raise BadFrame(f"not a page transfer connection: it starts with {bytes(buffer[:4])!r}")
    return parse_header(buffer, unit_bytes)


def parse_header(buffer: bytearray | bytes, unit_bytes: int) -> Header:
    """The header in ``buffer``.

    Raises:
        BadFrame: see ``read_header``.
    """
    (stated,) = _CHECK.unpack_from(buffer, _FIELDS.size)
    if checksum(memoryview(buffer)[: _FIELDS.size]) != stated:
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
    if not _plausible(header, unit_bytes):
        raise BadFrame(f"a {kind.name} frame of {header.length} bytes")
    return header


def _plausible(header: Header, unit_bytes: int) -> bool:
    if header.kind is not Kind.WRITE:
        return header.length <= MAX_CONTROL_BYTES
    units = header.units
    fits = units == 1 or 0 < units * unit_bytes <= MAX_BLOCK_BYTES
    return fits and header.length == units * (unit_bytes + CRC_BYTES)


def pack(
    kind: Kind,
    payload: bytes | memoryview = b"",
    lease_id: str = "",
    generation: int = 0,
) -> tuple[bytes, bytes | memoryview]:
    """Header and payload of a frame that is no write."""
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    header = pack_header(kind, lease_id, generation, (0, 0, 0, 0), size, checksum(payload))
    return header, payload


def pack_header(
    kind: Kind,
    lease_id: str,
    generation: int,
    block: tuple[int, int, int, int],
    length: int,
    crc: int = 0,
) -> bytes:
    """A header; ``block`` is (page, layer, pages, layers)."""
    raw_id = lease_id.encode()
    if len(raw_id) > MAX_LEASE_ID_BYTES:
        raise InvalidRequest(f"lease id {lease_id!r} is longer than {MAX_LEASE_ID_BYTES} bytes")
    fields = _FIELDS.pack(
        MAGIC, FRAME_VERSION, kind, len(raw_id), raw_id, generation, *block, length, crc
    )
    return fields + _CHECK.pack(checksum(fields))


def write_header(write: Write) -> bytes:
    """The header of a WRITE."""
    block = write.page, write.layer, write.pages, write.layers
    length = write.nbytes + CRC_BYTES * write.units
    return pack_header(Kind.WRITE, write.lease_id, write.generation, block, length)


def pack_crcs(crcs: Iterable[int]) -> bytes:
    """Checksums of units, in order."""
    numbers = list(crcs)
    return struct.pack(f"<{len(numbers)}I", *numbers)


def unpack_crcs(data: bytes | bytearray | memoryview) -> tuple[int, ...]:
    """The reverse of ``pack_crcs``."""
    return struct.unpack(f"<{len(data) // CRC_BYTES}I", data)


def unpack_credit(payload: memoryview) -> int:
    """The bytes that a CREDIT frame gives.

    Raises:
        BadFrame: the payload is none.
    """
    if len(payload) != _CREDIT.size:
        raise BadFrame(f"a CREDIT frame of {len(payload)} bytes")
    (count,) = _CREDIT.unpack(payload)
    return int(count)


def to_frame(message: Message | Credit) -> tuple[bytes, bytes | memoryview]:
    """Header and payload of a message; of a write, the notice that it has landed."""
    lease_id, generation = message.lease_id, message.generation
    match message:
        case Credit(count=count):
            return pack(Kind.CREDIT, _CREDIT.pack(count))
        case Open():
            return pack(Kind.OPEN, b"", lease_id, generation)
        case Write(crcs=crcs):
            block = message.page, message.layer, message.pages, message.layers
            payload = pack_crcs(crcs)
            return pack_header(
                Kind.LANDED, lease_id, generation, block, len(payload), checksum(payload)
            ), payload
        case Places(destination=destination):
            return pack(Kind.PLACES, encode(_Places.of(destination)), lease_id, generation)
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
    """The message of a frame that is neither WRITE nor CREDIT.

    Raises:
        BadFrame: the payload is wrong, or the frame belongs to the handshake.
    """
    lease_id, generation = header.lease_id, header.generation
    if checksum(payload) != header.crc:
        raise BadFrame(f"the checksum of a {header.kind.name} frame is wrong")
    match header.kind:
        case Kind.OPEN:
            return Open(lease_id, generation)
        case Kind.LANDED:
            return landed(header, unpack_crcs(payload[: len(payload) // CRC_BYTES * CRC_BYTES]))
        case Kind.PLACES:
            return Places(lease_id, generation, _parsed(payload, _Places).destination())
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
        case Kind.WRITE | Kind.CREDIT:
            raise BadFrame(f"a {header.kind.name} frame is not expected here")
        case _:
            assert_never(header.kind)


def landed(
    header: Header,
    crcs: tuple[int, ...] = (),
    pieces: tuple[memoryview, ...] = (),
    verdict: Verdict | None = None,
) -> Write:
    """The write of a header."""
    return Write(
        header.lease_id,
        header.generation,
        header.page,
        header.layer,
        pieces,
        crcs,
        header.pages,
        header.layers,
        verdict,
    )


class _Places(msgspec.Struct, frozen=True, array_like=True):
    first_page: int
    page_ids: tuple[int, ...]
    num_layers: int
    stride: int

    @classmethod
    def of(cls, place: Destination) -> _Places:
        return cls(place.first_page, place.page_ids, place.num_layers, place.stride)

    def destination(self) -> Destination:
        return Destination(self.first_page, self.page_ids, self.num_layers, self.stride)


def _fin(header: Header, payload: memoryview) -> Fin:
    fin = _parsed(payload, Fin)
    if (fin.lease_id, fin.generation) != (header.lease_id, header.generation):
        raise BadFrame(f"a FIN frame of lease {header.lease_id} speaks of {fin.lease_id}")
    return fin


def _parsed(payload: memoryview, kind: type[T]) -> T:
    try:
        return decode(bytes(payload), kind)
    except InvalidRequest as error:
        raise BadFrame(str(error)) from None

"""Where the store keeps a page, and the packed forms in which it does: pure functions.

A page is known by its *mark*, 7 bytes of its hash (with 8 a full segment would take the next size
of the server's memory allocator, a fifth more). The anchor of its segment picks one of the
mesh's partitions and a bucket in it, so the pages of a segment lie together and every key of a
partition has the same hash tag. All numbers are big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import SEGMENT_PAGES, PageHash

MARK_BYTES = 7
_MARK = slice(8, 8 + MARK_BYTES)
MAX_PARTITIONS = 4096
PAGES = 1_000_000
_PAGES_A_BUCKET = 48
_EVENT = struct.Struct(">BHQQ")
_ROW = struct.Struct(">QHQIQ")
_OWNER = struct.Struct(">HH")
_HIT = struct.Struct(">HQB")
_BUCKET = struct.Struct(">I")

EventOp = Literal["fence", "publish", "evict"]
EVENT_OPS: tuple[EventOp, ...] = ("fence", "publish", "evict")


def mark_of(page_hash: PageHash) -> bytes:
    """The bytes by which store and index know a page: not those that pick its place."""
    return page_hash[_MARK]


def xor_of(marks: Iterable[bytes]) -> int:
    """The order-free digest of a set of marks."""
    found = 0
    for mark in marks:
        found ^= int.from_bytes(mark, "big")
    return found


def joined(marks: Iterable[bytes]) -> bytes:
    """Marks in one string."""
    return b"".join(marks)


def split(marks: bytes) -> list[bytes]:
    """The marks of a string."""
    return [marks[i : i + MARK_BYTES] for i in range(0, len(marks), MARK_BYTES)]


class Place(NamedTuple):
    """A bucket of a partition."""

    partition: int
    bucket: int


class Segment(NamedTuple):
    """Consecutive pages of a chain that lie in one bucket."""

    place: Place
    marks: list[bytes]


def bits_for(pages: int) -> int:
    """Binary logarithm of the buckets for so many pages in a mesh.

    Ten times as many still work; then the buckets get large, and cost more memory and time.
    """
    return max(4, min(24, (pages // _PAGES_A_BUCKET).bit_length()))


@dataclass(frozen=True)
class Layout:
    """How one mesh's pages are spread; fixed for as long as the data live.

    Args:
        partitions: a power of two up to 4096.
        bits: binary logarithm of the buckets of all partitions.

    Raises:
        ConfigError: there cannot be so many partitions.
    """

    partitions: int
    bits: int = bits_for(PAGES)

    def __post_init__(self) -> None:
        count = self.partitions
        if not 1 <= count <= MAX_PARTITIONS or count & (count - 1):
            raise ConfigError(
                f"{count} partitions: give a power of two from 1 to {MAX_PARTITIONS}, e.g. 16"
            )

    @property
    def name(self) -> str:
        """How the store keeps it."""
        return f"{self.partitions}x{self.bits}"

    @classmethod
    def named(cls, name: bytes) -> Layout:
        """Of a name that the store keeps."""
        partitions, bits = name.split(b"x")
        return cls(int(partitions), int(bits))

    @property
    def bucket_bits(self) -> int:
        """Binary logarithm of the buckets of a partition."""
        return max(0, self.bits - self.partitions.bit_length() + 1)

    def place(self, anchor: PageHash) -> Place:
        """Where the segment that begins with the page ``anchor`` is kept."""
        number = int.from_bytes(anchor[:6], "big")
        bucket = (number & 0xFFFFFFFF) >> (32 - self.bucket_bits)
        return Place((number >> 32) % self.partitions, bucket)

    def segments(self, hashes: Sequence[PageHash]) -> Iterator[Segment]:
        """A prompt's pages from the first one on, cut where the store cuts them."""
        for i in range(0, len(hashes), SEGMENT_PAGES):
            marks = [page_hash[_MARK] for page_hash in hashes[i : i + SEGMENT_PAGES]]
            yield Segment(self.place(hashes[i]), marks)

    def buckets(self, bitmap: bytes) -> list[int]:
        """The buckets that are in use, of the bitmap that a partition keeps."""
        return [
            8 * at + bit
            for at, byte in enumerate(bitmap)
            if byte
            for bit in range(8)
            if byte & (128 >> bit)
        ]


class PageEvent(NamedTuple):
    """One change of a partition."""

    op: EventOp
    slot: int
    epoch: int
    seq: int
    marks: bytes


def pack_event(event: PageEvent) -> bytes:
    """As the functions do it."""
    head = _EVENT.pack(EVENT_OPS.index(event.op), event.slot, event.epoch, event.seq)
    return head + event.marks


def unpack_event(data: bytes) -> PageEvent:
    """The inverse of ``pack_event``. Raises IndexError or struct.error for anything else."""
    op, slot, epoch, seq = _EVENT.unpack_from(data)
    return PageEvent(EVENT_OPS[op], slot, epoch, seq, data[_EVENT.size :])


class Row(NamedTuple):
    """What a partition says about one slot.

    ``tag`` marks the slot's live records; their number ``pages`` and the ``xor`` of their marks are
    the slot's digest.
    """

    epoch: int
    tag: int
    seq: int
    pages: int
    xor: int


def pack_row(row: Row) -> bytes:
    """As the functions do it."""
    return _ROW.pack(*row)


def unpack_row(data: bytes) -> Row:
    """The inverse of ``pack_row``."""
    return Row(*_ROW.unpack(data))


def pack_owner(slot: int, tag: int) -> bytes:
    """One owner's record in the value of a page."""
    return _OWNER.pack(slot, tag)


def unpack_owner(data: bytes) -> tuple[int, int]:
    """(slot, tag)."""
    slot, tag = _OWNER.unpack(data)
    return slot, tag


class Hit(NamedTuple):
    """An owner of the leading ``pages`` pages of a segment."""

    slot: int
    epoch: int
    pages: int


def pack_hits(hits: Iterable[Hit]) -> bytes:
    """As the function ``lookup`` does it."""
    return b"".join(_HIT.pack(*hit) for hit in hits)


def unpack_hits(data: bytes) -> list[Hit]:
    """The inverse of ``pack_hits``."""
    return [Hit(*hit) for hit in _HIT.iter_unpack(data)]


def pack_group(bucket: int, marks: Iterable[bytes]) -> bytes:
    """The pages of one bucket, as an argument of ``publish``, ``evict`` and ``lookup``."""
    return _BUCKET.pack(bucket) + joined(marks)


def unpack_group(data: bytes) -> tuple[int, list[bytes]]:
    """The inverse of ``pack_group``."""
    return int(_BUCKET.unpack_from(data)[0]), split(data[_BUCKET.size :])

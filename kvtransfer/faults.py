"""What the loopback transport can be told to do wrong, message by message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pdmesh.kvtransfer.transport import Destination, Message, Write


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong on a connection. Messages towards the receiver are numbered from 0.

    A one-sided transport repeats only the notice of a write (network cards discard the repeated
    bytes), and opens leases at once, whatever is said here about that message.
    """

    drop: frozenset[int] = frozenset()
    duplicate: frozenset[int] = frozenset()
    corrupt: frozenset[int] = frozenset()
    """Writes of which a bit is flipped on the way."""
    delay: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Message number to how many later messages may overtake it."""
    stall_after: int | None = None
    """After so many deliveries nothing reaches the receiver until ``resume``."""
    disconnect_after: int | None = None
    """After so many deliveries the connection is lost."""


@dataclass(order=True, slots=True)
class Parcel:
    """A message on its way to the receiver, ordered by when it is due."""

    due: float
    order: int
    message: Message = field(compare=False)
    corrupt: bool = field(compare=False, default=False)
    repeat: bool = field(compare=False, default=False)
    """A second copy, made by the network: the sender's memory is not involved."""
    destination: Destination | None = field(compare=False, default=None)


def flipped(pieces: tuple[memoryview, ...]) -> tuple[memoryview, ...]:
    """A copy with one bit of the first piece changed."""
    copy = bytearray(pieces[0])
    copy[len(copy) // 2] ^= 1
    return memoryview(copy), *pieces[1:]


def repeated(item: Parcel, due: float) -> Parcel:
    """A second copy of a parcel, which does not refer to the sender's memory."""
    message = item.message
    if isinstance(message, Write) and message.pieces:
        copies = tuple(memoryview(bytes(piece)) for piece in message.pieces)
        message = replace(message, pieces=copies)
    return Parcel(due, item.order, message, item.corrupt, True, item.destination)

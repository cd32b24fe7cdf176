"""What a transport is: connections that carry a few kinds of messages between two workers.

The sender dials, the receiver listens. Both ends of a connection are a ``Link``; what comes in goes
to an ``Endpoint``. A transport knows nothing of leases' states; it delivers messages in order (or,
under test, in whatever order the faults say), reports when it is through with a write's memory,
and reports once that a connection is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdmesh.kvcache.store import DevicePages, LatentStore
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import PROTOCOL_VERSION, Fin


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a lease's pages are."""

    first_page: int
    """Prompt page index of ``page_ids[0]``."""
    page_ids: tuple[int, ...]
    num_layers: int
    stride: int = 1
    """Prompt pages from one page of the lease to the next: more than 1 where several senders
    share a prompt."""

    def index(self, page: int) -> int:
        """Which page of the lease a prompt page is; -1 if none."""
        index, rest = divmod(page - self.first_page, self.stride)
        return index if rest == 0 and 0 <= index < len(self.page_ids) else -1

    @property
    def last_page(self) -> int:
        """Prompt page index of the last page (before ``first_page`` if there is none)."""
        return self.first_page + (len(self.page_ids) - 1) * self.stride


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a transport found when it compared the checksums of a block."""

    wrong: int | None = None
    """Number in the block of the first unit whose checksum was wrong."""


@dataclass(frozen=True, slots=True)
class Open:
    """Sender to receiver: from now on I write under this lease."""

    lease_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Write:
    """Sender to receiver: a block of units (one layer of one page each) of a lease.

    The block is ``layers`` layers from ``layer`` on of each of ``pages`` pages of the lease from
    ``page`` on, which is counted from the prompt's first page. Its units are in page-major order.
    """

    lease_id: str
    generation: int
    page: int
    layer: int
    pieces: tuple[memoryview, ...] = ()
    """The bytes, one piece a page; none where the transport has put them into their pages."""
    crcs: tuple[int, ...] = ()
    """CRC-32 of the units that are checked, as the sender had them (computed by the transport)."""
    pages: int = 1
    layers: int = 1
    verdict: Verdict | None = None
    """What the receiving transport found where it compared the checksums itself."""
    device: DevicePages | None = None
    """In place of ``pieces``, for a link that ``takes_from`` their store: where the bytes are."""

    @property
    def units(self) -> int:
        return self.pages * self.layers

    @property
    def nbytes(self) -> int:
        here = sum(piece.nbytes for piece in self.pieces)
        return here + (0 if self.device is None else self.device.nbytes)


@dataclass(frozen=True, slots=True)
class Places:
    """Receiver to sender, one-sided: where the pages of an opened lease are."""

    lease_id: str
    generation: int
    destination: Destination


@dataclass(frozen=True, slots=True)
class FinMessage:
    """Sender to receiver: these were all the writes."""

    fin: Fin

    @property
    def lease_id(self) -> str:
        return self.fin.lease_id

    @property
    def generation(self) -> int:
        return self.fin.generation


@dataclass(frozen=True, slots=True)
class Abort:
    """Either way: this transfer has failed or is not wanted."""

    lease_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Sender to receiver: I will never write under this generation again."""

    lease_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Done:
    """Receiver to sender: every write of this transfer has arrived."""

    lease_id: str
    generation: int


Message = Open | Places | Write | FinMessage | Abort | Drained | Done


class Link(Protocol):
    """One end of a connection. Thread-safe; none of these block, except ``wait_room``."""

    @property
    def one_sided(self) -> bool:
        """Writes land without the receiver's check; pages need quarantine after a failure."""

    @property
    def check_every(self) -> int:
        """One unit in so many of a landed write carries a checksum; 1: every one."""

    @property
    def asks_places(self) -> bool:
        """The receiver answers an opening with ``Places``, and no write may come before."""

    def takes_from(self, store: LatentStore) -> bool:
        """Writes of pages of ``store`` may say where they are in its device's memory."""

    @property
    def closed(self) -> bool: ...

    def send(self, message: Message) -> None:
        """Queues a message. On a closed link it is dropped; ``on_closed`` tells of that."""

    def cancel(self, lease_id: str, generation: int) -> int:
        """Takes the queued writes of a transfer back; returns how many."""

    def wait_room(self, size: int, stop: Callable[[], bool]) -> None:
        """Blocks while the queue is too full for ``size`` more bytes.

        Returns early when the link closes, or when ``cancel`` was called and ``stop()`` is true.
        """

    def close(self, reason: str) -> None:
        """Closes the connection; writes under way are lost. Idempotent."""


class Endpoint(Protocol):
    """What a connection's messages go to. Called on the transport's threads."""

    def on_message(self, link: Link, message: Message) -> None:
        """The pieces of a write may be used only until this returns."""

    def on_sent(self, link: Link, writes: Sequence[Write]) -> None:
        """The transport is through with the memory of these writes."""

    def on_closed(self, link: Link, reason: str) -> None:
        """Called once, after the transport has let go of every write of the link."""


class Landing(Protocol):
    """The place in the store of a block whose bytes come in."""

    @property
    def views(self) -> Sequence[memoryview]:
        """Memory of the block, one view a page."""

    def fill(self, receive: Callable[[memoryview], int], view: memoryview) -> int | None:
        """``receive(view)``, while which the lease cannot end; None if it has ended.

        ``receive`` must not block: whoever cancels the lease waits for it.
        """


class ReceiverEndpoint(Endpoint, Protocol):
    """What a listener needs of its receiver."""

    @property
    def store(self) -> LatentStore: ...

    def landing(self, link: Link, write: Write) -> Landing | None:
        """The place of a write (without bytes yet) that is wanted as it is; None otherwise."""

    def destination(self, link: Link, lease_id: str, generation: int) -> Destination | None:
        """Where the writes of a lease opened over ``link`` go, or None if it was refused."""

    def land(self, page_id: int, layer: int, data: memoryview) -> None:
        """A one-sided write: copies into the page without any check, as a network card would."""


class Listener(Protocol):
    """The receiving side of a transport."""

    @property
    def name(self) -> str: ...

    def start(self, endpoint: ReceiverEndpoint) -> str:
        """Begins to accept connections; returns the address to give to senders."""

    def close(self) -> None:
        """Stops accepting and closes every connection. Idempotent."""


class Dialer(Protocol):
    """The sending side of a transport."""

    @property
    def name(self) -> str: ...

    def reaches(self, address: str) -> bool:
        """Whether this address can be dialled from here."""

    def dial(self, address: str, page_format: PageFormat, endpoint: Endpoint) -> Link:
        """Connects and agrees on version and page format.

        Raises:
            TransferFailed: nobody answers there.
            Incompatible: the peer has another version or page format.
        """


def refusal(receiver: PageFormat, sender: PageFormat, sender_protocol: int) -> str | None:
    """Why the receiver of a connection cannot work with its sender, naming both; None if it can."""
    if sender_protocol != PROTOCOL_VERSION:
        return (
            f"the receiver speaks protocol version {PROTOCOL_VERSION},"
            f" the sender version {sender_protocol}"
        )
    if receiver.fingerprint() == sender.fingerprint():
        return None
    difference = receiver.difference(sender)
    return f"page formats of the receiver (here) and the sender (there) differ: {difference}"

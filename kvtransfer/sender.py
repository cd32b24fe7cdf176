"""The sending side of transfers: one connection an address, many transfers over each.

``Transfer.push`` only queues; a thread of the connection sends while the next layer is computed.
The memory that was pushed must stay as it is until ``finish`` or ``abort`` has returned: then the
transport holds no view of it any more.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.loopback import LoopbackDialer
from pdmesh.kvtransfer.protocol import sender as protocol
from pdmesh.kvtransfer.protocol.sender import Phase
from pdmesh.kvtransfer.shm import ShmDialer
from pdmesh.kvtransfer.tcp import TcpDialer
from pdmesh.kvtransfer.transfer import Transfer
from pdmesh.kvtransfer.transport import (
    Abort,
    Dialer,
    Done,
    Drained,
    FinMessage,
    Link,
    Message,
    Open,
    Places,
    Write,
)
from pdmesh.wire.errors import Incompatible, LeaseGone, TransferFailed
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Lease

__all__ = ["Transfer", "TransferSender"]

log = logging.getLogger(__name__)

_TOMBSTONES = 4096
Key = tuple[str, int]


class TransferSender:
    """Opens transfers to leases; keeps one connection an address and dials again when it is lost.

    Args:
        page_format: what this worker's pages are. Leases of another format are refused. None takes
            each lease's own format.
        dialers: the transports this worker has; by default loopback (within a process), shared
            memory (within a host) and TCP.
        store: where ``push_pages`` finds its pages.

    Attributes:
        observe: told of each transfer that succeeded, with its transport and bytes; on any thread.
    """

    def __init__(
        self,
        page_format: PageFormat | None = None,
        dialers: Sequence[Dialer] | None = None,
        store: LatentStore | None = None,
    ) -> None:
        self._page_format = page_format
        self._store = store
        chosen = dialers if dialers is not None else (LoopbackDialer(), ShmDialer(), TcpDialer())
        self._dialers = {dialer.name: dialer for dialer in chosen}
        self._lock = threading.Lock()
        self._dial_locks: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
        self._links: dict[tuple[str, str], Link] = {}
        self._transfers: dict[Key, Transfer] = {}
        self._tombstones: OrderedDict[Key, None] = OrderedDict()
        self._closed = False
        self.observe: Callable[[str, int], None] | None = None

    def connect(self, addresses: Sequence[tuple[str, str]]) -> None:
        """Dials the best of a receiver's (transport, address) pairs, so that ``open`` need not.

        Blocks as ``open`` does.

        Raises:
            Incompatible, TransferFailed: as ``open``.
        """
        if self._page_format is not None:
            self._link_to(addresses, "the receiver", self._page_format)

    def open(self, lease: Lease) -> Transfer:
        """Begins a transfer over the lease's best transport that this worker has too.

        Blocks while it connects (a few seconds at most), so not for an event loop.

        Raises:
            Incompatible: the page formats differ, no transport is shared, or the versions differ.
            TransferFailed: the receiver cannot be reached.
            LeaseGone: the lease was finished or aborted here before, or has a writer already.
        """
        mine = self._page_format or lease.page_format
        if difference := mine.difference(lease.page_format):
            raise Incompatible(f"prefill and decode worker {lease.instance} differ: {difference}")
        key = (lease.lease_id, lease.generation)
        self._check_new(key)
        name, link = self._link_to(lease.transports, f"decode worker {lease.instance}", mine)
        transfer = Transfer(lease, link, self._settled, self._store, name)
        with self._lock:
            if key in self._tombstones or key in self._transfers:
                raise LeaseGone(f"lease {lease.lease_id} was aborted or has a writer already")
            self._transfers[key] = transfer
        if not link.asks_places:
            transfer._step(protocol.Granted())
        if link.closed:
            transfer._step(protocol.ConnectionClosed("closed on opening"))
        elif link.asks_places:
            transfer.await_places()
        return transfer

    def refuse(self, lease_id: str, generation: int, reason: str) -> None:
        """Aborts a transfer, also one that has not been opened yet and then never will be."""
        with self._lock:
            self._bury((lease_id, generation))
            transfer = self._transfers.get((lease_id, generation))
        if transfer is not None:
            transfer.abort(reason)

    def close(self) -> None:
        """Closes all connections; transfers under way fail. Idempotent."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            link.close("the sender is closing")

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        with self._lock:
            listed = list(self._transfers.items())
        over = [(key, transfer) for key, transfer in listed if transfer.settled]
        with self._lock:  # those that ended meanwhile have gone
            return [
                f"transfer of lease {key[0]} is over and still listed"
                for key, transfer in over
                if self._transfers.get(key) is transfer
            ]

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports over which it is connected."""
        with self._lock:
            return tuple(sorted({name for name, _ in self._links}))

    @property
    def num_transfers(self) -> int:
        """Transfers not yet over."""
        with self._lock:
            return len(self._transfers)

    def on_message(self, link: Link, message: Message) -> None:
        """What a receiver says (transport threads)."""
        transfer = self._find(link, (message.lease_id, message.generation))
        if transfer is None:
            if isinstance(message, Abort):
                self._never_writes(link, message)
            return
        match message:
            case Done():
                transfer._step(protocol.Acknowledged())
            case Places():
                transfer._step(protocol.Granted())
            case Abort(reason=reason):
                transfer._step(protocol.ReceiverRefused(reason))
            case Open() | Write() | FinMessage() | Drained():
                return

    def on_sent(self, link: Link, writes: Sequence[Write]) -> None:
        """The transport has let go of these writes (transport threads)."""
        counts: dict[Key, int] = {}
        for write in writes:
            key = (write.lease_id, write.generation)
            counts[key] = counts.get(key, 0) + write.units
        for key, count in counts.items():
            transfer = self._find(link, key)
            if transfer is not None:
                transfer._step(protocol.WritesDone(count))

    def on_closed(self, link: Link, reason: str) -> None:
        """A connection is gone (transport threads)."""
        with self._lock:
            hit = [t for t in self._transfers.values() if t._link is link]
            for target in [target for target, one in self._links.items() if one is link]:
                del self._links[target]
        for transfer in hit:
            transfer._step(protocol.ConnectionClosed(reason))

    def _never_writes(self, link: Link, message: Abort) -> None:
        """A receiver asks about a transfer that is over or was never opened: it has drained."""
        key = (message.lease_id, message.generation)
        with self._lock:
            if key in self._transfers:
                return
            self._bury(key)
        link.send(Drained(*key))

    def _check_new(self, key: Key) -> None:
        with self._lock:
            if key in self._tombstones:
                raise LeaseGone(f"lease {key[0]} was finished or aborted here before")
            if key in self._transfers:
                raise LeaseGone(f"lease {key[0]} has a writer already")

    def _link_to(
        self, addresses: Sequence[tuple[str, str]], whose: str, mine: PageFormat
    ) -> tuple[str, Link]:
        failure: TransferFailed | None = None
        for name, address in addresses:
            dialer = self._dialers.get(name)
            if dialer is None or not dialer.reaches(address):
                continue
            try:
                return name, self._connected(dialer, address, mine)
            except TransferFailed as error:  # the next transport may do
                failure = failure or error
        if failure is not None:
            raise failure
        offered = ", ".join(name for name, _ in addresses) or "none"
        raise Incompatible(
            f"no transport in common: {whose} offers {offered},"
            f" prefill has {', '.join(self._dialers)}"
        )

    def _connected(self, dialer: Dialer, address: str, mine: PageFormat) -> Link:
        target = (dialer.name, address)
        with self._lock:
            dial_lock = self._dial_locks[target]
        with dial_lock:
            with self._lock:
                if self._closed:
                    raise TransferFailed("the sender is closed")
                link = self._links.get(target)
            if link is not None and not link.closed:
                return link
            link = dialer.dial(address, mine, self)
            event(log, "pages_connected", transport=dialer.name, address=address)
            with self._lock:
                self._links[target] = link
            return link

    def _find(self, link: Link, key: Key) -> Transfer | None:
        with self._lock:
            transfer = self._transfers.get(key)
        return transfer if transfer is not None and transfer._link is link else None

    def _settled(self, transfer: Transfer) -> None:
        key = (transfer.lease.lease_id, transfer.lease.generation)
        with self._lock:
            if self._transfers.get(key) is transfer:
                del self._transfers[key]
                self._bury(key)
            else:
                return
        if self.observe is not None and transfer.phase is Phase.DONE:
            self.observe(transfer.transport, transfer.num_bytes)

    def _bury(self, key: Key) -> None:
        self._tombstones[key] = None
        while len(self._tombstones) > _TOMBSTONES:
            self._tombstones.popitem(last=False)

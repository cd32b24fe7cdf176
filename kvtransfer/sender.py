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

import torch

from pdmesh.kvcache.store import tensor_bytes
from pdmesh.kvtransfer.loopback import LoopbackDialer
from pdmesh.kvtransfer.protocol import sender as protocol
from pdmesh.kvtransfer.protocol.sender import Phase, SenderState, step
from pdmesh.kvtransfer.tcp import TcpDialer
from pdmesh.kvtransfer.transport import (
    Abort,
    Dialer,
    Done,
    Drained,
    FinMessage,
    Link,
    Message,
    Open,
    Write,
)
from pdmesh.wire.errors import Incompatible, InternalError, LeaseGone, TransferFailed
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Fin, Lease

log = logging.getLogger(__name__)

_TOMBSTONES = 4096
Key = tuple[str, int]


class Transfer:
    """The pages of one prompt on their way to one lease. Thread-safe."""

    def __init__(self, lease: Lease, link: Link, on_settled: Callable[[Transfer], None]) -> None:
        self.lease = lease
        self._on_settled = on_settled
        self._link = link
        self._size = lease.page_format.page_layer_bytes
        self._changed = threading.Condition(threading.RLock())
        self._state = SenderState(lease.page_format.num_layers)
        self._failure: str | None = None

    @property
    def num_writes(self) -> int:
        """(page, layer) writes made so far: what ``Fin.num_writes`` has to say."""
        return self._state.num_writes

    @property
    def failure(self) -> str | None:
        """Why the transfer has failed, or None; lets a caller stop computing early."""
        return self._failure

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def settled(self) -> bool:
        """The transfer is over and the transport holds no view of the pages."""
        return self._state.settled

    def push(self, page_index: int, layer: int, data: memoryview | torch.Tensor) -> None:
        """Queues one layer of one page. Each (page, layer) is pushed once, when it is complete.

        Blocks only while the connection's queue is full. After a failure it does nothing.

        Args:
            page_index: page of the prompt, from ``lease.cached_pages`` to ``lease.num_pages - 1``.
            layer: layer within the page.
            data: the raw bytes of that layer of that page, or a tensor that has them.

        Raises:
            InternalError: the place or the size is not the lease's, or it was pushed before.
        """
        view = tensor_bytes(data) if isinstance(data, torch.Tensor) else data.cast("B")
        lease = self.lease
        if not lease.cached_pages <= page_index < lease.num_pages:
            raise InternalError(
                f"page {page_index} is not among those lease {lease.lease_id} needs"
            )
        if not 0 <= layer < lease.page_format.num_layers or view.nbytes != self._size:
            raise InternalError(
                f"layer {layer} of {view.nbytes} bytes does not fit the page format"
            )
        self._link.wait_room(view.nbytes, lambda: self._over)
        self._step(protocol.Pushed(page_index, layer), view)

    def finish(self, fin: Fin, timeout: float = 60.0) -> None:
        """Sends FIN and waits until the receiver has acknowledged every write.

        In every case the transport holds no view of the pages when this returns or raises.

        Raises:
            TransferFailed: either side gave up, the connection was lost, ``fin`` counts other
                writes than were made, or there was no acknowledgement within ``timeout`` seconds.
        """
        self.start_finish(fin)
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._state.settled, timeout)
        if not self._over:
            self.abort(f"no acknowledgement within {timeout:g} s")
        self._wait_settled(5.0)
        if self._failure is not None:
            raise TransferFailed(f"lease {self.lease.lease_id}: {self._failure}")

    def start_finish(self, fin: Fin) -> None:
        """Sends FIN without waiting."""
        if (fin.lease_id, fin.generation) != (self.lease.lease_id, self.lease.generation):
            raise InternalError(f"FIN of lease {fin.lease_id} for lease {self.lease.lease_id}")
        self._step(protocol.Finished(fin))

    def abort(self, reason: str, grace: float = 5.0) -> None:
        """Gives up, tells the receiver, and waits until no write is under way. Idempotent.

        A write under way that does not end within ``grace`` seconds costs the connection: it is
        closed, and with it end the other transfers over it.
        """
        self.start_abort(reason)
        self._wait_settled(grace)

    def start_abort(self, reason: str) -> None:
        """Gives up and tells the receiver, without waiting for writes under way."""
        self._step(protocol.AbortRequested(reason))

    @property
    def _over(self) -> bool:
        return self._state.phase in (Phase.DONE, Phase.DRAINING, Phase.DRAINED)

    def _wait_settled(self, grace: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._state.settled, grace):
                return
        self._link.close(f"writes of lease {self.lease.lease_id} did not drain in {grace:g} s")
        with self._changed:
            self._changed.wait_for(lambda: self._state.settled)

    def _step(self, what: protocol.Event, data: memoryview | None = None) -> None:
        with self._changed:
            self._state, effects = step(self._state, what)
            for effect in effects:
                self._apply(effect, data)
                if isinstance(effect, protocol.Fail):
                    wanted = isinstance(what, protocol.AbortRequested)
                    level = logging.INFO if wanted else logging.WARNING
                    event(
                        log, "push_failed", level, lease=self.lease.lease_id, reason=effect.reason
                    )
            self._changed.notify_all()
            settled = self._state.settled
        if settled:
            self._on_settled(self)

    def _apply(self, effect: protocol.Effect, data: memoryview | None) -> None:
        """Links never block on these, so they are called under the lock, in order."""
        lease_id, generation = self.lease.lease_id, self.lease.generation
        match effect:
            case protocol.PostOpen():
                self._link.send(Open(lease_id, generation))
            case protocol.PostWrite(page, layer):
                self._link.send(Write(lease_id, generation, page, layer, data, 0))
            case protocol.PostFin(fin):
                self._link.send(FinMessage(fin))
            case protocol.PostAbort(reason):
                self._link.send(Abort(lease_id, generation, reason))
            case protocol.PostDrained():
                self._link.send(Drained(lease_id, generation))
            case protocol.CancelQueued():
                taken = self._link.cancel(lease_id, generation)
                self._step(protocol.WritesDone(taken))
            case protocol.Succeed():
                pass
            case protocol.Fail(reason):
                self._failure = reason


class TransferSender:
    """Opens transfers to leases; keeps one connection an address and dials again when it is lost.

    Args:
        page_format: what this worker's pages are. Leases of another format are refused. None takes
            each lease's own format.
        dialers: the transports this worker has; loopback (within a process) and TCP by default.
    """

    def __init__(
        self, page_format: PageFormat | None = None, dialers: Sequence[Dialer] | None = None
    ) -> None:
        self._page_format = page_format
        chosen = dialers if dialers is not None else (LoopbackDialer(), TcpDialer())
        self._dialers = {dialer.name: dialer for dialer in chosen}
        self._lock = threading.Lock()
        self._dial_locks: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
        self._links: dict[tuple[str, str], Link] = {}
        self._transfers: dict[Key, Transfer] = {}
        self._tombstones: OrderedDict[Key, None] = OrderedDict()
        self._closed = False

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
        link = self._link_to(lease, mine)
        transfer = Transfer(lease, link, self._settled)
        with self._lock:
            if key in self._tombstones or key in self._transfers:
                raise LeaseGone(f"lease {lease.lease_id} was aborted or has a writer already")
            self._transfers[key] = transfer
        transfer._step(protocol.Granted())
        if link.closed:
            transfer._step(protocol.ConnectionClosed("closed on opening"))
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
            return [
                f"transfer of lease {key[0]} is over and still listed"
                for key, transfer in self._transfers.items()
                if transfer.settled
            ]

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
            case Abort(reason=reason):
                transfer._step(protocol.ReceiverRefused(reason))
            case Open() | Write() | FinMessage() | Drained():
                return

    def on_sent(self, link: Link, writes: Sequence[Write]) -> None:
        """The transport has let go of these writes (transport threads)."""
        counts: dict[Key, int] = {}
        for write in writes:
            key = (write.lease_id, write.generation)
            counts[key] = counts.get(key, 0) + 1
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

    def _link_to(self, lease: Lease, mine: PageFormat) -> Link:
        for name, address in lease.transports:
            dialer = self._dialers.get(name)
            if dialer is not None and dialer.reaches(address):
                return self._connected(dialer, address, mine)
        offered = ", ".join(name for name, _ in lease.transports) or "none"
        raise Incompatible(
            f"no transport in common: decode worker {lease.instance} offers {offered},"
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

    def _bury(self, key: Key) -> None:
        self._tombstones[key] = None
        while len(self._tombstones) > _TOMBSTONES:
            self._tombstones.popitem(last=False)

"""The receiving side of transfers: leases, their arrivals, and the fence before the pages.

One lock guards all leases: a write is checked and copied under it, so a lease that was cancelled
takes no further write. That makes the fence immediate for transports that deliver bytes to this
process. One-sided transports write past this process; their pages stay in quarantine until the
sender has drained or its connection is gone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.alarms import Alarms
from pdmesh.kvtransfer.arrival import Arrival, BlockLanding
from pdmesh.kvtransfer.protocol import receiver as protocol
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.kvtransfer.transport import (
    Abort,
    Destination,
    Done,
    Drained,
    FinMessage,
    Link,
    Listener,
    Message,
    Open,
    Places,
    Write,
)
from pdmesh.wire.errors import InternalError, LeaseGone, TransferFailed
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Fin

log = logging.getLogger(__name__)

Later = list[Callable[[], None]]
"""Calls to make once the lock is released."""
CallLater = Callable[[float, Callable[[], None]], object]

REMIND_SECONDS = 2.0
"""After so long in quarantine the sender is asked again to say that it has drained."""
FENCE_SECONDS = 4.0
"""After so long its connection is closed. Nothing but its answer or its end gives pages back."""
_ENDED = 4096


class TransferReceiver:
    """Receives pages into a store over any number of transports.

    The owner of a lease calls ``expect``, then ``wait``, and always ``cancel`` in the end, after
    success too: it is what makes the receiver forget the lease.

    Args:
        store: where the pages are.
        transports: listeners, best first; ``start`` starts them.
        on_arrival: called with (lease id, FIN) once all pages of a lease are in place.
        on_failure: called with (lease id, reason) once a lease has failed.
        on_drained: called with a lease id when the quarantine that ``cancel`` spoke of is over.
        call_later: makes a call after some seconds; a small thread of the receiver by default.

    The callbacks run on a transport's thread, without locks held, and must not block.
    """

    def __init__(
        self,
        store: LatentStore,
        transports: Sequence[Listener],
        *,
        on_arrival: Callable[[str, Fin], None] | None = None,
        on_failure: Callable[[str, str], None] | None = None,
        on_drained: Callable[[str], None] | None = None,
        call_later: CallLater | None = None,
    ) -> None:
        self.store = store
        self._alarms = Alarms()
        self._call_later: CallLater = call_later or self._alarms.call_later
        self._listeners = list(transports)
        self.on_arrival = on_arrival
        self.on_failure = on_failure
        self.on_drained = on_drained
        self._lock = threading.Lock()
        self._arrivals: dict[str, Arrival] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Complete pages of leases that are over and FREE."""
        self._writers: set[Link] = set()
        self._addresses: tuple[tuple[str, str], ...] = ()
        self.dropped = 0
        """Messages ignored so far: stale, repeated, or for unknown leases."""

    @property
    def addresses(self) -> tuple[tuple[str, str], ...]:
        """(name, address) of each transport, best first; empty before ``start``."""
        return self._addresses

    def start(self) -> None:
        """Starts all listeners."""
        self._addresses = tuple((lis.name, lis.start(self)) for lis in self._listeners)

    def close(self) -> None:
        """Closes all listeners and connections; leases under way fail. Idempotent."""
        self._alarms.close()
        for listener in self._listeners:
            listener.close()
        later: Later = []
        with self._lock:
            for arrival in self._arrivals.values():
                if arrival.state.phase is Phase.RESERVED:
                    self._step(arrival, protocol.Cancelled(), later)
        _run(later)

    def expect(
        self,
        lease_id: str,
        generation: int,
        page_ids: Sequence[int],
        first_page: int,
        num_layers: int,
        *,
        request_id: str = "",
        stride: int = 1,
    ) -> None:
        """Lets one sender write prompt pages ``first_page``... into physical ``page_ids``.

        A higher generation of a lease takes the place of a lower one, whose waiter gets
        TransferFailed. ``request_id`` is for logs alone. With a ``stride`` the prompt pages are
        ``first_page``, ``first_page + stride``, ...: one sender's part of a prompt.

        Raises:
            InternalError: the generation is not higher, a page does not exist or is promised to
                another lease, or writes of the old generation may still land.
        """
        place = Destination(first_page, tuple(page_ids), num_layers, stride)
        if not all(0 <= page < self.store.num_pages for page in page_ids):
            raise InternalError(f"lease {lease_id}: a page is outside of the store")
        if not 0 < num_layers <= self.store.num_layers or len(set(page_ids)) != len(page_ids):
            raise InternalError(f"lease {lease_id}: {num_layers} layers, pages {place.page_ids}")
        later: Later = []
        try:
            with self._lock:
                self._replace_old(lease_id, generation, later)
                self._check_unpromised(place.page_ids)
                self._arrivals[lease_id] = Arrival(
                    lease_id, generation, place, self.store, request_id
                )
        finally:
            _run(later)

    def _replace_old(self, lease_id: str, generation: int, later: Later) -> None:
        old = self._arrivals.get(lease_id)
        if old is None:
            return
        if generation <= old.state.generation:
            raise InternalError(
                f"lease {lease_id}: generation {generation} after {old.state.generation}"
            )
        self._step(old, protocol.Cancelled(), later)
        if old.state.phase is not Phase.FREE:
            raise InternalError(f"lease {lease_id}: its old writer has not drained")
        del self._arrivals[lease_id]

    def _check_unpromised(self, page_ids: Sequence[int]) -> None:
        for arrival in self._arrivals.values():
            if arrival.holds_pages:
                shared = set(arrival.place.page_ids) & set(page_ids)
                if shared:
                    raise InternalError(
                        f"page {min(shared)} is promised to lease {arrival.lease_id}"
                    )

    async def wait(self, lease_id: str, timeout: float) -> Fin:
        """The FIN of a lease once all its pages are in place.

        A timeout leaves the lease as it is; the owner then cancels it.

        Raises:
            TransferFailed: the sender aborted or was lost, a checksum or a count was wrong, the
                lease was cancelled, or ``timeout`` seconds went by.
            LeaseGone: no such lease is expected.
        """
        with self._lock:
            arrival = self._require(lease_id)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wrap_future(arrival.outcome)
        except TimeoutError:
            raise TransferFailed(
                f"lease {lease_id}: {arrival.state.num_arrived} of {arrival.state.expected} writes"
                f" arrived within {timeout:g} s"
            ) from None
        return self.collect(lease_id)

    def collect(self, lease_id: str) -> Fin:
        """Takes over a lease that has arrived: it is then installed.

        Raises:
            TransferFailed: it failed, or has not arrived yet.
            LeaseGone: no such lease is expected.
        """
        with self._lock:
            arrival = self._require(lease_id)
            if not arrival.outcome.done():
                raise TransferFailed(f"lease {lease_id} has not arrived")
            fin = arrival.outcome.result()
            arrival.step(protocol.Installed())
            return fin

    def cancel(self, lease_id: str) -> bool:
        """Stops accepting writes for a lease and forgets it. Idempotent.

        Returns:
            True when no write can land in its pages any more. False when one still may: the pages
            must then be kept from other use until ``on_drained`` is called for the lease.
        """
        later: Later = []
        with self._lock:
            arrival = self._arrivals.get(lease_id)
            if arrival is None:
                return True
            self._step(arrival, protocol.Cancelled(), later)
            safe = arrival.state.phase is Phase.FREE
            if safe:
                self._forget(arrival)
            else:
                arrival.owner_waits = True
        _run(later)
        return safe

    def salvage(self, lease_id: str) -> int:
        """Leading pages of a failed lease that are complete and may be used all the same.

        Also after ``cancel`` and in ``on_drained``, for as long as the owner keeps the pages.

        Raises:
            InternalError: a write may still land in them.
        """
        with self._lock:
            arrival = self._arrivals.get(lease_id)
            if arrival is None:
                return self._ended.get(lease_id, 0)
            if arrival.state.phase is not Phase.FREE:
                raise InternalError(f"lease {lease_id} is {arrival.state.phase.value}, not free")
            return arrival.whole_pages

    def phase(self, lease_id: str) -> Phase | None:
        """Where a lease stands, or None if it is not known."""
        with self._lock:
            arrival = self._arrivals.get(lease_id)
            return None if arrival is None else arrival.state.phase

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        problems: list[str] = []
        with self._lock:
            promised: dict[int, str] = {}
            for lease_id, arrival in self._arrivals.items():
                problems += arrival.problems(self._writers)
                for page in arrival.place.page_ids if arrival.holds_pages else ():
                    if page in promised:
                        problems.append(f"page {page} is in leases {promised[page]} and {lease_id}")
                    promised[page] = lease_id
        return problems

    def on_message(self, link: Link, message: Message) -> None:
        """One message of a sender (transport threads); checksums are computed without the lock."""
        wrong = self._first_wrong(link, message) if isinstance(message, Write) else None
        later: Later = []
        with self._lock:
            arrival = self._arrivals.get(message.lease_id)
            if isinstance(message, Open):
                self._open(arrival, link, message, later)
            elif arrival is None or arrival.link is not link:
                self.dropped += 1
            else:
                self._dispatch(arrival, message, wrong, later)
        _run(later)

    def on_sent(self, link: Link, writes: Sequence[Write]) -> None:
        """A receiver writes nothing."""

    def on_closed(self, link: Link, reason: str) -> None:
        """A sender's connection is gone (transport threads)."""
        later: Later = []
        with self._lock:
            for arrival in list(self._arrivals.values()):
                if arrival.link is link:
                    self._step(arrival, protocol.ConnectionClosed(reason), later)
            self._writers.discard(link)
        _run(later)

    def destination(self, link: Link, lease_id: str, generation: int) -> Destination | None:
        """Where the writes of a lease opened over ``link`` go, or None if it was refused."""
        with self._lock:
            arrival = self._arrivals.get(lease_id)
            if arrival is None or arrival.link is not link:
                return None
            if arrival.state.generation != generation or arrival.state.phase is not Phase.FILLING:
                return None
            return arrival.place

    def landing(self, link: Link, write: Write) -> BlockLanding | None:
        """The place of a write that may come straight into its pages (transport threads)."""
        with self._lock:
            arrival = self._arrivals.get(write.lease_id)
            if arrival is None or arrival.link is not link:
                return None
            return arrival.landing(write)

    def land(self, page_id: int, layer: int, data: memoryview) -> None:
        """A one-sided write: into memory, past every check and lock."""
        layers = data.nbytes // self.store.page_layer_bytes
        self.store.write_block([page_id], layer, layers, [data])

    def _require(self, lease_id: str) -> Arrival:
        arrival = self._arrivals.get(lease_id)
        if arrival is None:
            raise LeaseGone(f"lease {lease_id} is not expected here")
        return arrival

    def _first_wrong(self, link: Link, write: Write) -> int | None:
        if write.verdict is not None:
            return write.verdict.wrong
        with self._lock:
            arrival = self._arrivals.get(write.lease_id)
        if arrival is None or arrival.link is not link:
            return None
        return arrival.first_wrong(write, link.check_every)

    def _open(self, arrival: Arrival | None, link: Link, message: Open, later: Later) -> None:
        if arrival is None:
            link.send(Abort(message.lease_id, message.generation, "no such lease is expected"))
        elif arrival.open(link, message.generation):
            self._writers.add(link)
            if link.asks_places and arrival.state.phase is Phase.FILLING:
                link.send(Places(arrival.lease_id, message.generation, arrival.place))
            if link.closed:  # its end may have been told of already
                self._step(arrival, protocol.ConnectionClosed("closed on opening"), later)

    def _dispatch(
        self,
        arrival: Arrival,
        message: Write | FinMessage | Abort | Drained | Done | Places,
        wrong: int | None,
        later: Later,
    ) -> None:
        generation = message.generation
        match message:
            case Write(page=page, layer=layer, layers=layers) if wrong is not None:
                place = arrival.place.index(page) + wrong // layers, layer + wrong % layers
                self._step(arrival, protocol.WriteCorrupt(generation, *place), later)
            case Write(page=page, layer=layer, pages=pages, layers=layers):
                block = arrival.place.index(page), layer, pages, layers
                arrived = protocol.WriteArrived(generation, *block)
                self._step(arrival, arrived, later, message.pieces)
            case FinMessage(fin):
                self._step(arrival, protocol.FinArrived(fin), later)
            case Abort(reason=reason):
                self._step(arrival, protocol.SenderAborted(generation, reason), later)
            case Drained():
                self._step(arrival, protocol.SenderDrained(generation), later)
            case Done() | Places():
                self.dropped += 1

    def _step(
        self,
        arrival: Arrival,
        what: protocol.Event,
        later: Later,
        pieces: tuple[memoryview, ...] = (),
    ) -> None:
        before = arrival.state.phase
        notices = arrival.step(what, pieces)
        if arrival.state.phase is Phase.QUARANTINED is not before:
            later.append(partial(self._watch, arrival))
        for notice in notices:
            match notice:
                case protocol.Deliver(fin):
                    later.append(partial(self._deliver, arrival, fin))
                case protocol.Fail(reason):
                    wanted = isinstance(what, protocol.Cancelled | protocol.SenderAborted)
                    level = logging.INFO if wanted else logging.WARNING
                    event(
                        log,
                        "transfer_failed",
                        level,
                        request=arrival.request_id,
                        lease=arrival.lease_id,
                        reason=reason,
                    )
                    later.append(partial(self._fail, arrival, reason))
                case protocol.Drop():
                    self.dropped += 1
                case protocol.Free():
                    if arrival.owner_waits:
                        self._forget(arrival)
                        later.append(partial(self._drained, arrival.lease_id))

    def _forget(self, arrival: Arrival) -> None:
        self._arrivals.pop(arrival.lease_id, None)
        self._ended[arrival.lease_id] = arrival.whole_pages
        while len(self._ended) > _ENDED:
            self._ended.popitem(last=False)

    def _watch(self, arrival: Arrival) -> None:
        """Sees to it that a quarantine ends: reminds the sender, then cuts it off."""
        self._call_later(REMIND_SECONDS, partial(self._overdue, arrival, protocol.Reminded()))
        self._call_later(FENCE_SECONDS, partial(self._overdue, arrival, protocol.DrainOverdue()))

    def _overdue(self, arrival: Arrival, what: protocol.Reminded | protocol.DrainOverdue) -> None:
        later: Later = []
        with self._lock:
            self._step(arrival, what, later)
        _run(later)

    def _deliver(self, arrival: Arrival, fin: Fin) -> None:
        arrival.outcome.set_result(fin)
        if self.on_arrival is not None:
            self.on_arrival(arrival.lease_id, fin)

    def _fail(self, arrival: Arrival, reason: str) -> None:
        arrival.outcome.set_exception(TransferFailed(f"lease {arrival.lease_id}: {reason}"))
        if self.on_failure is not None:
            self.on_failure(arrival.lease_id, reason)

    def _drained(self, lease_id: str) -> None:
        if self.on_drained is not None:
            self.on_drained(lease_id)


def _run(later: Later) -> None:
    for call in later:
        call()

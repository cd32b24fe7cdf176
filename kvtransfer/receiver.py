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
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.protocol import receiver as protocol
from pdmesh.kvtransfer.protocol.receiver import Phase, ReceiverState, step
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
    Write,
    checksum,
)
from pdmesh.wire.errors import InternalError, LeaseGone, TransferFailed
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Fin

log = logging.getLogger(__name__)

_OVER = (Phase.INSTALLED, Phase.FREE)


class _Record:
    """One lease under one generation."""

    def __init__(self, lease_id: str, state: ReceiverState, place: Destination) -> None:
        self.lease_id = lease_id
        self.state = state
        self.place = place
        self.link: Link | None = None
        self.owner_waits = False
        """The owner cancelled and waits for the end of the quarantine."""
        self.outcome: Future[Fin] = Future()
        self.outcome.set_running_or_notify_cancel()


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
    ) -> None:
        self._store = store
        self._listeners = list(transports)
        self.on_arrival = on_arrival
        self.on_failure = on_failure
        self.on_drained = on_drained
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}
        self._writers: set[Link] = set()
        self._addresses: tuple[tuple[str, str], ...] = ()
        self.dropped = 0
        """Messages ignored so far: stale, repeated, or for unknown leases."""

    @property
    def addresses(self) -> tuple[tuple[str, str], ...]:
        """(name, address) of each transport, best first; empty before ``start``."""
        return self._addresses

    @property
    def page_layer_bytes(self) -> int:
        return self._store.page_layer_bytes

    def start(self) -> None:
        """Starts all listeners."""
        self._addresses = tuple((lis.name, lis.start(_Inbox(self, lis))) for lis in self._listeners)

    def close(self) -> None:
        """Closes all listeners and connections; leases under way fail. Idempotent."""
        for listener in self._listeners:
            listener.close()
        later: list[Callable[[], None]] = []
        with self._lock:
            for record in self._records.values():
                if record.state.phase is Phase.RESERVED:
                    self._step(record, protocol.Cancelled(), later)
        _run(later)

    def expect(
        self,
        lease_id: str,
        generation: int,
        page_ids: Sequence[int],
        first_page: int,
        num_layers: int,
    ) -> None:
        """Lets one sender write prompt pages ``first_page``... into physical ``page_ids``.

        A higher generation of a lease takes the place of a lower one, whose waiter gets
        TransferFailed.

        Raises:
            InternalError: the generation is not higher, a page does not exist or is promised to
                another lease, or writes of the old generation may still land.
        """
        place = Destination(first_page, tuple(page_ids), num_layers)
        if not all(0 <= page < self._store.num_pages for page in page_ids):
            raise InternalError(f"lease {lease_id}: a page is outside of the store")
        if not 0 < num_layers <= self._store.num_layers or len(set(page_ids)) != len(page_ids):
            raise InternalError(f"lease {lease_id}: {num_layers} layers, pages {place.page_ids}")
        later: list[Callable[[], None]] = []
        try:
            with self._lock:
                self._replace_old(lease_id, generation, later)
                self._check_unpromised(place.page_ids)
                state = ReceiverState(generation, len(place.page_ids), num_layers)
                self._records[lease_id] = _Record(lease_id, state, place)
        finally:
            _run(later)

    def _replace_old(self, lease_id: str, generation: int, later: list[Callable[[], None]]) -> None:
        old = self._records.get(lease_id)
        if old is None:
            return
        if generation <= old.state.generation:
            raise InternalError(
                f"lease {lease_id}: generation {generation} after {old.state.generation}"
            )
        self._step(old, protocol.Cancelled(), later)
        if old.state.phase is not Phase.FREE:
            raise InternalError(f"lease {lease_id}: its old writer has not drained")
        del self._records[lease_id]

    def _check_unpromised(self, page_ids: Sequence[int]) -> None:
        for record in self._records.values():
            if record.state.phase not in _OVER:
                shared = set(record.place.page_ids) & set(page_ids)
                if shared:
                    raise InternalError(
                        f"page {min(shared)} is promised to lease {record.lease_id}"
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
            record = self._require(lease_id)
        try:
            await asyncio.wait_for(asyncio.wrap_future(record.outcome), timeout)
        except TimeoutError:
            raise TransferFailed(
                f"lease {lease_id}: {record.state.num_arrived} of {record.state.expected} writes"
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
            record = self._require(lease_id)
            if not record.outcome.done():
                raise TransferFailed(f"lease {lease_id} has not arrived")
            fin = record.outcome.result()
            record.state, _ = step(record.state, protocol.Installed())
            return fin

    def cancel(self, lease_id: str) -> bool:
        """Stops accepting writes for a lease and forgets it. Idempotent.

        Returns:
            True when no write can land in its pages any more. False when one still may: the pages
            must then be kept from other use until ``on_drained`` is called for the lease.
        """
        later: list[Callable[[], None]] = []
        with self._lock:
            record = self._records.get(lease_id)
            if record is None:
                return True
            self._step(record, protocol.Cancelled(), later)
            safe = record.state.phase is Phase.FREE
            if safe:
                del self._records[lease_id]
            else:
                record.owner_waits = True
        _run(later)
        return safe

    def phase(self, lease_id: str) -> Phase | None:
        """Where a lease stands, or None if it is not known."""
        with self._lock:
            record = self._records.get(lease_id)
            return None if record is None else record.state.phase

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        problems: list[str] = []
        with self._lock:
            seen: dict[int, str] = {}
            for lease_id, record in self._records.items():
                state = record.state
                if state.phase in (Phase.FILLING, Phase.QUARANTINED) and (
                    record.link is None or record.link not in self._writers
                ):
                    problems.append(f"lease {lease_id} is {state.phase.value} without a writer")
                if state.phase is Phase.COMPLETE and state.num_arrived != state.expected:
                    problems.append(f"lease {lease_id} is complete with writes missing")
                if state.arrived >> state.expected:
                    problems.append(f"lease {lease_id} counts writes that it does not have")
                if state.phase in _OVER:
                    continue
                for page in record.place.page_ids:
                    if page in seen:
                        problems.append(f"page {page} is in leases {seen[page]} and {lease_id}")
                    seen[page] = lease_id
        return problems

    def _require(self, lease_id: str) -> _Record:
        record = self._records.get(lease_id)
        if record is None:
            raise LeaseGone(f"lease {lease_id} is not expected here")
        return record

    def _destination(self, link: Link, lease_id: str, generation: int) -> Destination | None:
        with self._lock:
            record = self._records.get(lease_id)
            if record is None or record.link is not link:
                return None
            if record.state.generation != generation or record.state.phase is not Phase.FILLING:
                return None
            return record.place

    def _handle(self, link: Link, message: Message, one_sided: bool) -> None:
        """One message of a connection; the checksum is computed outside of the lock."""
        intact = not isinstance(message, Write) or self._intact(message)
        later: list[Callable[[], None]] = []
        with self._lock:
            record = self._records.get(message.lease_id)
            if isinstance(message, Open):
                self._open(link, message, one_sided, later)
            elif record is None or record.link is not link:
                self.dropped += 1
            else:
                self._dispatch(record, message, intact, later)
        _run(later)

    def _intact(self, write: Write) -> bool:
        if write.data is not None:
            return checksum(write.data) == write.crc
        with self._lock:
            record = self._records.get(write.lease_id)
            if record is None:
                return True
            place = record.place
        index = write.page - place.first_page
        if not (0 <= index < len(place.page_ids) and 0 <= write.layer < place.num_layers):
            return True
        return checksum(self._store.read(place.page_ids[index], write.layer)) == write.crc

    def _open(
        self, link: Link, message: Open, one_sided: bool, later: list[Callable[[], None]]
    ) -> None:
        record = self._records.get(message.lease_id)
        if record is None:
            link.send(Abort(message.lease_id, message.generation, "no such lease is expected"))
            return
        record.state, effects = step(record.state, protocol.Opened(message.generation, one_sided))
        for effect in effects:
            if isinstance(effect, protocol.TellSender):
                link.send(Abort(message.lease_id, message.generation, effect.reason))
        if not effects:
            record.link = link
            self._writers.add(link)
            if link.closed:
                self._step(record, protocol.ConnectionClosed("closed on opening"), later)

    def _dispatch(
        self,
        record: _Record,
        message: Write | FinMessage | Abort | Drained | Done,
        intact: bool,
        later: list[Callable[[], None]],
    ) -> None:
        generation = message.generation
        match message:
            case Write(page=page, layer=layer, data=data):
                index = page - record.place.first_page
                arrived = protocol.WriteArrived if intact else protocol.WriteCorrupt
                self._step(record, arrived(generation, index, layer), later, data=data)
            case FinMessage(fin):
                self._step(record, protocol.FinArrived(fin), later)
            case Abort(reason=reason):
                self._step(record, protocol.SenderAborted(generation, reason), later)
            case Drained():
                self._step(record, protocol.SenderDrained(generation), later)
            case Done():
                self.dropped += 1

    def _closed(self, link: Link, reason: str) -> None:
        later: list[Callable[[], None]] = []
        with self._lock:
            for record in list(self._records.values()):
                if record.link is link:
                    self._step(record, protocol.ConnectionClosed(reason), later)
            self._writers.discard(link)
        _run(later)

    def _step(
        self,
        record: _Record,
        what: protocol.Event,
        later: list[Callable[[], None]],
        data: memoryview | None = None,
    ) -> None:
        record.state, effects = step(record.state, what)
        for effect in effects:
            self._apply(record, effect, later, data)

    def _apply(
        self,
        record: _Record,
        effect: protocol.Effect,
        later: list[Callable[[], None]],
        data: memoryview | None,
    ) -> None:
        link, lease_id, generation = record.link, record.lease_id, record.state.generation
        match effect:
            case protocol.Store(page, layer):
                if data is not None:
                    self._store.write(record.place.page_ids[page], layer, data)
            case protocol.Drop():
                self.dropped += 1
            case protocol.TellSender(reason):
                if link is not None:
                    link.send(Abort(lease_id, generation, reason))
            case protocol.Acknowledge():
                if link is not None:
                    link.send(Done(lease_id, generation))
            case protocol.Deliver(fin):
                later.append(lambda: self._deliver(record, fin))
            case protocol.Fail(reason):
                later.append(lambda: self._fail(record, reason))
            case protocol.Free():
                if record.owner_waits:
                    self._records.pop(lease_id, None)
                    later.append(lambda: self._drained(lease_id))

    def _deliver(self, record: _Record, fin: Fin) -> None:
        record.outcome.set_result(fin)
        if self.on_arrival is not None:
            self.on_arrival(record.lease_id, fin)

    def _fail(self, record: _Record, reason: str) -> None:
        event(log, "transfer_failed", logging.WARNING, lease=record.lease_id, reason=reason)
        record.outcome.set_exception(TransferFailed(f"lease {record.lease_id}: {reason}"))
        if self.on_failure is not None:
            self.on_failure(record.lease_id, reason)

    def _drained(self, lease_id: str) -> None:
        if self.on_drained is not None:
            self.on_drained(lease_id)


class _Inbox:
    """A receiver as the connections of one listener see it."""

    def __init__(self, receiver: TransferReceiver, listener: Listener) -> None:
        self._receiver = receiver
        self._one_sided = listener.one_sided

    @property
    def page_layer_bytes(self) -> int:
        return self._receiver.page_layer_bytes

    def on_message(self, link: Link, message: Message) -> None:
        self._receiver._handle(link, message, self._one_sided)

    def on_sent(self, link: Link, writes: Sequence[Write]) -> None:
        """A receiver writes nothing."""

    def on_closed(self, link: Link, reason: str) -> None:
        self._receiver._closed(link, reason)

    def destination(self, link: Link, lease_id: str, generation: int) -> Destination | None:
        return self._receiver._destination(link, lease_id, generation)

    def land(self, page_id: int, layer: int, data: memoryview) -> None:
        self._receiver._store.write(page_id, layer, data)


def _run(later: list[Callable[[], None]]) -> None:
    for call in later:
        call()

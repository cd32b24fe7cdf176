"""One transfer at its sender: the protocol's state, the writes it makes, and waits for its end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from pdmesh.kvcache.store import DevicePages, LatentStore, tensor_bytes
from pdmesh.kvtransfer.frames import MAX_BLOCK_BYTES, MAX_DEVICE_BLOCK_BYTES
from pdmesh.kvtransfer.protocol import sender as protocol
from pdmesh.kvtransfer.protocol.sender import Phase, SenderState, step
from pdmesh.kvtransfer.transport import Abort, Drained, FinMessage, Link, Open, Write
from pdmesh.wire.errors import InternalError, TransferFailed
from pdmesh.wire.logs import event
from pdmesh.wire.messages import Fin, Lease

log = logging.getLogger(__name__)

GRANT_SECONDS = 2.0
"""Wait for the places of the pages before asking again, and then before giving up."""


class Transfer:
    """The pages of one prompt on their way to one lease. Thread-safe."""

    def __init__(
        self,
        lease: Lease,
        link: Link,
        on_settled: Callable[[Transfer], None],
        store: LatentStore | None = None,
        transport: str = "",
    ) -> None:
        self.lease = lease
        self.transport = transport
        self._store = store
        self._on_settled = on_settled
        self._link = link
        self._size = lease.page_format.page_layer_bytes
        self._changed = threading.Condition(threading.RLock())
        self._state = SenderState(lease.page_format.num_layers)
        self._failure: str | None = None
        self._outcome: Future[None] = Future()
        self._ended: Future[None] = Future()

    @property
    def num_writes(self) -> int:
        """(page, layer) writes made so far: what ``Fin.num_writes`` has to say."""
        return self._state.num_writes

    @property
    def num_bytes(self) -> int:
        """Bytes of the writes made so far."""
        return self._state.num_writes * self._size

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
        with self._changed:  # not between the step that ends it and what follows from that
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
        self._push_block(page_index, layer, 1, (view,))

    def push_layer(
        self, store: LatentStore, first: int, layer: int, page_ids: Sequence[int]
    ) -> None:
        """Queues one layer of several pages: ``first`` and those after it. See ``push``.

        ``page_ids`` are where they are in ``store``. Call it after the work that fills them.
        """
        step = max(1, self._block_bytes(store) // self._size)
        for start in range(0, len(page_ids), step):
            self._push_held(store, first + start, layer, 1, page_ids[start : start + step])

    def push_pages(
        self,
        first: int,
        count: int,
        page_ids: Sequence[int],
        store: LatentStore | None = None,
    ) -> None:
        """Queues whole pages, all layers of each. See ``push``.

        Args:
            first: page of the prompt that comes first, and ``count`` in all.
            page_ids: where they are in ``store``.
            store: whose pages they are; the store of the ``TransferSender`` by default.

        Raises:
            InternalError: as ``push``; there are not ``count`` pages, or there is no store.
        """
        held = store or self._store
        if held is None or len(page_ids) != count:
            raise InternalError(f"{count} pages to push, {len(page_ids)} page ids, store {held}")
        num_layers = self.lease.page_format.num_layers
        block = self._block_bytes(held)
        layers = min(num_layers, max(1, block // self._size))
        pages = max(1, block // (num_layers * self._size))
        for start in range(0, count, pages):
            ids = page_ids[start : start + pages]
            for layer in range(0, num_layers, layers):
                part = min(layers, num_layers - layer)
                self._push_held(held, first + start, layer, part, ids)

    def _block_bytes(self, store: LatentStore) -> int:
        return MAX_DEVICE_BLOCK_BYTES if self._link.takes_from(store) else MAX_BLOCK_BYTES

    def _push_held(
        self, store: LatentStore, first: int, layer: int, layers: int, page_ids: Sequence[int]
    ) -> None:
        if self._link.takes_from(store):
            device = store.device_pages(page_ids, layer, layers)
            self._push_block(first, layer, layers, (), device)
        else:
            self._push_block(first, layer, layers, store.views(page_ids, layer, layers))

    def _push_block(
        self,
        first: int,
        layer: int,
        layers: int,
        pieces: tuple[memoryview, ...],
        device: DevicePages | None = None,
    ) -> None:
        lease = self.lease
        pages = len(pieces) if device is None else len(device.page_ids)
        sizes = {piece.nbytes for piece in pieces} if device is None else {device.piece_bytes}
        if not lease.cached_pages <= first <= first + pages <= lease.num_pages:
            raise InternalError(f"page {first} is not among those lease {lease.lease_id} needs")
        within = 0 <= layer < layer + layers <= lease.page_format.num_layers
        for size in sizes:
            if not within or size != layers * self._size:
                raise InternalError(f"layer {layer} of {size} bytes does not fit the page format")
        self._link.wait_room(pages * layers * self._size, lambda: self._over)
        self._step(protocol.Pushed(first, layer, pages, layers), pieces, device)

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

    async def finished(self, fin: Fin, timeout: float = 60.0) -> None:
        """``finish`` for an event loop: waits without a thread. Raises as ``finish`` does."""
        self.start_finish(fin)
        if not await _done(self._outcome, timeout):
            self.start_abort(f"no acknowledgement within {timeout:g} s")
        await self._drained(5.0)
        if self._failure is not None:
            raise TransferFailed(f"lease {self.lease.lease_id}: {self._failure}")

    async def aborted(self, reason: str, grace: float = 5.0) -> None:
        """``abort`` for an event loop: waits without a thread."""
        self.start_abort(reason)
        await self._drained(grace)

    async def _drained(self, grace: float) -> None:
        if not await _done(self._ended, grace):
            self._link.close(f"writes of lease {self.lease.lease_id} did not drain in {grace:g} s")
            await _done(self._ended, None)

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

    def await_places(self) -> None:
        """Opens the lease where the receiver has to say where the pages are; waits for that.

        If it does not say, the transfer has failed.
        """
        self._step(protocol.Leased())
        for what in (protocol.Reminded(), protocol.AbortRequested("no answer to the opening")):
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._state.phase is not Phase.OPENING, GRANT_SECONDS
                ):
                    return
            self._step(what)

    def _step(
        self,
        what: protocol.Event,
        pieces: tuple[memoryview, ...] = (),
        device: DevicePages | None = None,
    ) -> None:
        with self._changed:
            self._state, effects = step(self._state, what)
            for effect in effects:
                self._apply(effect, pieces, device)
                if isinstance(effect, protocol.Fail):
                    wanted = isinstance(what, protocol.AbortRequested)
                    level = logging.INFO if wanted else logging.WARNING
                    event(
                        log, "push_failed", level, lease=self.lease.lease_id, reason=effect.reason
                    )
            settled = self._state.settled
            if settled:  # before anybody who waits for it can see it
                self._on_settled(self)
            self._changed.notify_all()
            for future, due in ((self._outcome, self._over or settled), (self._ended, settled)):
                if due and not future.done():
                    future.set_result(None)

    def _apply(
        self,
        effect: protocol.Effect,
        pieces: tuple[memoryview, ...],
        device: DevicePages | None,
    ) -> None:
        """Links never block on these, so they are called under the lock, in order."""
        lease_id, generation = self.lease.lease_id, self.lease.generation
        match effect:
            case protocol.PostOpen():
                self._link.send(Open(lease_id, generation))
            case protocol.PostWrite(page, layer, pages, layers):
                self._link.send(
                    Write(
                        lease_id,
                        generation,
                        page,
                        layer,
                        pieces,
                        device=device,
                        pages=pages,
                        layers=layers,
                    )
                )
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


async def _done(future: Future[None], timeout: float | None) -> bool:
    """Waits for a future that threads may settle; whether it is."""
    if not future.done():
        await asyncio.wait({asyncio.wrap_future(future)}, timeout=timeout)
    return future.done()

"""One lease at its receiver: the protocol's state with the effects that concern only this lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.checks import EVERY_UNIT, checked_units, checksum
from pdmesh.kvtransfer.protocol import receiver as protocol
from pdmesh.kvtransfer.protocol.receiver import Phase, ReceiverState
from pdmesh.kvtransfer.transport import Abort, Destination, Done, Link, Write
from pdmesh.wire.messages import Fin

Notice = protocol.Deliver | protocol.Fail | protocol.Free | protocol.Drop


class Arrival:
    """The pages of one lease under one generation. Its owner serialises all calls."""

    def __init__(
        self,
        lease_id: str,
        generation: int,
        place: Destination,
        store: LatentStore,
        request_id: str = "",
    ) -> None:
        self.lease_id = lease_id
        self.request_id = request_id
        self.place = place
        self.state = ReceiverState(generation, len(place.page_ids), place.num_layers)
        self.link: Link | None = None
        """The connection of the one sender that opened the lease."""
        self._corrupt = False
        self.owner_waits = False
        """The owner cancelled and waits for the end of the quarantine."""
        self.outcome: Future[Fin] = Future()
        self.outcome.set_running_or_notify_cancel()
        self._store = store
        self._gate = threading.Lock()
        """Held while bytes come into the pages past ``step``; see ``BlockLanding``."""

    @property
    def holds_pages(self) -> bool:
        """Writes for this lease may land, or have landed and are not taken over yet."""
        return self.state.phase not in (Phase.INSTALLED, Phase.FREE)

    @property
    def whole_pages(self) -> int:
        """Leading pages that may be kept after a failure: those with every layer, none after a
        checksum was wrong, since not every unit carries one."""
        return 0 if self._corrupt else self.state.complete_pages

    def open(self, link: Link, generation: int) -> bool:
        """Gives the lease to the sender behind ``link``; False, and it is told, if refused.

        A repeated opening by the sender that has it changes nothing.
        """
        if link is self.link and generation == self.state.generation:
            return True
        self.state, effects = protocol.step(self.state, protocol.Opened(generation, link.one_sided))
        for effect in effects:
            if isinstance(effect, protocol.TellSender):
                link.send(Abort(self.lease_id, generation, effect.reason))
        if effects:
            return False
        self.link = link
        return True

    def step(self, what: protocol.Event, pieces: tuple[memoryview, ...] = ()) -> list[Notice]:
        """Handles one event; returns what others have to learn of it.

        Once this has returned, no byte lands in the pages of a lease that is not filling.

        Args:
            pieces: the bytes of a write, one piece a page, if they are not in their pages yet.
        """
        was_filling = self.state.phase is Phase.FILLING
        self._corrupt |= isinstance(what, protocol.WriteCorrupt)
        self.state, effects = protocol.step(self.state, what)
        if was_filling and self.state.phase is not Phase.FILLING:
            self._gate.acquire()  # waits for what was let in before
            self._gate.release()
        notices: list[Notice] = []
        for effect in effects:
            match effect:
                case protocol.Store(page, layer, pages, layers):
                    if pieces:
                        ids = self.place.page_ids[page : page + pages]
                        self._store.write_block(ids, layer, layers, pieces)
                case protocol.TellSender(reason):
                    if self.link is not None:
                        self.link.send(Abort(self.lease_id, self.state.generation, reason))
                case protocol.Acknowledge():
                    if self.link is not None:
                        self.link.send(Done(self.lease_id, self.state.generation))
                case protocol.Fence(reason):
                    if self.link is not None:
                        self.link.close(reason)
                case _:
                    notices.append(effect)
        return notices

    def landing(self, write: Write) -> BlockLanding | None:
        """The place of a write whose bytes may come straight into their pages; None if not."""
        index = self.place.index(write.page)
        block = index, write.layer, write.pages, write.layers
        if not self._store.on_cpu or not self.state.wants(write.generation, *block):
            return None
        ids = self.place.page_ids[index : index + write.pages]
        return BlockLanding(self, self._store.views(ids, write.layer, write.layers))

    def fill(self, receive: Callable[[memoryview], int], view: memoryview) -> int | None:
        """See ``Landing.fill``."""
        with self._gate:
            return receive(view) if self.state.phase is Phase.FILLING else None

    def first_wrong(self, write: Write, every: int) -> int | None:
        """Number in its block of the first unit that differs from what its sender had.

        Args:
            every: one unit in so many carries a checksum; writes with their bytes carry all.
        """
        index = self.place.index(write.page)
        if not self.state.has(index, write.layer, write.pages, write.layers):
            return None  # the protocol refuses it for its place
        checked = list(checked_units(write, self.place, EVERY_UNIT if write.pieces else every))
        if len(checked) != len(write.crcs):
            return 0
        for (page, layer), unit, crc in zip(
            checked, self._units(write, checked), write.crcs, strict=True
        ):
            if checksum(unit) != crc:
                return page * write.layers + layer
        return None

    def _units(self, write: Write, checked: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Bytes of units (page of the block, layer of the block), landed already or with it."""
        if write.pieces:
            size = self._store.page_layer_bytes
            return [
                write.pieces[page][layer * size : (layer + 1) * size] for page, layer in checked
            ]
        first = self.place.index(write.page)
        return self._store.read_units(
            [(self.place.page_ids[first + page], write.layer + layer) for page, layer in checked]
        )

    def problems(self, open_links: set[Link]) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        found: list[str] = []
        state = self.state
        if state.phase in (Phase.FILLING, Phase.QUARANTINED) and self.link not in open_links:
            found.append(f"lease {self.lease_id} is {state.phase.value} without a writer")
        if state.phase is Phase.COMPLETE and state.num_arrived != state.expected:
            found.append(f"lease {self.lease_id} is complete with writes missing")
        if state.arrived >> state.expected:
            found.append(f"lease {self.lease_id} counts writes that it does not have")
        return found


class BlockLanding:
    """A ``Landing``: the views of a block's pages behind the gate of its lease."""

    def __init__(self, arrival: Arrival, views: tuple[memoryview, ...]) -> None:
        self.views = views
        self.fill = arrival.fill

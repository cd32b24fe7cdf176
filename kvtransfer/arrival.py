"""One lease at its receiver: the protocol's state with the effects that concern only this lease."""

from __future__ import annotations

from concurrent.futures import Future

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.protocol import receiver as protocol
from pdmesh.kvtransfer.protocol.receiver import Phase, ReceiverState
from pdmesh.kvtransfer.transport import Abort, Destination, Done, Link, Write, checksum
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
        self.owner_waits = False
        """The owner cancelled and waits for the end of the quarantine."""
        self.outcome: Future[Fin] = Future()
        self.outcome.set_running_or_notify_cancel()
        self._store = store

    @property
    def holds_pages(self) -> bool:
        """Writes for this lease may land, or have landed and are not taken over yet."""
        return self.state.phase not in (Phase.INSTALLED, Phase.FREE)

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

    def step(self, what: protocol.Event, data: memoryview | None = None) -> list[Notice]:
        """Handles one event; returns what others have to learn of it.

        Args:
            data: the bytes of a write, if they are not in their page yet.
        """
        self.state, effects = protocol.step(self.state, what)
        notices: list[Notice] = []
        for effect in effects:
            match effect:
                case protocol.Store(page, layer):
                    if data is not None:
                        self._store.write(self.place.page_ids[page], layer, data)
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

    def landed_intact(self, write: Write) -> bool:
        """Whether the page that a one-sided write went to has the sender's bytes."""
        index = write.page - self.place.first_page
        if (
            not 0 <= index < len(self.place.page_ids)
            or not 0 <= write.layer < self.state.num_layers
        ):
            return True  # the protocol refuses it for its place
        return checksum(self._store.read(self.place.page_ids[index], write.layer)) == write.crc

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

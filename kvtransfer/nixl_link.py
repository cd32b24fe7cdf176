"""One established NIXL connection: the library writes blocks, the stream says that they landed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from pdmesh.kvtransfer.frames import Credit, to_frame
from pdmesh.kvtransfer.shm_link import PlacedLink
from pdmesh.kvtransfer.stream_link import StreamLink, send_all
from pdmesh.kvtransfer.transport import Destination, Drained, FinMessage, Message, Write

_POLL_SECONDS = 5e-5


class NixlLink(PlacedLink):
    """The sender's end. A write is over when the library says so: then it is in remote memory."""

    batch_bytes = 64 << 20
    agent: Any = None
    remote = ""
    """The receiver's agent."""
    base = 0
    """Address of the receiver's pool there."""
    own = range(0)
    """Addresses of this side's pool."""

    def start(self) -> None:
        self._writing = threading.Lock()
        super().start()

    def close(self, reason: str) -> None:
        if self._begin_close(reason):
            with self._writing:  # after this nothing is written any more
                self._shut()

    def _post(self, batch: list[Message | Credit]) -> None:
        """All writes of a batch are one request, then come its messages in order."""
        frames: list[Message | Credit] = []
        pieces: list[memoryview] = []
        offsets: list[int] = []
        for message in batch:
            if not isinstance(message, Write):
                frames.append(message)
                continue
            place = self._places[message.lease_id, message.generation]
            pieces += message.pieces
            offsets += self._offsets(message, place)
            frames.append(replace(message, pieces=(), crcs=self._crcs(message, place)))
        if pieces:
            self.put_now(pieces, offsets)
        send_all(self._sock, [part for frame in frames for part in to_frame(frame)])
        for message in frames:
            if isinstance(message, FinMessage | Drained):
                self._places.pop((message.lease_id, message.generation), None)

    def _offsets(self, write: Write, place: Destination) -> list[int]:
        first = place.index(write.page)
        ids = place.page_ids[first : first + write.pages]
        return [(page * place.num_layers + write.layer) * self._page_layer_bytes for page in ids]

    def put_now(self, pieces: Sequence[memoryview], offsets: Sequence[int]) -> None:
        """Writes pieces to offsets of the receiver's pool and waits until they are there.

        Raises:
            OSError: the library failed, or the link is closed.
        """
        here = [(_address(piece), piece.nbytes, 0) for piece in pieces]
        there = [(self.base + at, size, 0) for at, (_, size, _) in zip(offsets, here, strict=True)]
        foreign = [(*one, "pushed") for one in here if not self._is_own(*one[:2])]
        agent = self.agent
        with self._writing:
            if self._closed:
                raise OSError("the connection is closed")
            extra = agent.register_memory(foreign, "DRAM") if foreign else None
            try:
                self._run(agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"))
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - the library has many
                raise OSError(f"nixl: {error}") from error
            finally:
                if extra is not None:
                    agent.deregister_memory(extra)

    def _run(self, here: Any, there: Any) -> None:
        handle = self.agent.initialize_xfer("WRITE", here, there, self.remote)
        try:
            state = self.agent.transfer(handle)
            while state == "PROC":
                time.sleep(_POLL_SECONDS)
                state = self.agent.check_xfer_state(handle)
            if state != "DONE":
                raise OSError(f"a write ended as {state}")
        finally:
            self.agent.release_xfer_handle(handle)

    def _is_own(self, address: int, size: int) -> bool:
        return address in self.own and address + size in self.own

    def _release(self) -> None:
        with suppress(Exception):  # the peer may be gone
            self.agent.remove_remote_agent(self.remote)


class NixlReceiverLink(StreamLink):
    """The receiver's end, with the agent through which its sender writes."""

    one_sided = True
    asks_places = True
    agent: Any = None
    registered: Any = None

    def _release(self) -> None:
        """Destroys the agent: its sender writes nothing any more."""
        agent, self.agent = self.agent, None
        with suppress(Exception):
            agent.deregister_memory(self.registered)
        self.registered = None
        del agent


def _address(piece: memoryview) -> int:
    return int(np.frombuffer(piece, np.uint8).ctypes.data)

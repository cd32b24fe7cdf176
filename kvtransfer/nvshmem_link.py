"""One established NVSHMEM connection: puts with signals, and the notices that follow them."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pdmesh.kvcache.store import LatentStore, taken_units
from pdmesh.kvtransfer.blocks import freed, joined, parted
from pdmesh.kvtransfer.checks import checked_units, checksum
from pdmesh.kvtransfer.compared_link import ComparedLink
from pdmesh.kvtransfer.device_memory import copies
from pdmesh.kvtransfer.frames import BadFrame, Credit, to_frame
from pdmesh.kvtransfer.shm_link import PlacedLink
from pdmesh.kvtransfer.stream_link import send_all
from pdmesh.kvtransfer.transport import Destination, Drained, FinMessage, Message, Write

if TYPE_CHECKING:
    from pdmesh.kvtransfer.nvshmem import NvshmemJob

_SIGNAL_ADD = 10
"""NVSHMEM_SIGNAL_ADD."""
_LANDED_SECONDS = 5.0
_POLL_SECONDS = 2e-5


class NvshmemLink(PlacedLink):
    """The sender's end. A write is over when its puts have left this device's memory."""

    batch_bytes = 1 << 30
    pool = 0
    """Address of this side's pool, and so of the receiver's there."""
    signal = 0
    """Symmetric address of the receiver's counter for this connection."""
    rank = 0
    """Of the receiver in the job."""
    stream: Any = None

    def takes_from(self, store: LatentStore) -> bool:
        return store.symmetric

    def start(self) -> None:
        self._putting = threading.Lock()
        self._bindings = importlib.import_module("nvshmem.bindings")
        super().start()

    def close(self, reason: str) -> None:
        if self._begin_close(reason):
            with self._putting:  # after this nothing is put any more
                self._shut()

    def _post(self, batch: list[Message | Credit]) -> None:
        free, rest = freed(batch)
        self._say(free)
        for part in parted(joined(rest)):
            self._post_part(part)

    def _post_part(self, part: Sequence[Message | Credit]) -> None:
        """All puts of a part, one wait for them, then its messages in order."""
        frames: list[Message | Credit] = []
        with self._putting, torch.cuda.stream(self.stream):
            if self._closed:
                raise OSError("the connection is closed")
            for message in part:
                if isinstance(message, Write):
                    place = self._places[message.lease_id, message.generation]
                    self._put_block(message, place)
                    crcs = self._crcs(message, place)
                    frames.append(replace(message, pieces=(), device=None, crcs=crcs))
                else:
                    frames.append(message)
            self.stream.synchronize()
        self._say(frames)

    def _say(self, frames: Sequence[Message | Credit]) -> None:
        send_all(self._sock, [part for frame in frames for part in to_frame(frame)])
        for frame in frames:
            if isinstance(frame, FinMessage | Drained):
                self._places.pop((frame.lease_id, frame.generation), None)

    def _put_block(self, write: Write, place: Destination) -> None:
        held, size = write.device, self._page_layer_bytes
        if held is None:
            raise OSError("only pages of the job's symmetric memory can be put")
        first = place.index(write.page)
        ids = place.page_ids[first : first + write.pages]
        for computed in held.ready:
            self.stream.wait_event(computed)
        put, stream = self._bindings.putmem_signal_on_stream, self.stream.cuda_stream
        target, source = self.pool + write.layer * size, held.tensor.data_ptr() + held.layer * size
        piece, page_bytes = held.piece_bytes, place.num_layers * size
        for one in copies(target, source, piece, page_bytes, ids, held.page_ids):
            pages = one.size // piece
            for row in range(one.rows):
                put(
                    one.target + row * one.target_pitch,
                    one.source + row * one.source_pitch,
                    one.size,
                    self.signal,
                    pages,
                    _SIGNAL_ADD,
                    self.rank,
                    stream,
                )

    def _crcs(self, write: Write, place: Destination) -> tuple[int, ...]:
        checked, held = list(checked_units(write, place, self.check_every)), write.device
        if not checked or held is None:
            return ()
        taken = taken_units(held.tensor, [held.unit(page, layer) for page, layer in checked])
        size = self._page_layer_bytes
        return tuple(checksum(taken[at : at + size]) for at in range(0, len(taken), size))


class NvshmemReceiverLink(ComparedLink):
    """The receiver's end: a notice counts once the counter says that its pieces have landed."""

    memory: NvshmemJob
    counter = 0
    _announced = 0
    _given_up = False

    def close(self, reason: str) -> None:
        if threading.current_thread() not in (self._reader, self._writer):
            self._given_up = True  # else the sender's end is seen, and what it said before counts
        super().close(reason)

    def _await(self, messages: Sequence[Message]) -> None:
        announced = sum(message.pages for message in messages if isinstance(message, Write))
        if not announced:
            return
        self._announced += announced
        deadline = time.monotonic() + _LANDED_SECONDS
        while self.memory.landed(self.counter) < self._announced:
            if self._given_up or time.monotonic() > deadline:
                raise BadFrame("the pieces of a write did not land")
            time.sleep(_POLL_SECONDS)

    def _release(self) -> None:
        super()._release()
        self.memory.give_counter(self.counter)

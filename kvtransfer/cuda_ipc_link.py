"""One established connection between processes that share a device: the sender queues the copies.

The stream (a Unix socket) carries control messages and notices of landed blocks. A notice leaves
once the mark behind its copies is done: then they are in the memory of the device, where every
kernel that is launched later, by any process, sees them. Two threads send: one queues copies and
never waits for them, so that the opening of another lease is not held up; the other waits for
marks and announces, in order.

The end of the stream says nothing about copies under way, because it comes at once, also when the
sender is killed, while a device may go on copying for a dead process until its driver has cleaned
up. So the receiver waits for one of two things before it calls the connection closed: the sender
says that its lane is at rest and its mapping closed, through an eventfd that came with the
welcome and that a full socket cannot hold up; or its process is gone (pidfd), which the kernel
reports after it has closed the process's files, those of the device among them.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from queue import SimpleQueue

import numpy as np

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.checks import checked_units, checksum
from pdmesh.kvtransfer.device_memory import DeviceMemory, ExportedPool, Lane, Mark
from pdmesh.kvtransfer.frames import Credit, to_frame
from pdmesh.kvtransfer.shm_link import PlacedLink, ShmReceiverLink
from pdmesh.kvtransfer.stream_link import send_all, words
from pdmesh.kvtransfer.transport import Drained, FinMessage, Message, Places, Write
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

Frame = Message | Credit
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Messages that wait for a mark, and for each the bytes of which it carries checksums."""

    mark: Mark
    messages: tuple[Frame, ...]
    checked: tuple[tuple[memoryview, ...], ...]


class CudaIpcLink(PlacedLink):
    """The sender's end. A write is over when its copies are in place."""

    batch_bytes = 1 << 28
    memory: DeviceMemory
    pool: ExportedPool
    """The receiver's."""
    address = 0
    """Where it is mapped here."""
    rest_fd = -1
    """An eventfd: raised once nothing is copied and nothing mapped any more."""

    def takes_from(self, store: LatentStore) -> bool:
        return self.memory.holds(store)

    def start(self) -> None:
        self._lane: Lane = self.memory.lane()
        self._sending = threading.Lock()
        self._waiting: SimpleQueue[_Batch | None] = SimpleQueue()
        self._ahead: Counter[Key] = Counter()
        """Messages of a transfer that wait for a mark: later ones of it must not overtake them."""
        name = f"kv-announce-{self.peer}"
        self._announcer = threading.Thread(target=self._announce, name=name, daemon=True)
        self._announcer.start()
        super().start()

    def _post(self, batch: list[Frame]) -> None:
        """Queues the copies of a batch; sends what has nothing to wait for."""
        ordered: list[Frame] = []
        for message in batch:
            with self._sending:
                free = not isinstance(message, Write) and not self._ahead[_key(message)]
                if free:
                    self._send([message])
                else:
                    self._ahead[_key(message)] += 1
                    ordered.append(message)
        if ordered:
            self._waiting.put(self._copied(ordered))

    def _posted(self, batch: Sequence[Frame]) -> None:
        """Only queued: the thread that waits for marks says when a write is over."""

    def _copied(self, messages: list[Frame]) -> _Batch:
        units = [self._copy(one) if isinstance(one, Write) else [] for one in messages]
        checked = self._stage(units)
        return _Batch(self._lane.record(), tuple(messages), checked)

    def _copy(self, write: Write) -> list[int]:
        """Queues the copies of a write; returns the addresses here of its units to be checked."""
        place, size = self._places[_key(write)], self._page_layer_bytes
        first = place.index(write.page)
        sources = [piece.address for piece in write.device] or list(map(_address, write.pieces))
        if write.device:
            self._lane.follow(write.device[0].ready)
        self._lane.copy(
            [
                (
                    self.address + (page_id * place.num_layers + write.layer) * size,
                    source,
                    write.layers * size,
                )
                for page_id, source in zip(place.page_ids[first:], sources, strict=False)
            ]
        )
        checked = checked_units(write, place, self.check_every)
        return [sources[page] + layer * size for page, layer in checked]

    def _stage(self, units: list[list[int]]) -> tuple[tuple[memoryview, ...], ...]:
        """Queues copies of units to the host; where each will be."""
        size, flat = self._page_layer_bytes, [unit for chosen in units for unit in chosen]
        self._staged = staged = self.memory.staging(len(flat) * size)
        base = staged.ctypes.data
        self._lane.copy([(base + i * size, unit, size) for i, unit in enumerate(flat)])
        views = iter(staged.data[at : at + size] for at in range(0, len(staged), size))
        return tuple(tuple(islice(views, len(chosen))) for chosen in units)

    def _announce(self) -> None:
        while (batch := self._waiting.get()) is not None:
            try:
                batch.mark.wait()
                frames = [
                    replace(message, pieces=(), device=(), crcs=tuple(map(checksum, views)))
                    if isinstance(message, Write)
                    else message
                    for message, views in zip(batch.messages, batch.checked, strict=True)
                ]
                with self._sending:
                    self._ahead -= Counter(map(_key, frames))
                    if self._closed:
                        continue
                    self._send(frames)
            except OSError as error:
                self.close(words(error))
                continue
            super()._posted(batch.messages)

    def _send(self, frames: Sequence[Frame]) -> None:
        send_all(self._sock, [part for frame in frames for part in to_frame(frame)])
        for frame in frames:
            if isinstance(frame, FinMessage | Drained):
                self._places.pop(_key(frame), None)

    def _rest(self) -> None:
        self._waiting.put(None)
        self._announcer.join()
        try:
            self._lane.record().wait()
            self._lane.close()
            self.memory.close(self.pool, self.address)
        except OSError as error:
            # The receiver keeps the pages until this process is gone.
            event(log, "copies_not_accounted", logging.ERROR, peer=self.peer, reason=words(error))
            return
        with suppress(OSError):
            os.eventfd_write(self.rest_fd, 1)

    def _release(self) -> None:
        os.close(self.rest_fd)


class CudaIpcReceiverLink(ShmReceiverLink):
    """The receiver's end: closed when the sender's copies have ended, and not before."""

    memory: DeviceMemory
    rest_fd = -1
    """An eventfd that the sender raises when it is at rest."""
    process_fd = -1
    """A pidfd of the sender."""

    def _deliver(self, message: Message) -> None:
        beside = self.memory.aside() if isinstance(message, Write) else nullcontext()
        with beside:  # checksums do not wait for a step that computes
            super()._deliver(message)

    def _post(self, batch: list[Frame]) -> None:
        """Tells places only when this device is through with what it did there before.

        A sender's copies are in no order with this process's kernels, and what the host is done
        with, its stream may not be.
        """
        if any(isinstance(message, Places) for message in batch):
            self.memory.settle()
        super()._post(batch)

    def _release(self) -> None:
        super()._release()
        ends = select.poll()
        for fd in (self.rest_fd, self.process_fd):
            ends.register(fd, select.POLLIN)
        while not ends.poll():
            pass
        os.close(self.rest_fd)
        os.close(self.process_fd)


def _key(message: Frame) -> Key:
    return message.lease_id, message.generation


def _address(piece: memoryview) -> int:
    return int(np.frombuffer(piece, np.uint8).ctypes.data)

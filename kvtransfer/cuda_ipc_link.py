"""One established connection between processes that share a device: the sender queues the copies.

The stream (a Unix socket) carries control messages and notices of landed blocks. A notice leaves
once the mark behind its copies is done: then they are in the memory of the device, where every
kernel that is launched later, by any process, sees them. Two threads send: one queues copies and
never waits for them, so that the opening of another lease is not held up; the other waits for
marks and announces, in order. What is said of a transfer follows its own last write, whatever was
queued behind that.

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
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from queue import SimpleQueue

import numpy as np

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.blocks import joined, parted
from pdmesh.kvtransfer.checks import checked_units, checksum
from pdmesh.kvtransfer.compared_link import ComparedLink, ms
from pdmesh.kvtransfer.device_memory import Copy, DeviceMemory, ExportedPool, Lane, Mark, copies
from pdmesh.kvtransfer.frames import Credit, to_frame
from pdmesh.kvtransfer.shm_link import PlacedLink, ShmReceiverLink
from pdmesh.kvtransfer.stream_link import send_all, words
from pdmesh.kvtransfer.transport import (
    Drained,
    FinMessage,
    Message,
    Write,
)
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

Frame = Message | Credit
Key = tuple[str, int]
_Units = tuple[int, list[int]]
"""Address of a pool and the numbers of units in it; or 0 and addresses of units."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Writes that wait for a mark, and for each the bytes of which it carries checksums."""

    mark: Mark
    writes: tuple[Write, ...]
    checked: tuple[tuple[memoryview, ...], ...]
    after: list[Frame] = field(default_factory=list)
    """What is to be said once they are announced."""
    queued: float = field(default_factory=time.monotonic)


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
        self._last: dict[Key, _Batch] = {}
        """Of each transfer that has writes which wait for a mark the batch with the last of them:
        what it says later must not overtake them."""
        name = f"kv-announce-{self.peer}"
        self._announcer = threading.Thread(target=self._announce, name=name, daemon=True)
        self._announcer.start()
        super().start()

    def _post(self, batch: list[Frame]) -> None:
        """Queues the copies of a batch; sends what has nothing to wait for."""
        for part in parted(joined(batch)):
            for written, group in groupby(part, lambda message: isinstance(message, Write)):
                if written:
                    self._copy_all([one for one in group if isinstance(one, Write)])
                else:
                    for message in group:
                        self._say(message)

    def _say(self, message: Frame) -> None:
        with self._sending:
            ahead = self._last.get(_key(message))
            if ahead is None:
                self._send([message])
            else:
                ahead.after.append(message)

    def _copy_all(self, writes: Sequence[Write]) -> None:
        batch = self._copied(writes)
        with self._sending:
            self._last |= dict.fromkeys(map(_key, writes), batch)
        self._waiting.put(batch)

    def _posted(self, batch: Sequence[Frame]) -> None:
        """Only queued: the thread that waits for marks says when a write is over."""

    def _copied(self, writes: Sequence[Write]) -> _Batch:
        checked = self._stage([self._copy(write) for write in writes])
        return _Batch(self._lane.record(), tuple(writes), checked)

    def _copy(self, write: Write) -> _Units:
        """Queues the copies of a write; returns its units to be checked, where they are here."""
        place, size = self._places[_key(write)], self._page_layer_bytes
        first, held = place.index(write.page), write.device
        ids = place.page_ids[first : first + write.pages]
        checked = checked_units(write, place, self.check_every)
        target, page_bytes = self.address + write.layer * size, place.num_layers * size
        if held is None:
            sources = list(map(_address, write.pieces))
            self._lane.copy(
                [
                    Copy(target + page_id * page_bytes, source, write.layers * size)
                    for page_id, source in zip(ids, sources, strict=True)
                ]
            )
            return 0, [sources[page] + layer * size for page, layer in checked]
        for computed in held.ready:
            self._lane.follow(computed)
        base = held.tensor.data_ptr()
        source = base + held.layer * size
        block = target, source, write.layers * size, page_bytes
        self._lane.copy(list(copies(*block, ids, held.page_ids)))
        return base, [held.unit(page, layer) for page, layer in checked]

    def _stage(self, units: Sequence[_Units]) -> tuple[tuple[memoryview, ...], ...]:
        """Queues copies of units to the host; where each will be."""
        size, total = self._page_layer_bytes, sum(len(chosen) for _, chosen in units)
        self._staged = staged = self.memory.staging(total * size)
        at = staged.ctypes.data
        queued: list[Copy] = []
        for base, chosen in units:
            if base:
                queued += copies(at, base, size, size, range(len(chosen)), chosen)
            else:
                queued += [Copy(at + i * size, unit, size) for i, unit in enumerate(chosen)]
            at += len(chosen) * size
        self._lane.copy(queued)
        held = staged.data
        views = iter(held[at : at + size] for at in range(0, len(held), size))
        return tuple(tuple(islice(views, len(chosen))) for _, chosen in units)

    def _announce(self) -> None:
        while (batch := self._waiting.get()) is not None:
            try:
                begun = time.monotonic()
                batch.mark.wait()
                there = time.monotonic()
                notices = [
                    replace(write, pieces=(), device=None, crcs=tuple(map(checksum, views)))
                    for write, views in zip(batch.writes, batch.checked, strict=True)
                ]
                with self._sending:
                    for key in set(map(_key, notices)):
                        if self._last[key] is batch:
                            del self._last[key]
                    if self._closed:
                        continue
                    self._send([*notices, *batch.after])
            except OSError as error:
                self.close(words(error))
                continue
            self._tell(batch, begun, there)
            super()._posted(batch.writes)

    def _tell(self, batch: _Batch, begun: float, there: float) -> None:
        """Where the time of a batch went: until it was this thread's turn, for its mark, since."""
        last = batch.writes[-1]
        event(
            log,
            "pages_announced",
            logging.DEBUG,
            lease=last.lease_id,
            layer=last.layer + last.layers - 1,
            writes=len(batch.writes),
            ends=len(batch.after),
            turn_ms=ms(begun - batch.queued),
            mark_ms=ms(there - begun),
            told_ms=ms(time.monotonic() - there),
            behind=self._waiting.qsize(),
        )

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


class CudaIpcReceiverLink(ComparedLink, ShmReceiverLink):
    """The receiver's end: closed when the sender's copies have ended, and not before."""

    memory: DeviceMemory
    rest_fd = -1
    """An eventfd that the sender raises when it is at rest."""
    process_fd = -1
    """A pidfd of the sender."""

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

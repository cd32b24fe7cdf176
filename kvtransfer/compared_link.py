"""A receiver's end of a connection whose pages are on a device: notices are compared together.

A notice of landed blocks carries checksums, and nothing is told of before they agree. To compare
them takes a wait for the device, which others compute on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol, cast

from pdmesh.kvtransfer.checks import checked_units, checksum
from pdmesh.kvtransfer.frames import BadFrame, Credit
from pdmesh.kvtransfer.stream_link import StreamLink, words
from pdmesh.kvtransfer.transport import (
    Destination,
    FinMessage,
    Message,
    Places,
    Verdict,
    Write,
)
from pdmesh.wire.logs import event

if TYPE_CHECKING:
    from pdmesh.kvtransfer.transport import ReceiverEndpoint

log = logging.getLogger(__name__)

COMPARED_BYTES = 1 << 26
"""When so much is to be read from the device at a time, no further notice is added."""


class ComputingDevice(Protocol):
    """What such an end asks of its device; see ``DeviceMemory``."""

    def settle(self) -> None: ...

    def aside(self) -> AbstractContextManager[None]: ...


class ComparedLink(StreamLink):
    """One thread reads messages, another delivers them, and compares the checksums of all notices
    that came meanwhile by one read of the device."""

    one_sided = True
    asks_places = True
    memory: ComputingDevice

    def start(self) -> None:
        self._came: SimpleQueue[Message | None] = SimpleQueue()
        name = f"kv-compare-{self.peer}"
        self._comparer = threading.Thread(target=self._compare, name=name, daemon=True)
        self._comparer.start()
        super().start()

    def join(self, timeout: float | None = None) -> None:
        if threading.current_thread() is not self._comparer:
            super().join(timeout)

    def _deliver(self, message: Message) -> None:
        self._came.put(message)

    def _compare(self) -> None:
        ended = False
        while not ended:
            batch = [self._came.get()]
            with suppress(Empty):
                while sum(map(self._read_bytes, batch)) < COMPARED_BYTES:
                    batch.append(self._came.get_nowait())
            ended = None in batch
            messages = [message for message in batch if message is not None]
            began, ran = time.monotonic(), time.thread_time()
            try:
                with self.memory.aside():  # checksums do not wait for a step that computes
                    self._await(messages)
                    for message in self._compared(messages):
                        super()._deliver(message)
            except OSError as error:
                self.close(words(error))
            except BadFrame as error:
                self.close(str(error))
            except Exception:  # torch has many for a device that fails
                log.exception("notices cannot be compared")
                self.close("notices cannot be compared")
            self._tell(messages, time.monotonic() - began, time.thread_time() - ran)

    def _tell(self, messages: Sequence[Message], took: float, ran: float) -> None:
        """How long messages took to handle, and how much of that this thread ran.

        A thread that waits for a device runs, since it polls; one that waits for another thread of
        its process (the interpreter's lock) does not. That is what the two numbers tell apart.
        """
        writes = [message for message in messages if isinstance(message, Write)]
        ends = [message.lease_id for message in messages if isinstance(message, FinMessage)]
        if writes or ends:
            event(
                log,
                "pages_compared",
                logging.DEBUG,
                writes=len(writes),
                units=sum(len(write.crcs) for write in writes),
                ends=",".join(ends),
                ms=ms(took),
                ran_ms=ms(ran),
            )

    def _read_bytes(self, message: Message | None) -> int:
        crcs = len(message.crcs) if isinstance(message, Write) else 0
        return crcs * self._page_layer_bytes

    def _compared(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with what was found about writes of leases that are being filled."""
        endpoint = cast("ReceiverEndpoint", self._endpoint)
        chosen: dict[int, list[tuple[int, int]]] = {}
        units: list[tuple[int, int]] = []  # of pages of the pool, by layers
        for i, write in enumerate(messages):
            if not isinstance(write, Write):
                continue
            place = endpoint.destination(self, write.lease_id, write.generation)
            if place is None or not _within(write, place):
                continue  # the receiver says what that is
            chosen[i] = list(checked_units(write, place, self.check_every))
            pages = place.page_ids[place.index(write.page) :]
            units += [(pages[page], write.layer + layer) for page, layer in chosen[i]]
        found = iter(endpoint.store.read_units(units) if units else ())
        return [
            replace(message, verdict=_verdict(message, chosen[i], found))
            if isinstance(message, Write) and i in chosen
            else message
            for i, message in enumerate(messages)
        ]

    def _await(self, messages: Sequence[Message]) -> None:
        """Waits until the blocks of all notices among them are in the device's memory. Here: a
        notice leaves its sender when they are.

        Raises:
            BadFrame: they never will be.
        """

    def _post(self, batch: list[Message | Credit]) -> None:
        """Tells places only when this device is through with what it did there before.

        A sender's copies are in no order with this process's kernels, and what the host is done
        with, its stream may not be.
        """
        if any(isinstance(message, Places) for message in batch):
            began = time.monotonic()
            self.memory.settle()
            event(log, "device_settled", logging.DEBUG, ms=ms(time.monotonic() - began))
        super()._post(batch)

    def _release(self) -> None:
        self._came.put(None)
        self._comparer.join()  # nothing that came is told of after the end
        super()._release()


def _within(write: Write, place: Destination) -> bool:
    """Whether the lease has a place for the whole block."""
    first = place.index(write.page)
    pages = 0 <= first < first + write.pages <= len(place.page_ids)
    return pages and 0 <= write.layer < write.layer + write.layers <= place.num_layers


def _verdict(
    write: Write, checked: Sequence[tuple[int, int]], found: Iterator[memoryview]
) -> Verdict:
    """Takes as many units as are checked of a block, each by its page and layer there, and tells
    the first that is another than its sender had."""
    sums = [checksum(next(found)) for _ in checked]
    if len(sums) != len(write.crcs):
        return Verdict(0)
    numbers = (page * write.layers + layer for page, layer in checked)
    pairs = zip(numbers, sums, write.crcs, strict=True)
    return Verdict(next((number for number, mine, sent in pairs if mine != sent), None))


def ms(seconds: float) -> str:
    """For the log."""
    return f"{seconds * 1e3:.2f}"

"""Reads of lent pages inside one process, and what they can be told to do wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from zlib import crc32

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.pull_reader import (
    Lent,
    ReadOrder,
    ReadStopped,
    Stop,
    WrongBytes,
    fill_page,
    page_view,
)
from pdmesh.wire.errors import TransferFailed

_servers: dict[str, LoopbackPageServer] = {}
_numbers = count()


@dataclass(frozen=True)
class ReadFaults:
    """What goes wrong with a read. Pages are counted from the start of the prefix.

    Attributes:
        wrong_bytes: pages of which a bit is flipped on the way.
        lost_at: the connection is lost before this page.
        before_page: called before each page; may block, or do things meanwhile.
        unchecked: checksums are not compared, as on a transport that has none.
    """

    wrong_bytes: frozenset[int] = frozenset()
    lost_at: int | None = None
    before_page: Callable[[int], None] | None = None
    unchecked: bool = False


class LoopbackPageServer:
    """Offers the pages of ``store`` that ``lent`` knows to readers of the same process."""

    name = "loopback"

    def __init__(self, store: LatentStore, lent: Lent) -> None:
        self.store = store
        self.lent = lent
        self._address = f"loopback:{next(_numbers)}"

    def start(self) -> str:
        _servers[self._address] = self
        return self._address

    def close(self) -> None:
        _servers.pop(self._address, None)


class LoopbackPageReader:
    """Copies pages as the owner's memory holds them, page after page.

    It takes the places that the loan named and asks nobody, as a read of remote memory does.
    """

    name = "loopback"

    def __init__(self, store: LatentStore) -> None:
        self._store = store
        self.faults = ReadFaults()
        self.reading = 0
        """Reads under way."""

    def reaches(self, address: str) -> bool:
        return address.startswith("loopback:")

    def read(self, order: ReadOrder, stop: Stop) -> None:
        self.reading += 1
        try:
            for offset, place in enumerate(order.page_ids):
                self._page(order, stop, offset, place)
        finally:
            self.reading -= 1

    def close(self) -> None:
        pass

    def _page(self, order: ReadOrder, stop: Stop, offset: int, place: int) -> None:
        faults, page = self.faults, order.first_page + offset
        if faults.before_page is not None:
            faults.before_page(page)
        if stop.asked:
            raise ReadStopped("the read was stopped")
        server = _servers.get(order.address)
        if server is None or faults.lost_at == page:
            raise TransferFailed(f"{order.address} is gone")
        data = bytearray(page_view(server.store, place))
        sent = crc32(data)
        if page in faults.wrong_bytes:
            data[len(data) // 2] ^= 1

        def arrive(view: memoryview) -> None:
            view[:] = data

        fill_page(self._store, order.destinations[offset], arrive)
        if crc32(data) != sent and not faults.unchecked:
            raise WrongBytes(f"the checksum of page {page} is wrong")

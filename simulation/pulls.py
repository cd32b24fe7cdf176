"""Reads of lent pages between simulated processes.

A read takes its time, half a page at a moment; the loan may end meanwhile, and the owner put the
pages to another use. The reader takes the places that the loan named and asks nobody, as a read of
remote memory does.
"""

from __future__ import annotations

from collections.abc import Generator
from zlib import crc32

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.pull_costs import PullCosts
from pdmesh.kvtransfer.pull_reader import (
    Lent,
    ReadOrder,
    ReadStopped,
    Stop,
    WrongBytes,
    fill_page,
    page_view,
)
from pdmesh.simulation.loop import Process, in_pieces
from pdmesh.simulation.memory import GuardedStore
from pdmesh.simulation.network import Network
from pdmesh.simulation.transport import NAME, Troubles
from pdmesh.wire.errors import TransferFailed


class SimPageServer:
    """Offers the pages of a process."""

    name = NAME

    def __init__(
        self, troubles: Troubles, process: Process, store: LatentStore, lent: Lent
    ) -> None:
        self.process = process
        self.store = store
        self.lent = lent
        self._servers = troubles.page_servers
        self._address = f"sim:{process.name}:pages:{len(self._servers)}"

    def start(self) -> str:
        self._servers[self._address] = self
        return self._address

    def close(self) -> None:
        """Readers find nobody any more."""
        self._servers.pop(self._address, None)


class SimPageReader:
    """Reads into the store of a process; ``read_s``: longest time of half a page."""

    name = NAME

    def __init__(
        self,
        network: Network,
        troubles: Troubles,
        process: Process,
        store: GuardedStore,
        read_s: float,
    ) -> None:
        self._read_s = read_s
        self._network = network
        self._troubles = troubles
        self._process = process
        self._store = store

    def reaches(self, address: str) -> bool:
        return address.startswith("sim:")

    @in_pieces
    def read(self, order: ReadOrder, stop: Stop) -> Generator[float | None, None, None]:
        server = self._troubles.page_servers.get(order.address)
        if server is None:
            raise TransferFailed(f"{order.address} is gone")
        for place, destination in zip(order.page_ids, order.destinations, strict=True):
            data = bytearray()
            for half in (0, 1):
                yield self._network.rng.random() * self._read_s
                if stop.asked:
                    raise ReadStopped("the read was stopped")
                self._reach(server)
                data += _half(page_view(server.store, place), half)
            self._put(data, destination)

    def close(self) -> None:
        """Nothing is kept open."""

    def _reach(self, server: SimPageServer) -> None:
        pair = self._network.pair(self._process, server.process)
        if not server.process.alive:
            raise TransferFailed(f"{server.process} is gone")
        if pair.cut_until > self._network.loop.time():
            raise TransferFailed(f"{server.process} does not answer")

    def _put(self, data: bytearray, destination: int) -> None:
        rng, troubles = self._network.rng, self._troubles
        sent = crc32(data)
        if rng.random() < troubles.flip:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if rng.random() < troubles.cut:
            raise TransferFailed("the connection was cut")

        def arrive(view: memoryview) -> None:
            view[:] = data

        self._store.touch([destination], "a pull")
        fill_page(self._store, destination, arrive)
        if crc32(data) != sent:
            raise WrongBytes("the checksum of a page is wrong")


def _half(view: memoryview, half: int) -> memoryview:
    middle = len(view) // 2
    return view[middle:] if half else view[:middle]


class EagerCosts(PullCosts):
    """Every pull is worth its time."""

    def worth(self, num_pages: int, page_bytes: int, page_size: int, now: float) -> bool:
        return num_pages > 0

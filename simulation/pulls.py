"""Reads of lent pages between simulated processes.

A read takes place at one moment of the time that its thread takes; the loan may have ended by then.
The reader takes the places that the loan named and asks nobody, as a read of remote memory does.
"""

from __future__ import annotations

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
from pdmesh.simulation.loop import Process
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
    """Reads into the store of a process."""

    name = NAME

    def __init__(
        self, network: Network, troubles: Troubles, process: Process, store: LatentStore
    ) -> None:
        self._network = network
        self._troubles = troubles
        self._process = process
        self._store = store

    def reaches(self, address: str) -> bool:
        return address.startswith("sim:")

    def read(self, order: ReadOrder, stop: Stop) -> None:
        server = self._troubles.page_servers.get(order.address)
        if server is None or not server.process.alive:
            raise TransferFailed(f"{order.address} is gone")
        pair = self._network.pair(self._process, server.process)
        if pair.cut_until > self._network.loop.time():
            raise TransferFailed(f"{order.address} does not answer")
        for place, destination in zip(order.page_ids, order.destinations, strict=True):
            if stop.asked:
                raise ReadStopped("the read was stopped")
            self._page(server, place, destination)

    def close(self) -> None:
        """Nothing is kept open."""

    def _page(self, server: SimPageServer, place: int, destination: int) -> None:
        rng, troubles = self._network.rng, self._troubles
        data = bytearray(page_view(server.store, place))
        sent = crc32(data)
        if rng.random() < troubles.flip:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if rng.random() < troubles.cut:
            raise TransferFailed("the connection was cut")

        def arrive(view: memoryview) -> None:
            view[:] = data

        fill_page(self._store, destination, arrive)
        if crc32(data) != sent:
            raise WrongBytes("the checksum of a page is wrong")

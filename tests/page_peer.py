"""A process with a pool that sends and receives pages, told what to do over a pipe.

One command a line, JSON; ``nvshmem_peer.py`` and ``cuda_ipc_peer.py`` are such processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn, TextIO

import torch

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.kvtransfer.transport import Dialer, Listener
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import Fin, Lease

SMALL = "64,5,16,72"
PAGES, LAYERS, PAGE_SIZE, WIDTH = map(int, os.environ.get("PEER_SHAPE", SMALL).split(","))
FORMAT = PageFormat("tiny", "weights", "bfloat16", PAGE_SIZE, LAYERS, 0, WIDTH)
CHECK_EVERY = int(os.environ.get("PEER_CHECK_EVERY", "4"))


class Peer:
    """A pool, a receiver and a sender of one process."""

    def __init__(
        self, store: LatentStore, listeners: Sequence[Listener], dialers: Sequence[Dialer]
    ) -> None:
        self.store = store
        self.device = store.tensor.device
        self.receiver = TransferReceiver(store, listeners)
        self.receiver.start()
        self.sender = TransferSender(FORMAT, dialers, store)

    def do(self, command: dict) -> object:
        return getattr(self, command.pop("do"))(**command)

    def address(self) -> list:
        return [list(pair) for pair in self.receiver.addresses]

    def fill(self, seed: int) -> None:
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(self.store.tensor.shape, generator=generator, device=self.device)
        self.store.tensor.copy_(values)
        self._synchronize()

    def poison(self) -> None:
        self.store.tensor.fill_(float("nan"))
        self._synchronize()

    def expect(self, lease_id: str, pages: list[int], first: int) -> None:
        self.receiver.expect(lease_id, 1, pages, first, LAYERS)

    def arrived(self, lease_id: str) -> str:
        try:
            asyncio.run(self.receiver.wait(lease_id, 20.0))
        except PdmeshError as error:
            return error.message
        return "arrived"

    def cancel(self, lease_id: str) -> bool:
        return self.receiver.cancel(lease_id)

    def phase(self, lease_id: str) -> str:
        phase = self.receiver.phase(lease_id)
        return "forgotten" if phase is None else phase.value

    def send(
        self, lease_id: str, to: list, pages: list[int], first: int, how: str, part: str = "all"
    ) -> str:
        """Pushes pages; all, or all but the last layer and then "abort" or "hold" on."""
        lease = Lease(
            lease_id=lease_id,
            generation=1,
            instance="pe",
            cached_pages=first,
            num_pages=first + len(pages),
            transports=tuple((name, where) for name, where in to),
            page_format=FORMAT,
        )
        transfer = self.sender.open(lease)
        if how == "pages":
            transfer.push_pages(first, len(pages), pages)
        else:
            for layer in range(LAYERS if part == "all" else LAYERS - 1):
                transfer.push_layer(self.store, first, layer, pages)
        if part == "abort":
            transfer.abort("stopped on purpose")
            return "aborted"
        if part == "hold":
            return "held"
        fin = Fin(
            lease_id=lease_id,
            generation=1,
            request_id="",
            num_writes=transfer.num_writes,
            first_tokens=(1,),
        )
        try:
            transfer.finish(fin, 20.0)
        except PdmeshError as error:
            return error.message
        return "done"

    def digest(self, pages: list[int]) -> list[int]:
        """Sum of the raw bits of each page, weighted by their places."""
        size = self.store.page_bytes // 2
        bits = self.store.tensor[pages].view(torch.int16).reshape(len(pages), size).long()
        weights = torch.arange(1, bits.shape[1] + 1, device=self.device)
        return (bits * weights).sum(1).tolist()

    def timed(self, lease_id: str, to: list, pages: list[int], how: str = "pages") -> float:
        """Seconds of one transfer, from opening to acknowledgement."""
        self._synchronize()
        began = time.perf_counter()
        assert self.send(lease_id, to, pages, 0, how) == "done"
        return time.perf_counter() - began

    def copied(self, pages: int) -> float:
        """Seconds of a copy of so many pages within the device."""
        there = torch.empty_like(self.store.tensor[:pages])
        self._synchronize()
        began = time.perf_counter()
        there.copy_(self.store.tensor[:pages])
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def problems(self) -> list[str]:
        return self.receiver.check_integrity() + self.sender.check_integrity()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def answers() -> TextIO:
    """Where answers go; what libraries print does not get between them."""
    made = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return made


def serve(peer: Peer, out: TextIO) -> NoReturn:
    """Does what it is told until nobody tells it anything any more."""
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.do(json.loads(line))), file=out, flush=True)
    os._exit(0)  # to leave an NVSHMEM job is collective, and a test may have killed a peer

"""One process of an NVSHMEM job of a few on one GPU: PE 0 sends pages, the others receive them.

Run by test_kvtransfer_nvshmem.py; talks to it over a pipe, one command a line, JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import torch

from pdmesh.kvtransfer.nvshmem import NvshmemDialer, NvshmemJob, NvshmemListener
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import Fin, Lease

SMALL = "64,5,16,72"
PAGES, LAYERS, PAGE_SIZE, WIDTH = map(int, os.environ.get("PEER_SHAPE", SMALL).split(","))
FORMAT = PageFormat("tiny", "weights", "bfloat16", PAGE_SIZE, LAYERS, 0, WIDTH)
CHECK_EVERY = int(os.environ.get("PEER_CHECK_EVERY", "4"))


class Peer:
    """A pool, a receiver and a sender of one process."""

    def __init__(self, job: NvshmemJob) -> None:
        self.store = job.store(PAGES, LAYERS, PAGE_SIZE, WIDTH, torch.bfloat16)
        self.receiver = TransferReceiver(
            self.store, [NvshmemListener(job, FORMAT, check_every=CHECK_EVERY)]
        )
        self.receiver.start()
        self.sender = TransferSender(FORMAT, [NvshmemDialer(job, self.store)], self.store)

    def do(self, command: dict) -> object:
        return getattr(self, command.pop("do"))(**command)

    def address(self) -> list:
        return [list(pair) for pair in self.receiver.addresses]

    def fill(self, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        shape = self.store.tensor.shape
        values = torch.randn(shape, generator=generator, device="cuda")
        self.store.tensor.copy_(values)
        torch.cuda.synchronize()

    def poison(self) -> None:
        self.store.tensor.fill_(float("nan"))
        torch.cuda.synchronize()

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
        weights = torch.arange(1, bits.shape[1] + 1, device="cuda")
        return (bits * weights).sum(1).tolist()

    def timed(self, lease_id: str, to: list, pages: list[int]) -> float:
        """Seconds of one transfer of whole pages, from opening to acknowledgement."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        assert self.send(lease_id, to, pages, 0, "pages") == "done"
        return time.perf_counter() - began

    def copied(self, pages: int) -> float:
        """Seconds of a copy of so many pages within the device."""
        there = torch.empty_like(self.store.tensor[:pages])
        torch.cuda.synchronize()
        began = time.perf_counter()
        there.copy_(self.store.tensor[:pages])
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def problems(self) -> list[str]:
        return self.receiver.check_integrity() + self.sender.check_integrity()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def main() -> None:
    rank, size, job_id = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")  # what libraries print must not get between the answers
    os.dup2(2, 1)
    job = NvshmemJob(job_id, rank, size, torch.device("cuda:0"))
    peer = Peer(job)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.do(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # leaving the job is collective, and a test may have killed a peer


if __name__ == "__main__":
    main()

"""One process of an NVSHMEM job of a few on one GPU: PE 0 sends pages, the others receive them.

Run by test_kvtransfer_nvshmem.py; see ``page_peer.py``.
"""

from __future__ import annotations

import sys

import torch
from page_peer import CHECK_EVERY, FORMAT, LAYERS, PAGE_SIZE, PAGES, WIDTH, Peer, answers, serve

from pdmesh.kvtransfer.nvshmem import NvshmemDialer, NvshmemJob, NvshmemListener


def main() -> None:
    rank, size, job_id = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
    out = answers()
    job = NvshmemJob(job_id, rank, size, torch.device("cuda:0"))
    store = job.store(PAGES, LAYERS, PAGE_SIZE, WIDTH, torch.bfloat16)
    listener = NvshmemListener(job, FORMAT, check_every=CHECK_EVERY)
    serve(Peer(store, [listener], [NvshmemDialer(job, store)]), out)


if __name__ == "__main__":
    main()

"""Pages between two processes of one GPU over NVSHMEM, beside a copy within the device.

    python -P bench/gpu_transfer.py            (needs a CUDA device and nvshmem4py)

Pages are those of DeepSeek-V3 (61 layers, 64 tokens, 576 values, bfloat16: 4.5 MB). A transfer is
timed whole, from the opening of its lease to the receiver's acknowledgement. Every write carries a
checksum of one unit in 64, computed on the CPU.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / ".pythonpath")]
os.environ["PEER_SHAPE"] = "300,61,64,576"
os.environ["PEER_CHECK_EVERY"] = "64"

from test_kvtransfer_nvshmem import job  # noqa: E402 - the path is set above

PAGE_BYTES = 61 * 64 * 576 * 2
ROUNDS = 20


def main() -> None:
    os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(300 * PAGE_BYTES + (1 << 28))
    with job(2) as (sender, receiver):
        sender.ask("fill", seed=1)
        to = receiver.ask("address")
        for count in (1, 16, 256):
            times, copies = [], []
            for number in range(ROUNDS):
                lease = f"{count}-{number}"
                pages = list(range(count))
                receiver.ask("expect", lease_id=lease, pages=pages, first=0)
                times.append(sender.ask("timed", lease_id=lease, to=to, pages=pages))
                receiver.ask("cancel", lease_id=lease)
                copies.append(sender.ask("copied", pages=count))
            took, copied = statistics.median(times[2:]), statistics.median(copies[2:])
            size = count * PAGE_BYTES
            print(
                f"{count:4} pages: {took * 1e6:9.0f} us, {size / took / 1e9:7.1f} GB/s;"
                f" copy {copied * 1e6:8.0f} us, {size / copied / 1e9:7.1f} GB/s",
                flush=True,
            )


if __name__ == "__main__":
    main()

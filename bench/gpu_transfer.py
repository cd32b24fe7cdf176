"""Pages between two processes of one GPU: over CUDA IPC, TCP and NVSHMEM, beside a copy within it.

    python -P bench/gpu_transfer.py            (needs a CUDA device; NVSHMEM where nvshmem4py is)

Pages are those of DeepSeek-V3 (61 layers, 64 tokens, 576 values, bfloat16: 4.5 MB). A transfer is
timed whole, from the opening of its lease to the receiver's acknowledgement; the rounds of CUDA
IPC, TCP and the copy take turns. "layers" pushes layer by layer, as a prompt that is being computed
does. Over CUDA IPC and NVSHMEM one unit in 64 carries a checksum, over TCP each, computed on the
CPU. The limit is the copy: a page is read once and written once.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests"), str(ROOT / ".pythonpath")]
os.environ.setdefault("PEER_SHAPE", "300,61,64,576")
os.environ["PEER_CHECK_EVERY"] = "64"

import command_line  # noqa: E402 - the path is set above
from test_cuda_ipc_gpu import peers  # noqa: E402 - the path is set above
from test_kvtransfer_nvshmem import job  # noqa: E402

from pdmesh.kvtransfer import nvshmem  # noqa: E402

SHAPE = [int(part) for part in os.environ["PEER_SHAPE"].split(",")]
PAGE_BYTES = SHAPE[1] * SHAPE[2] * SHAPE[3] * 2
WARM = 2
MOST_PAGES = 1280
"""In all rounds of one number of pages, if these are more than three: over TCP a GB takes long."""


def measure(
    sender: Any, receiver: Any, names: Sequence[str], counts: Sequence[int], rounds: int
) -> None:
    """Prints a line for each number of pages and way, and for the copy."""
    sender.ask("fill", seed=1)
    to = {name: [pair for pair in receiver.ask("address") if pair[0] == name] for name in names}
    ways = [(name, how) for name in names for how in ("pages", "layers")]
    for count in counts:
        turns = min(rounds, max(3, MOST_PAGES // count))
        times: dict[tuple[str, str], list[float]] = {way: [] for way in (*ways, ("copy", ""))}
        pages = list(range(count))
        for number in range(turns + WARM):
            for name, how in ways:
                lease = f"{name}-{how}-{count}-{number}"
                receiver.ask("expect", lease_id=lease, pages=pages, first=0)
                took = sender.ask("timed", lease_id=lease, to=to[name], pages=pages, how=how)
                times[name, how].append(took)
                receiver.ask("cancel", lease_id=lease)
            times["copy", ""].append(sender.ask("copied", pages=count))
        copied = statistics.median(times["copy", ""][WARM:])
        for (name, how), all_of_it in times.items():
            took, size = statistics.median(all_of_it[WARM:]), count * PAGE_BYTES
            print(
                f"{count:4} pages  {name:8} {how:6} {took * 1e6:10.0f} us"
                f" {size / took / 1e9:8.1f} GB/s  {copied / took:6.1%} of the copy",
                flush=True,
            )


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--device", default="cuda:0", help='"fake": shared memory, to try this out')
    parser.add_argument("--rounds", type=int, default=20, help="ways taking turns")
    parser.add_argument(
        "--pages", type=int, nargs="*", default=[1, 16, 256], help="pages of a transfer"
    )
    asked = parser.parse_args()
    if asked.device != "fake":
        command_line.need_device()
    with peers(asked.device, asked.device) as (sender, receiver):
        measure(sender, receiver, ("cuda_ipc", "tcp"), asked.pages, asked.rounds)
    if (reason := nvshmem.missing()) is not None:
        print(f"without nvshmem: {reason}")
        return
    os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(SHAPE[0] * PAGE_BYTES + (1 << 28))
    with job(2) as (sender, receiver):
        measure(sender, receiver, ("nvshmem",), asked.pages, asked.rounds)


if __name__ == "__main__":
    main()

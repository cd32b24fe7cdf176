"""Dispatch and combine between ranks on GPUs: microseconds and GB/s of each half, beside limits.

    python -P bench/ep.py [--ranks 2 4 8] [--tokens 16 128 256 1024 4096] [--tune] [--put]
    python -P bench/ep.py --layout contiguous [--ranks 2 4 8] [--tokens 1024 4096 8192 16384]

Hidden 7168, 8 of 256 experts a token, at random; FP8 out, bfloat16 back. Rows land in the masked
layout of grouped products, a decode step's, or in the contiguous one, a prefill's.

With fewer GPUs than ranks all ranks share one process and one GPU: then a "peer's memory" is the
same HBM, and what is timed is each kernel of rank 0 alone, with what it waits for already there, as
a mean over repetitions inside of a CUDA graph. The limit is the device's copy rate over the bytes
that the kernel has to read and write. What the same rows cost on NVLink or on a network is
computed from their bytes, not measured.

With at least as many GPUs as ranks there is a process a GPU, over NVSHMEM: dispatch is send and
receive, combine likewise, both waits included; medians over exchanges of the slowest rank, inside
of CUDA graphs. Beside each, taken the same way, NCCL's all-to-all of the same bytes to the same
ranks, which does nothing else; and their parts, as graphs of their own, so all of them take longer.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
from ep_processes import (  # noqa: E402
    HBM,
    TOKENS,
    TOP,
    bounds,
    layout_of,
    many_gpus,
    member,
    routed,
    sized,
    table,
)

from pdmesh.kernels.symmetric import in_process_heaps  # noqa: E402
from pdmesh.model.parallel.exchange import Channel  # noqa: E402
from pdmesh.model.parallel.nvshmem import NvshmemExperts  # noqa: E402
from pdmesh.model.parallel.nvshmem_memory import Tuning  # noqa: E402

OUT = Path(os.environ.get("OUT", "."))
REPEATS = 20


def timed(work: Callable[[], None], repeats: int = REPEATS) -> float:
    """Microseconds of one `work`: the median over replays of a graph with `repeats` of them."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    took = []
    for _ in range(7):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        took.append(began.elapsed_time(ended) * 1e3 / repeats)
    return statistics.median(took[1:])


class OneGpu:
    """All ranks in this process."""

    def __init__(
        self,
        ranks: int,
        tokens: int,
        layout: str = "masked",
        tuning: Tuning = Tuning(),  # noqa: B008
    ) -> None:
        self.size = sized(ranks, tokens, layout)
        where = table(ranks)
        self.ends = [
            NvshmemExperts(heap, where, self.size, lanes=1)
            for heap in in_process_heaps(ranks, str(where[0].ranks.device))
        ]
        self.data = [routed(tokens, rank) for rank in range(ranks)]
        self.out = torch.empty_like(self.data[0][0])
        self.tune(tuning)

    def tune(self, tuning: Tuning) -> None:
        for end in self.ends:
            end.lanes[0].tune(tuning)
            end.reset(range(self.size.ranks))
        self.exchange()

    def exchange(self) -> None:
        """A whole one, which leaves everything as rank 0 needs it to do any part again."""
        channel = Channel("dispatch", 1, 0, -1)
        sent = [
            end.dispatch_send(channel, 0, *data[:2])
            for end, data in zip(self.ends, self.data, strict=True)
        ]
        received = [end.dispatch_recv(handle) for end, handle in zip(self.ends, sent, strict=True)]
        back = []
        for end, handle, here in zip(self.ends, sent, received, strict=True):
            here.made.normal_()
            back.append(end.combine_send(handle, here, here.made))
        for end, handle, data in zip(self.ends, back, self.data, strict=True):
            end.combine_recv(handle, data[2])
        if self.out.is_cuda:
            torch.cuda.synchronize()
        for end in self.ends:
            end.check()

    def times(self) -> dict[str, float]:
        """Microseconds of the parts of rank 0."""
        lane, (rows, ids, weights) = self.ends[0].lanes[0], self.data[0]
        places = self.ends[0]._tables[0]
        found = {
            "spread": timed(lane.spread_rows),
            "spread whole": timed(lambda: lane.spread_rows(whole=True)),
            "return": timed(lambda: lane.send_outputs(lane.made)),
            "send": timed(lambda: lane.write_rows(rows, ids, places.experts)),
            "plan": timed(lambda: lane.plan_rows(ids, places)),
        }
        self.ends[0].reset(range(self.size.ranks))
        for end in self.ends[1:]:
            end.reset(range(self.size.ranks))
        self.exchange()
        seen = lane._seen.clone()
        parity = int(lane.step) % 2
        lane._pairs_to.zero_()
        seen[parity] -= (lane._view(lane._arrivals).view(torch.int64).view(2, -1))[parity]

        def waits() -> None:
            lane._seen.copy_(seen)
            lane.wait_rows()

        def copies() -> None:
            lane._seen.copy_(seen)

        found["wait rows"] = timed(waits) - timed(copies)
        found["wait outputs"] = timed(lane.wait_outputs)
        found["sum"] = (
            timed(lambda: lane.sum_outputs(ids, weights, self.out, places.experts))
            - found["wait outputs"]
        )
        return found

    def counts(self) -> tuple[int, int, int, int]:
        """Rows sent to any rank, pairs; rows received, pairs: of rank 0."""
        lane = self.ends[0].lanes[0]
        pairs_in = int(lane.arrived.counts.sum())
        ranks = [end._tables[0].ranks[:, 0].long() for end in self.ends]
        rows_to = rows_in = 0
        for home, (_, ids, _) in enumerate(self.data):
            to = ranks[home][ids]
            for peer in range(self.size.ranks):
                there = int((to == peer).any(1).sum())
                rows_to += there if home == 0 else 0
                rows_in += there if peer == 0 else 0
        return rows_to, self.data[0][1].numel(), rows_in, pairs_in

    def wire(self) -> tuple[int, int]:
        """Bytes that rank 0 sends to others: dispatch, combine."""
        rows = pairs = 0
        owner = self.ends[0]._tables[0].ranks[:, 0].long()
        to = owner[self.data[0][1]]
        for peer in range(1, self.size.ranks):
            rows += self.size.dispatch_bytes(int((to == peer).any(1).sum()))
        for home in range(1, self.size.ranks):
            pairs += int((owner[self.data[home][1]] == 0).sum())
        return rows, self.size.combine_bytes(pairs)


def one_gpu(ranks: int, tokens: int, layout: str) -> dict[str, object]:
    """A line of the table."""
    group = OneGpu(ranks, tokens, layout)
    took = group.times()
    rows_to, _, rows_in, pairs_in = group.counts()
    size = group.size
    record, wide, labels = size.record + size.note, size.hidden * 2, size.capacity * 4
    moved = {
        "send": tokens * wide + rows_to * record,
        "spread": rows_in * record + pairs_in * (size.hidden + size.hidden // 32) + labels,
        "spread whole": rows_in * record + pairs_in * (size.hidden + size.hidden // 32) + labels,
        "return": 2 * pairs_in * wide,
        "sum": tokens * (TOP + 1) * wide,
    }
    dispatch, combine = group.wire()
    line: dict[str, object] = {"ranks": ranks, "tokens": tokens, "where": "one GPU"}
    line |= layout_of(size)
    for name, nbytes in moved.items():
        line[f"{name} us"] = round(took[name], 1)
        line[f"{name} GB/s"] = round(nbytes / took[name] / 1e3)
        line[f"{name} of copy"] = round(nbytes / HBM * 1e6 / took[name], 2)
    for name in ("plan", "wait rows", "wait outputs"):
        line[f"{name} us"] = round(took[name], 1)
    for name, nbytes, parts in (
        ("dispatch", dispatch, ("plan", "send", "wait rows", "spread")),
        ("combine", combine, ("return", "wait outputs", "sum")),
    ):
        line[f"{name} us"] = round(sum(took[part] for part in parts), 1)
        line.update(bounds(name, nbytes))
    return line


def sweep(ranks: int) -> None:
    """Launch parameters, to choose defaults by."""
    for tokens in (128, 4096):
        group = OneGpu(ranks, tokens)
        tunings = [Tuning(p, 1024, w) for w in (1, 2, 4) for p in (1056, 2112, 4224)]
        tunings += [Tuning(scan=scan) for scan in (1024, 2048, 4096, 8192, 16384)]
        for tuning in tunings:
            group.tune(tuning)
            words = "  ".join(f"{name} {value:6.1f}" for name, value in group.times().items())
            print(f"{tokens:5} {tuning}: {words}", flush=True)
        del group
        torch.cuda.empty_cache()


def keep(lines: list[dict[str, object]]) -> None:
    """A CSV file of what is known."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    with (OUT / "ep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(lines)


def main() -> int:
    parser = command_line.parser(__doc__, "standard output and $OUT/ep.csv (without $OUT ./ep.csv)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4, 8], help="sizes of the group"
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="rows a rank")
    parser.add_argument(
        "--layout", choices=list(TOKENS), default="masked", help="of the rows that arrive"
    )
    parser.add_argument(
        "--tune", action="store_true", help="first try other tiles and numbers of blocks"
    )
    parser.add_argument("--put", action="store_true", help="puts, though memory could be mapped")
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    layout, counts = asked.layout, asked.tokens or TOKENS[asked.layout]
    if asked.member:
        rank, ranks, job, meeting = asked.member
        member(int(rank), int(ranks), job, meeting, counts, asked.put, layout)
    if asked.tune:
        sweep(asked.ranks[-1])
    lines: list[dict[str, object]] = []
    failed = 0
    for ranks in asked.ranks:
        if ranks <= torch.cuda.device_count():
            lines += many_gpus(ranks, counts, asked.put, layout)
            keep(lines)
            continue
        for tokens in counts:
            try:
                lines.append(one_gpu(ranks, tokens, layout))
            except Exception:  # noqa: BLE001 - the other sizes are still of interest
                failed += 1
                print(f"{ranks} ranks, {tokens} tokens:", flush=True)
                traceback.print_exc()
                continue
            print("  ".join(f"{name} {value}" for name, value in lines[-1].items()), flush=True)
            keep(lines)
            torch.cuda.empty_cache()
    return int(failed > 0 or not lines)


if __name__ == "__main__":
    sys.exit(main())

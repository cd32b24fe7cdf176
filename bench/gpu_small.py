"""The memory-bound Triton kernels on a GPU: checked against float64, timed in CUDA graphs.

    python -P bench/gpu_small.py [--only NAME] [--tune]         (needs a CUDA device)

Shapes are DeepSeek-V3's. A graph holds the operation many times over several sets of random data,
together larger than the L2 cache; a time is the median of the graph's replays over its length.
GB/s counts each input read once and each output written once. `copy` is the share of what a large
copy within the device reaches in the same run. `eager` is the definition in plain torch
(pdmesh.kernels), launched from Python, in the same run.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
from figures import as_json  # noqa: E402
from gpu_small_cases import CASES, Case  # noqa: E402
from gpu_small_routing import CASES as ROUTING  # noqa: E402
from gpu_small_routing import tunings  # noqa: E402

L2_BYTES = 128 << 20
"""A graph's data are larger than this: twice an H200's L2 cache."""
REPLAYS = 15


def graph_time(calls: list[Callable[[], Any]], repeat: int) -> float:
    """Seconds of one call in a graph that makes all of `calls` `repeat` times."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeat):
                for call in calls:
                    call()
        times = []
        for number in range(REPLAYS + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 3:
                times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times) / (repeat * len(calls))


def eager_time(call: Callable[[], Any]) -> float:
    """Seconds of one call from Python, the launches included."""
    times = []
    for number in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if number >= 4:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 1 GiB within the device."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / eager_time(lambda: target.copy_(source))


def sets_of(case: Case) -> list[Any]:
    """Several sets of data, together larger than the L2 cache, but no more than 24."""
    count = min(24, max(2, -(-L2_BYTES // case.bytes)))
    return [case.make(seed) for seed in range(count)]


def measure(case: Case, copy: float, tune: bool) -> dict[str, Any]:
    """One row of the table."""
    sets = sets_of(case)
    row: dict[str, Any] = {"name": case.name, "error": case.error(sets[0]), "limit": case.limit}
    repeat = max(1, 48 // len(sets))
    variants = tunings(case) if tune else [{}]
    timed = []
    for more in variants:
        calls = [lambda data=data, more=more: case.run(data, **more) for data in sets]
        try:
            timed.append((graph_time(calls, repeat), more))
        except Exception as error:  # noqa: BLE001 - another variant may still do
            print("  ", case.name, more, type(error).__name__, str(error)[:200], flush=True)
    for seconds, more in timed if tune else []:
        print(f"    {case.name:34} {seconds * 1e6:9.2f} us  {more}")
    seconds, best = min(timed, key=lambda pair: pair[0])
    row |= {"us": seconds * 1e6, "GB/s": case.bytes / seconds / 1e9, "best": str(best)}
    row["copy"] = case.bytes / seconds / copy
    row["eager"] = eager_time(lambda: case.eager(sets[1])) * 1e6 if case.eager else None
    return row


def main() -> None:
    parser = command_line.parser(
        __doc__, "standard output, and to gpu_small.json in $OUT where that is set"
    )
    parser.add_argument("--only", default="", help="parts of names to run, with commas")
    parser.add_argument("--tune", action="store_true", help="try other tiles and numbers of warps")
    arguments = parser.parse_args()
    torch.cuda.init()
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy / 1e9:.0f} GB/s")
    print(f"{'':34} {'us':>9} {'GB/s':>7} {'copy':>5} {'eager us':>9} {'ratio':>6} {'error':>9}")
    rows = []
    for case in (*CASES, *ROUTING):
        if not any(part in case.name for part in arguments.only.split(",")):
            continue
        try:
            row = measure(case, copy, arguments.tune)
        except Exception as error:  # noqa: BLE001 - the others are still of interest
            print(f"{case.name:34} {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        rows.append(row)
        ratio = f"{row['eager'] / row['us']:6.1f}" if row["eager"] else "     -"
        eager = f"{row['eager']:9.1f}" if row["eager"] else "        -"
        bad = "" if row["error"] <= row["limit"] else f"  ABOVE {row['limit']}"
        print(
            f"{row['name']:34} {row['us']:9.2f} {row['GB/s']:7.0f} {row['copy']:5.2f} {eager}"
            f" {ratio} {row['error']:9.2e}{bad}",
            flush=True,
        )
        torch.cuda.empty_cache()
        if "OUT" in os.environ:
            (Path(os.environ["OUT"]) / "gpu_small.json").write_text(as_json(rows, 1))
    if any(not row["error"] <= row["limit"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

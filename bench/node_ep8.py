"""Decode of full-width DeepSeek-V3 on all GPUs of a node: throughput against output speed.

    python -P bench/node_ep8.py [--budget-s 560] [--layers N] [--gpus N]        (needs Hopper GPUs)
    python -P bench/node_ep8.py --plan 8 --memory-gb 150.7       what would fit, without a GPU
    python -P bench/node_ep8.py --dry                            tiny sizes, without a GPU

One process a GPU. Routed experts are spread over all (EP = GPUs), dispatch and combine are this
project's over NVSHMEM; tensor parallelism (TP) splits the heads of attention, with latents held by
every member and sums by NCCL. Weights are random FP8, two rows and 5,000 latents a sequence, 1 to
128 sequences a GPU, in CUDA graphs, in the modes of `model/parallel/schedule.py`. Experts are drawn
evenly at random in the place of the router's choice, which is computed nevertheless (`--routing
gate`: what the router chooses, with room for every row).

Memory is planned before anything is allocated: on fewer than 8 GPUs as many layers run as fit, and
a step of 61 layers, the draft's and both heads is computed from the times of those that ran; lines
say so. Cells run in order of importance until the time is over; what is known by then is kept.

Written under $OUT (default .): node_ep8.json, node_ep8.csv with the bound, the published and the
emulated points beside, and node_ep8.png where matplotlib is there (else tools/draw_node.py).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

import command_line  # noqa: E402 - the path is set above
from figures import as_json, shown  # noqa: E402
from node_plan import BATCHES, MODES, WIDTHS, grid, plan_node, product_shapes, usable  # noqa: E402
from node_results import (  # noqa: E402
    bound_rows,
    emulated_rows,
    pareto,
    published_rows,
    table_line,
)

from pdmesh.model.device.full_width import full_width  # noqa: E402
from pdmesh.model.parallel.schedule import Mode  # noqa: E402

OUT = Path(os.environ.get("OUT", "."))
DATA = ROOT / "docs" / "data"
SYMMETRIC_BYTES = 2 << 30
NO_MULTICAST = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
GRACE_S = 20.0
"""Behind the budget, until ranks that still run are ended."""


class Report:
    """Prints lines as they come, and keeps both files complete at any time."""

    def __init__(self, folder: Path, gpus: int, experts: int = 256) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {"gpus": gpus, "experts": experts, "rows": [], "notes": []}
        self._gpus, self._experts = gpus, experts

    def take(self, line: dict[str, Any]) -> bool:
        """Whether it was the last one."""
        kind = line.pop("line")
        if kind == "result":
            self.found["rows"].append(line["row"])
            print(table_line(line["row"]), flush=True)
        elif kind == "skipped":
            self.found.setdefault("skipped", []).append(line)
            print(f"TP{line['tp']} batch {line['batch']}: not measured: {line['why']}", flush=True)
        elif kind == "operations":
            self.found.setdefault("operations", []).append(line)
            print(f"operations of a layer, TP{line['tp']} batch {line['batch']}, us (bound):")
            for row in line["rows"]:
                limit = row.get("bound_us")
                beside = "" if limit is None else f" ({limit:.1f})"
                print(f"  {row['op']:22} {row['us']:8.1f}{beside}", flush=True)
        elif kind == "exchange":
            self.found.setdefault("exchange", []).append(line["row"])
            words = "  ".join(f"{name} {shown(value, '')}" for name, value in line["row"].items())
            print(f"exchange alone: {words}", flush=True)
        elif kind != "done":
            self.found["notes"].append(line.get("text", ""))
            print(line.get("text", ""), flush=True)
        self.save()
        return bool(kind == "done")

    def rows(self) -> list[dict[str, Any]]:
        """Measured ones, and what stands beside them."""
        layer, wires = DATA / "h200_layer.json", DATA / "communication.csv"
        beside = [*published_rows(), *bound_rows(self._gpus, experts=self._experts)]
        if layer.exists() and wires.exists():
            with wires.open() as file:
                beside += emulated_rows(json.loads(layer.read_text()), list(csv.DictReader(file)))
        return [*self.found["rows"], *beside]

    def save(self) -> None:
        """Both files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "node_ep8.json").write_text(as_json(self.found, 1) + "\n")
        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        with (self.folder / "node_ep8.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)

    def end(self) -> None:
        """The Pareto front, and the plot where matplotlib is there."""
        self.save()
        front = pareto([row for row in self.found["rows"] if row["finite"]])
        if front:
            print("\nPareto front, and what was published, computed or emulated:")
            beside = [row for row in self.rows() if row["kind"] in ("published", "emulated")]
            for row in [*front, *beside]:
                name = row["name"]
                if row["kind"] == "measured":
                    name += f" batch {row['batch']} {row['mode']}"
                print(
                    f"  {row['tokens_s_request']:8.2f} tokens/s a request"
                    f" {row['tokens_s_node']:9.1f} a node  {name}"
                )
        command = [sys.executable, str(ROOT / "tools" / "draw_node.py")]
        command += [str(self.folder / f"node_ep8.{kind}") for kind in ("csv", "png")]
        subprocess.run(command, check=False)


def lines_of(
    commands: Sequence[Sequence[str]], environment: dict[str, str], until: float
) -> Iterator[dict[str, Any]]:
    """What the first process writes, until it is done, any process fails or the time is over.

    Raises:
        RuntimeError: a process failed, or they did not end in time; all are ended then.
    """
    inbox: queue.Queue[str | None] = queue.Queue()
    processes = [
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
            text=True,
        )
        for number, command in enumerate(commands)
    ]

    def read() -> None:
        for line in processes[0].stdout or ():
            inbox.put(line)
        inbox.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            try:
                line = inbox.get(timeout=0.5)
            except queue.Empty:
                failed = [n for n, one in enumerate(processes) if one.poll() not in (None, 0)]
                if failed:
                    raise RuntimeError(f"rank {failed[0]} failed; see above") from None
                if time.time() > until:
                    raise RuntimeError("ranks did not end in time") from None
                continue
            if line is None:
                if processes[0].wait():
                    raise RuntimeError("rank 0 failed; see above")
                return
            yield json.loads(line)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        reader.join(5.0)
        if processes[0].stdout is not None and not reader.is_alive():
            processes[0].stdout.close()


def measure(args: argparse.Namespace, gpus: int, began: float) -> int:
    """The command's work; its exit status."""
    from gpu_warm import compile_products

    from pdmesh.kernels.dense import choose
    from pdmesh.kernels.symmetric import missing, new_job_id

    if problem := missing():
        print(f"this needs NVSHMEM: {problem}")
        return 2
    report = Report(OUT, gpus, args.experts)
    if args.warm:
        cells = grid(gpus, args.tp, args.batches)[: args.warm]
        shapes = product_shapes(full_width(4, args.experts), cells, gpus)
        jobs = [
            (experts, m, n, k)
            for experts, m, n, k in shapes
            if experts or choose(m, n, k).backend == "deep_gemm"
        ]
        processes = max(4, min(32, (os.cpu_count() or 8) // 2))
        compile_products(jobs, processes, limit_s=60.0)
        print(f"DeepGEMM's kernels compiled in {time.time() - began:.1f} s", flush=True)
    job, deadline = new_job_id().hex(), began + args.budget_s
    environment = {**os.environ, **NO_MULTICAST, "NVSHMEM_SYMMETRIC_SIZE": str(SYMMETRIC_BYTES)}
    own = [word for word in sys.argv[1:] if word != "--member"]
    with tempfile.TemporaryDirectory() as folder:
        base = [sys.executable, "-P", str(Path(__file__).resolve()), *own, "--member"]
        commands = [
            [*base, str(rank), str(gpus), job, f"{folder}/meeting", str(deadline)]
            for rank in range(gpus)
        ]
        try:
            for line in lines_of(commands, environment, deadline + GRACE_S):
                if report.take(line):
                    break
        except RuntimeError as error:
            print(f"stopped: {error}; what was known is kept", flush=True)
            report.found["stopped"] = str(error)
            report.end()
            return 1
    report.end()
    return 0


def member(args: argparse.Namespace) -> None:
    """The process of a rank."""
    from node_rank import Asked, run

    rank, ranks, job, meeting, deadline = args.member
    run(
        Asked(
            int(rank),
            int(ranks),
            job,
            meeting,
            float(deadline),
            args.layers,
            args.experts,
            tuple(args.tp),
            tuple(args.batches),
            tuple(args.modes),
            args.routing == "even",
        )
    )


def dry() -> int:
    """Tiny sizes in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(ROOT / "tests"))
    import triton_interpreter

    triton_interpreter.install()
    from node_dry import dry_run

    return 0 if dry_run() else 1


def arguments() -> argparse.ArgumentParser:
    parser = command_line.parser(
        __doc__, "standard output, and to files in $OUT (without $OUT: here)"
    )
    parser.add_argument("--budget-s", type=float, default=560.0, help="of the whole command")
    parser.add_argument("--layers", type=int, help="MoE layers (as many as fit)")
    parser.add_argument("--gpus", type=int, help="of the visible ones (1, 2, 4 or 8 of them)")
    parser.add_argument(
        "--experts", type=int, default=256, help="in all; 32 a GPU is the load of EP8 on fewer GPUs"
    )
    parser.add_argument(
        "--tp", type=int, nargs="+", default=list(WIDTHS), help="GPUs that share attention heads"
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=list(BATCHES), help="sequences of a GPU"
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=get_args(Mode),
        default=list(MODES),
        help="schedules of a layer",
    )
    parser.add_argument(
        "--routing", choices=("even", "gate"), default="even", help="how experts are chosen"
    )
    parser.add_argument(
        "--warm", type=int, default=8, help="first cells whose kernels are compiled ahead (8)"
    )
    parser.add_argument("--plan", type=int, metavar="GPUS", help="print what fits, and end")
    parser.add_argument("--memory-gb", type=float, default=150.7, help="of a GPU, for --plan")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, no GPU")
    parser.add_argument("--member", nargs=5, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    began = time.time()
    args = arguments().parse_args()
    if args.member:
        member(args)
    if args.dry:
        sys.exit(dry())
    if args.plan:
        cells = grid(args.plan, args.tp, args.batches)
        total = int(args.memory_gb * 1e9)
        config, even = full_width(4, args.experts), args.routing == "even"
        budget = usable(total, total)
        print(plan_node(config, args.plan, budget, cells, args.layers, even=even).describe())
        sys.exit()
    import torch

    visible = torch.cuda.device_count()
    gpus = args.gpus or max((n for n in (1, 2, 4, 8) if n <= visible), default=0)
    if not 0 < gpus <= visible:
        sys.exit(f"{visible} GPUs are visible: this needs at least one (try --dry or --plan 8)")
    sys.exit(measure(args, gpus, began))


if __name__ == "__main__":
    main()

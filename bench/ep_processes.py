"""Ranks of bench/ep.py as processes with a GPU each, and what both of its ways share."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath")]

import torch  # noqa: E402 - the path is set above
import torch.distributed as dist  # noqa: E402

from pdmesh.kernels.expert_exchange import ExchangeSize  # noqa: E402
from pdmesh.kernels.routing import ALIGNMENT  # noqa: E402
from pdmesh.kernels.symmetric import NvshmemHeap, new_job_id  # noqa: E402
from pdmesh.model.parallel.nvshmem import NvshmemExperts  # noqa: E402
from pdmesh.model.parallel.placement import Placement  # noqa: E402
from pdmesh.model.parallel.replicas import ReplicaTable  # noqa: E402

HIDDEN, TOP, EXPERTS = 7168, 8, 256
DEVICE = "cuda"
TOKENS = {"masked": [16, 128, 256, 1024, 4096], "contiguous": [1024, 4096, 8192, 16384]}
"""Rows a rank by layout: of decode steps and of a prefill."""
HBM, NVLINK, NETWORK = 4.27e12, 380e9, 50e9
"""Bytes a second: a copy on an H200 (read and written), NVLink one way, InfiniBand 400 Gb/s."""


def routed(tokens: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, ids and weights of a rank."""
    generator = torch.Generator(DEVICE).manual_seed(rank)
    rows = torch.randn(tokens, HIDDEN, generator=generator, device=DEVICE).bfloat16()
    scores = torch.rand(tokens, EXPERTS, generator=generator, device=DEVICE)
    ids = scores.topk(TOP, dim=1).indices
    return rows, ids, torch.rand(tokens, TOP, generator=generator, device=DEVICE)


def sized(ranks: int, tokens: int, layout: str) -> ExchangeSize:
    """Room for a third more rows an expert than there are on average; of a rank for a tenth more,
    and for what each of its experts may fill a block up with."""
    slots = EXPERTS // ranks
    if layout == "contiguous":
        pairs = tokens * TOP
        most = int(pairs * 1.1 + 6 * pairs**0.5) + slots * (ALIGNMENT - 1)
        capacity = -(-most // ALIGNMENT) * ALIGNMENT
        return ExchangeSize.contiguous(ranks, slots, tokens, HIDDEN, TOP, capacity)
    average = ranks * tokens * TOP / EXPERTS
    most = int(average * 1.33 + 6 * average**0.5 + 16)
    return ExchangeSize(ranks, slots, tokens, HIDDEN, TOP, -(-most // 64) * 64)


def layout_of(size: ExchangeSize) -> dict[str, object]:
    """Its name, and its memory: rows in FP8 with scales and homes, and outputs in bfloat16."""
    each = 3 * size.hidden + size.hidden // 32 + 4 + bool(size.align) * 4
    name = "contiguous" if size.align else "masked"
    return {"layout": name, "layout MiB": round(math.prod(size.layout) * each / 2**20)}


def table(ranks: int) -> list[ReplicaTable]:
    return [ReplicaTable.build(Placement.even(1, EXPERTS, ranks), 0, DEVICE)]


def bounds(name: str, size: int) -> dict[str, object]:
    """What `size` bytes of `name` from one rank take at least."""
    return {
        f"{name} wire bytes": size,
        f"{name} NVLink bound us": round(size / NVLINK * 1e6, 1),
        f"{name} network bound us": round(size / NETWORK * 1e6, 1),
    }


class Member:
    """A rank with a GPU of its own."""

    def __init__(
        self, rank: int, ranks: int, tokens: int, heap: NvshmemHeap, put: bool, layout: str
    ) -> None:
        self.rank = rank
        self.size = sized(ranks, tokens, layout)
        mapped = [rank] if put else None
        self.end = NvshmemExperts(heap, table(ranks), self.size, mapped, lanes=1, timeout_s=20.0)
        self.rows, self.ids, self.weights = routed(tokens, rank)
        self.out = torch.empty_like(self.rows)
        self.meet()

    def meet(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()

    def times(self) -> tuple[float, float]:
        """Microseconds of dispatch and of combine: medians over exchanges."""
        lane, places = self.end.lanes[0], self.end._tables[0]

        def dispatch() -> None:
            lane.send_rows(self.rows, self.ids, places)
            lane.receive_rows()

        def combine() -> None:
            lane.send_outputs(lane.made)
            lane.sum_outputs(self.ids, self.weights, self.out, places.experts)

        lane.made.normal_()
        lane.send_rows(self.rows, self.ids, places)  # compiles, so nobody waits for its rows yet
        self.meet()
        lane.receive_rows()
        lane.send_outputs(lane.made)
        self.meet()
        lane.sum_outputs(self.ids, self.weights, self.out, places.experts)
        for _ in range(3):
            dispatch()
            combine()
        self.meet()
        self.end.check()
        graphs = []
        for work in (dispatch, combine):
            graph = torch.cuda.CUDAGraph()
            # Threads of NCCL and NVSHMEM go on using the device meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
            graphs.append(graph)
        self.meet()
        count = 60
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(count)]
        for four in marks:
            for half, graph in enumerate(graphs):
                four[2 * half].record()
                graph.replay()
                four[2 * half + 1].record()
        self.meet()
        self.end.check()
        return tuple(
            statistics.median(four[half].elapsed_time(four[half + 1]) * 1e3 for four in marks[10:])
            for half in (0, 2)
        )

    def nccl(self, group: object) -> float:
        """Microseconds of all_to_all_single of one bfloat16 row a choice."""
        count = self.rows.shape[0] * TOP // self.size.ranks * self.size.ranks
        given = torch.randn(max(count, self.size.ranks), HIDDEN, device="cuda").bfloat16()
        taken = torch.empty_like(given)
        took = []
        for _ in range(25):
            dist.barrier()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            dist.all_to_all_single(taken, given, group=group)
            ended.record()
            torch.cuda.synchronize()
            took.append(began.elapsed_time(ended) * 1e3)
        return statistics.median(took[5:])


def member(
    rank: int, ranks: int, job: str, meeting: str, tokens: list[int], put: bool, layout: str
) -> None:
    """A process of `many_gpus`; rank 0 prints a line of JSON for each number of tokens."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device = torch.device("cuda", rank)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    heap = NvshmemHeap.join(bytes.fromhex(job), rank, ranks, device)
    nccl = dist.new_group(backend="nccl")
    for count in tokens:
        here = Member(rank, ranks, count, heap, put, layout)
        dispatch, combine = here.times()
        times = torch.tensor([dispatch, combine, here.nccl(nccl)])
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        sent = here.end.sent
        steps = int(here.end.lanes[0].step)
        line: dict[str, object] = {
            "ranks": ranks, "tokens": count, "where": "put" if put else "mapped",
            **layout_of(here.size),
        }  # fmt: skip
        for name, took in zip(("dispatch", "combine"), times.tolist(), strict=False):
            size = sent.total(name) // steps
            line[f"{name} us"] = round(took, 1)
            line[f"{name} GB/s"] = round(size / took / 1e3)
            line.update(bounds(name, size))
        line["NCCL all-to-all us"] = round(float(times[2]), 1)
        if rank == 0:
            print(json.dumps(line), file=answers, flush=True)
        here.meet()
        here.end.close()
        del here
        torch.cuda.empty_cache()
    os._exit(0)


def many_gpus(ranks: int, tokens: list[int], put: bool, layout: str) -> list[dict[str, object]]:
    """Lines of the table, from processes with a GPU each."""
    job = new_job_id().hex()
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "NVSHMEM_DISABLE_NVLS": "1",
            "NVSHMEM_SYMMETRIC_SIZE": str((10 if put else 8) << 30),
        }
        script = str(ROOT / "bench" / "ep.py")
        command = [sys.executable, "-P", script, "--tokens", *map(str, tokens)]
        command += ["--layout", layout]
        command += ["--put"] if put else []
        processes = [
            subprocess.Popen(
                [*command, "--member", str(rank), str(ranks), job, f"{folder}/meeting"],
                env=environment, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            lines = []
            for line in processes[0].stdout or ():
                lines.append(json.loads(line))
                print(line, end="", flush=True)
        finally:
            for process in processes:
                process.kill()
    return lines

"""Ranks of bench/ep.py as processes with a GPU each, and what both of its ways share."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import torch  # noqa: E402 - the path is set above
import torch.distributed as dist  # noqa: E402
from figures import as_json, rounded  # noqa: E402
from rank_processes import ends_at_once, together  # noqa: E402

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

    def works(self) -> dict[str, Callable[[], object]]:
        """Launches of one exchange, in order; two are alike but for how rows are cut up."""
        lane, places = self.end.lanes[0], self.end._tables[0]
        rows, ids, experts = self.rows, self.ids, places.experts
        return {
            "plan": lambda: lane.plan_rows(ids, places),
            "send": lambda: lane.write_rows(rows, ids, experts),
            "wait rows": lane.wait_rows,
            "spread": lane.spread_rows,
            "spread whole": lambda: lane.spread_rows(whole=True),
            "return": lambda: lane.send_outputs(lane.made),
            "wait and sum": lambda: lane.sum_outputs(ids, self.weights, self.out, experts),
        }

    def times(self) -> tuple[dict[str, float], dict[str, float]]:
        """Microseconds of dispatch and of combine, and of their parts as graphs of their own."""
        lane, parts = self.end.lanes[0], self.works()

        def together(*names: str) -> Callable[[], None]:
            def run() -> None:
                for name in names:
                    parts[name]()

            return run

        dispatch = together("plan", "send", "wait rows", "spread")
        combine = together("return", "wait and sum")
        lane.made.normal_()
        together("plan", "send")()  # compiles, so nobody waits for its rows yet
        self.meet()
        together("wait rows", "spread", "return")()
        self.meet()
        parts["wait and sum"]()
        for _ in range(3):
            dispatch()
            combine()
        found = self.replayed({"dispatch": dispatch, "combine": combine})
        return found, self.replayed(parts)

    def replayed(self, works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Microseconds of each: medians over turns, of graphs that follow each other."""
        self.meet()
        self.end.check()
        graphs = [captured(work) for work in works.values()]
        self.meet()
        turns = spans(graphs)
        self.meet()
        self.end.check()
        medians = (statistics.median(each) for each in zip(*turns, strict=True))
        return dict(zip(works, medians, strict=True))

    def nccl(self, group: object) -> dict[str, float]:
        """Microseconds of all_to_all_single of what dispatch and combine send, as they are timed.

        To each rank, the own one too, the bytes that it gets in that half, in multiples of 128. How
        many they are everybody knows before, nothing is quantised, laid out or summed. Infinite if
        NCCL fails, so that the slowest rank's are too.
        """
        to = self.end._tables[0].ranks[:, 0].long()[self.ids]
        rows = [int((to == peer).any(1).sum()) for peer in range(self.size.ranks)]
        pairs = [int((to == peer).sum()) for peer in range(self.size.ranks)]
        works: dict[str, Callable[[], object]] = {}
        for name, (sent, taken) in shares(self.size, self.rank, gathered(rows + pairs)).items():
            given = torch.randint(0, 255, (sum(sent),), dtype=torch.uint8, device=DEVICE)
            got = torch.empty(sum(taken), dtype=torch.uint8, device=DEVICE)

            def work(
                given: torch.Tensor = given,
                got: torch.Tensor = got,
                sent: list[int] = sent,
                taken: list[int] = taken,
            ) -> object:
                return dist.all_to_all_single(got, given, taken, sent, group=group)

            works[name] = work
        try:
            for _ in range(10):  # connections, and clocks
                for work in works.values():
                    work()
            return self.replayed(works)
        except RuntimeError:
            traceback.print_exc()
            return dict.fromkeys(works, math.inf)


def gathered(own: list[int]) -> list[list[int]]:
    """Everybody's."""
    all_of_them = [torch.zeros(len(own), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, torch.tensor(own))
    return [one.tolist() for one in all_of_them]


def shares(
    size: ExchangeSize, rank: int, told: list[list[int]]
) -> dict[str, tuple[list[int], list[int]]]:
    """Bytes that `rank` sends to each and gets from each: of dispatch and of combine.

    told: of each rank, how many rows it has for each, then how many choices there.
    """
    ranks = range(size.ranks)

    def padded(nbytes: int) -> int:
        return -(-nbytes // 128) * 128

    def out(home: int, peer: int) -> int:
        return padded(size.dispatch_bytes(told[home][peer]))

    def back(home: int, peer: int) -> int:
        return padded(size.combine_bytes(told[home][size.ranks + peer]))

    return {
        "dispatch": ([out(rank, peer) for peer in ranks], [out(home, rank) for home in ranks]),
        "combine": ([back(home, rank) for home in ranks], [back(rank, peer) for peer in ranks]),
    }


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`work` in a graph."""
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL and NVSHMEM go on using the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


def spans(graphs: Sequence[torch.cuda.CUDAGraph], turns: int = 60) -> list[list[float]]:
    """Microseconds of each graph in each turn but the first ten; the host waits for none."""
    marks = [
        [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in graphs]
        for _ in range(turns)
    ]
    for turn in marks:
        for graph, (began, ended) in zip(graphs, turn, strict=True):
            began.record()
            graph.replay()
            ended.record()
    torch.cuda.synchronize()
    return [[began.elapsed_time(ended) * 1e3 for began, ended in turn] for turn in marks[10:]]


def slowest(took: Mapping[str, float]) -> dict[str, float]:
    """Of each, the largest of any rank."""
    values = torch.tensor(list(took.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(took, values.tolist(), strict=True))


def member(
    rank: int, ranks: int, job: str, meeting: str, tokens: list[int], put: bool, layout: str
) -> None:
    """A process of `many_gpus`; rank 0 prints a line of JSON for each number of tokens."""
    with ends_at_once(), os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        tell(answers, rank, ranks, job, meeting, tokens, put, layout)


def tell(
    answers: TextIO,
    rank: int,
    ranks: int,
    job: str,
    meeting: str,
    tokens: list[int],
    put: bool,
    layout: str,
) -> None:
    """What `member` does; lines go to `answers`."""
    device = torch.device("cuda", rank)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    heap = NvshmemHeap.join(bytes.fromhex(job), rank, ranks, device)
    group = dist.new_group(backend="nccl")
    for count in tokens:
        here = Member(rank, ranks, count, heap, put, layout)
        took, parts = map(slowest, here.times())
        nccl = slowest(here.nccl(group))
        sent = here.end.sent
        steps = int(here.end.lanes[0].step)
        line: dict[str, object] = {
            "ranks": ranks, "tokens": count, "where": "put" if put else "mapped",
            **layout_of(here.size),
        }  # fmt: skip
        for name, each in took.items():
            size = sent.total(name) // steps
            line[f"{name} us"] = round(each, 1)
            line[f"{name} GB/s"] = round(size / each / 1e3)
            line.update(bounds(name, size))
            line[f"{name} NCCL us"] = rounded(nccl[name], 1)
        line |= {f"{name} us": round(each, 1) for name, each in parts.items()}
        if rank == 0:
            print(as_json(line), file=answers, flush=True)
        here.meet()
        here.end.close()
        del here
        torch.cuda.empty_cache()


def many_gpus(ranks: int, tokens: list[int], put: bool, layout: str) -> list[dict[str, object]]:
    """Lines of the table, from processes with a GPU each.

    Raises:
        SystemExit: one of them failed.
    """
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
        lines = []
        with together(processes):
            for line in processes[0].stdout or ():
                lines.append(json.loads(line))
                print(line, end="", flush=True)
    return lines

"""The ranks of `node_ep8.py` together: NVSHMEM, NCCL within a TP group, gloo for the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from node_layer import Gather, Sum
from node_plan import grid
from torch import Tensor

from pdmesh.kernels.symmetric import NvshmemHeap
from pdmesh.model.parallel.schedule import Mode


@dataclass(frozen=True)
class Asked:
    """What the command hands to its ranks."""

    rank: int
    ranks: int
    job: str
    meeting: str
    deadline: float
    """In seconds of `time.time`."""
    layers: int | None
    experts: int
    widths: tuple[int, ...]
    batches: tuple[int, ...]
    modes: tuple[Mode, ...]
    even: bool


class World:
    """The ranks together: gloo for the host, NCCL between the GPUs of a TP group."""

    def __init__(self, asked: Asked) -> None:
        self.rank, self.ranks = asked.rank, asked.ranks
        self.device = torch.device("cuda", asked.rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{asked.meeting}",
            rank=asked.rank,
            world_size=asked.ranks,
        )
        self.heap = NvshmemHeap.join(bytes.fromhex(asked.job), asked.rank, asked.ranks, self.device)
        self.nccl = dist.new_group(backend="nccl")
        self._groups: dict[int, Any] = {}
        widths = {cell.tp for cell in grid(asked.ranks, asked.widths, asked.batches)}
        for tp in sorted(widths - {1}):
            for first in range(0, asked.ranks, tp):
                group = dist.new_group(list(range(first, first + tp)), backend="nccl")
                if first <= asked.rank < first + tp:
                    self._groups[tp] = group

    def meet(self) -> None:
        """All ranks and their devices."""
        torch.cuda.synchronize()
        dist.barrier()

    def slowest(self, *values: float) -> list[float]:
        """Of each, the largest of any rank."""
        gathered = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(gathered, op=dist.ReduceOp.MAX)
        return [float(value) for value in gathered]

    def least(self, value: float) -> float:
        """The smallest of any rank."""
        return -self.slowest(-value)[0]

    def together(self, tp: int) -> Callable[[Sum | Gather], Tensor]:
        """What a TP group does with its members' parts, in stream order."""
        group = self._groups.get(tp)

        def run(wanted: Sum | Gather) -> Tensor:
            part = wanted.part.contiguous()
            if isinstance(wanted, Sum):
                dist.all_reduce(part, group=group)
                return part
            whole = part.new_empty((part.shape[0] * tp, part.shape[1]))
            dist.all_gather_into_tensor(whole, part, group=group)
            return whole

        return run


def captured(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`function` once eagerly, then in a graph; other threads (NCCL's) may go on meanwhile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        graph.kept = function()  # type: ignore[attr-defined]
    return graph

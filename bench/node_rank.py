"""What a rank of `node_ep8.py` does: a process with a GPU of its own, over NVSHMEM and NCCL.

Rank 0 writes one line of JSON for each thing that is known; the command makes tables of them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any, TextIO

import bounds
import torch
import torch.distributed as dist
from ep_processes import Member
from figures import as_json, rounded
from gpu_timing import replay_times, timed
from node_layer import Flow, Gather, Kit, Sum, drive, flows_of, schedule_of
from node_plan import (
    KV,
    PAGE,
    Cell,
    CellPlan,
    NodePlan,
    exchange_size,
    goes_on,
    grid,
    modes_of,
    plan_node,
    usable,
)
from node_results import Times, bound_work, moe_time, result_row
from node_weights import Ends, LayerWeights, Pages, even_choices, first_heads, random_layer
from node_world import Asked, World, captured
from rank_processes import ends_at_once
from torch import Tensor

from pdmesh.kernels.backends import Backends, Shapes, choose_backends
from pdmesh.model.config import ModelConfig
from pdmesh.model.device.full_width import full_width
from pdmesh.model.parallel.nvshmem import NvshmemExperts
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable
from pdmesh.model.parallel.schedule import Mode
from pdmesh.model.rope import rope_table

TIMEOUT_S = 60.0
"""Of a wait for another rank: compilers take their time where a kernel runs for the first time."""
REPLAYS = 12
OPERATIONS = (Cell(1, 128), Cell(1, 32), Cell(8, 1))
"""Cells whose operations are timed one by one, where there are such, and at least the first one."""
MOST_NOTED = 4
"""Layers whose operands together exceed the L2 cache."""


class Rank:
    """A rank with its weights."""

    def __init__(self, asked: Asked, out: TextIO) -> None:
        self.asked, self._out = asked, out
        self.config: ModelConfig = full_width(4, asked.experts)
        self.world = World(asked)
        self.plan = self._plan()
        self.tell("plan", text=self.plan.describe(), moe=self.plan.moe, dense=self.plan.dense)
        if not self.plan.moe:
            return
        began, c = time.time(), self.config
        self.weights = [
            random_layer(
                c, asked.ranks, asked.rank, layer, self.world.device, dense=layer < self.plan.dense
            )
            for layer in range(self.plan.dense + self.plan.moe)
        ]
        self.ends = Ends.random(c, self.world.device)
        self.table = rope_table(c, self.world.device)
        self.world.meet()
        held = torch.cuda.memory_allocated() / 1e9
        self.tell("note", text=f"weights of {held:.1f} GB made in {time.time() - began:.1f} s")

    def tell(self, kind: str, **what: Any) -> None:
        """A line for the command, from rank 0."""
        if self.asked.rank == 0:
            print(as_json({"line": kind, **what}), file=self._out, flush=True)

    def _plan(self) -> NodePlan:
        asked = self.asked
        free, total = torch.cuda.mem_get_info(self.world.device)
        budget = int(self.world.least(float(usable(total, free))))
        cells = grid(asked.ranks, asked.widths, asked.batches)
        return plan_node(self.config, asked.ranks, budget, cells, asked.layers, KV, asked.even)

    def work(self) -> None:
        """The grid as far as the time reaches, then the exchange beside NCCL."""
        last, detailed = 60.0, 0
        for plan in self.plan.cells:
            cell = plan.cell
            if not plan.moe:
                self.tell("skipped", tp=cell.tp, batch=cell.batch, why=plan.note)
                continue
            if not self._goes_on(last):
                self.tell("skipped", tp=cell.tp, batch=cell.batch, why="the time is over")
                continue
            began = time.time()
            detail = cell in OPERATIONS or not detailed
            detailed += detail
            self._cell(plan, detail)
            torch.cuda.empty_cache()
            last = self.world.slowest(time.time() - began)[0]
            if detailed == 1:
                detailed += 1
                self._exchange((cell.tokens, 2))
        self.world.meet()
        self.tell("done")

    def _goes_on(self, last: float) -> bool:
        """Rank 0's answer, the same everywhere."""
        now = time.time()
        answer = torch.tensor([int(goes_on(now, now, self.asked.deadline - now, last))])
        dist.broadcast(answer, 0)
        return bool(answer)

    def ops(self, tp: int) -> Backends:
        """What computes for so many heads."""
        c = self.config
        shapes = Shapes(
            c.hidden_size,
            c.num_attention_heads // tp,
            c.kv_lora_rank,
            c.qk_rope_head_dim,
            c.qk_nope_head_dim,
            c.v_head_dim,
            c.moe_intermediate_size,
            c.n_routed_experts // self.asked.ranks,
            PAGE,
        )
        return choose_backends(self.world.device, shapes)

    def _pages(self, cell: Cell, layers: int) -> Pages | None:
        """None if any rank has no room, whatever the plan says."""
        pages = None
        try:
            pages = Pages(
                self.config, cell.batch, KV, layers, self.asked.rank // cell.tp, self.world.device
            )
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
        return pages if self.world.least(float(pages is not None)) else None

    def _cell(self, plan: CellPlan, detail: bool) -> None:
        cell, c, world, asked = plan.cell, self.config, self.world, self.asked
        dense, moe = self.plan.dense, plan.moe
        pages = self._pages(cell, dense + moe)
        if pages is None:
            self.tell("skipped", tp=cell.tp, batch=cell.batch, why="out of memory for latents")
            return
        placement = Placement.even(1, c.n_routed_experts, asked.ranks)
        size = exchange_size(c, asked.ranks, cell.share, asked.even)
        tables = [ReplicaTable.build(placement, 0, world.device)]
        exchange = NvshmemExperts(world.heap, tables, size, lanes=2, timeout_s=TIMEOUT_S)
        world.meet()
        weights: list[LayerWeights] = [
            first_heads(w, c, cell.tp) for w in self.weights[: dense + moe]
        ]
        ops, member = self.ops(cell.tp), asked.rank % cell.tp
        even = None
        if asked.even:
            even = even_choices(c, dense + moe, cell.share + 1, asked.rank, world.device)
        kit = Kit(c, ops, self.table, exchange, cell.tp, member, weights, even)
        start = self.ends.start(cell.tokens, asked.rank // cell.tp)
        rest: float | None = None
        for mode in modes_of(cell, asked.modes):
            flows = flows_of(kit, pages, start, mode)
            found, hidden = self._mode(flows, cell, dense, moe, mode)
            exchange.check()
            if rest is None:
                whole = torch.cat(hidden)
                graph = captured(lambda w=whole: self.ends.rest(w, cell.tp, ops, c.rms_norm_eps))
                rest = world.slowest(statistics.median(replay_times(graph, REPLAYS)))[0]
                del graph
            times = Times(found.pop("moe"), found.pop("dense"), rest)
            self.tell(
                "result", row=result_row(plan, asked.ranks, mode, times, found, asked.experts)
            )
            del flows, hidden
        if detail:
            self._operations(kit, pages, start, cell, dense)
        world.meet()
        exchange.close()

    def _mode(
        self, flows: dict[int, Flow], cell: Cell, dense: int, moe: int, mode: Mode
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Microseconds of a MoE and a dense layer, and whether the hidden states are sane."""
        together, found = self.world.together(cell.tp), {}
        took: dict[int, float] = {}
        hidden: list[Tensor] = []
        for layers in (0, moe):
            schedule = schedule_of(dense, layers, mode)
            graph = captured(lambda s=schedule: drive(flows, s, together))
            self.world.meet()
            each = replay_times(graph, REPLAYS)
            took[layers] = self.world.slowest(statistics.median(each))[0]
            hidden = [one.clone() for one in graph.kept]  # type: ignore[attr-defined]
            del graph
        one = torch.cat(hidden).float()
        largest, wrong = self.world.slowest(
            float(one.square().mean().sqrt().nan_to_num(float("inf"))),
            float(not bool(torch.isfinite(one).all())),
        )
        found["finite"], found["hidden_rms"] = not wrong, rounded(largest, 2)
        dense_us = took[0] / dense
        found["chain_us"] = round(took[moe], 1)
        return found | {"dense": dense_us, "moe": moe_time(took[moe], dense_us, moe, dense)}, hidden

    def _operations(self, kit: Kit, pages: Pages, start: Tensor, cell: Cell, dense: int) -> None:
        """Microseconds of each operation on the values it has in the layers, weights cold."""
        layers = min(len(kit.weights) - dense, MOST_NOTED)
        flows = flows_of(kit, pages, start, "no_overlap")
        together, noted = self.world.together(cell.tp), {}
        for flow in flows.values():
            flow.noted = noted
        drive(flows, schedule_of(dense, layers, "no_overlap")[dense:], together)
        self.world.meet()
        kit.exchange.check()
        bound = bound_work(cell, self.asked.ranks, experts=self.asked.experts)
        rows = []
        for name, calls in noted.items():
            jobs = [lambda o=op, a=args, k=more: o(*a, **k) for op, args, more in calls]
            took = self.world.slowest(timed(jobs, rounds=2))[0]
            limit = bound[name].microseconds(bounds.H200) if name in bound else None
            rows.append({"op": name, "us": round(took, 1), "bound_us": limit and round(limit, 1)})
        rows.append({"op": "sum of these", "us": round(sum(row["us"] for row in rows), 1)})
        if cell.tp > 1:
            share = torch.zeros_like(start[:1]).repeat(cell.share, 1)
            for name, wanted in (("sum", Sum(start.clone())), ("gather", Gather(share))):
                graph = captured(lambda w=wanted: [together(w) for _ in range(8)])
                self.world.meet()
                took = self.world.slowest(statistics.median(replay_times(graph)) / 8)[0]
                rows.append({"op": f"{name} over TP{cell.tp} (NCCL)", "us": round(took, 1)})
        chosen = {choice.op: choice.backend for choice in kit.ops.choices}
        self.tell("operations", tp=cell.tp, batch=cell.batch, rows=rows, backends=chosen)

    def _exchange(self, tokens: Sequence[int]) -> None:
        """Dispatch and combine by themselves, beside NCCL's all-to-all of the same bytes."""
        for count in tokens:
            here = Member(
                self.asked.rank, self.asked.ranks, count, self.world.heap, False, "masked"
            )
            took, nccl = here.times()[0], here.nccl(self.world.nccl)
            both = self.world.slowest(*took.values(), *nccl.values())
            sent, steps = here.end.sent, int(here.end.lanes[0].step)
            row: dict[str, Any] = {"tokens": count}
            for name, mine, theirs in zip(took, both, both[len(took) :], strict=False):
                row |= {f"{name}_us": round(mine, 1), f"{name}_bytes": sent.total(name) // steps}
                row[f"{name}_nccl_us"] = rounded(theirs, 1)
            self.tell("exchange", row=row)
            here.meet()
            here.end.close()
            del here
            torch.cuda.empty_cache()


def run(asked: Asked) -> None:
    """The process of a rank; ends it."""
    with ends_at_once(), os.fdopen(os.dup(1), "w") as out, torch.no_grad():
        os.dup2(2, 1)
        rank = Rank(asked, out)
        if rank.plan.moe:
            rank.work()
        else:
            rank.tell("done")

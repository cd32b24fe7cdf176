"""What a node's measured layers come to: steps, speeds, bounds, and what others published. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bounds
import project
from node_plan import BATCHES, KV, QUERY, WHOLE_LAYERS, Cell, CellPlan, grid

ARTICLE = "Perplexity 2025-04-18"
ARTICLE_LAYERS_US = {
    "EP8 TP1 batch 128": 1802.0,
    "EP128 TP1 batch 128, no_overlap": 2667.0,
    "EP128 TP1 batch 128, dispatch_overlap": 2651.0,
    "EP128 TP1 batch 128, microbatch": 1896.0,
}
"""Microseconds of a MoE layer on H100s, query length 2, 5,000 latents, of the breakdown."""
ARTICLE_REST_MS = 4.5
"""Dense layers, draft and head beside its 58 MoE layers: an estimate, the article has no number."""
SPEEDS = (
    (f"{ARTICLE}: EP8 TP8 batch 1, H200, more than", 100.0, 100.0),
    ("TensorRT-LLM, 8 H200, largest throughput", 11.3, 11489.0),
    ("TensorRT-LLM, 8 H200, least latency", 158.0, 158.0),
    ("DeepSeek production, EP144, H800", 21.0, 14800.0),
)
"""Tokens a second of a request and of a node as published; other loads, so not like for like."""


@dataclass(frozen=True)
class Times:
    """Microseconds measured of a cell in one mode.

    Attributes:
        moe: a MoE layer, in a chain.
        dense: a layer without experts.
        rest: both heads and the draft's projection.
    """

    moe: float
    dense: float
    rest: float

    @property
    def step_ms(self) -> float:
        """Of the whole model with its draft: layers that were not there count like the others."""
        return (WHOLE_LAYERS * self.moe + bounds.DENSE_LAYERS * self.dense + self.rest) / 1e3


def moe_time(chain_us: float, dense_us: float, moe: int, dense: int) -> float:
    """A MoE layer's part of a chain with `dense` other layers."""
    return (chain_us - dense * dense_us) / moe


def speeds(step_ms: float, requests: int) -> tuple[float, float]:
    """Tokens a second: of a request, of the node. 1.6 a step (a draft right six times in ten)."""
    each = bounds.TOKENS_A_STEP / step_ms * 1e3
    return each, each * requests


def active_experts(experts: int, of: int, tokens: float, top_k: int) -> float:
    """Of `experts` out of `of`, how many any of `tokens` tokens asks for, in the mean."""
    return experts * (1 - (1 - top_k / of) ** tokens)


def bound_work(
    cell: Cell, ranks: int, kv: int = KV, experts: int = bounds.EXPERTS
) -> dict[str, bounds.Work]:
    """The products of one MoE layer of a rank, full width. A member of a TP group has a part of the
    heads, and its share of the rows in all that follows attention."""
    work = bounds.attention_half(cell.batch, QUERY, kv, bounds.HEADS // cell.tp)
    work["gate"] = bounds.moe_layer(1, cell.share, kv, ranks)["gate"]
    work["shared_up"] = bounds.gemm(cell.share, bounds.HIDDEN, 2 * bounds.WIDTH)
    work["shared_down"] = bounds.gemm(cell.share, bounds.WIDTH, bounds.HIDDEN)
    tokens = ranks / cell.tp * cell.tokens
    active = active_experts(experts // ranks, experts, tokens, bounds.TOP_K)
    rows = tokens * bounds.TOP_K / ranks / active
    for name, n, k in (
        ("routed_up", 2 * bounds.WIDTH, bounds.HIDDEN),
        ("routed_down", bounds.HIDDEN, bounds.WIDTH),
    ):
        moved = active * (rows * k + n * k + 2 * rows * n)
        work[name] = bounds.Work(2 * active * rows * n * k, moved)
    return work


def bound_layer(
    cell: Cell, ranks: int, kv: int = KV, experts: int = bounds.EXPERTS
) -> tuple[float, float]:
    """A MoE layer on H200s at least, microseconds: one after another, and all overlapped.

    NVLink carries dispatch and combine; the sums over a TP group count as nothing.
    """
    computed = bounds.total(bound_work(cell, ranks, kv, experts), bounds.H200)
    own = cell.tokens / cell.tp
    wire = sum(bounds.transfer(1, bounds.NVLINK, own * (ranks - 1) / ranks))
    return computed + wire, max(computed, wire)


def bound_times(
    cell: Cell,
    ranks: int,
    overlapped: bool = False,
    kv: int = KV,
    experts: int = bounds.EXPERTS,
) -> Times:
    """The same for a step."""
    dense = bounds.attention_half(cell.batch, QUERY, kv, bounds.HEADS // cell.tp)
    dense["up"] = bounds.gemm(cell.share, bounds.HIDDEN, 2 * bounds.DENSE_WIDTH)
    dense["down"] = bounds.gemm(cell.share, bounds.DENSE_WIDTH, bounds.HIDDEN)
    logits = bounds.head(cell.tokens).microseconds(bounds.H200) / cell.tp
    moe = bound_layer(cell, ranks, kv, experts)[int(overlapped)]
    return Times(moe, bounds.total(dense, bounds.H200), 2 * logits)


def result_row(
    plan: CellPlan,
    ranks: int,
    mode: str,
    times: Times,
    measured: Mapping[str, Any],
    experts: int = bounds.EXPERTS,
) -> dict[str, Any]:
    """A line of the CSV: what was measured, what it comes to, and the bound."""
    cell = plan.cell
    speed, node = speeds(times.step_ms, cell.requests(ranks))
    extrapolated = plan.moe < WHOLE_LAYERS
    row: dict[str, Any] = {
        "kind": "measured",
        "name": f"EP{ranks} DP{ranks // cell.tp} TP{cell.tp}"
        + ("" if experts == bounds.EXPERTS else f" of {experts} experts"),
        "ranks": ranks,
        "tp": cell.tp,
        "batch": cell.batch,
        "experts": experts,
        "mode": mode,
        "moe_layers": plan.moe,
        "extrapolated": extrapolated,
        "fits_whole": plan.whole,
        "moe_us": round(times.moe, 1),
        "dense_us": round(times.dense, 1),
        "rest_us": round(times.rest, 1),
        "step_ms": round(times.step_ms, 2),
        "tokens_s_request": round(speed, 2),
        "tokens_s_node": round(node, 1),
    }
    after, best = bound_layer(cell, ranks, experts=experts)
    ideal = speeds(bound_times(cell, ranks, experts=experts).step_ms, cell.requests(ranks))
    row |= {"bound_us": round(after, 1), "bound_overlapped_us": round(best, 1)}
    row |= {"bound_tokens_s_request": round(ideal[0], 2), "bound_tokens_s_node": round(ideal[1], 1)}
    return row | dict(measured)


def pareto(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows that no other is at least as good as in both speeds, slowest request first."""
    best, front = -math.inf, []
    keys = ("tokens_s_request", "tokens_s_node")
    for row in sorted(rows, key=lambda row: tuple(-float(row[key]) for key in keys)):
        if float(row["tokens_s_node"]) > best:
            best = float(row["tokens_s_node"])
            front.append(row)
    return front[::-1]


def _reference(kind: str, name: str, speed: float, node: float, **more: Any) -> dict[str, Any]:
    row = {"kind": kind, "name": name, "tokens_s_request": round(speed, 2)}
    return row | {"tokens_s_node": round(node, 1)} | more


def published_rows() -> list[dict[str, Any]]:
    """The article's points and others'. A step of its layers is computed, not published."""
    rows = [_reference("published", *point) for point in SPEEDS]
    for name, layer in ARTICLE_LAYERS_US.items():
        step = bounds.MOE_LAYERS * layer / 1e3 + ARTICLE_REST_MS
        speed, node = speeds(step, 8 * 128)
        label = f"{ARTICLE}: {name}, H100 (step computed from its layer)"
        rows.append(_reference("published", label, speed, node, moe_us=layer, batch=128, tp=1))
    return rows


def emulated_rows(
    layer: Mapping[str, Any], wires: Sequence[Mapping[str, str]], gpus: int = 8
) -> list[dict[str, Any]]:
    """A rank of EP8 measured on one GPU, with published times of the wire (bench/project.py)."""
    return [
        _reference(
            "emulated",
            f"one GPU as a rank of {row.name}",
            row.request,
            gpus * row.gpu,
            moe_us=round(row.layer_us, 1),
            batch=project.BATCH,
            tp=1,
        )
        for row in project.all_rows(layer, None, wires)
        if row.name.startswith("EP8") and "bound" not in row.name
    ]


def bound_rows(
    ranks: int, batches: Sequence[int] = BATCHES, experts: int = bounds.EXPERTS
) -> list[dict[str, Any]]:
    """The limit of every cell of a node, whether or not it is measured; memory's size aside."""
    rows = []
    for cell in grid(ranks, batches=batches):
        for overlapped in (False, True):
            times = bound_times(cell, ranks, overlapped, experts=experts)
            speed, node = speeds(times.step_ms, cell.requests(ranks))
            kind = "bound_overlapped" if overlapped else "bound"
            name = f"EP{ranks} TP{cell.tp}"
            more = {"tp": cell.tp, "batch": cell.batch, "moe_us": round(times.moe, 1)}
            rows.append(_reference(kind, name, speed, node, ranks=ranks, **more))
    return rows


def table_line(row: Mapping[str, Any]) -> str:
    """A measured row as it is printed."""
    part = f" ({row['moe_layers']} MoE layers measured, step extrapolated)"
    return (
        f"{row['name']:14} batch {row['batch']:4} {row['mode']:17} layer {row['moe_us']:8.1f} us"
        f" (bound {row['bound_us']:7.1f})  step {row['step_ms']:7.2f} ms "
        f" {row['tokens_s_request']:7.2f} tokens/s a request {row['tokens_s_node']:9.1f} a node"
        + (part if row["extrapolated"] else "")
        + ("" if row["fits_whole"] else " [the whole model does not fit at this batch]")
        + ("" if row.get("finite", True) else " [NOT FINITE]")
    )

"""The gate: router projection, choice of experts, and where the choices stand.

Definition: `pdmesh.kernels.routing`. Three launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.routing import Places, Routing
from pdmesh.kernels.triton.choose import choose_rows, expert_columns, rule_constants
from pdmesh.kernels.triton.launch import chains
from pdmesh.kernels.triton.place import place
from pdmesh.kernels.triton.project import Tile, project, tile_for, workspace


@triton.jit
def choose_kernel(
    partials,
    bias,
    num_rows,
    ids,
    weights,
    rows,
    scale,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    COUNTED: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    expert, inside = expert_columns(GROUPS, GROUPS_PADDED, SIZE, SIZE_PADDED)
    correction = tl.zeros((1, GROUPS_PADDED * SIZE_PADDED), dtype=tl.float32)
    if BIASED:
        correction = tl.load(bias + expert, mask=inside, other=0.0)
    if CHAINED:
        gdc_wait()
    logits = tl.zeros((ROWS, GROUPS_PADDED * SIZE_PADDED), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        at = partials + (part * rows + row) * (GROUPS * SIZE) + expert
        logits += tl.load(at, mask=inside & (row < rows), other=0.0)
    chosen, weight = choose_rows(
        logits,
        correction,
        inside,
        scale,
        ROWS,
        SIGMOID,
        NORMALISE,
        TOP,
        TOP_PADDED,
        GROUPS,
        GROUPS_PADDED,
        TOP_GROUPS,
        SIZE,
        SIZE_PADDED,
    )
    if COUNTED:
        counts = row < tl.load(num_rows)
        chosen = tl.where(counts, chosen, -1)
        weight = tl.where(counts, weight, 0.0)
    to = tl.arange(0, TOP_PADDED)[None, :]
    kept = (to < TOP) & (row < rows)
    tl.store(ids + row * TOP + to, chosen, mask=kept)
    tl.store(weights + row * TOP + to, weight, mask=kept)


def new_routing(rows: int, rule: GateRule, device: torch.device | str) -> Routing:
    """An empty `Routing` for a number of rows."""

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    weights = torch.empty((rows, rule.top_k), dtype=torch.float32, device=device)
    counts, offsets = integers(rule.num_experts), integers(rule.num_experts)
    return Routing(integers(rows, rule.top_k), weights, counts, offsets, integers(rows, rule.top_k))


def gate_topk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rule: GateRule,
    num_rows: Tensor | None = None,
    *,
    out: Routing | None = None,
    work: Tensor | None = None,
    tile: Tile | None = None,
    chained: bool | None = None,
) -> Routing:
    """Projects rows to experts, chooses, and counts: `pdmesh.kernels.routing.gate_topk`.

    Args:
        x: [m, hidden] bfloat16; a row's elements are consecutive.
        weight: [experts, hidden] bfloat16 or float32, contiguous. A float32 weight is taken as
            three bfloat16 parts, which hold all of it unless it is below 2^-110.
        bias: [experts] float32, contiguous.
        rule: how experts are chosen; at most 1,024 experts.
        num_rows: int32 on the device: rows from there on are padding.
        out: where the result goes; made if it is None.
        work: see `workspace`; made if it is None.
        tile: for tuning.
        chained: whether the second launch and the third may begin before the one ahead has ended
            (programmatic dependent launch, CUDA programming guide); by default where they can.
    """
    rows = x.shape[0]
    check(x, weight, bias, rule)
    out = new_routing(rows, rule, x.device) if out is None else out
    if rows == 0:
        out.counts.zero_()
        out.offsets.zero_()
        return out
    work = workspace(rows, weight.shape[0], x.device) if work is None else work
    wide = weight.dtype == torch.float32
    chained = chains(x) if chained is None else chained
    project(x, weight, work, tile or tile_for(rows, wide), chained)
    choose(work, bias, rule, num_rows, out, chained)
    place(out.ids, Places(out.counts, out.offsets, out.places), chained)
    return out


def choose(
    work: Tensor,
    bias: Tensor | None,
    rule: GateRule,
    num_rows: Tensor | None,
    out: Routing,
    chained: bool,
    rows_a_program: int = 1,
) -> None:
    """Adds up the chunks in `work` and writes ids and weights of `out`; a warp a row."""
    parts, rows, _ = work.shape
    options: dict[str, Any] = {"launch_pdl": True} if chained else {}
    choose_kernel[(-(-rows // rows_a_program),)](
        work,
        work if bias is None else bias,
        out.ids if num_rows is None else num_rows,
        out.ids,
        out.weights,
        rows,
        rule.scale,
        PARTS=parts,
        BIASED=bias is not None and rule.method == "noaux_tc",
        COUNTED=num_rows is not None,
        ROWS=rows_a_program,
        **rule_constants(rule),
        CHAINED=chained,
        num_warps=rows_a_program,
        **options,
    )


def check(x: Tensor, weight: Tensor, bias: Tensor | None, rule: GateRule) -> None:
    """Raises ValueError for what the kernels cannot take."""
    experts = rule.num_experts
    if weight.shape != (experts, x.shape[1]) or not weight.is_contiguous() or experts > 1024:
        raise ValueError(f"weight {weight.shape} for rows {x.shape} and {experts} experts")
    if x.dtype != torch.bfloat16 or weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"rows {x.dtype} and a weight {weight.dtype}")
    if bias is not None and (bias.shape != (experts,) or bias.dtype != torch.float32):
        raise ValueError(f"bias {bias.shape} {bias.dtype} for {experts} experts")

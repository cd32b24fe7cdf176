"""The gate in one launch, for the few rows of decoding.

All programs are on the device at once (a cooperative launch). Those of a row tile wait for each
other between the projection and the choice, all of them between the choice and the counting. The
logits and what is chosen are those of `pdmesh.kernels.triton.gate`, bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.routing import Routing
from pdmesh.kernels.triton.choose import choose_rows, expert_columns, rule_constants
from pdmesh.kernels.triton.launch import multiprocessors, power_of_two, rows_of
from pdmesh.kernels.triton.place import MAX_BLOCK, place_expert
from pdmesh.kernels.triton.project import CHUNKS, Tile, Work, project_chunk

ROWS_AT_ONCE = tl.constexpr(4)
"""Rows that a program chooses for at once: a warp each."""


@triton.jit
def meet(counter, first, parties):
    """Returns once all `parties` programs are here; exactly one of them is `first`.

    The counter, int32 and 0 at the beginning, is 0 or -2^31 whenever nobody is here: every meeting
    adds 2^31 in all, and who waits looks at the sign.
    """
    tl.debug_barrier()
    step = tl.where(first, 2147483647 - (parties - 2), 1)
    before = tl.atomic_add(counter, step, sem="acq_rel", scope="gpu")
    now = before
    while (before ^ now) >= 0:
        now = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def fused_gate_kernel(
    x,
    weight,
    bias,
    num_rows,
    partials,
    arrivals,
    ids,
    weights,
    counts,
    offsets,
    places,
    rows,
    hidden,
    x_row,
    scale,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    COUNTED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
):
    experts: tl.constexpr = GROUPS * SIZE
    tile = tl.program_id(1)
    in_tile = tl.program_id(0) * PARTS + tl.program_id(2)
    parties = tl.num_programs(0) * PARTS
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    row = tile * ROWS + tl.arange(0, ROWS)
    of_expert = tl.minimum(expert, experts - 1)[:, None] * hidden
    of_row = tl.minimum(row, rows - 1)[None, :] * x_row
    first = tl.program_id(2) * CHUNK
    sums = project_chunk(
        x, weight, of_row, of_expert, first, hidden, CHUNK, EVEN, EXPERTS, ROWS, STEP
    )
    to = partials + (tl.program_id(2) * rows + row)[None, :] * experts + expert[:, None]
    tl.store(to, sums, mask=(expert < experts)[:, None] & (row < rows)[None, :])
    meet(arrivals + 1 + tile, in_tile == 0, parties)

    column, inside = expert_columns(GROUPS, GROUPS_PADDED, SIZE, SIZE_PADDED)
    correction = tl.zeros((1, GROUPS_PADDED * SIZE_PADDED), dtype=tl.float32)
    if BIASED:
        correction = tl.load(bias + column, mask=inside, other=0.0)
    for start in range(in_tile * ROWS_AT_ONCE, ROWS, parties * ROWS_AT_ONCE):
        some = (tile * ROWS + start + tl.arange(0, ROWS_AT_ONCE))[:, None]
        logits = tl.zeros((ROWS_AT_ONCE, GROUPS_PADDED * SIZE_PADDED), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            at = partials + (part * rows + some) * experts + column
            logits += tl.load(at, mask=inside & (some < rows), other=0.0, cache_modifier=".cg")
        chosen, share = choose_rows(
            logits,
            correction,
            inside,
            scale,
            ROWS_AT_ONCE,
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
            used = some < tl.load(num_rows)
            chosen = tl.where(used, chosen, -1)
            share = tl.where(used, share, 0.0)
        at = tl.arange(0, TOP_PADDED)[None, :]
        kept = (at < TOP) & (some < rows)
        tl.store(ids + some * TOP + at, chosen, mask=kept)
        tl.store(weights + some * TOP + at, share, mask=kept)
    programs = parties * tl.num_programs(1)
    number = tile * parties + in_tile
    meet(arrivals, number == 0, programs)

    for one in range(number, experts, programs):
        place_expert(ids, counts, offsets, places, rows * TOP, one, BLOCK)


def tile_for(rows: int, wide: bool) -> Tile:
    """The tile for a number of rows; `wide` where weights are float32."""
    if rows <= 32:
        return Tile(64, 16 if rows <= 16 else 32, 64, 4, 4)
    return Tile(64 if wide or rows <= 256 else 128, 64, 64, 4, 4)


def unfit(x: Tensor, weight: Tensor, tile: Tile) -> str | None:
    """Why the launch is not to be had for these rows; None if it is."""
    if not x.is_cuda:
        return "programs that wait for each other need a device"
    tiles = triton.cdiv(weight.shape[0], tile.experts) * triton.cdiv(x.shape[0], tile.rows)
    if tiles * CHUNKS > 2 * multiprocessors(x):
        return f"{tiles * CHUNKS} programs do not fit on the device at once"
    return None


def fused_gate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rule: GateRule,
    num_rows: Tensor | None,
    out: Routing,
    work: Work,
    tile: Tile,
) -> Routing:
    """`pdmesh.kernels.triton.gate.gate_topk` in one launch; see `unfit`."""
    rows, stride = rows_of(x)
    experts, hidden = weight.shape
    chunk = -(-hidden // (CHUNKS * tile.step)) * tile.step
    grid = (triton.cdiv(experts, tile.experts), triton.cdiv(rows, tile.rows), CHUNKS)
    fused_gate_kernel[grid](
        x,
        weight,
        work.sums if bias is None else bias,
        out.ids if num_rows is None else num_rows,
        work.sums,
        work.arrivals,
        *out,
        rows,
        hidden,
        stride,
        rule.scale,
        CHUNK=chunk,
        PARTS=CHUNKS,
        EVEN=chunk * CHUNKS == hidden,
        EXPERTS=tile.experts,
        ROWS=tile.rows,
        STEP=tile.step,
        BLOCK=min(MAX_BLOCK, max(16, power_of_two(out.ids.numel()))),
        BIASED=bias is not None and rule.method == "noaux_tc",
        COUNTED=num_rows is not None,
        **rule_constants(rule),
        num_warps=4,
        num_stages=tile.stages,
        launch_cooperative_grid=True,
    )
    return out

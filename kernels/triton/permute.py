"""Rows to the layouts of experts and back.

Definitions: `pdmesh.kernels.routing`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.quantised import Rows
from pdmesh.kernels.routing import ALIGNMENT, Permuted
from pdmesh.kernels.triton.launch import power_of_two, rows_of
from pdmesh.kernels.triton.quantise import _rows

COLUMNS = 1024
"""Columns that one program of `unpermute` adds up."""


@triton.jit
def copy_row(
    values, scales, to_values, to_scales, k, groups, group_in, group_out, K_PADDED: tl.constexpr
):
    """One row of k bytes and its scales; the pointers are those of the row."""
    column = tl.arange(0, K_PADDED)
    group = tl.arange(0, K_PADDED // 128)
    row = tl.load(values + column, mask=column < k)
    scale = tl.load(scales + group * group_in, mask=group < groups)
    tl.store(to_values + column, row, mask=column < k)
    tl.store(to_scales + group * group_out, scale, mask=group < groups)


@triton.jit
def permute_masked_kernel(
    values,
    scales,
    ids,
    places,
    to_values,
    to_scales,
    targets,
    experts,
    max_rows,
    k,
    groups,
    group_in,
    expert_out,
    group_out,
    CHOICES: tl.constexpr,
    K_PADDED: tl.constexpr,
):
    choice = tl.program_id(0)
    row = (choice // CHOICES).to(tl.int64)
    expert = tl.load(ids + choice)
    place = tl.load(places + choice)
    fits = (expert >= 0) & (expert < experts) & (place >= 0) & (place < max_rows)
    to = expert.to(tl.int64) * max_rows + place
    tl.store(targets + choice, tl.where(fits, to, -1).to(tl.int32))
    if fits:
        copy_row(
            values + row * k,
            scales + row,
            to_values + to * k,
            to_scales + expert.to(tl.int64) * expert_out + place,
            k,
            groups,
            group_in,
            group_out,
            K_PADDED,
        )


@triton.jit
def permute_contiguous_kernel(
    values,
    scales,
    ids,
    places,
    counts,
    to_values,
    to_scales,
    targets,
    row_expert,
    choices,
    experts,
    capacity,
    k,
    groups,
    group_in,
    group_out,
    CHOICES: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    ALIGN: tl.constexpr,
    K_PADDED: tl.constexpr,
):
    choice = tl.program_id(0)
    every = tl.arange(0, EXPERTS_PADDED)
    count = tl.load(counts + every, mask=every < experts, other=0)
    padded = (count + ALIGN - 1) // ALIGN * ALIGN
    if choice < choices:
        expert = tl.load(ids + choice)
        place = tl.load(places + choice)
        to = tl.sum(tl.where(every < expert, padded, 0), axis=0) + place
        fits = (expert >= 0) & (expert < experts) & (place >= 0) & (to < capacity)
        tl.store(targets + choice, tl.where(fits, to, -1))
        if fits:
            row = (choice // CHOICES).to(tl.int64)
            at = to.to(tl.int64)
            copy_row(
                values + row * k,
                scales + row,
                to_values + at * k,
                to_scales + at,
                k,
                groups,
                group_in,
                group_out,
                K_PADDED,
            )
    else:
        # ALIGN rows of the layout, which are one expert's or nobody's.
        first = (choice - choices) * ALIGN
        ends = tl.cumsum(padded, axis=0)
        expert = tl.sum((ends <= first).to(tl.int32), axis=0)
        used = tl.sum(tl.where(every == expert, ends - padded + count, 0), axis=0)
        at = first + tl.arange(0, ALIGN)
        tl.store(row_expert + at, tl.where(at < used, expert, -1), mask=at < capacity)


@triton.jit
def unpermute_kernel(
    parts,
    targets,
    weights,
    plus,
    out,
    h,
    CHOICES: tl.constexpr,
    PLUS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = row * h + column
    if PLUS:
        more = tl.load(plus + here, mask=column < h, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        at = tl.load(targets + row * CHOICES + choice).to(tl.int64)
        weight = tl.load(weights + row * CHOICES + choice)
        inside = (column < h) & (at >= 0)
        part = tl.load(parts + at * h + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(at >= 0, part * weight, 0.0)
    if PLUS:
        total = total.to(tl.bfloat16).to(tl.float32) + more
    tl.store(out + here, total.to(tl.bfloat16), mask=column < h)


def permute_masked(
    x: Rows,
    ids: Tensor,
    places: Tensor,
    experts: int,
    max_rows: int,
    *,
    out: Permuted | None = None,
    num_warps: int = 4,
) -> Permuted:
    """Copies rows to the masked layout: `pdmesh.kernels.routing.permute_masked`.

    Rows that no choice stands in are not touched, nor is one beyond the layout written.
    """
    rows, k = _checked(x, ids, places)
    to = _rows((experts, max_rows, k), x.values, None if out is None else out.rows)
    targets = torch.empty_like(ids) if out is None else out.targets
    if rows and ids.shape[1]:
        permute_masked_kernel[(ids.numel(),)](
            x.values.view(torch.uint8),
            x.scales,
            ids,
            places,
            to.values.view(torch.uint8),
            to.scales,
            targets,
            experts,
            max_rows,
            k,
            -(-k // BLOCK),
            x.scales.stride(1),
            to.scales.stride(0),
            to.scales.stride(2),
            CHOICES=ids.shape[1],
            K_PADDED=max(BLOCK, power_of_two(k)),
            num_warps=num_warps,
        )
    return Permuted(to, targets, None)


def permute_contiguous(
    x: Rows,
    ids: Tensor,
    places: Tensor,
    counts: Tensor,
    capacity: int,
    *,
    out: Permuted | None = None,
    num_warps: int = 4,
) -> Permuted:
    """Copies rows to the contiguous layout: `pdmesh.kernels.routing.permute_contiguous`."""
    rows, k = _checked(x, ids, places)
    to = _rows((capacity, k), x.values, None if out is None else out.rows)
    targets = torch.empty_like(ids) if out is None else out.targets
    row_expert = None if out is None else out.row_expert
    if row_expert is None:
        row_expert = ids.new_empty((capacity,))
    grid = ids.numel() + -(-capacity // ALIGNMENT)
    if grid:
        permute_contiguous_kernel[(grid,)](
            x.values.view(torch.uint8),
            x.scales,
            ids,
            places,
            counts,
            to.values.view(torch.uint8),
            to.scales,
            targets,
            row_expert,
            ids.numel(),
            counts.shape[0],
            capacity,
            k,
            -(-k // BLOCK),
            x.scales.stride(1),
            to.scales.stride(1),
            CHOICES=max(1, ids.shape[1]),
            EXPERTS_PADDED=power_of_two(counts.shape[0]),
            ALIGN=ALIGNMENT,
            K_PADDED=max(BLOCK, power_of_two(k)),
            num_warps=num_warps,
        )
    return Permuted(to, targets, row_expert)


def unpermute(
    parts: Tensor,
    targets: Tensor,
    weights: Tensor,
    plus: Tensor | None = None,
    *,
    out: Tensor | None = None,
    num_warps: int = 8,
) -> Tensor:
    """The weighted sum of what the experts gave: `pdmesh.kernels.routing.unpermute`.

    Args:
        parts: [rows, h] or [experts, max_rows, h] bfloat16, contiguous.
        targets: [m, choices] int32, contiguous.
        weights: [m, choices] float32, contiguous.
        plus: [m, h] bfloat16, contiguous, or None.
        out: [m, h] bfloat16, contiguous; made if it is None.
        num_warps: warps of a program, for tuning.
    """
    rows, choices = targets.shape
    h = parts.shape[-1]
    if weights.shape != targets.shape or parts.dtype != torch.bfloat16:
        raise ValueError(f"parts {parts.dtype}, targets {targets.shape}, weights {weights.shape}")
    if not (parts.is_contiguous() and targets.is_contiguous() and weights.is_contiguous()):
        raise ValueError("parts, targets and weights have to be contiguous")
    if plus is not None and (
        plus.shape != (rows, h) or plus.dtype != parts.dtype or not plus.is_contiguous()
    ):
        raise ValueError(f"{plus.dtype} {plus.shape} {plus.stride()} beside sums [{rows}, {h}]")
    out = parts.new_empty((rows, h)) if out is None else out
    if rows and h:
        columns = min(COLUMNS, power_of_two(h))
        unpermute_kernel[(rows, -(-h // columns))](
            parts,
            targets,
            weights,
            weights if plus is None else plus,
            out,
            h,
            CHOICES=choices,
            PLUS=plus is not None,
            COLUMNS=columns,
            num_warps=num_warps,
            # The definition rounds every product by itself.
            enable_fp_fusion=False,
        )
    return out


def _checked(x: Rows, ids: Tensor, places: Tensor) -> tuple[int, int]:
    """Rows and their width; raises ValueError for what the kernels cannot take."""
    rows, stride = rows_of(x.values)
    k = x.values.shape[1]
    if stride != k or (x.scales.stride(0) != 1 and rows > 1) or ids.shape[0] != rows:
        raise ValueError(f"rows {x.values.shape}, {x.scales.stride()} for ids {ids.shape}")
    if ids.dtype != torch.int32 or places.dtype != torch.int32 or ids.shape != places.shape:
        raise ValueError(f"ids {ids.shape} {ids.dtype}, places {places.shape} {places.dtype}")
    if not (ids.is_contiguous() and places.is_contiguous()):
        raise ValueError("ids and places have to be contiguous")
    return rows, k

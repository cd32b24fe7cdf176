"""Rows to FP8 with one scale for 128 values, alone and after SwiGLU.

Definitions: `pdmesh.kernels.quantised`. A value is multiplied by the reciprocal of its scale where
the definition divides by the scale, so one midway between two FP8 numbers may become the other. Of
a NaN only its own element becomes NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.quantised import Rows, new_scales
from pdmesh.kernels.triton.launch import multiprocessors, power_of_two

MAX_GROUPS = 64
"""Groups of 128 that one program holds at most."""
SILU_GROUPS = 16


@triton.jit
def quantised_groups(x):
    """x [groups, 128] float32: e4m3 [groups, 128] and scales [groups]."""
    scales = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), 1e-10), 448.0)
    return (x * tl.div_rn(1.0, scales)[:, None]).to(tl.float8e4nv), scales


@triton.jit
def quantise_kernel(
    x, values, scales, rows, k, x_batch, x_row, scale_batch, scale_group, GROUPS: tl.constexpr
):
    batch = (tl.program_id(0) // rows).to(tl.int64)
    row = (tl.program_id(0) % rows).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < k
    read = tl.load(x + batch * x_batch + row * x_row + column, mask=inside, other=0.0)
    quantised, scale = quantised_groups(read.to(tl.float32))
    tl.store(values + (batch * rows + row) * k + column, quantised, mask=inside)
    to = scales + batch * scale_batch + group * scale_group + row
    tl.store(to, scale, mask=group * 128 < k)


def quantise_rows(x: Tensor, *, out: Rows | None = None, num_warps: int | None = None) -> Rows:
    """x [m, k] or [batch, m, k] in any floating dtype to `Rows`; a row's elements are consecutive.

    Args:
        x: the rows; the last group of a row may be partial.
        out: where the result goes; made if it is None.
        num_warps: warps of a program, for tuning.
    """
    batched = x if x.dim() == 3 else x.unsqueeze(0)
    batch, rows, k = batched.shape
    if x.dim() not in (2, 3) or (k > 1 and batched.stride(2) != 1):
        raise ValueError(f"need rows of consecutive elements, not {x.shape} {x.stride()}")
    out = _rows(x.shape, x, out)
    if x.numel() == 0:
        return out
    groups = -(-k // BLOCK)
    block = min(power_of_two(groups), MAX_GROUPS)
    quantise_kernel[(batch * rows, -(-groups // block))](
        batched,
        out.values,
        out.scales,
        rows,
        k,
        batched.stride(0),
        batched.stride(1),
        out.scales.stride(0) if x.dim() == 3 else 0,
        out.scales.stride(-1),
        GROUPS=block,
        num_warps=num_warps or _warps(block),
    )
    return out


@triton.jit
def silu_row(gate_up, values, scales, k, scale_group, first, GROUPS: tl.constexpr):
    """GROUPS groups from group `first` on of one row; the pointers are those of the row."""
    group = first + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < k
    gate = tl.load(gate_up + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + k + column, mask=inside, other=0.0).to(tl.float32)
    quantised, scale = quantised_groups(gate / (1.0 + tl.exp(-gate)) * up)
    tl.store(values + column, quantised, mask=inside)
    tl.store(scales + group * scale_group, scale, mask=group * 128 < k)


@triton.jit
def silu_mul_kernel(gate_up, values, scales, k, row_stride, scale_group, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    silu_row(
        gate_up + row * row_stride, values + row * k, scales + row, k, scale_group, first, GROUPS
    )


def silu_mul_quantise(
    gate_up: Tensor, *, out: Rows | None = None, num_warps: int | None = None
) -> Rows:
    """silu(gate) * up of gate_up [m, 2 i], in float32, quantised: [m, i].

    Args:
        gate_up: gate then up; a row's elements are consecutive.
        out: where the result goes; made if it is None.
        num_warps: warps of a program, for tuning.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"need rows of gate and up, not {gate_up.shape} {gate_up.stride()}")
    rows, k = gate_up.shape[0], gate_up.shape[1] // 2
    out = _rows((rows, k), gate_up, out)
    if rows == 0:
        return out
    groups = -(-k // BLOCK)
    block = min(power_of_two(groups), SILU_GROUPS)
    silu_mul_kernel[(rows, -(-groups // block))](
        gate_up,
        out.values,
        out.scales,
        k,
        gate_up.stride(0),
        out.scales.stride(-1),
        GROUPS=block,
        num_warps=num_warps or _warps(block),
    )
    return out


@triton.jit
def masked_silu_mul_kernel(
    gate_up,
    counts,
    values,
    scales,
    experts,
    rows,
    k,
    scale_expert,
    scale_group,
    EXPERTS_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # The rows of all experts, one expert after the other, go to the programs in turn.
    every = tl.arange(0, EXPERTS_PADDED)
    count = tl.load(counts + every, mask=every < experts, other=0)
    ends = tl.cumsum(tl.minimum(count, rows), axis=0)
    total = tl.max(ends, axis=0) * BLOCKS
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        place = item // BLOCKS
        before = ends <= place
        expert = tl.cast(tl.sum(before.to(tl.int32), axis=0), tl.int64)
        row = place - tl.max(tl.where(before, ends, 0), axis=0)
        at = expert * rows + row
        to = scales + expert * scale_expert + row
        first = (item % BLOCKS) * GROUPS
        silu_row(gate_up + at * 2 * k, values + at * k, to, k, scale_group, first, GROUPS)


def masked_silu_mul_quantise(
    gate_up: Tensor,
    counts: Tensor,
    *,
    out: Rows | None = None,
    num_warps: int | None = None,
    programs: int = 8,
) -> Rows:
    """`silu_mul_quantise` of the first counts[e] rows of each expert e; others are not touched.

    The counts are read on the device: nothing waits for the host.

    Args:
        gate_up: [experts, rows, 2 i], contiguous.
        counts: [experts] int32 on the device; more than `rows` counts as `rows`.
        out: where the result goes; made if it is None.
        num_warps: warps of a program, for tuning.
        programs: programs a multiprocessor, for tuning.
    """
    if gate_up.dim() != 3 or gate_up.shape[2] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"need [experts, rows, 2 i], contiguous, not {gate_up.shape}")
    experts, rows, k = gate_up.shape[0], gate_up.shape[1], gate_up.shape[2] // 2
    out = _rows((experts, rows, k), gate_up, out)
    if gate_up.numel() == 0:
        return out
    groups = -(-k // BLOCK)
    block = min(power_of_two(groups), SILU_GROUPS)
    blocks = -(-groups // block)
    grid = min(experts * rows * blocks, programs * multiprocessors(gate_up))
    masked_silu_mul_kernel[(grid,)](
        gate_up,
        counts,
        out.values,
        out.scales,
        experts,
        rows,
        k,
        out.scales.stride(0),
        out.scales.stride(-1),
        EXPERTS_PADDED=power_of_two(experts),
        GROUPS=block,
        BLOCKS=blocks,
        num_warps=num_warps or _warps(block),
    )
    return out


def new_rows(*shape: int, device: torch.device | str) -> Rows:
    """Empty `Rows` of [..., m, k]."""
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return Rows(values, new_scales(*shape[:-1], -(-shape[-1] // BLOCK), device=device))


def _rows(shape: tuple[int, ...] | torch.Size, like: Tensor, out: Rows | None) -> Rows:
    """`out`, or new rows; checks that `out` fits."""
    if out is None:
        return new_rows(*shape, device=like.device)
    groups = -(-shape[-1] // BLOCK)
    fits = out.values.shape == shape and out.scales.shape == (*shape[:-1], groups)
    if not fits or not out.values.is_contiguous() or out.scales.stride(-2) != 1:
        raise ValueError(f"out holds {out.values.shape} and {out.scales.shape}, not rows {shape}")
    return out


def _warps(groups: int) -> int:
    """Warps for a tile of `groups` x 128."""
    return min(8, max(1, groups // 4))

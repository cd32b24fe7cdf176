"""RMS normalisation, with the sum before it and the quantisation after it.

Definitions: `pdmesh.kernels.quantised`. The mean is summed in another order than there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.quantised import Rows
from pdmesh.kernels.triton.launch import (
    lets_next_begin,
    multiprocessors,
    power_of_two,
    rows_of,
)
from pdmesh.kernels.triton.quantise import _rows, quantised_groups

MAX_WIDTH = 16384


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    values,
    scales,
    normed,
    rows,
    k,
    x_row,
    residual_row,
    scale_group,
    eps,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    GROUPS: tl.constexpr,
    NEXT: tl.constexpr,
):
    if NEXT:
        gdc_launch_dependents()
    # A program that has several rows keeps the weight for all of them.
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < k
    scale = tl.load(weight + column, mask=inside, other=0.0)
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        read = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            at = residual + row * residual_row + column
            total = (read + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(tl.bfloat16)
            tl.store(at, total, mask=inside)
            read = total.to(tl.float32)
        mean = tl.sum(tl.sum(read * read, axis=1), axis=0) / k
        unit = (read * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))).to(tl.bfloat16).to(tl.float32)
        result = (unit * scale.to(tl.float32)).to(tl.bfloat16)
        if KEEP:
            tl.store(normed + row * k + column, result, mask=inside)
        quantised, factor = quantised_groups(result.to(tl.float32))
        tl.store(values + row * k + column, quantised, mask=inside)
        tl.store(scales + group * scale_group + row, factor, mask=group * 128 < k)


def rms_norm_quantise(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    with_normed: bool = True,
    out: Rows | None = None,
    normed_out: Tensor | None = None,
    num_warps: int | None = None,
    programs: int | None = None,
) -> tuple[Rows, Tensor]:
    """`rms_norm` of x [m, k] bfloat16, quantised, and the normalised rows themselves [m, k].

    x may be a view of wider rows: the first 1,536 columns of what the fused query and latent
    projection gave are normalised and quantised without a copy.

    Args:
        x: k at most MAX_WIDTH; a row's elements are consecutive.
        weight: [k] bfloat16.
        eps: added to the mean of the squares.
        with_normed: whether the normalised rows are wanted; if not, [0, k] takes their place.
        out: where the quantised rows go; made if it is None.
        normed_out: where the normalised rows go [m, k], contiguous.
        num_warps: warps of a program, for tuning.
        programs: programs a multiprocessor, for tuning; None: a program a row.
    """
    return _norm(x, None, weight, eps, with_normed, out, normed_out, (num_warps, programs))


def add_rms_norm_quantise(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    with_normed: bool = True,
    out: Rows | None = None,
    normed_out: Tensor | None = None,
    num_warps: int | None = None,
    programs: int | None = None,
) -> tuple[Rows, Tensor]:
    """Adds x [m, k] to `residual` [m, k] in place, then as `rms_norm_quantise` of the sum."""
    if residual.shape != x.shape or residual.dtype != torch.bfloat16:
        raise ValueError(f"residual {residual.shape} {residual.dtype} for rows {x.shape}")
    return _norm(x, residual, weight, eps, with_normed, out, normed_out, (num_warps, programs))


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    with_normed: bool,
    out: Rows | None,
    normed_out: Tensor | None,
    tuning: tuple[int | None, int | None],
) -> tuple[Rows, Tensor]:
    rows, stride = rows_of(x)
    k = x.shape[1]
    num_warps, programs = tuning
    if k > MAX_WIDTH or weight.shape != (k,) or weight.dtype != torch.bfloat16:
        raise ValueError(f"rows of {k} with a weight {weight.shape} {weight.dtype}")
    out = _rows(x.shape, x, out)
    if normed_out is None:
        normed_out = x.new_empty((rows if with_normed else 0, k), dtype=torch.bfloat16)
    if rows == 0:
        return out, normed_out
    groups = power_of_two(-(-k // BLOCK))
    grid = rows if programs is None else min(rows, programs * multiprocessors(x))
    rms_norm_kernel[(grid,)](
        x,
        x if residual is None else residual,
        weight,
        out.values,
        out.scales,
        normed_out if with_normed else x,
        rows,
        k,
        stride,
        0 if residual is None else rows_of(residual)[1],
        out.scales.stride(1),
        eps,
        ADD=residual is not None,
        KEEP=with_normed,
        GROUPS=groups,
        NEXT=lets_next_begin(),
        num_warps=num_warps or min(16, max(1, groups // 8)),
    )
    return out, normed_out

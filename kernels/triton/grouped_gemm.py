"""The experts' block-scaled FP8 products for any shape: for what DeepGEMM is not there for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.quantised import BlockWeight, Rows
from pdmesh.kernels.triton.block_product import block_product
from pdmesh.kernels.triton.launch import power_of_two
from pdmesh.kernels.triton.splitk_gemm import bulk_loads


class GroupedConfig(NamedTuple):
    """Tile, and how it is computed: see `gemm_config.SplitConfig`.

    Attributes:
        together: tiles of rows in the contiguous layout that follow each other for a tile of the
            weight; after all columns come the next ones. 0: all rows.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    swap: bool = False
    bulk: bool = True
    together: int = 0


@triton.jit
def tile_of_an_expert(
    x,
    w,
    y,
    x_scales,
    w_scales,
    row,
    end,
    expert,
    column,
    n,
    k,
    x_scale_row,
    x_scale_step,
    w_scale_expert,
    w_scale_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    BULK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Computes and stores rows from `row` on, up to `end`, of all of x and y, for one expert.

    `x_scales` is such that row 0 of x has its scale there.
    """
    total = block_product(
        x,
        w,
        x_scales,
        w_scales + expert.to(tl.int64) * w_scale_expert + (column // 128) * w_scale_row,
        row,
        end,
        expert * n + column,
        expert * n + n,
        k,
        k,
        x_scale_row,
        x_scale_step,
        0,
        tl.cdiv(k, 128),
        BLOCK_M,
        BLOCK_N,
        SWAP,
        BULK,
        EVEN,
    )
    if SWAP:
        total = total.T
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    pointers = y + rows.to(tl.int64)[:, None] * n + columns[None, :]
    mask = (rows[:, None] < end) & (columns[None, :] < n)
    tl.store(pointers, total.to(tl.bfloat16), mask=mask)


@triton.jit
def masked_gemm_kernel(
    x,
    w,
    y,
    x_scales,
    w_scales,
    counts,
    experts,
    space,
    n,
    k,
    x_scale_expert,
    x_scale_row,
    x_scale_step,
    w_scale_expert,
    w_scale_row,
    EXPERTS_PADDED: tl.constexpr,
    FIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    BULK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Grid: (n tiles, m tiles at a time, experts; or if FIND, so many of them that have rows).

    Each expert has `space` rows, of which the first of its count are computed.
    """
    place = tl.program_id(2)
    if FIND:
        every = tl.arange(0, EXPERTS_PADDED)
        used = tl.load(counts + every, mask=every < experts, other=0) > 0
        number = tl.cumsum(used.to(tl.int32), axis=0)
        expert = tl.sum(tl.where(used & (number == place + 1), every, 0), axis=0)
        count = tl.where(place < tl.sum(used.to(tl.int32), axis=0), tl.load(counts + expert), 0)
    else:
        expert = place
        count = tl.load(counts + expert)
    start = expert * space
    for tile in range(tl.program_id(1), tl.cdiv(count, BLOCK_M), tl.num_programs(1)):
        tile_of_an_expert(
            x,
            w,
            y,
            x_scales + expert.to(tl.int64) * x_scale_expert - start * x_scale_row,
            w_scales,
            start + tile * BLOCK_M,
            start + count,
            expert,
            tl.program_id(0) * BLOCK_N,
            n,
            k,
            x_scale_row,
            x_scale_step,
            w_scale_expert,
            w_scale_row,
            BLOCK_M,
            BLOCK_N,
            SWAP,
            BULK,
            EVEN,
        )


@triton.jit(do_not_specialize=["together"])
def sorted_gemm_kernel(
    x,
    w,
    y,
    x_scales,
    w_scales,
    row_expert,
    rows,
    together,
    n,
    k,
    x_scale_row,
    x_scale_step,
    w_scale_expert,
    w_scale_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    BULK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Grid: m tiles x n tiles. `together` m tiles come with all n tiles before the next m tiles do.

    A tile of `rows` rows belongs to the expert of its first one; -1: nobody.
    """
    program = tl.program_id(0)
    of_those = together * tl.cdiv(n, BLOCK_N)
    row = (program // of_those * together + program % together) * BLOCK_M
    expert = tl.load(row_expert + row, mask=row < rows, other=-1)
    if expert >= 0:
        tile_of_an_expert(
            x,
            w,
            y,
            x_scales,
            w_scales,
            row,
            rows,
            expert,
            (program % of_those // together) * BLOCK_N,
            n,
            k,
            x_scale_row,
            x_scale_step,
            w_scale_expert,
            w_scale_row,
            BLOCK_M,
            BLOCK_N,
            SWAP,
            BULK,
            EVEN,
        )


def masked_config(rows: int) -> GroupedConfig:
    """By the rows that an expert probably has; a router gives some more than that."""
    if rows <= 10:
        return GroupedConfig(16, 128, 4, 5, True)
    if rows <= 24:
        return GroupedConfig(32, 128, 4, 5, True)
    if rows <= 64:
        return GroupedConfig(64, 128, 4, 4)
    return GroupedConfig(128, 128, 8, 4)


def contiguous_config(rows: int) -> GroupedConfig:
    """The same; 0: many. `python -P bench/gpu_gemm.py --only sorted --tune` on an H200."""
    if 0 < rows <= 20:
        return GroupedConfig(32, 128, 4, 5, True, together=4)
    if 0 < rows <= 512:
        return GroupedConfig(64, 128, 4, 4, together=8)
    return GroupedConfig(128, 64, 4, 4, together=2)


def _operands(x: Rows, weight: BlockWeight, c: GroupedConfig) -> tuple[Any, Any, bool]:
    """Values of all rows and of all experts, as the kernels take them; whether in bulk."""
    k = weight.values.shape[2]
    rows, weights = x.values.view(-1, k), weight.values.view(-1, k)
    if not (c.bulk and bulk_loads(rows, weights)):
        return rows, weights, False
    return (
        TensorDescriptor.from_tensor(rows, [c.block_m, BLOCK]),
        TensorDescriptor.from_tensor(weights, [c.block_n, BLOCK]),
        True,
    )


def masked_grouped_gemm(
    x: Rows,
    weight: BlockWeight,
    counts: Tensor,
    expected: int,
    used: int = 0,
    *,
    out: Tensor | None = None,
    config: GroupedConfig | None = None,
) -> Tensor:
    """`quantised.masked_grouped_gemm`; rows from counts[e] on are left as they were in `out`.

    Args:
        out: bfloat16 [experts, rows, n], contiguous.
    """
    experts, rows, k = x.values.shape
    n = weight.values.shape[1]
    if out is None:
        out = x.values.new_empty((experts, rows, n), dtype=torch.bfloat16)
    if experts * rows == 0:
        return out
    c = config or masked_config(expected)
    x_values, w_values, bulk = _operands(x, weight, c)
    find = 0 < used < experts
    tiles, likely = -(-rows // c.block_m), -(-2 * expected // c.block_m)
    masked_gemm_kernel[(-(-n // c.block_n), max(1, min(tiles, likely)), used if find else experts)](
        x_values,
        w_values,
        out,
        x.scales,
        weight.scales,
        counts,
        experts,
        rows,
        n,
        k,
        x.scales.stride(0),
        x.scales.stride(1),
        x.scales.stride(2),
        weight.scales.stride(0),
        weight.scales.stride(1),
        EXPERTS_PADDED=power_of_two(experts),
        FIND=find,
        BLOCK_M=c.block_m,
        BLOCK_N=c.block_n,
        SWAP=c.swap,
        BULK=bulk,
        EVEN=k % BLOCK == 0,
        num_warps=c.warps,
        num_stages=c.stages,
    )
    return out


def contiguous_grouped_gemm(
    x: Rows,
    weight: BlockWeight,
    row_expert: Tensor,
    expected: int = 0,
    *,
    out: Tensor | None = None,
    config: GroupedConfig | None = None,
) -> Tensor:
    """`quantised.contiguous_grouped_gemm`. A tile of padding alone is left as it was in `out`.

    Args:
        out: bfloat16 [m, n], contiguous.
        config: a tile's rows divide 128.
    """
    m, k = x.values.shape
    n = weight.values.shape[1]
    if out is None:
        out = x.values.new_empty((m, n), dtype=torch.bfloat16)
    if m == 0:
        return out
    c = config or contiguous_config(expected)
    x_values, w_values, bulk = _operands(x, weight, c)
    tiles = -(-m // c.block_m)
    together = min(c.together or tiles, tiles)
    sorted_gemm_kernel[(-(-tiles // together) * together * -(-n // c.block_n),)](
        x_values,
        w_values,
        out,
        x.scales,
        weight.scales,
        row_expert,
        m,
        together,
        n,
        k,
        x.scales.stride(0),
        x.scales.stride(1),
        weight.scales.stride(0),
        weight.scales.stride(1),
        BLOCK_M=c.block_m,
        BLOCK_N=c.block_n,
        SWAP=c.swap,
        BULK=bulk,
        EVEN=k % BLOCK == 0,
        num_warps=c.warps,
        num_stages=c.stages,
    )
    return out

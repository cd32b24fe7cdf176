"""The experts' block-scaled FP8 products for any shape: for what DeepGEMM is not there for."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.quantised import BlockWeight, Rows
from pdmesh.kernels.triton.block_product import block_product
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


@triton.jit(do_not_specialize=["together"])
def grouped_gemm_kernel(
    x,
    w,
    y,
    x_scales,
    w_scales,
    groups,
    rows_of_all,
    n,
    k,
    x_stride,
    x_scale_expert,
    x_scale_row,
    x_scale_step,
    w_scale_expert,
    w_scale_row,
    together,
    CONTIGUOUS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    BULK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One tile. Grid: (m tiles x n tiles, m tiles fastest; experts, or 1 if CONTIGUOUS).

    `groups` is the expert of each of `rows_of_all` rows if CONTIGUOUS, where `together` m tiles
    come with all n tiles before the next m tiles do; else the rows that count of each expert, of
    `rows_of_all` that lie there, and `together` is all m tiles.
    """
    program = tl.program_id(0)
    of_those = together * tl.cdiv(n, BLOCK_N)
    row = (program // of_those * together + program % together) * BLOCK_M
    column = (program % of_those // together) * BLOCK_N
    if CONTIGUOUS:
        expert = tl.load(groups + row, mask=row < rows_of_all, other=-1)
        count = rows_of_all
        start = 0
        used = expert >= 0
    else:
        expert = tl.program_id(1)
        count = tl.load(groups + expert)
        start = expert * rows_of_all
        used = row < count
    if used:
        total = block_product(
            x,
            w,
            x_scales + expert.to(tl.int64) * x_scale_expert - start * x_scale_row,
            w_scales + expert.to(tl.int64) * w_scale_expert + (column // 128) * w_scale_row,
            start + row,
            start + count,
            expert * n + column,
            expert * n + n,
            k,
            x_stride,
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
        pointers = y + (start + rows).to(tl.int64)[:, None] * n + columns[None, :]
        mask = (rows[:, None] < count) & (columns[None, :] < n)
        tl.store(pointers, total.to(tl.bfloat16), mask=mask)


def masked_config(rows: int) -> GroupedConfig:
    """By the rows that an expert probably has."""
    if rows <= 16:
        return GroupedConfig(16, 128, 4, 5, True)
    if rows <= 32:
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


def _launch(
    x: Rows, weight: BlockWeight, groups: Tensor, out: Tensor, rows: int, c: GroupedConfig
) -> Tensor:
    experts, n, k = weight.values.shape
    contiguous = x.values.dim() == 2
    x_matrix, w_matrix = x.values.view(-1, k), weight.values.view(-1, k)
    bulk = c.bulk and bulk_loads(x_matrix, w_matrix)
    if bulk:
        x_matrix = TensorDescriptor.from_tensor(x_matrix, [c.block_m, BLOCK])
        w_matrix = TensorDescriptor.from_tensor(w_matrix, [c.block_n, BLOCK])
    tiles = -(-rows // c.block_m)
    together = min(c.together, tiles) if contiguous and c.together else tiles
    grid = (
        -(-tiles // together) * together * -(-n // c.block_n),
        1 if contiguous else experts,
    )
    grouped_gemm_kernel[grid](
        x_matrix,
        w_matrix,
        out,
        x.scales,
        weight.scales,
        groups,
        rows,
        n,
        k,
        k,
        0 if contiguous else x.scales.stride(0),
        x.scales.stride(-2),
        x.scales.stride(-1),
        weight.scales.stride(0),
        weight.scales.stride(1),
        together,
        CONTIGUOUS=contiguous,
        BLOCK_M=c.block_m,
        BLOCK_N=c.block_n,
        SWAP=c.swap,
        BULK=bulk,
        EVEN=k % BLOCK == 0,
        num_warps=c.warps,
        num_stages=c.stages,
    )
    return out


def masked_grouped_gemm(
    x: Rows,
    weight: BlockWeight,
    counts: Tensor,
    expected: int,
    *,
    out: Tensor | None = None,
    config: GroupedConfig | None = None,
) -> Tensor:
    """`quantised.masked_grouped_gemm`; rows from counts[e] on are left as they were in `out`.

    Args:
        out: bfloat16 [experts, rows, n], contiguous.
    """
    experts, rows, _ = x.values.shape
    n = weight.values.shape[1]
    if out is None:
        out = x.values.new_empty((experts, rows, n), dtype=torch.bfloat16)
    if experts * rows == 0:
        return out
    return _launch(x, weight, counts, out, rows, config or masked_config(expected))


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
    m, n = x.values.shape[0], weight.values.shape[1]
    if out is None:
        out = x.values.new_empty((m, n), dtype=torch.bfloat16)
    if m == 0:
        return out
    return _launch(x, weight, row_expert, out, m, config or contiguous_config(expected))

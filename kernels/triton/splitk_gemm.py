"""The block-scaled FP8 product for few rows: the sums are split among thread blocks.

With 256 rows or fewer a weight has too few tiles to fill a device, and a tile's sum of thousands is
a long chain of steps. Here each tile's groups are divided among `split` thread blocks. All but the
last write float32 partial sums; the last one of a tile in launch order waits for them and adds
them in a fixed order, so the result does not vary from run to run. It waits only for thread blocks
that were launched before it, so it cannot wait for ever, however few run at a time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.gemm_config import SplitConfig, split_config
from pdmesh.kernels.quantised import BlockWeight, Rows
from pdmesh.kernels.triton.block_product import BULK_ALIGNMENT, block_product

PARTIAL_FLOATS = 8 << 20
MOST_TILES = 8192


class Workspace(NamedTuple):
    """What split products need besides their output; used by one stream at a time.

    Attributes:
        partials: float32 [PARTIAL_FLOATS], anything.
        arrived: int32 [MOST_TILES], zeros, which every product leaves zeros.
    """

    partials: Tensor
    arrived: Tensor


def new_workspace(device: torch.device | str) -> Workspace:
    return Workspace(
        torch.empty(PARTIAL_FLOATS, dtype=torch.float32, device=device),
        torch.zeros(MOST_TILES, dtype=torch.int32, device=device),
    )


@functools.cache
def shared_workspace(device: torch.device) -> Workspace:
    """The one of a device's main stream. Ask for it once before a CUDA graph is recorded."""
    return new_workspace(device)


@triton.jit
def split_gemm_kernel(
    x,
    w,
    y,
    x_scales,
    w_scales,
    partials,
    arrived,
    m,
    n,
    k,
    x_stride,
    x_scale_row,
    x_scale_step,
    w_scale_row,
    y_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    BULK: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One tile's sum over one part of k. Grid: SPLIT x tiles, tiles fastest."""
    if DEPENDENT:
        gdc_launch_dependents()
    program = tl.program_id(0)
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles = tiles_m * tl.cdiv(n, BLOCK_N)
    part = program // tiles
    tile = program % tiles
    row = (tile % tiles_m) * BLOCK_M
    column = (tile // tiles_m) * BLOCK_N
    steps = tl.cdiv(k, 128)
    first = steps * part // SPLIT
    last = steps * (part + 1) // SPLIT
    if DEPENDENT:
        gdc_wait()
    total = block_product(
        x,
        w,
        x_scales,
        w_scales + (column // 128) * w_scale_row,
        row,
        m,
        column,
        n,
        k,
        x_stride,
        x_scale_row,
        x_scale_step,
        first,
        last,
        BLOCK_M,
        BLOCK_N,
        SWAP,
        BULK,
        EVEN,
    )
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    pointers = y + rows.to(tl.int64)[:, None] * y_stride + columns[None, :]
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    if SPLIT == 1:
        result = total.T if SWAP else total
        tl.store(pointers, result.to(tl.bfloat16), mask=mask)
    else:
        if SWAP:
            inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        else:
            inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mine = partials + tile.to(tl.int64) * (BLOCK_M * BLOCK_N)
        apart = tiles.to(tl.int64) * (BLOCK_M * BLOCK_N)
        if part < SPLIT - 1:
            tl.store(mine + part * apart + inside, total, cache_modifier=".cg")
            tl.debug_barrier()
            tl.atomic_add(arrived + tile, 1, sem="release")
        else:
            while tl.atomic_add(arrived + tile, 0, sem="acquire") < SPLIT - 1:
                pass
            tl.debug_barrier()
            others = tl.load(mine + inside, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT - 1):
                others += tl.load(mine + other * apart + inside, cache_modifier=".cg")
            result = others + total
            if SWAP:
                result = result.T
            tl.store(pointers, result.to(tl.bfloat16), mask=mask)
            tl.store(arrived + tile, 0)


def bulk_loads(*matrices: Tensor) -> bool:
    """Whether the copy engine can read these [.., k] matrices: aligned rows and starts."""
    return all(
        t.data_ptr() % BULK_ALIGNMENT == 0
        and t.stride(-1) == 1
        and t.stride(-2) * t.element_size() % BULK_ALIGNMENT == 0
        for t in matrices
    )


def fp8_gemm(
    x: Rows,
    weight: BlockWeight,
    *,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    config: SplitConfig | None = None,
) -> Tensor:
    """`quantised.fp8_gemm`: x [m, k] times weight [n, k] transposed: [m, n] bfloat16.

    Args:
        out: bfloat16 [m, n], rows contiguous, written and returned.
        workspace: the device's shared one by default.
        config: the tile; by default `gemm_config.split_config` of the shape.
    """
    (m, k), n = x.values.shape, weight.values.shape[0]
    if out is None:
        out = x.values.new_empty((m, n), dtype=torch.bfloat16)
    if m == 0:
        return out
    if config is None:
        config = split_config(m, n, k)
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    split = min(config.split, -(-k // BLOCK))
    size = tiles * config.block_m * config.block_n
    if (split - 1) * size > PARTIAL_FLOATS or (split > 1 and tiles > MOST_TILES):
        split = 1
    space = workspace or shared_workspace(x.values.device)
    bulk = config.bulk and bulk_loads(x.values, weight.values)
    dependent = config.dependent and x.values.is_cuda
    x_matrix, w_matrix = x.values, weight.values
    if bulk:
        x_matrix = TensorDescriptor.from_tensor(x_matrix, [config.block_m, BLOCK])
        w_matrix = TensorDescriptor.from_tensor(w_matrix, [config.block_n, BLOCK])
    split_gemm_kernel[(tiles * split,)](
        x_matrix,
        w_matrix,
        out,
        x.scales,
        weight.scales,
        space.partials,
        space.arrived,
        m,
        n,
        k,
        x.values.stride(0),
        x.scales.stride(0),
        x.scales.stride(1),
        weight.scales.stride(0),
        out.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SPLIT=split,
        SWAP=config.swap,
        BULK=bulk,
        EVEN=k % BLOCK == 0,
        DEPENDENT=dependent,
        num_warps=config.warps,
        num_stages=config.stages,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out

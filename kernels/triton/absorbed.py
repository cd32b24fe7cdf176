"""The per-head products of absorbed attention, with FP8 weights read once and widened in registers.

Both move far more bytes than they multiply. Weights are e4m3 with a scale a 128 x 128, which is
exact in bfloat16, so `wide` multiplies bfloat16 by bfloat16 and loses nothing; else the rows are
quantised in registers, one scale for 128 values, and the FP8 matrix instruction is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.kernels import quantised
from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.quantised import BlockWeight, Rows, new_scales
from pdmesh.kernels.triton.launch import power_of_two


class HeadConfig(NamedTuple):
    """A tile of one head's product.

    Attributes:
        block_m, block_n: rows, and outputs of a head that are computed at once; block_n divides
            128, so that one scale holds.
        chunks: how many thread blocks share a head's outputs.
        warps, stages: of a thread block; loads in flight.
        wide: multiply in bfloat16; else in FP8.
        swap: the weight takes the matrix instruction's rows.
    """

    block_m: int
    block_n: int
    chunks: int = 1
    warps: int = 4
    stages: int = 3
    wide: bool = True
    swap: bool = False


@triton.jit
def head_product(rows, weight, WIDE: tl.constexpr, SWAP: tl.constexpr):
    """rows [m, k] bf16 times weight [n, k] e4m3: float32 [m, n], or [n, m] if SWAP; unscaled."""
    if WIDE:
        wide = weight.to(tl.bfloat16)
        product = tl.dot(wide, rows.T) if SWAP else tl.dot(rows, wide.T)
    else:
        scale = tl.maximum(tl.max(tl.abs(rows), axis=1).to(tl.float32), 1e-10) / 448.0
        narrow = (rows.to(tl.float32) / scale[:, None]).to(tl.float8e4nv)
        if SWAP:
            product = tl.dot(weight, narrow.T) * scale[None, :]
        else:
            product = tl.dot(narrow, weight.T) * scale[:, None]
    return product


@triton.jit
def absorb_query_kernel(
    query,
    w,
    w_scales,
    rotated,
    out,
    m,
    scale,
    query_row,
    query_head,
    rotated_row,
    rotated_head,
    heads,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDE: tl.constexpr,
    SWAP: tl.constexpr,
):
    """One head, BLOCK_M rows, one of CHUNKS parts of the rank. Grid: CHUNKS x m tiles x heads."""
    program = tl.program_id(0)
    part = program % CHUNKS
    tiles = tl.cdiv(m, BLOCK_M)
    row = (program // CHUNKS % tiles) * BLOCK_M
    head = program // CHUNKS // tiles
    rows = row + tl.arange(0, BLOCK_M)
    wide_rows = rows.to(tl.int64)
    inside = rows < m
    depth = tl.arange(0, BLOCK_D)
    head_out = out + wide_rows[:, None] * (heads * (RANK + ROPE)) + head * (RANK + ROPE)
    q = tl.load(
        query + wide_rows[:, None] * query_row + head * query_head + depth[None, :],
        mask=inside[:, None] & (depth[None, :] < NOPE),
        other=0.0,
    )
    blocks: tl.constexpr = (RANK + 127) // 128
    portion: tl.constexpr = ((RANK + CHUNKS * BLOCK_N - 1) // (CHUNKS * BLOCK_N)) * BLOCK_N
    start = part * portion
    for column in range(start, min(start + portion, RANK), BLOCK_N):
        columns = column + tl.arange(0, BLOCK_N)
        weight = tl.load(
            w + (head * RANK + columns).to(tl.int64)[:, None] * NOPE + depth[None, :],
            mask=(columns[:, None] < RANK) & (depth[None, :] < NOPE),
            other=0.0,
        )
        factor = tl.load(w_scales + head * blocks + column // 128) * scale
        product = head_product(q, weight, WIDE, SWAP) * factor
        if SWAP:
            product = product.T
        tl.store(
            head_out + columns[None, :],
            product.to(tl.bfloat16),
            mask=inside[:, None] & (columns[None, :] < RANK),
        )
    if part == CHUNKS - 1:
        turn = tl.arange(0, BLOCK_R)
        mask = inside[:, None] & (turn[None, :] < ROPE)
        r = tl.load(
            rotated + wide_rows[:, None] * rotated_row + head * rotated_head + turn[None, :],
            mask=mask,
            other=0.0,
        )
        r = (r.to(tl.float32) * scale).to(tl.bfloat16)
        tl.store(head_out + RANK + turn[None, :], r, mask=mask)


@triton.jit
def project_values_kernel(
    latent,
    w,
    w_scales,
    out,
    out_scales,
    m,
    latent_row,
    latent_head,
    heads,
    scale_step,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDE: tl.constexpr,
    SWAP: tl.constexpr,
):
    """One head's 128 values of BLOCK_M rows, quantised. Grid: m tiles x heads."""
    program = tl.program_id(0)
    tiles = tl.cdiv(m, BLOCK_M)
    row = (program % tiles) * BLOCK_M
    head = program // tiles
    rows = row + tl.arange(0, BLOCK_M)
    wide_rows = rows.to(tl.int64)
    inside = rows < m
    values = tl.arange(0, 128)
    depth = tl.arange(0, 128)
    blocks: tl.constexpr = (RANK + 127) // 128
    x_pointers = latent + wide_rows[:, None] * latent_row + head * latent_head + depth[None, :]
    w_pointers = w + (head * 128 + values).to(tl.int64)[:, None] * RANK + depth[None, :]
    if SWAP:
        total = tl.zeros((128, BLOCK_M), dtype=tl.float32)
    else:
        total = tl.zeros((BLOCK_M, 128), dtype=tl.float32)
    for step in range(blocks):
        factor = tl.load(w_scales + head * blocks + step)
        if RANK % 128 == 0:
            x = tl.load(x_pointers + step * 128, mask=inside[:, None], other=0.0)
            weight = tl.load(w_pointers + step * 128)
        else:
            left = depth[None, :] < RANK - step * 128
            x = tl.load(x_pointers + step * 128, mask=inside[:, None] & left, other=0.0)
            weight = tl.load(w_pointers + step * 128, mask=left, other=0.0)
        total += head_product(x, weight, WIDE, SWAP) * factor
    if SWAP:
        total = total.T
    scale = tl.maximum(tl.max(tl.abs(total), axis=1), 1e-10) / 448.0
    narrow = (total / scale[:, None]).to(tl.float8e4nv)
    target = out + wide_rows[:, None] * (heads * 128) + head * 128 + values[None, :]
    tl.store(target, narrow, mask=inside[:, None])
    tl.store(out_scales + head * scale_step + rows, scale, mask=inside)


def _rows(m: int, most: int) -> int:
    return min(most, max(16, power_of_two(m)))


def absorb_config(m: int, heads: int) -> HeadConfig:
    """What was measured to be fastest without a loss, 128 and 256 rows of 128 and 16 heads."""
    if m <= 64:
        return HeadConfig(_rows(m, 64), 128)
    return HeadConfig(128, 128, warps=8) if heads >= 64 else HeadConfig(64, 128, 4, stages=1)


def project_config(m: int, heads: int) -> HeadConfig:
    """As `absorb_config`."""
    if m <= 64:
        return HeadConfig(_rows(m, 64), 128)
    if heads >= 64:
        return HeadConfig(128, 128, warps=8)
    return HeadConfig(32, 128, warps=8, stages=4, swap=True)


def absorb_query(
    query: Tensor,
    weight: BlockWeight,
    rotated: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    config: HeadConfig | None = None,
) -> Tensor:
    """`quantised.absorb_query`: [m, heads, rank + rope] bfloat16.

    Args:
        query, rotated: [m, heads, *] bfloat16, any strides but the last, which is one.
        out: bfloat16, contiguous, written and returned.

    Raises:
        ValueError: a head's query is longer than 128, one scale's length.
    """
    m, heads, nope = query.shape
    rank, rope = weight.values.shape[1], rotated.shape[2]
    if nope > BLOCK:
        raise ValueError(f"a head's query has {nope} values, more than one scale's {BLOCK}")
    if out is None:
        out = query.new_empty((m, heads, rank + rope), dtype=torch.bfloat16)
    if m == 0:
        return out
    c = config or absorb_config(m, heads)
    absorb_query_kernel[(c.chunks * -(-m // c.block_m) * heads,)](
        query,
        weight.values,
        weight.scales,
        rotated,
        out,
        m,
        scale,
        query.stride(0),
        query.stride(1),
        rotated.stride(0),
        rotated.stride(1),
        heads,
        NOPE=nope,
        RANK=rank,
        ROPE=rope,
        BLOCK_M=c.block_m,
        BLOCK_N=c.block_n,
        BLOCK_D=max(32, power_of_two(nope)),
        BLOCK_R=power_of_two(rope),
        CHUNKS=c.chunks,
        WIDE=c.wide,
        SWAP=c.swap,
        num_warps=c.warps,
        num_stages=c.stages,
    )
    return out


def project_values_quantise(
    latent: Tensor,
    weight: BlockWeight,
    *,
    out: Rows | None = None,
    config: HeadConfig | None = None,
) -> Rows:
    """`quantised.project_values_quantise`: values [m, heads * value_dim], one scale a 128.

    A head with another number of values than 128 takes the plain definition, which allocates.
    """
    m, heads, rank = latent.shape
    if weight.values.shape[1] != BLOCK:
        plain = quantised.project_values_quantise(latent, weight)
        if out is None:
            return plain
        out.values.copy_(plain.values)
        out.scales.copy_(plain.scales)
        return out
    if out is None:
        values = latent.new_empty((m, heads * BLOCK), dtype=torch.float8_e4m3fn)
        out = Rows(values, new_scales(m, heads, device=latent.device))
    if m == 0:
        return out
    c = config or project_config(m, heads)
    project_values_kernel[(-(-m // c.block_m) * heads,)](
        latent,
        weight.values,
        weight.scales,
        out.values,
        out.scales,
        m,
        latent.stride(0),
        latent.stride(1),
        heads,
        out.scales.stride(1),
        RANK=rank,
        BLOCK_M=c.block_m,
        WIDE=c.wide,
        SWAP=c.swap,
        num_warps=c.warps,
        num_stages=c.stages,
    )
    return out

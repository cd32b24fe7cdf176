"""Attention over paged latents, few query rows a sequence, in absorbed form: Triton, any GPU.

Two kernels: every program takes a tile of (row, head) pairs of one sequence and one split of its
tokens, with softmax on the run (Milakov and Gimelshein, arXiv:1805.02867); then the splits are
merged in their order. A split is a fixed number of tokens, so what a row gets depends on its own
sequence and on nothing else in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.kernels.triton.launch import power_of_two

GROUP = 128
"""Values of a packed latent that share a scale."""


class Tuning(NamedTuple):
    """Sizes of a program: query rows, tokens, warps, stages of the pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@triton.jit
def decode_kernel(
    query,
    latents,
    scales,
    rotated,
    page_table,
    lengths,
    output,
    partial,
    sums,
    scale_log2,
    heads,
    table_stride,
    page_stride,
    scale_page_stride,
    rope_page_stride,
    split,
    first_key,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PACKED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of query rows times one split: `output`, or `partial` and `sums` if SPLITS > 1.

    partial is [splits, m, heads, RANK] float32, each split's own result; sums [splits, m, heads]
    float32 is log2 of the sum of its weights, -inf where it sees nothing.
    """
    sequence = tl.program_id(1)
    piece = tl.program_id(2)
    length = tl.load(lengths + sequence)
    begin = piece * split
    if (SPLITS > 1) & (begin >= length) & (piece > 0):
        return
    pair = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_tile = pair < ROWS * heads
    pair_row = pair // heads
    seen = length - (ROWS - 1 - pair_row)
    flat = sequence.to(tl.int64) * ROWS * heads + pair
    d = tl.arange(0, RANK)
    r = tl.arange(0, ROPE)
    q_base = query + flat[:, None] * (RANK + ROPE)
    q = tl.load(q_base + d[None, :], mask=in_tile[:, None], other=0.0)
    q_rope = tl.load(q_base + RANK + r[None, :], mask=in_tile[:, None], other=0.0)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, RANK), tl.float32)
    end = tl.minimum(begin + split, length)
    for first in tl.range(begin, end, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        inside = (token < end) & (token >= first_key)
        page = tl.load(page_table + sequence * table_stride + token // PAGE, mask=inside, other=0)
        page = page.to(tl.int64)
        slot = token % PAGE
        at = page * page_stride + slot * TOKEN_STRIDE
        k = tl.load(latents + at[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        at = page * rope_page_stride + slot * ROPE_STRIDE
        k_rope = tl.load(rotated + at[:, None] + r[None, :], mask=inside[:, None], other=0.0)
        if PACKED:
            g = tl.arange(0, RANK // 128)
            at = page * scale_page_stride + slot * SCALE_STRIDE
            s = tl.load(scales + at[:, None] + g[None, :], mask=inside[:, None], other=0.0)
            wide = tl.reshape(k.to(tl.float32), (BLOCK_N, RANK // 128, 128)) * s[:, :, None]
            k = tl.reshape(wide, (BLOCK_N, RANK)).to(tl.bfloat16)
        scores = tl.dot(q_rope, tl.trans(k_rope))
        scores = tl.dot(q, tl.trans(k), scores) * scale_log2
        visible = inside[None, :] & (token[None, :] < seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        now = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(tl.bfloat16), k, acc * shrink[:, None])
        peak = now
    result = acc * tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)[:, None]
    if SPLITS == 1:
        where = output + flat[:, None] * RANK + d[None, :]
        tl.store(where, result.to(tl.bfloat16), mask=in_tile[:, None])
    else:
        number = tl.num_programs(1).to(tl.int64) * ROWS * heads
        here = piece * number + flat
        tl.store(partial + here[:, None] * RANK + d[None, :], result, mask=in_tile[:, None])
        mass = tl.where(total > 0.0, tl.log2(tl.where(total > 0.0, total, 1.0)) + peak, peak)
        tl.store(sums + here, mass, mask=in_tile)


@triton.jit
def combine_kernel(
    partial,
    sums,
    lengths,
    output,
    pairs,
    split,
    number,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merges a (row, head) pair's splits in their order; pairs = rows * heads of a sequence."""
    flat = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + flat // pairs)
    used = tl.maximum((length + split - 1) // split, 1)
    s = tl.arange(0, SPLITS)
    mass = tl.load(sums + s * number + flat, mask=s < used, other=float("-inf"))
    peak = tl.max(mass, axis=0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    d = tl.arange(0, RANK)
    acc = tl.zeros((RANK,), tl.float32)
    total = 0.0
    for piece in range(used):
        weight = tl.exp2(tl.load(sums + piece * number + flat) - peak)
        acc += weight * tl.load(partial + (piece * number + flat) * RANK + d)
        total += weight
    acc = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(output + flat * RANK + d, acc.to(tl.bfloat16))


def tuning_for(pairs: int, packed: bool) -> Tuning:
    """Program sizes for `pairs` (row, head) pairs a sequence."""
    if pairs <= 16:
        return Tuning(16, 32, 4, 3 if packed else 2)
    if pairs <= 32 and not packed:
        return Tuning(32, 32, 4, 2)
    return Tuning(64, 64, 8, 2)


def split_tokens(max_length: int, sequences: int, pairs: int, processors: int = 132) -> int:
    """Tokens a split, for a batch of at most `sequences`: enough programs for `processors`.

    Depends on bounds of the batch only, not on what is in it; a multiple of 256.
    """
    tiles = sequences * -(-pairs // 64)
    splits = min(max(1, 2 * processors // tiles), max(1, max_length // 512))
    return -(-max_length // splits // 256) * 256


def mla_decode(
    query: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    rows: int,
    scale: float,
    *,
    rank: int = 512,
    first_key: int = 0,
    split: int | None = None,
    max_length: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """As `kernels.mla_reference.mla_decode`.

    Args:
        rank: values of a latent that are not rotated; a power of two, as is the rest.
        first_key: tokens before it are not read.
        split: tokens a split; results depend on it. Default: `split_tokens`.
        max_length: a bound of `lengths`; default: what the page table can hold.
        out: [m, heads, rank] bfloat16.
        workspace: float32, at least `workspace_floats(...)`; unused with a single split.
        tuning: program sizes.
    """
    m, heads, width = query.shape
    n, page_size, packed = lengths.shape[0], pages.shape[1], pages.dtype == torch.uint8
    rope = width - rank
    max_length = page_table.shape[1] * page_size if max_length is None else max_length
    if split is None:
        split = split_tokens(max_length, n, rows * heads)
    splits = max(1, -(-max_length // split))
    tuning = tuning or tuning_for(rows * heads, packed)
    out = query.new_empty((m, heads, rank)) if out is None else out
    if m == 0:
        return out
    if packed:
        groups = rank // GROUP
        latents = pages[..., :rank].view(torch.float8_e4m3fn)
        scales = pages[..., rank : rank + 4 * groups].view(torch.float32)
        rotated = pages[..., rank + 4 * groups :].view(torch.bfloat16)
    else:
        latents, scales, rotated = pages, pages, pages[..., rank:]
    partial = sums = out
    if splits > 1:
        size = workspace_floats(m, heads, rank, splits)
        if workspace is None:
            workspace = query.new_empty(size, dtype=torch.float32)
        sums = workspace[: splits * m * heads]
        partial = workspace[splits * m * heads : size]
    decode_kernel[(-(-rows * heads // tuning.block_m), n, splits)](
        query,
        latents,
        scales,
        rotated,
        page_table,
        lengths,
        out,
        partial,
        sums,
        scale * 1.4426950408889634,
        heads,
        page_table.stride(0),
        latents.stride(0),
        scales.stride(0),
        rotated.stride(0),
        split,
        first_key,
        TOKEN_STRIDE=latents.stride(1),
        SCALE_STRIDE=scales.stride(1),
        ROPE_STRIDE=rotated.stride(1),
        ROWS=rows,
        PAGE=page_size,
        RANK=rank,
        ROPE=rope,
        PACKED=packed,
        SPLITS=splits,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    if splits > 1:
        combine(partial, sums, lengths, out, rows, split, splits)
    return out


def combine(
    partial: Tensor,
    sums: Tensor,
    lengths: Tensor,
    out: Tensor,
    rows: int,
    split: int,
    splits: int,
) -> None:
    """Merges splits into `out` [m, heads, rank] in their order, whatever wrote them.

    Args:
        partial: [splits, m, heads, rank] float32, each split's own result.
        sums: [splits, m, heads] float32, log2 of the sum of a split's weights, -inf for none.
        lengths, rows, split: as in `mla_decode`; a sequence's splits beyond its length are unread.
        splits: how many there are at most.
    """
    m, heads, rank = out.shape
    combine_kernel[(m * heads,)](
        partial,
        sums,
        lengths,
        out,
        rows * heads,
        split,
        m * heads,
        RANK=rank,
        SPLITS=power_of_two(splits),
        num_warps=4,
    )


def workspace_floats(m: int, heads: int, rank: int, splits: int) -> int:
    """float32 values that `mla_decode` needs for partial results."""
    return splits * m * heads * (rank + 1)


def unavailable() -> str | None:
    """Why these kernels cannot run here, or None."""
    return None if torch.cuda.is_available() else "no CUDA device"

"""Causal attention in MHA form over ragged rows: Triton, any GPU.

One program takes a tile of query rows of one head of one sequence and walks its keys, with softmax
on the run. Key and value widths differ (192 and 128 in DeepSeek-V3) and need not be powers of two:
a width is cut into a power of two and a rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.kernels.triton.launch import power_of_two


@triton.jit
def _columns(base, row, stride, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """[rows, WIDTH] from column FIRST on; zeros for rows not inside and columns from D on."""
    d = FIRST + tl.arange(0, WIDTH)
    mask = inside[:, None] & (d[None, :] < D)
    return tl.load(base + row[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def prefill_kernel(
    query,
    key,
    value,
    query_starts,
    key_starts,
    output,
    scale_log2,
    query_stride,
    key_stride,
    value_stride,
    query_head,
    key_head,
    value_head,
    HEADS: tl.constexpr,
    QK: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of BLOCK_M query rows of a head; the longest tiles of a sequence come first.

    QK = key width = at most WIDTH + REST, both powers of two; V_WIDTH a power of two >= V.
    """
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    q_begin = tl.load(query_starts + sequence)
    q_count = tl.load(query_starts + sequence + 1) - q_begin
    k_begin = tl.load(key_starts + sequence)
    k_count = tl.load(key_starts + sequence + 1) - k_begin
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_row = tile * BLOCK_M
    if first_row >= q_count:
        return
    offset = k_count - q_count
    row = first_row + tl.arange(0, BLOCK_M)
    in_rows = row < q_count
    at = (q_begin + row).to(tl.int64)
    q_base = query + head * query_head
    q = _columns(q_base, at, query_stride, in_rows, 0, WIDTH, QK)
    if REST > 0:
        q_rest = _columns(q_base, at, query_stride, in_rows, WIDTH, REST, QK)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, V_WIDTH), tl.float32)
    end = tl.minimum(offset + first_row + BLOCK_M, k_count)
    for first in tl.range(0, end, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        inside = token < end
        place = (k_begin + token).to(tl.int64)
        k_base = key + head * key_head
        k = _columns(k_base, place, key_stride, inside, 0, WIDTH, QK)
        scores = tl.dot(q, tl.trans(k))
        if REST > 0:
            k_rest = _columns(k_base, place, key_stride, inside, WIDTH, REST, QK)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores)
        visible = inside[None, :] & (token[None, :] <= offset + row[:, None])
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        now = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - now)
        weights = tl.exp2(scores - now[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = _columns(value + head * value_head, place, value_stride, inside, 0, V_WIDTH, V)
        acc = tl.dot(weights.to(tl.bfloat16), v, acc * shrink[:, None])
        peak = now
    d = tl.arange(0, V_WIDTH)
    where = output + (at[:, None] * HEADS + head) * V + d[None, :]
    mask = in_rows[:, None] & (d[None, :] < V)
    tl.store(where, (acc / total[:, None]).to(tl.bfloat16), mask=mask)


def mla_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    scale: float,
    *,
    max_queries: int | None = None,
    out: Tensor | None = None,
    block_m: int = 128,
    block_n: int = 128,
    warps: int = 8,
    stages: int = 2,
) -> Tensor:
    """As `kernels.mla_reference.mla_prefill`; inputs need contiguous last dimensions only.

    Args:
        max_queries: a bound of a sequence's queries; default: all of them.
        out: [total_q, heads, v] bfloat16, contiguous.
        block_m, block_n, warps, stages: a program's query rows and keys, warps, pipeline.
    """
    total, heads, width = query.shape
    value_width = value.shape[-1]
    out = query.new_empty((total, heads, value_width)) if out is None else out
    longest = total if max_queries is None else max_queries
    if total == 0:
        return out
    body = 1 << (width.bit_length() - 1)
    rest = width - body
    prefill_kernel[(-(-longest // block_m), heads, query_starts.shape[0] - 1)](
        query,
        key,
        value,
        query_starts,
        key_starts,
        out,
        scale * 1.4426950408889634,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        query.stride(1),
        key.stride(1),
        value.stride(1),
        HEADS=heads,
        QK=width,
        V=value_width,
        WIDTH=max(16, body),
        REST=max(16, power_of_two(rest)) if rest else 0,
        V_WIDTH=max(16, power_of_two(value_width)),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def unavailable() -> str | None:
    """Why this kernel cannot run here, or None."""
    return None if torch.cuda.is_available() else "no CUDA device"

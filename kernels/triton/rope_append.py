"""Rotation of queries and keys, and the new latents into their pages, in one launch.

Definition: `pdmesh.kernels.rope_append`. A packed latent's values are multiplied by the reciprocal
of its scale where the definition divides, so one midway between two FP8 numbers may go to either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from pdmesh.kernels.quantised import LATENT_BYTES
from pdmesh.kernels.rope_append import LATENT_NORM_EPS
from pdmesh.kernels.triton.launch import lets_next_begin, power_of_two

HEADS = 32
"""Heads that one program rotates."""


@triton.jit
def rotated_pair(first, second, cos, sin, at, other):
    """Both elements of each pair, turned: `at` and `other` are their places in the table's row."""
    one = first * tl.load(cos + at)[None, :] + second * tl.load(sin + at)[None, :]
    two = second * tl.load(cos + other)[None, :] + first * tl.load(sin + other)[None, :]
    return one, two


@triton.jit
def rotate(read, write, row, inside, cos, sin, ROPE: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Rotates ROPE values at read + row, to write + row of the second pair of offsets.

    row: the two [n, 1] offsets of the values read and written. All is read before any is written.
    """
    pair = tl.arange(0, ROPE // 2)
    if INTERLEAVE:
        column = tl.arange(0, ROPE)[None, :]
        both = tl.load(read + row[0] + column, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (both.shape[0], ROPE // 2, 2)))
        one, two = rotated_pair(first, second, cos, sin, 2 * pair, 2 * pair + 1)
        turned = tl.reshape(tl.join(one, two), (both.shape[0], ROPE))
        tl.store(write + row[1] + column, turned.to(tl.bfloat16), mask=inside)
    else:
        at = read + row[0] + pair[None, :]
        first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(at + ROPE // 2, mask=inside, other=0.0).to(tl.float32)
        one, two = rotated_pair(first, second, cos, sin, pair, pair + ROPE // 2)
        to = write + row[1] + pair[None, :]
        tl.store(to, one.to(tl.bfloat16), mask=inside)
        tl.store(to + ROPE // 2, two.to(tl.bfloat16), mask=inside)


@triton.jit
def rope_append_kernel(
    query,
    turned,
    latent,
    weight,
    cos,
    sin,
    positions,
    slots,
    pool,
    pool_bytes,
    pool_scales,
    heads,
    layer_row,
    query_row,
    query_head,
    turned_row,
    turned_head,
    latent_row,
    eps,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PACKED: tl.constexpr,
    NEXT: tl.constexpr,
):
    if NEXT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int64)
    cos += position * ROPE
    sin += position * ROPE
    if tl.program_id(1) < tl.num_programs(1) - 1:
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
        read = row * query_row + head * query_head
        write = row * turned_row + head * turned_head
        rotate(query, turned, (read, write), head < heads, cos, sin, ROPE, INTERLEAVE)
    elif slot >= 0:
        at = (slot + layer_row).to(tl.int64)
        latent += row * latent_row
        column = tl.arange(0, RANK // 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
        read = tl.load(latent + column).to(tl.float32)
        mean = tl.sum(tl.sum(read * read, axis=1), axis=0) / RANK
        unit = (read * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))).to(tl.bfloat16).to(tl.float32)
        normed = (unit * tl.load(weight + column).to(tl.float32)).to(tl.bfloat16)
        one = tl.arange(0, 1)[:, None]
        if PACKED:
            wide = normed.to(tl.float32)
            largest = tl.max(tl.max(tl.abs(wide), axis=1), axis=0)
            scale = tl.div_rn(tl.maximum(largest, 1e-10), 448.0)
            values = (wide * tl.div_rn(1.0, scale)).to(tl.float8e4nv)
            tl.store(pool_bytes + at * (RANK + RANK // 32 + 2 * ROPE) + column, values)
            to = pool_scales + at * ((RANK + RANK // 32 + 2 * ROPE) // 4) + RANK // 4
            tl.store(to + tl.arange(0, RANK // 128), scale)
            pool += at * ((RANK + RANK // 32 + 2 * ROPE) // 2) + (RANK + RANK // 32) // 2
        else:
            pool += at * (RANK + ROPE)
            tl.store(pool + column, normed)
            pool += RANK
        rotate(latent + RANK, pool, (one, one), one == 0, cos, sin, ROPE, INTERLEAVE)


def rope_append(
    query_rope: Tensor,
    latent: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    pool: Tensor,
    layer: int,
    *,
    interleave: bool = True,
    eps: float = LATENT_NORM_EPS,
    out: Tensor | None = None,
) -> Tensor:
    """Rotates queries, and writes normalised and rotated latents into their pages.

    Arguments and result are those of `pdmesh.kernels.rope_append.rope_append`. Views of wider rows
    are taken as they are; the last dimension of every tensor has to be consecutive.
    """
    rows, heads, rope = query_rope.shape
    rank = kv_norm.shape[0]
    packed = pool.dtype == torch.uint8
    _check(query_rope, latent, cos, sin, pool, rank, packed)
    if out is None:
        out = query_rope.new_empty(query_rope.shape)
    if rows == 0:
        return out
    block = min(HEADS, power_of_two(heads))
    rope_append_kernel[(rows, -(-heads // block) + 1)](
        query_rope,
        out,
        latent,
        kv_norm,
        cos,
        sin,
        positions,
        slots,
        pool.view(torch.bfloat16),
        pool.view(torch.float8_e4m3fn) if packed else pool,
        pool.view(torch.float32) if packed else pool,
        heads,
        layer * pool.shape[2],
        query_rope.stride(0),
        query_rope.stride(1),
        out.stride(0),
        out.stride(1),
        latent.stride(0),
        eps,
        RANK=rank,
        ROPE=rope,
        HEADS=block,
        INTERLEAVE=interleave,
        PACKED=packed,
        NEXT=lets_next_begin(),
        num_warps=4,
        # The definition rounds every product by itself.
        enable_fp_fusion=False,
    )
    return out


def _check(
    query: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, rank: int, packed: bool
) -> None:
    """Raises ValueError for what the kernel cannot take."""
    rope = query.shape[2]
    wide = rank + rope
    if rank % 128 or latent.shape[1] != wide or cos.shape[1:] != (rope,) or cos.shape != sin.shape:
        raise ValueError(f"latents {latent.shape} of rank {rank} with tables {cos.shape}")
    if pool.shape[-1] != (LATENT_BYTES if packed else wide) or not pool.is_contiguous():
        raise ValueError(f"pool {pool.shape} for latents of {wide}")
    if packed and (rank, rope) != (512, 64):
        raise ValueError(f"{LATENT_BYTES} bytes hold a latent of 512 + 64, not {rank} + {rope}")
    tensors = (query, latent, cos, sin)
    if any(t.stride(-1) != 1 for t in tensors) or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("the last dimension is not consecutive")

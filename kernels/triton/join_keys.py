"""Keys of every head from what is a head's own and what all heads share, in one pass.

Definition: `pdmesh.kernels.latent_rows.join_keys`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdmesh.kernels.triton.launch import power_of_two

HEADS = 32
"""Heads that one program writes."""


@triton.jit
def join_keys_kernel(
    nope,
    rotated,
    keys,
    heads,
    nope_row,
    nope_head,
    rotated_row,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    own, shared = tl.arange(0, NOPE_PADDED)[None, :], tl.arange(0, ROPE_PADDED)[None, :]
    one_of = head < heads
    read = tl.load(
        nope + row * nope_row + head * nope_head + own, mask=one_of & (own < NOPE), other=0.0
    )
    turned = tl.load(rotated + row * rotated_row + shared, mask=shared < ROPE, other=0.0)
    to = keys + (row * heads + head) * (NOPE + ROPE)
    tl.store(to + own, read, mask=one_of & (own < NOPE))
    turned = tl.broadcast_to(turned, (HEADS, ROPE_PADDED))
    tl.store(to + NOPE + shared, turned, mask=one_of & (shared < ROPE))


def join_keys(nope: Tensor, rotated: Tensor) -> Tensor:
    """Arguments and result are those of `pdmesh.kernels.latent_rows.join_keys`.

    Any strides but the last, which is one; both of one dtype.
    """
    rows, heads, width = nope.shape
    rope = rotated.shape[1]
    if rotated.shape[0] != rows or nope.dtype != rotated.dtype:
        raise ValueError(f"nope {nope.shape} {nope.dtype}, rotated {rotated.shape} {rotated.dtype}")
    if nope.stride(2) != 1 or rotated.stride(1) != 1:
        raise ValueError("the last dimension is not consecutive")
    keys = nope.new_empty((rows, heads, width + rope))
    if rows == 0:
        return keys
    block = min(HEADS, power_of_two(heads))
    join_keys_kernel[(rows, -(-heads // block))](
        nope,
        rotated,
        keys,
        heads,
        nope.stride(0),
        nope.stride(1),
        rotated.stride(0),
        NOPE=width,
        ROPE=rope,
        HEADS=block,
        NOPE_PADDED=power_of_two(width),
        ROPE_PADDED=power_of_two(rope),
        num_warps=4,
    )
    return keys

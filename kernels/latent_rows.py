"""Latents of a step's keys out of the pages, whichever form they are kept in, and keys of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from pdmesh.kernels.quantised import unpack_latents


def read_latents(pool: Tensor, layer: int, slots: Tensor) -> Tensor:
    """The latents of flat layer-0 rows [n] of `layer`: [n, rank + rope] in the pool's dtype, or in
    bfloat16 where the pool [num_pages, num_layers, page_size, 656] is packed."""
    picked = pool.view(-1, pool.shape[3]).index_select(0, slots + layer * pool.shape[2])
    return unpack_latents(picked).to(torch.bfloat16) if pool.dtype == torch.uint8 else picked


def join_keys(nope: Tensor, rotated: Tensor) -> Tensor:
    """Keys in multi-head form: nope [n, heads, d] of each head, then rotated [n, rope] of all.

    DeepSeek-V2 (arXiv:2405.04434), section 2.1.3.

    Returns:
        [n, heads, d + rope] in the dtype of `nope`.
    """
    return torch.cat([nope, rotated[:, None].expand(-1, nope.shape[1], -1)], dim=-1)

"""Latents of a step's keys out of the pages, whichever form they are kept in."""

from __future__ import annotations

import torch
from torch import Tensor

from pdmesh.kernels.quantised import unpack_latents


def read_latents(pool: Tensor, layer: int, slots: Tensor) -> Tensor:
    """The latents of flat layer-0 rows [n] of `layer`: [n, rank + rope] in the pool's dtype, or in
    bfloat16 where the pool [num_pages, num_layers, page_size, 656] is packed."""
    picked = pool.view(-1, pool.shape[3]).index_select(0, slots + layer * pool.shape[2])
    return unpack_latents(picked).to(torch.bfloat16) if pool.dtype == torch.uint8 else picked

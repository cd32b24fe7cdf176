"""The rotation of a step's queries and keys, and the new latents into their pages, in plain torch.

Rotation: `pdmesh.kernels.rope`; normalisation of the latent: DeepSeek-V2 (arXiv:2405.04434),
section 2.1; pages: `pdmesh.kernels.page_copy` (bfloat16) or `pack_latents` of
`pdmesh.kernels.quantised` (656 bytes a latent, one scale for its 512 values, four times).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdmesh.kernels.norm import rms_norm
from pdmesh.kernels.page_copy import append_latents
from pdmesh.kernels.quantised import pack_latents
from pdmesh.kernels.rope import apply_rope

LATENT_NORM_EPS = 1e-6
"""The published models fix this one, whatever rms_norm_eps is."""


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

    No page changes for a row whose slot is -1, whatever it holds; its queries are rotated like any.

    Args:
        query_rope: [m, heads, rope] bfloat16, the rotated part of the queries.
        latent: [m, rank + rope] bfloat16, as projected.
        kv_norm: [rank] bfloat16, the weight of the latent's normalisation.
        cos, sin: [max_position, rope] float32, of a `RopeTable`.
        positions: [m] int64.
        slots: [m] int64, flat rows of the pool in layer 0, each at most once.
        pool: [num_pages, num_layers, page_size, rank + rope] bfloat16, or, for a rank of 512 and
            64 rotated values, [num_pages, num_layers, page_size, 656] uint8: `pack_latents`.
        layer: the layer whose pages are written.
        interleave: whether pairs are (0, 1), (2, 3), ... and not (i, i + rope / 2).
        eps: of the latent's normalisation.
        out: where the rotated queries go, `query_rope` itself perhaps; made if it is None.

    Returns:
        [m, heads, rope] bfloat16, the rotated queries.
    """
    rank = kv_norm.shape[0]
    valid = slots >= 0
    table = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    rotated = apply_rope(query_rope, *table, interleave)
    key = apply_rope(latent[:, None, rank:], *table, interleave)[:, 0]
    values = torch.cat([rms_norm(latent[:, :rank], kv_norm, eps), key], dim=-1)[valid]
    if pool.dtype == torch.uint8:
        values = pack_latents(values)
    append_latents(pool, layer, slots[valid], values)
    return rotated if out is None else out.copy_(rotated)

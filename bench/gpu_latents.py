"""Pools of latents, bfloat16 or packed in 656 bytes: random ones, and a layer's way into them."""

from __future__ import annotations

from typing import Any

import torch
from bounds import LATENT
from torch import Tensor

from pdmesh.kernels.latent_rows import read_latents
from pdmesh.kernels.quantised import LATENT_BYTES, pack_latents
from pdmesh.kernels.rope import apply_rope

PAGE = 64


def random_pool(pages: int, layers: int, packed: bool, draw: torch.Generator) -> Tensor:
    """[pages, layers, 64, 576] bfloat16, or packed, [..., 656] bytes: normally distributed."""
    width, dtype = (LATENT_BYTES, torch.uint8) if packed else (LATENT, torch.bfloat16)
    pool = torch.empty(pages, layers, PAGE, width, dtype=dtype, device=draw.device)
    for layer in range(layers):
        if not packed:
            pool[:, layer].normal_(generator=draw)
            continue
        for part in pool[:, layer].split(1024):
            some = torch.empty(*part.shape[:2], LATENT, dtype=torch.bfloat16, device=draw.device)
            part.copy_(pack_latents(some.normal_(generator=draw)))
    return pool


def rope_append(
    query: Tensor,
    latent: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    pool: Tensor,
    layer: int,
) -> Tensor:
    """Rotates queries; normalises, rotates and appends latents. In plain torch."""
    c, s = cos[positions], sin[positions]
    normed = torch.nn.functional.rms_norm(latent[:, :512].float(), (512,), weight.float(), 1e-6).to(
        torch.bfloat16
    )
    rope = apply_rope(latent[:, 512:], c, s, True)
    flat = pool.view(-1, pool.shape[-1])
    latents = torch.cat([normed, rope], dim=-1)
    packed = pool.dtype == torch.uint8
    flat[slots + layer * pool.shape[2]] = pack_latents(latents) if packed else latents
    return apply_rope(query, c[:, None], s[:, None], True)


def turned_and_written(result: Tensor, call: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The rotated queries, and the latents that stand in the pages now.

    These are cleared, so that what the next candidate does not write is not found there.
    """
    slots, pool, layer = call[6:9]
    written = read_latents(pool, layer, slots)
    pool.view(-1, pool.shape[-1])[slots + layer * pool.shape[2]] = 0
    return result, written

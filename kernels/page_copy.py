"""Latents into and out of pages.

A pool is [num_pages, num_layers, page_size, width], page-major, contiguous. A slot's flat row in
layer 0 is page * num_layers * page_size + slot; layer i is i * page_size rows further on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def flat_rows(pages: Tensor, slots: Tensor, num_layers: int, page_size: int) -> Tensor:
    """The flat rows of layer 0 for pages and slots (int64, broadcast together)."""
    return pages * (num_layers * page_size) + slots


def append_latents(latents: Tensor, layer: int, rows: Tensor, values: Tensor) -> None:
    """Write values [n, width] to the flat layer-0 rows [n] of `layer`, in place."""
    flat = latents.view(-1, latents.shape[3])
    flat.index_copy_(0, rows + layer * latents.shape[2], values.to(latents.dtype))


def gather_latents(latents: Tensor, layer: int, rows: Tensor) -> Tensor:
    """Read the flat layer-0 rows [...] of `layer`: [..., width] in the pool's dtype."""
    flat = latents.view(-1, latents.shape[3])
    picked = flat.index_select(0, (rows + layer * latents.shape[2]).flatten())
    return picked.view(*rows.shape, latents.shape[3])


def move_latents(
    latents: Tensor,
    page_table: Sequence[int],
    page_size: int,
    sources: Sequence[int],
    targets: Sequence[int],
) -> None:
    """Copy all layers of a sequence's positions `sources` to its positions `targets`, in place.

    Every target gets what its source held before the call, also where the two overlap.

    Raises:
        ValueError: another number of sources than targets, a target named twice, a position
            that no page holds, or a pool of another page size.
    """
    if len(sources) != len(targets) or len(set(targets)) != len(targets):
        raise ValueError(f"{len(sources)} sources do not go to {len(set(targets))} targets")
    if latents.shape[2] != page_size:
        raise ValueError(f"latents have pages of {latents.shape[2]}, not of {page_size}")
    held = len(page_table) * page_size
    for position in (*sources, *targets):
        if not 0 <= position < held:
            raise ValueError(f"position {position} is not one of the {held} on the page table")
    moved = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
    if not moved:
        return
    at = torch.tensor(moved, dtype=torch.int64)
    pages = torch.tensor(page_table, dtype=torch.int64)[at // page_size]
    rows = flat_rows(pages, at % page_size, latents.shape[1], page_size)
    layers = torch.arange(latents.shape[1], dtype=torch.int64) * page_size
    every = (rows[:, None, :] + layers[None, :, None]).to(latents.device)
    flat = latents.view(-1, latents.shape[3])
    picked = flat.index_select(0, every[..., 0].flatten())
    flat.index_copy_(0, every[..., 1].flatten(), picked)

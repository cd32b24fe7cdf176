"""Attention over paged latents (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434).

A latent is `rank` normalised values and `rope` rotated ones. Two forms of the same function:

* MHA form: keys and values of every head are projected from the latents, then per head
  softmax(q . k) v. Cheaper for many queries a key.
* absorbed form: q is multiplied by the key projection once, so that all heads read the latents
  themselves as keys, and as values; the value projection follows. Cheaper for few queries a key.

All products have a fixed shape (a tile of rows against one page), maxima do not depend on order,
and sums run page by page. So a row's result does not depend on its neighbours, on how the rows were
split into batches, or on how many keys follow. Everything is float32.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .linear import linear
from .page_copy import flat_rows, gather_latents
from .page_walk import Chunk, Group, PageWalk

Pair = tuple[Tensor, Tensor]


def absorbed_attention(
    query: Tensor, latents: Tensor, layer: int, walk: PageWalk, rank: int
) -> Tensor:
    """Attention in absorbed form.

    Args:
        query: [n, heads, rank + rope] float32, already scaled and absorbed.
        latents: [num_pages, num_layers, page_size, rank + rope], the pool.
        layer: which layer's latents.
        walk: the plan of the batch; its rows are those of `query` (further ones are padding).
        rank: values come from the first `rank` of a latent.

    Returns:
        [n, heads, rank] float32; rows beyond the walk's repeat row 0.
    """
    heads = query.shape[1]

    def load(chunk: Chunk) -> Pair:
        rows = flat_rows(chunk.pages, chunk.slots, latents.shape[1], latents.shape[2])
        keys = gather_latents(latents, layer, rows).float()
        return keys, keys[..., :rank]

    parts = []
    for group in walk.groups:
        tiles, rows = group.rows.shape
        packed = query.index_select(0, group.rows.flatten()).view(tiles, rows * heads, -1)
        masks = [chunk.masked[:, :, None, :].expand(-1, -1, heads, -1) for chunk in group.chunks]
        parts.append(_attend(packed, group, load, masks).view(tiles * rows, heads, rank))
    return _rows_back(parts, walk, query.shape[0])


def mha_attention(
    query: Tensor, latents: Tensor, layer: int, walk: PageWalk, key_up: Tensor, value_up: Tensor
) -> Tensor:
    """Attention in MHA form.

    Args:
        query: [n, heads, nope + rope] float32, already scaled.
        latents: [num_pages, num_layers, page_size, rank + rope], the pool.
        layer: which layer's latents.
        walk: the plan of the batch; its rows are those of `query` (further ones are padding).
        key_up: [heads, nope, rank].
        value_up: [heads, v, rank].

    Returns:
        [n, heads, v] float32; rows beyond the walk's repeat row 0.
    """
    heads, _, rank = key_up.shape
    value_dim = value_up.shape[1]
    up = torch.cat([key_up.flatten(0, 1), value_up.flatten(0, 1)])

    def load(chunk: Chunk) -> Pair:
        rows = flat_rows(chunk.pages, chunk.slots, latents.shape[1], latents.shape[2])
        return _project(gather_latents(latents, layer, rows), up, heads, rank, value_dim)

    parts = []
    for group in walk.groups:
        tiles, rows = group.rows.shape
        packed = query.index_select(0, group.rows.flatten())
        packed = packed.view(tiles, rows, heads, -1).transpose(1, 2)
        masks = [chunk.masked[:, None, :, :].expand(-1, heads, -1, -1) for chunk in group.chunks]
        result = _attend(packed.reshape(tiles, heads * rows, -1), group, load, masks)
        result = result.view(tiles, heads, rows, value_dim).transpose(1, 2)
        parts.append(result.reshape(tiles * rows, heads, value_dim))
    return _rows_back(parts, walk, query.shape[0])

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
import torch.nn.functional as F
from torch import Tensor

from pdmesh.kernels.linear import linear, padded_rows
from pdmesh.kernels.page_copy import flat_rows, gather_latents
from pdmesh.kernels.page_walk import Chunk, Group, PageWalk

Load = Callable[[Chunk], tuple[Tensor, Tensor]]
"""Keys [n, g, page_size, d] and values [n, g, page_size, v] of a chunk's entries."""


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
    num_heads, heads = query.shape[1], padded_rows(query.shape[1])
    if heads != num_heads:
        query = F.pad(query, (0, 0, 0, heads - num_heads))

    def load(chunk: Chunk) -> tuple[Tensor, Tensor]:
        rows = flat_rows(chunk.pages, chunk.slots, latents.shape[1], latents.shape[2])
        keys = gather_latents(latents, layer, rows).float().unsqueeze(1)
        return keys, keys[..., :rank]

    parts = []
    for group in walk.groups:
        tiles, rows = group.rows.shape
        packed = query.index_select(0, group.rows.flatten()).view(tiles, 1, rows * heads, -1)
        masks = [_repeat_rows(chunk.masked, heads) for chunk in group.chunks]
        parts.append(_attend(packed, group, load, masks).view(tiles * rows, heads, rank))
    return _rows_back(parts, walk, query.shape[0])[:, :num_heads]


def mha_attention(
    query: Tensor, latents: Tensor, layer: int, walk: PageWalk, up: tuple[Tensor, Tensor]
) -> Tensor:
    """Attention in MHA form.

    Args:
        query: [n, heads, nope + rope] float32, already scaled.
        latents: [num_pages, num_layers, page_size, rank + rope], the pool.
        layer: which layer's latents.
        walk: the plan of the batch; its rows are those of `query` (further ones are padding).
        up: the key projection [heads, nope, rank] and the value projection [heads, v, rank].

    Returns:
        [n, heads, v] float32; rows beyond the walk's repeat row 0.
    """
    heads, value_dim = query.shape[1], up[1].shape[1]

    def load(chunk: Chunk) -> tuple[Tensor, Tensor]:
        pages, slots = chunk.pages[chunk.distinct], chunk.slots[chunk.distinct]
        rows = flat_rows(pages, slots, latents.shape[1], latents.shape[2])
        keys, values = project_latents(gather_latents(latents, layer, rows), up)
        if chunk.distinct.shape[0] == chunk.same.shape[0]:
            return keys[chunk.same], values[chunk.same]
        return keys.index_select(0, chunk.same), values.index_select(0, chunk.same)

    parts = []
    for group in walk.groups:
        tiles, rows = group.rows.shape
        packed = query.index_select(0, group.rows.flatten())
        packed = packed.view(tiles, rows, heads, -1).transpose(1, 2).contiguous()
        masks = [chunk.masked.unsqueeze(1) for chunk in group.chunks]
        result = _attend(packed, group, load, masks).transpose(1, 2)
        parts.append(result.reshape(tiles * rows, heads, value_dim))
    return _rows_back(parts, walk, query.shape[0])


def project_latents(latents: Tensor, up: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys [n, heads, s, nope + rope] and values [n, heads, s, v], float32, of latents [n, s, w].

    `up` is the key projection [heads, nope, rank] and the value projection [heads, v, rank]; the
    rotated part of a latent is every head's.
    """
    heads, _, rank = up[0].shape
    count, slots, _ = latents.shape
    compressed = latents[..., :rank].reshape(count * slots, rank)
    keys, values = (
        linear(compressed, weight.flatten(0, 1)).float().view(count, slots, heads, -1)
        for weight in up
    )
    rotated = latents[..., None, rank:].float().expand(-1, -1, heads, -1)
    keys = torch.cat([keys, rotated], dim=-1)
    return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()


def _repeat_rows(masked: Tensor, heads: int) -> Tensor:
    """masked [n, rows, page_size] for rows x heads: [n, 1, rows * heads or 1, page_size]."""
    if masked.shape[1] == 1:
        return masked.unsqueeze(1)
    return masked.repeat_interleave(heads, dim=1).unsqueeze(1)


def _attend(query: Tensor, group: Group, load: Load, masks: Sequence[Tensor]) -> Tensor:
    """softmax(q k) v for query [tiles, g, m, d]: [tiles, g, m, v], both float32.

    First the largest score of each row over all pages, then the sums page by page. Where a group
    needs several chunks the scores are computed twice, to bound memory.
    """
    keep = len(group.chunks) == 1
    peak = query.new_full(query.shape[:3], torch.finfo(query.dtype).min)
    kept: list[tuple[Tensor, Tensor]] = []
    for chunk, mask in zip(group.chunks, masks, strict=True):
        scores, values = _scores(query, chunk, load, mask)
        _each_page(peak, scores.amax(dim=-1), chunk.counts, torch.maximum)
        if keep:
            kept.append((scores, values))
    total = torch.zeros_like(peak)
    result: Tensor | None = None
    for number, (chunk, mask) in enumerate(zip(group.chunks, masks, strict=True)):
        scores, values = kept[number] if keep else _scores(query, chunk, load, mask)
        weights = scores.sub_(peak.index_select(0, chunk.tiles).unsqueeze(-1)).exp_()
        part = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1))
        part = part.view(*weights.shape[:3], -1)
        if result is None:
            result = part.new_zeros((*peak.shape, part.shape[-1]))
        _each_page(total, weights.sum(dim=-1), chunk.counts, torch.add)
        _each_page(result, part, chunk.counts, torch.add)
    assert result is not None
    return result / total.unsqueeze(-1)


def _scores(query: Tensor, chunk: Chunk, load: Load, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Masked scores [n, g, m, page_size] of a chunk's entries, and their values."""
    keys, values = load(chunk)
    picked = query.index_select(0, chunk.tiles)
    scores = torch.bmm(picked.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    scores = scores.view(*picked.shape[:3], -1)
    return scores.masked_fill_(mask, float("-inf")), values


def _each_page(
    total: Tensor, parts: Tensor, counts: Sequence[int], combine: Callable[..., Tensor]
) -> None:
    """total[:c] = combine(total[:c], the next c of parts) for every c of counts, in order."""
    begin = 0
    for count in counts:
        head = total[:count]
        combine(head, parts[begin : begin + count], out=head)
        begin += count


def _rows_back(parts: Sequence[Tensor], walk: PageWalk, num_rows: int) -> Tensor:
    """The tiles' results as batch rows [num_rows, heads, v]; padding rows repeat row 0."""
    result = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    take = walk.take
    if take.shape[0] < num_rows:
        take = torch.cat([take, take[:1].expand(num_rows - take.shape[0])])
    return result.index_select(0, take)

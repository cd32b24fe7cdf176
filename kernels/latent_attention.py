"""Attention over paged latents (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434).

A latent is `rank` normalised values and `rope` rotated ones. Two forms of the same function:

* MHA form: keys and values of every head are projected from the latents, then per head
  softmax(q . k) v. Cheaper for many queries a key.
* absorbed form: q is multiplied by the key projection once, so that all heads read the latents
  themselves as keys, and as values; the value projection follows. Cheaper for few queries a key.

All products have a fixed shape (a tile of rows against one split of keys), maxima do not depend on
order, and sums run split by split. So a row's result does not depend on its neighbours, on how the
rows were put into batches, on how many keys follow, or on the page size. Everything is float32.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.kernels.linear import linear, padded_rows
from pdmesh.kernels.page_copy import flat_rows, gather_latents
from pdmesh.kernels.page_walk import Chunk, Group, PageWalk

Load = Callable[[Chunk, bool], tuple[Tensor, Tensor | None]]
"""Keys [n, g, SPLIT, d] of a chunk's entries and, if asked for, values [n, g, SPLIT, v]."""


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

    def load(chunk: Chunk, _: bool) -> tuple[Tensor, Tensor | None]:
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

    def load(chunk: Chunk, wanted: bool) -> tuple[Tensor, Tensor | None]:
        pages, slots = chunk.pages[chunk.distinct], chunk.slots[chunk.distinct]
        rows = flat_rows(pages, slots, latents.shape[1], latents.shape[2])
        gathered = gather_latents(latents, layer, rows)
        keys = project_keys(gathered, up[0]).index_select(0, chunk.same)
        if not wanted:
            return keys, None
        return keys, project_values(gathered, up[1]).index_select(0, chunk.same)

    parts = []
    for group in walk.groups:
        tiles, rows = group.rows.shape
        packed = query.index_select(0, group.rows.flatten())
        packed = packed.view(tiles, rows, heads, -1).transpose(1, 2).contiguous()
        masks = [None if c.masked is None else c.masked.unsqueeze(1) for c in group.chunks]
        result = _attend(packed, group, load, masks).transpose(1, 2)
        parts.append(result.reshape(tiles * rows, heads, value_dim))
    return _rows_back(parts, walk, query.shape[0])


def project_keys(latents: Tensor, weight: Tensor) -> Tensor:
    """Keys [n, heads, s, nope + rope] float32 of latents [n, s, w]; weight [heads, nope, rank].

    The rotated part of a latent is every head's.
    """
    heads, _, rank = weight.shape
    rotated = latents[..., None, rank:].float().expand(-1, -1, heads, -1)
    keys = torch.cat([_project(latents, weight), rotated], dim=-1)
    return keys.transpose(1, 2).contiguous()


def project_values(latents: Tensor, weight: Tensor) -> Tensor:
    """Values [n, heads, s, v] float32 of latents [n, s, w]; weight [heads, v, rank]."""
    return _project(latents, weight).transpose(1, 2).contiguous()


def _project(latents: Tensor, weight: Tensor) -> Tensor:
    count, slots, _ = latents.shape
    compressed = latents[..., : weight.shape[2]].reshape(count * slots, -1)
    projected = linear(compressed, weight.flatten(0, 1)).float()
    return projected.view(count, slots, weight.shape[0], -1)


def _repeat_rows(masked: Tensor | None, heads: int) -> Tensor | None:
    """masked [n, rows, SPLIT] for rows x heads: [n, 1, rows * heads or 1, SPLIT]."""
    if masked is None:
        return None
    if masked.shape[1] == 1:
        return masked.unsqueeze(1)
    return masked.repeat_interleave(heads, dim=1).unsqueeze(1)


def _attend(query: Tensor, group: Group, load: Load, masks: Sequence[Tensor | None]) -> Tensor:
    """softmax(q k) v for query [tiles, g, m, d]: [tiles, g, m, v], both float32.

    First the largest score of each row over all splits, then the sums split by split. Where a group
    needs several chunks the scores are computed twice, to bound memory.
    """
    keep = len(group.chunks) == 1
    peak = query.new_full(query.shape[:3], torch.finfo(query.dtype).min)
    kept: tuple[Tensor, Tensor | None] | None = None
    for chunk, mask in zip(group.chunks, masks, strict=True):
        scored = _scores(query, chunk, load, mask, values=keep)
        _each_split(peak, scored[0].amax(dim=-1), chunk.counts, torch.maximum)
        kept = scored if keep else None
    total = torch.zeros_like(peak)
    result: Tensor | None = None
    for chunk, mask in zip(group.chunks, masks, strict=True):
        scores, values = kept or _scores(query, chunk, load, mask, values=True)
        assert values is not None
        weights = scores.sub_(peak.index_select(0, chunk.tiles).unsqueeze(-1)).exp_()
        part = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1))
        part = part.view(*weights.shape[:3], -1)
        if result is None:
            result = part.new_zeros((*peak.shape, part.shape[-1]))
        _each_split(total, weights.sum(dim=-1), chunk.counts, torch.add)
        _each_split(result, part, chunk.counts, torch.add)
    assert result is not None
    return result / total.unsqueeze(-1)


def _scores(
    query: Tensor, chunk: Chunk, load: Load, mask: Tensor | None, values: bool
) -> tuple[Tensor, Tensor | None]:
    """Masked scores [n, g, m, SPLIT] of a chunk's entries, and their values if asked for."""
    keys, loaded = load(chunk, values)
    picked = query.index_select(0, chunk.tiles)
    scores = torch.bmm(picked.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    scores = scores.view(*picked.shape[:3], -1)
    return scores if mask is None else scores.masked_fill_(mask, float("-inf")), loaded


def _each_split(
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

"""What a step on a device needs besides `quantised`, in plain torch: the definitions.

Every function has static shapes and leaves its inputs' values to the device, so that a fast version
of it can be part of a captured graph. Rows that nobody asked for have slot -1 and no expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.kernels.gate import GateRule, choose_experts
from pdmesh.kernels.norm import rms_norm
from pdmesh.kernels.quantised import Rows, new_scales, pack_latents, unpack_latents
from pdmesh.kernels.rope import apply_rope

ALIGNMENT = 128
"""An expert's rows in the contiguous layout begin at a multiple of this."""


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
    eps: float = 1e-6,
) -> Tensor:
    """Rotates queries and keys, normalises latents, and writes them to their pages.

    Args:
        query_rope: [m, heads, rope].
        latent: [m, rank + rope] as projected.
        kv_norm: [rank].
        cos, sin: [max_position, rope] float32, as in `RopeTable`.
        positions: [m] int64.
        slots: [m] int64, flat layer-0 rows of the pool; a row of -1 is written nowhere.
        pool: [num_pages, num_layers, page_size, rank + rope], or uint8 as `pack_latents` gives.
        layer: which layer's latents.

    Returns:
        The rotated queries [m, heads, rope] in the dtype of `query_rope`.
    """
    rank = kv_norm.shape[0]
    rows = (cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))
    both = torch.cat([query_rope, latent[:, None, rank:]], dim=1)
    rotated = apply_rope(both, *rows, interleave)
    normed = torch.cat([rms_norm(latent[:, :rank], kv_norm, eps), rotated[:, -1]], dim=-1)
    values = pack_latents(normed) if pool.dtype == torch.uint8 else normed.to(pool.dtype)
    flat = pool.view(-1, pool.shape[3])
    written = slots >= 0
    flat[slots[written] + layer * pool.shape[2]] = values[written]
    return rotated[:, :-1]


def read_latents(pool: Tensor, layer: int, slots: Tensor) -> Tensor:
    """The latents of flat layer-0 rows [n] of `layer`: [n, rank + rope] in bfloat16 or the
    pool's dtype."""
    picked = pool.view(-1, pool.shape[3]).index_select(0, slots + layer * pool.shape[2])
    return unpack_latents(picked).to(torch.bfloat16) if pool.dtype == torch.uint8 else picked


def gate_topk(
    x: Tensor, weight: Tensor, bias: Tensor | None, rule: GateRule, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each row.

    Args:
        x: [m, hidden].
        weight: the router [experts, hidden], bfloat16 or float32; products are float32.
        bias: [experts] float32, for the choice only.
        rule: how experts are chosen.
        real: [m] bool; the other rows get no expert.

    Returns:
        ids [m, k] int32, -1 for none, and weights [m, k] float32.
    """
    ids, weights = choose_experts(F.linear(x.float(), weight.float()), bias, rule)
    if real is not None:
        ids = torch.where(real.unsqueeze(1), ids, -1)
    return ids.int(), weights


def to_masked(rows: Rows, ids: Tensor, experts: int, capacity: int) -> tuple[Rows, Tensor, Tensor]:
    """Rows to a share of `capacity` rows for each expert.

    Args:
        rows: values [m, k].
        ids: [m, choices] int32, -1 for none. No expert has more than `capacity` rows.

    Returns:
        Rows of values [experts, capacity, k], of which the first counts[e] of expert e are defined;
        counts [experts] int32; places [m, choices] int64 in the flattened shares, -1 for none.
    """
    order, expert, rank, counts = _ranked(ids, experts)
    target = torch.where(expert < experts, expert * capacity + rank, experts * capacity)
    placed = _scatter(rows, order // ids.shape[1], target, experts * capacity)
    k, groups = rows.values.shape[1], rows.scales.shape[1]
    scales = new_scales(experts, capacity, groups, device=ids.device)
    scales.copy_(placed.scales.view(experts, capacity, groups))
    shares = Rows(placed.values.view(experts, capacity, k), scales)
    return shares, counts.int(), _places(target, order, ids, experts * capacity)


def contiguous_rows(num_rows: int, choices: int, experts: int) -> int:
    """Rows that `to_contiguous` may need at most: every expert's last tile may be almost empty."""
    used = min(experts, num_rows * choices)
    return -(-(num_rows * choices + used * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT


def to_contiguous(rows: Rows, ids: Tensor, experts: int) -> tuple[Rows, Tensor, Tensor]:
    """Rows one expert after another, each from a multiple of 128 on.

    Returns:
        Rows of values [r, k], r as `contiguous_rows` says; the expert of each [r] int32, -1 for
        padding; places [m, choices] int64, -1 for none.
    """
    total = contiguous_rows(ids.shape[0], ids.shape[1], experts)
    order, expert, rank, counts = _ranked(ids, experts)
    shares = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    starts = F.pad(shares.cumsum(0) - shares, (0, 1))
    target = torch.where(expert < experts, starts[expert] + rank, total)
    row_expert = torch.full((total + 1,), -1, dtype=torch.int32, device=ids.device)
    row_expert[target] = torch.where(expert < experts, expert, -1).int()
    placed = _scatter(rows, order // ids.shape[1], target, total)
    return placed, row_expert[:total], _places(target, order, ids, total)


def from_experts(
    outputs: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None = None
) -> Tensor:
    """The weighted sum of each row's experts, in the order of its choices, in float32.

    Args:
        outputs: [r, hidden] bfloat16, what the experts gave.
        places: [m, choices] int64 rows of it, -1 for none.
        weights: [m, choices] float32.
        shared: [m, hidden] to be added.
    """
    picked = outputs.index_select(0, places.flatten().clamp_min(0)).view(*places.shape, -1)
    scaled = torch.where((places >= 0).unsqueeze(-1), picked.float() * weights.unsqueeze(-1), 0.0)
    total = scaled[:, 0]
    for choice in range(1, places.shape[1]):
        total = total + scaled[:, choice]
    return (total if shared is None else total + shared.float()).to(outputs.dtype)


def mla_decode(
    query: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    rows: int,
    scale: float,
    *,
    rank: int = 512,
    first_key: int = 0,
) -> Tensor:
    """Absorbed attention over paged latents, `rows` rows for every sequence.

    Args:
        query: [n * rows, heads, rank + rope], not scaled.
        pages: one layer of the pool, [num_pages, page_size, rank + rope], or uint8.
        page_table: [n, max_pages] int32.
        lengths: [n] int32, keys of each sequence, those of its own rows included. Row j sees keys
            first_key to lengths - rows + j; a row that sees none gives zeros.
        scale: what a product is multiplied by.

    Returns:
        [n * rows, heads, rank] in the dtype of query.
    """
    n, page_size = page_table.shape[0], pages.shape[1]
    used = max(1, -(-int(lengths.max()) // page_size)) if n else 1
    keys = pages[page_table[:, :used].long()].flatten(1, 2)
    keys = unpack_latents(keys) if pages.dtype == torch.uint8 else keys.float()
    heads, width = query.shape[1:]
    packed = query.view(n, rows, heads, width).float()
    at = torch.arange(keys.shape[1], device=query.device)
    last = lengths[:, None] - rows + torch.arange(rows, device=query.device)
    seen = (at >= first_key) & (at <= last.unsqueeze(-1))
    keys = torch.where((at < lengths[:, None])[..., None] & (at >= first_key)[:, None], keys, 0.0)
    scores = torch.einsum("nrhw,nkw->nrhk", packed, keys) * scale
    scores = scores.masked_fill(~seen.unsqueeze(2), float("-inf"))
    weights = torch.where(seen.any(-1)[..., None, None], scores.softmax(dim=-1), 0.0)
    return torch.einsum("nrhk,nkv->nrhv", weights, keys[..., :rank]).flatten(0, 1).to(query.dtype)


def mla_prefill(
    query: Tensor, keys: Tensor, values: Tensor, query_ends: Tensor, key_ends: Tensor, scale: float
) -> Tensor:
    """Attention of sequences laid end to end, in MHA form; a sequence's last row sees all its keys.

    Args:
        query: [m, heads, nope + rope], keys [s, heads, nope + rope], values [s, heads, value_dim].
        query_ends, key_ends: [n + 1] int32, where each sequence begins and the last one ends.

    Returns:
        [m, heads, value_dim] in the dtype of query.
    """
    output = query.new_empty((*query.shape[:2], values.shape[2]))
    q, k = query_ends.tolist(), key_ends.tolist()
    for i in range(len(q) - 1):
        rows, seen = slice(q[i], q[i + 1]), slice(k[i], k[i + 1])
        count, length = q[i + 1] - q[i], k[i + 1] - k[i]
        mask = torch.ones(count, length, dtype=torch.bool, device=query.device).tril(length - count)
        q_, k_, v_ = (t.transpose(0, 1).float() for t in (query[rows], keys[seen], values[seen]))
        attended = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask, scale=scale)
        output[rows] = attended.transpose(0, 1).to(query.dtype)
    return output


def _ranked(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choices sorted by expert (those of none last): order, expert and rank of each, counts."""
    flat = torch.where(ids < 0, experts, ids).flatten().long()
    order = flat.argsort(stable=True)
    expert = flat[order]
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    rank = torch.arange(flat.shape[0], device=ids.device) - starts[expert]
    return order, expert, rank, counts[:experts]


def _scatter(rows: Rows, source: Tensor, target: Tensor, total: int) -> Rows:
    """Row source[i] to row target[i] of `total` rows; targets of `total` are dropped."""
    values = torch.zeros((total + 1, rows.values.shape[1]), dtype=torch.uint8, device=source.device)
    values[target] = rows.values.view(torch.uint8)[source]
    scales = new_scales(total + 1, rows.scales.shape[1], device=source.device)
    scales.zero_()
    scales[target] = rows.scales[source]
    kept = new_scales(total, rows.scales.shape[1], device=source.device)
    kept.copy_(scales[:total])
    return Rows(values[:total].view(torch.float8_e4m3fn), kept)


def _places(target: Tensor, order: Tensor, ids: Tensor, total: int) -> Tensor:
    places = torch.empty_like(target)
    places[order] = torch.where(target < total, target, -1)
    return places.view(ids.shape)

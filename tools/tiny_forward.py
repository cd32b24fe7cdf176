"""A training forward over the serving model's own parameters: dropout, and experts without a sync.

The serving code runs one numerically pinned form on flat rows. Training wants whole windows,
dropout and one compiled graph, so the same equations (DeepSeek-V3 report, arXiv:2412.19437,
sections 2.1 and 2.2) are stated once more here. A test holds both to the same outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_ALIGN = 16


@dataclass(frozen=True)
class Mode:
    """`dropout` of each residual branch; `grouped`: products by expert instead of all experts."""

    dropout: float = 0.0
    grouped: bool = False


def split_last(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """The last dimension cut into two."""
    return x.view(*x.shape[:-1], *sizes)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [..., h]; gate_up [2 i, h]; down [h, i]."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def route(logits: Tensor, bias: Tensor, groups: int, top_groups: int, top_k: int) -> Tensor:
    """Chosen experts as a 0/1 mask [n, experts] (noaux_tc); the choice has no gradient."""
    with torch.no_grad():
        choice = torch.sigmoid(logits.float()) + bias
        grouped = split_last(choice, (groups, -1))
        rank = grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(rank).scatter(-1, rank.topk(top_groups, dim=-1).indices, 1.0)
        choice = grouped.masked_fill(kept.unsqueeze(-1) == 0, -1e9).flatten(-2)
        chosen = choice.topk(top_k, dim=-1).indices
        return torch.zeros_like(choice).scatter(-1, chosen, 1.0)


def expert_weights(logits: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Sigmoid scores of the chosen experts, normalised to sum `scale`. [n, experts] float32."""
    scores = torch.sigmoid(logits.float()) * mask
    return scores * (scale / (scores.sum(-1, keepdim=True) + 1e-20))


def all_experts(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every expert on every row, weighted (zero where not chosen): one wide SwiGLU.

    x [n, h]; weights [n, e]; gate_up [e, 2 i, h]; down [e, h, i].
    """
    experts, double, _ = gate_up.shape
    wide = split_last(F.linear(x, gate_up.flatten(0, 1)), (experts, double))
    gate, up = wide.chunk(2, dim=-1)
    hidden = F.silu(gate) * up * weights.to(x.dtype).unsqueeze(-1)
    return F.linear(hidden.flatten(-2), down.transpose(0, 1).flatten(1))


def grouped_experts(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, top_k: int
) -> Tensor:
    """The same sum with one grouped product: only the chosen (row, expert) pairs are computed."""
    rows, experts = weights.shape
    chosen_weights, chosen = weights.topk(top_k, dim=-1)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat))
    padded = (counts + GROUP_ALIGN - 1) // GROUP_ALIGN * GROUP_ALIGN
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    position = torch.arange(rows * top_k, device=x.device) + shift[flat[order]]
    slots = torch.empty_like(position).scatter(0, order, position)
    size = rows * top_k + experts * GROUP_ALIGN
    pair_weight = x.new_zeros(size).scatter(0, slots, chosen_weights.flatten().to(x.dtype))
    offs = ends.to(torch.int32)
    inside = (torch.arange(size, device=x.device) < ends[-1]).unsqueeze(-1)
    pairs = x.unsqueeze(1).expand(rows, top_k, x.shape[1]).reshape(rows * top_k, -1)
    grouped = x.new_zeros((size, x.shape[1])).index_copy(0, slots, pairs)
    wide = F.grouped_mm(grouped, gate_up.to(x.dtype).transpose(1, 2), offs=offs)
    gate, up = torch.where(inside, wide, 0.0).chunk(2, dim=-1)
    hidden = F.silu(gate) * up * pair_weight.unsqueeze(-1)
    parts = F.grouped_mm(hidden, down.to(x.dtype).transpose(1, 2), offs=offs)
    return _take_rows(parts, slots).view(rows, top_k, -1).sum(1)


class _TakeRows(torch.autograd.Function):
    """rows of x at distinct indices; the gradient is a plain copy, which needs no atomic adds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = x.shape[0]
        return x[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros((ctx.size, grad.shape[1])).index_copy(0, index, grad), None


def _take_rows(x: Tensor, index: Tensor) -> Tensor:
    taken: Tensor = _TakeRows.apply(x, index)  # type: ignore[no-untyped-call]  # torch has no types for it
    return taken


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs. x [b, t, heads, dim]; cos, sin [t, 1, dim], sin with the sign."""
    partner = split_last(x, (-1, 2)).flip(-1).flatten(-2)
    rotated = x.float() * cos + partner.float() * sin
    return rotated.to(x.dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query, key [b, t, heads, d], value [b, t, heads, v] with v <= d: [b, t, heads * v].

    Values are padded to d: the fused kernels want one head size.
    """
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width))
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return output[..., :width].transpose(1, 2).flatten(2)

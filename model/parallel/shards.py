"""The part of the weights that one rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pdmesh.model.block import Block
from pdmesh.model.config import ModelConfig
from pdmesh.model.expert_source import Experts
from pdmesh.model.mla import Mla
from pdmesh.model.moe import Mlp, Moe
from pdmesh.wire.hashes import Arithmetic


@dataclass(frozen=True)
class LayerShard:
    """One layer on one rank, without its routed experts.

    Attributes:
        input_norm, post_norm: [h], with `eps`.
        attention: the rank's heads; its own o_proj is unused.
        o_weight: [h, all heads * v], or in fast arithmetic over several TP ranks its columns only.
        o_bias: [h] or None; added once a row.
        mlp: the feed-forward part of a layer without routed experts, or the routed layer, of which
            the router and the shared experts are used here.
    """

    input_norm: Tensor
    post_norm: Tensor
    eps: float
    attention: Mla
    o_weight: Tensor
    o_bias: Tensor | None
    mlp: Mlp | Moe


class HeadShard(Mla):
    """Some heads of `whole`: its rows of q_b, k_b and v_b; projections to latents are replicated.

    With `whole_query` every query is projected and the other heads' are dropped: a product of
    16-bit numbers with fewer columns may be rounded another way by a CPU (measured with torch 2.13
    on Sapphire Rapids).
    """

    def __init__(
        self, whole: Mla, config: ModelConfig, heads: range, whole_query: bool = False
    ) -> None:
        count = whole.heads if whole_query else len(heads)
        with torch.device("meta"):
            super().__init__(dataclasses.replace(config, num_attention_heads=count), whole.layer)
        self._kept = heads if whole_query else None
        width = whole.nope + whole.rope
        rows = slice(None) if whole_query else slice(heads.start * width, heads.stop * width)
        if whole.q_rank is None:
            self.q_proj.weight = _frozen(whole.q_proj.weight[rows])
            self.kv_a_proj = whole.kv_a_proj
        else:
            self.qkv_a_proj = whole.qkv_a_proj
            self.q_a_norm = whole.q_a_norm
            self.q_b_proj.weight = _frozen(whole.q_b_proj.weight[rows])
        self.kv_a_norm = whole.kv_a_norm
        self.k_b_proj = _frozen(whole.k_b_proj[heads.start : heads.stop])
        self.v_b_proj = _frozen(whole.v_b_proj[heads.start : heads.stop])

    def _query_and_latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, latent = super()._query_and_latent(x)
        if self._kept is not None:
            query = query[:, self._kept.start : self._kept.stop]
        return query, latent


def layer_shard(
    block: Block, config: ModelConfig, heads: range, arithmetic: Arithmetic
) -> LayerShard:
    """The part of `block` for a rank with these heads; views where it can, copies where it must."""
    attention, whole = block.self_attn, block.self_attn
    weight = whole.o_proj.weight.detach()
    if len(heads) < whole.heads:
        exact = arithmetic == "exact"
        narrow = weight.device.type == "cpu" and weight.element_size() < 4
        attention = HeadShard(whole, config, heads, whole_query=exact and narrow)
        if not exact:
            size = whole.value_dim
            weight = weight[:, heads.start * size : heads.stop * size].contiguous()
    return LayerShard(
        block.input_norm.detach(),
        block.post_norm.detach(),
        block.eps,
        attention,
        weight,
        whole.o_proj.bias,
        block.mlp,
    )


def keep_heads(block: Block, shard: LayerShard) -> None:
    """Frees the heads of `block` that `shard` lacks, which then has its own weights.

    The block cannot compute any more.
    """
    whole, own = block.self_attn, shard.attention
    if own is whole:
        return
    queries = "q_proj" if whole.q_rank is None else "q_b_proj"
    _move(getattr(whole, queries), getattr(own, queries), "weight")
    for name in ("k_b_proj", "v_b_proj"):
        _move(whole, own, name)
    if shard.o_weight.data_ptr() != whole.o_proj.weight.data_ptr():  # columns of their own
        whole.o_proj.weight = _frozen(whole.o_proj.weight[:0].clone())


def _move(whole: nn.Module, own: nn.Module, name: str) -> None:
    """A part of a weight to its own memory, and the rest of it out of memory."""
    setattr(own, name, _frozen(getattr(own, name).clone()))
    setattr(whole, name, _frozen(getattr(whole, name)[:0].clone()))


def expert_shard(
    read: Callable[[Sequence[int]], Experts], wanted: Sequence[int], old: Mapping[int, Experts]
) -> Experts:
    """The weights of `wanted`, one a slot; those in `old` (one expert each) are not read again."""
    lacking = sorted(set(wanted) - set(old))
    if not set(wanted) & set(old):
        return read(wanted)
    gate_up, down = read(lacking)
    have = {e: (gate_up[i], down[i]) for i, e in enumerate(lacking)}
    found = [have.get(e) or old[e] for e in wanted]
    return torch.stack([one[0] for one in found]), torch.stack([one[1] for one in found])


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)

"""Whole-window forward of the small model for training: losses, logits and expert counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.model.config import ModelConfig
from pdmesh.tools.tiny_eval import Rows
from pdmesh.tools.tiny_forward import (
    Mode,
    all_experts,
    causal_attention,
    expert_weights,
    grouped_experts,
    rope,
    route,
    split_last,
    swiglu,
)


@dataclass(frozen=True)
class AttentionWeights:
    """MLA of one layer: fused down projections [q_lora + rank + rope, h] and per-head up ones."""

    qkv_a: Tensor
    q_norm: Tensor
    kv_norm: Tensor
    q_b: Tensor
    k_b: Tensor
    v_b: Tensor
    out: Tensor


@dataclass(frozen=True)
class MoeWeights:
    """Gate [e, h], its bias [e], stacked experts, and the shared expert."""

    gate: Tensor
    bias: Tensor
    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer; `dense` is (gate_up, down) where there are no experts."""

    input_norm: Tensor
    post_norm: Tensor
    attention: AttentionWeights
    dense: tuple[Tensor, Tensor] | None
    moe: MoeWeights | None


@dataclass(frozen=True)
class NetworkWeights:
    """All parameters of the serving model; `mtp` is (enorm, hnorm, eh_proj, norm)."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    mtp_layer: LayerWeights
    mtp: tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Hidden:
    """Normed outputs [b, t, h] of the trunk and [b, t - 1, h] of the MTP layer, whose first row is
    that of position 1, and the rows each expert got [moe layers, e]."""

    main: Tensor
    mtp: Tensor
    load: Tensor


class Network:
    """The forward pass. Stateless but for the rope tables; weights are handed in."""

    def __init__(self, config: ModelConfig, weights: NetworkWeights) -> None:
        self.config = config
        self.weights = weights
        self.mode = Mode()
        device = weights.embedding.device
        half = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32, device=device)
        inverse = config.rope_theta ** (-half / config.qk_rope_head_dim)
        positions = torch.arange(config.max_position_embeddings, device=device)
        angles = positions[:, None].float() * inverse
        self.cos = angles.cos().repeat_interleave(2, -1).unsqueeze(1)
        self.sin = torch.stack([-angles.sin(), angles.sin()], -1).flatten(1).unsqueeze(1)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in float32, x's dtype back."""
        return F.rms_norm(x.float(), weight.shape, weight, self.config.rms_norm_eps).to(x.dtype)

    def attention(self, x: Tensor, w: AttentionWeights, first: int) -> Tensor:
        """MLA in MHA form over causal windows. x [b, t, h], of positions first..."""
        c = self.config
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        rank, rope_dim = c.kv_lora_rank, c.qk_rope_head_dim
        q_rank = w.qkv_a.shape[0] - rank - rope_dim
        down_q, latent, key_rope = torch.split_with_sizes(
            F.linear(x, w.qkv_a), (q_rank, rank, rope_dim), dim=-1
        )
        latent = self.norm(latent, w.kv_norm)
        query = split_last(F.linear(self.norm(down_q, w.q_norm), w.q_b), (heads, -1))
        key = split_last(F.linear(latent, w.k_b.flatten(0, -2)), (heads, nope))
        value = split_last(F.linear(latent, w.v_b.flatten(0, -2)), (heads, -1))
        here = slice(first, first + x.shape[1])
        cos, sin = self.cos[here], self.sin[here]
        key_rope = rope(key_rope.unsqueeze(2), cos, sin).expand(-1, -1, heads, -1)
        query = torch.cat([query[..., :nope], rope(query[..., nope:], cos, sin)], -1)
        key = torch.cat([key, key_rope], -1)
        scale = float(nope + rope_dim) ** -0.5
        return F.linear(causal_attention(query, key, value, scale), w.out)

    def moe(self, x: Tensor, w: MoeWeights) -> tuple[Tensor, Tensor]:
        """Routed and shared experts of x [b, t, h], and the tokens each expert got [e]."""
        rule = self.config.gate
        assert rule is not None
        flat = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(flat.float(), w.gate.float())
        mask = route(logits, w.bias, rule.num_groups, rule.top_groups, rule.top_k)
        weights = expert_weights(logits, mask, rule.scale)
        if self.mode.grouped:
            routed = grouped_experts(flat, weights, w.gate_up, w.down, rule.top_k)
        else:
            routed = all_experts(flat, weights, w.gate_up, w.down)
        shared = swiglu(flat, w.shared_gate_up, w.shared_down)
        return (routed + shared).view_as(x), mask.sum(0)

    def layer(self, x: Tensor, w: LayerWeights, first: int = 0) -> tuple[Tensor, Tensor | None]:
        """One layer; dropout on both branches while training."""
        drop = self.mode.dropout
        branch = self.attention(self.norm(x, w.input_norm).to(self.dtype), w.attention, first)
        x = x + F.dropout(branch, drop, training=drop > 0).float()
        normed = self.norm(x, w.post_norm).to(self.dtype)
        load = None
        if w.moe is None:
            assert w.dense is not None
            branch = swiglu(normed, *w.dense)
        else:
            branch, load = self.moe(normed, w.moe)
        return x + F.dropout(branch, drop, training=drop > 0).float(), load

    @property
    def dtype(self) -> torch.dtype:
        """What products run in: bfloat16 on a GPU, else float32. The residual is float32."""
        return torch.bfloat16 if self.weights.embedding.is_cuda else torch.float32

    def hidden(self, tokens: Tensor) -> Hidden:
        """Run tokens [b, t] through the trunk and the MTP layer."""
        w, drop = self.weights, self.mode.dropout
        embedded = F.embedding(tokens, w.embedding)
        x = F.dropout(embedded, drop, training=drop > 0)
        loads = []
        for layer in w.layers:
            x, load = self.layer(x, layer)
            if load is not None:
                loads.append(load)
        main = self.norm(x, w.norm)
        enorm, hnorm, eh_proj, mtp_norm = w.mtp
        both = torch.cat([self.norm(embedded[:, 1:], enorm), self.norm(x[:, :-1], hnorm)], -1)
        y, load = self.layer(F.linear(both.to(self.dtype), eh_proj).float(), w.mtp_layer, first=1)
        assert load is not None
        return Hidden(main, self.norm(y, mtp_norm), torch.stack([*loads, load]))

    def logits(self, normed: Tensor) -> Tensor:
        """[..., h] to [..., vocab]."""
        return F.linear(normed.to(self.dtype), self.weights.head)

    def rows(self, tokens: Tensor) -> Rows:
        """Logits of both heads, for scoring."""
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
            hidden = self.hidden(tokens)
            mtp = F.pad(self.logits(hidden.mtp), (0, 0, 1, 0))
            return Rows(self.logits(hidden.main), mtp, hidden.load)

    def losses(
        self, tokens: Tensor, weights: Tensor, teacher: Teacher | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(main, MTP) weighted cross entropies of windows [b, t + 1], and expert counts.

        With a teacher, part of the main target is its distribution instead of the true token.
        """
        hidden = self.hidden(tokens[:, :-1])
        logits = self.logits(hidden.main)
        main = _weighted(logits, tokens[:, 1:], weights[:, 1:])
        if teacher is not None:
            with torch.no_grad():
                target = teacher.network.logits(teacher.network.hidden(tokens[:, :-1]).main)
                probabilities = target.float().softmax(-1)
            soft = -(probabilities * logits.float().log_softmax(-1)).sum(-1)
            scored = weights[:, 1:]
            soft = (soft * scored).sum() / scored.sum().clamp_min(1.0)
            main = (1 - teacher.share) * main + teacher.share * soft
        mtp = _weighted(self.logits(hidden.mtp), tokens[:, 2:], weights[:, 2:])
        return main, mtp, hidden.load


@dataclass(frozen=True)
class Teacher:
    """Distillation (Hinton et al. 2015): `share` of the loss is against this network's output."""

    network: Network
    share: float


def _weighted(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    flat = weights.flatten()
    return (losses * flat).sum() / flat.sum().clamp_min(1.0)

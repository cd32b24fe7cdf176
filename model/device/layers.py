"""The layers of a model in FP8: what a step does with its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.kernels.backends import Backends
from pdmesh.kernels.latent_attention import absorbed_attention
from pdmesh.kernels.latent_rows import read_latents
from pdmesh.kernels.linear import bmm
from pdmesh.kernels.quantised import BlockWeight, Rows
from pdmesh.kernels.rope import RopeTable
from pdmesh.kernels.routing import Routing, contiguous_capacity
from pdmesh.model.config import ModelConfig
from pdmesh.model.device.step import Attention, DeviceStep, Paged, Part, Ragged, heads_at_once
from pdmesh.model.device.weights import (
    AttentionWeights,
    LayerWeights,
    Linear,
    MlpWeights,
    MoeWeights,
    round_up,
    rows_of_blocks,
)
from pdmesh.model.mla import LATENT_NORM_EPS
from pdmesh.model.rope import softmax_scale

MASKED_ROWS = 512
"""Up to so many rows every expert has room for all of them; beyond, rows are sorted by expert."""


@dataclass(frozen=True)
class Layers:
    """The arithmetic of a model's layers; weights, pool and rows come with each call."""

    config: ModelConfig
    table: RopeTable
    ops: Backends

    def planned(self, step: DeviceStep) -> DeviceStep:
        """The step with what the backends of attention plan once for all layers."""
        first = step.first_key
        parts = tuple(replace(p, attention=self._plan(p.attention, first)) for p in step.parts)
        return replace(step, parts=parts)

    def _plan(self, attention: Attention, first_key: int) -> Attention:
        c, ops = self.config, self.ops
        if isinstance(attention, Paged) and not first_key and hasattr(ops.mla_decode, "plan"):
            heads = c.num_attention_heads
            plan = ops.mla_decode.plan(attention.lengths, attention.count, heads)
            return replace(attention, plan=plan)
        if isinstance(attention, Ragged) and hasattr(ops.mla_prefill, "plan"):
            widths, scale = (c.qk_head_dim, c.v_head_dim), softmax_scale(c)
            heads = heads_at_once(c, attention.slots.shape[0])
            plan = ops.mla_prefill.plan(attention.host_ends, heads, widths, scale)
            return replace(attention, plan=plan)
        return attention

    def run(
        self, weights: LayerWeights, rows: Rows, step: DeviceStep, pool: Tensor, layer: int
    ) -> Tensor:
        """Attention of normalised, quantised rows [m, hidden]; writes the layer's latents."""
        return self.attend(
            weights, self.project(weights, rows, step, pool, layer), step, pool, layer
        )

    def project(
        self, weights: LayerWeights, rows: Rows, step: DeviceStep, pool: Tensor, layer: int
    ) -> Tensor:
        """Queries of normalised, quantised rows [m, hidden]; writes the layer's latents.

        Returns:
            [m, heads, nope + rope], rotated.
        """
        w, ops, c = weights.attention, self.ops, self.config
        both = self._linear(rows, w.first)
        if w.q_b is None or w.q_norm is None:
            query = both[:, : w.first_rows]
        else:
            compressed, _ = ops.rms_norm_quantise(
                both[:, : w.first_rows], w.q_norm, LATENT_NORM_EPS
            )
            query = ops.fp8_gemm(compressed, w.q_b)
        query = query.view(-1, c.num_attention_heads, c.qk_head_dim)
        turned = query[..., c.qk_nope_head_dim :]
        ops.rope_append(
            turned,
            both[:, w.latent_at :],
            w.kv_norm,
            self.table.cos,
            self.table.sin,
            step.positions,
            step.slots,
            pool,
            layer,
            interleave=self.table.interleave,
            eps=LATENT_NORM_EPS,
            out=turned,
        )
        return query

    def attend(
        self, weights: LayerWeights, query: Tensor, step: DeviceStep, pool: Tensor, layer: int
    ) -> Tensor:
        """What the heads see by a query of `project`, projected: [m, hidden]."""
        w = weights.attention
        outputs = [
            self._linear(self._attend(w, query, part, step, pool, layer), w.o)
            for part in step.parts
        ]
        return outputs[0] if step.merge is None else torch.cat(outputs)[step.merge]

    def feed_forward(
        self, weights: MlpWeights | MoeWeights, rows: Rows, normed: Tensor, num_rows: Tensor | None
    ) -> Tensor:
        """rows and normed [m, hidden], the same numbers: [m, hidden] bfloat16."""
        if isinstance(weights, MlpWeights):
            return self.mlp(weights, rows)
        return self._moe(weights, rows, normed, num_rows)

    def _linear(self, rows: Rows, linear: Linear) -> Tensor:
        output: Tensor = self.ops.fp8_gemm(rows, linear.weight)
        return output if linear.bias is None else output + linear.bias

    def mlp(self, weights: MlpWeights, rows: Rows) -> Tensor:
        """rows [m, hidden]: [m, hidden] bfloat16."""
        gate_up = self.ops.fp8_gemm(rows, weights.gate_up)
        output: Tensor = self.ops.fp8_gemm(self.ops.silu_mul_quantise(gate_up), weights.down)
        return output

    def route(self, w: MoeWeights, normed: Tensor, num_rows: Tensor | None) -> Routing:
        """Which experts rows [m, hidden] are for; rows from `num_rows` on are for none."""
        rule = self.config.gate
        assert rule is not None
        routing: Routing = self.ops.gate_topk(normed, w.router, w.bias, rule, num_rows)
        return routing

    def masked_experts(
        self, w: MoeWeights, rows: Rows, counts: Tensor, expected: int, used: int = 0
    ) -> Tensor:
        """Rows [experts, most, hidden], counts[e] of each, through their experts: bfloat16.

        `expected` of each are likely, and no more than `used` experts have any (0: all may).
        """
        ops = self.ops
        gate_up = ops.masked_grouped_gemm(rows, w.gate_up, counts, expected, used)
        hidden = ops.masked_silu_mul_quantise(gate_up, counts)
        del gate_up  # its memory is for what is next
        outputs: Tensor = ops.masked_grouped_gemm(hidden, w.down, counts, expected, used)
        return outputs

    def _moe(self, w: MoeWeights, rows: Rows, normed: Tensor, num_rows: Tensor | None) -> Tensor:
        ops, rule = self.ops, self.config.gate
        assert rule is not None
        routed = self.route(w, normed, num_rows)
        ids, places = routed.ids, routed.places
        m, experts = normed.shape[0], rule.num_experts
        if m <= MASKED_ROWS:
            # A tile of a grouped product may be of 128 rows, and must not reach the next expert's.
            capacity = m if normed.device.type == "cpu" else round_up(m)
            rows_of, targets, _ = ops.permute_masked(rows, ids, places, experts, capacity)
            expected = max(1, m * rule.top_k // experts)
            how: tuple[object, ...] = (routed.counts, expected, m * rule.top_k)
            product, activation = ops.masked_grouped_gemm, ops.masked_silu_mul_quantise
        else:
            capacity = contiguous_capacity(m, rule.top_k, experts)
            expected = -(-m * rule.top_k // experts)
            rows_of, targets, row_expert = ops.permute_contiguous(
                rows, ids, places, routed.counts, capacity
            )
            how = (row_expert, expected)
            product, activation = ops.contiguous_grouped_gemm, ops.silu_mul_quantise
        # In memory at a time: rows or what they are activated to, and one product of the two.
        lead, widths = rows_of.values.shape[:-1], (w.gate_up.values.shape[1], normed.shape[1])
        both = normed.new_empty(lead.numel() * max(widths))
        first, second = (both[: lead.numel() * n].view(*lead, n) for n in widths)
        gate_up = product(rows_of, w.gate_up, *how, out=first)
        del rows_of
        hidden = activation(gate_up, *how[:1]) if m <= MASKED_ROWS else activation(gate_up)
        outputs = product(hidden, w.down, *how, out=second)
        shared = None if w.shared is None else self.mlp(w.shared, rows)
        summed: Tensor = ops.unpermute(outputs, targets, routed.weights, shared)
        return summed

    def _attend(
        self,
        w: AttentionWeights,
        query: Tensor,
        part: Part,
        step: DeviceStep,
        pool: Tensor,
        layer: int,
    ) -> Rows:
        """The heads' values of a part's rows, quantised for the output projection."""
        if part.rows is not None:
            query = query[part.rows]
        if isinstance(part.attention, Ragged):
            return self._ragged(w, query, part.attention, pool, layer)
        nope, rank = self.config.qk_nope_head_dim, self.config.kv_lora_rank
        absorbed = self._absorb(query[..., :nope], w.k_b, query[..., nope:])
        scale = softmax_scale(self.config)
        if isinstance(part.attention, Paged):
            paged = part.attention
            seen = self.ops.mla_decode(
                absorbed,
                pool[:, layer],
                paged.page_table,
                paged.lengths,
                paged.count,
                scale,
                rank=rank,
                first_key=step.first_key,
                **({} if paged.plan is None else {"plan": paged.plan}),
            )
        else:
            if pool.dtype == torch.uint8:
                raise ValueError("trees of drafts need latents that are not packed in FP8")
            scaled = absorbed.float() * scale
            seen = absorbed_attention(scaled, pool, layer, part.attention.walk, rank)
            seen = seen.to(query.dtype)
        return self._project(seen, w.v_b)

    def _ragged(
        self, w: AttentionWeights, query: Tensor, ragged: Ragged, pool: Tensor, layer: int
    ) -> Rows:
        """MHA form: keys and values of every head from the latents in the pages; of as many heads
        at a time as `heads_at_once` has room for."""
        c, ops = self.config, self.ops
        latents = read_latents(pool, layer, ragged.slots).to(query.dtype)
        compressed = ops.quantise_rows(latents[:, : c.kv_lora_rank])
        heads, per_head = heads_at_once(c, latents.shape[0]), c.qk_nope_head_dim + c.v_head_dim
        attended = []
        for first in range(0, c.num_attention_heads, heads):
            kv_b = w.kv_b
            if heads < c.num_attention_heads:
                kv_b = rows_of_blocks(kv_b, first * per_head, heads * per_head)
            attended.append(
                self._mha(
                    query[:, first : first + heads],
                    ops.fp8_gemm(compressed, kv_b).view(latents.shape[0], heads, -1),
                    latents[:, c.kv_lora_rank :],
                    ragged,
                )
            )
        whole = attended.pop() if len(attended) == 1 else torch.cat(attended, dim=1)
        rows: Rows = ops.quantise_rows(whole.flatten(1))
        return rows

    def _mha(self, query: Tensor, up: Tensor, rotated: Tensor, ragged: Ragged) -> Tensor:
        """query [m, h, nope + rope], up [s, h, nope + value_dim], rotated [s, rope] of all heads:
        [m, h, value_dim]."""
        c = self.config
        keys = self.ops.join_keys(up[..., : c.qk_nope_head_dim], rotated)
        values = up[..., c.qk_nope_head_dim :]
        ends = ragged.query_ends, ragged.key_ends
        planned = {} if ragged.plan is None else {"plan": ragged.plan}
        if query.shape[1] < c.num_attention_heads:
            query = query.contiguous()
        seen: Tensor = self.ops.mla_prefill(query, keys, values, *ends, softmax_scale(c), **planned)
        return seen

    def _absorb(self, query: Tensor, k_b: BlockWeight | Tensor, rotated: Tensor) -> Tensor:
        """query [m, heads, nope], rotated [m, heads, rope]: [m, heads, rank + rope]."""
        if isinstance(k_b, BlockWeight):
            absorbed: Tensor = self.ops.absorb_query(query, k_b, rotated, 1.0)
            return absorbed
        latent = bmm(query.transpose(0, 1), k_b).transpose(0, 1)
        return torch.cat([latent, rotated], dim=-1)

    def _project(self, seen: Tensor, v_b: BlockWeight | Tensor) -> Rows:
        """seen [m, heads, rank]: the heads' values [m, heads * value_dim], quantised."""
        if isinstance(v_b, BlockWeight):
            rows: Rows = self.ops.project_values_quantise(seen, v_b)
            return rows
        values = bmm(seen.transpose(0, 1), v_b.transpose(1, 2)).transpose(0, 1)
        quantised: Rows = self.ops.quantise_rows(values.flatten(1))
        return quantised


def head_logits(normed: Tensor, head: Tensor) -> Tensor:
    """normed [..., hidden] bfloat16 times head [vocab, hidden]: [..., vocab] float32."""
    return F.linear(normed, head).float()

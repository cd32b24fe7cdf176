"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) in both forms.

With c the normalised latent of a key and k_r its rotated part, head h scores a query (q_h, q_r)

    MHA form:       q_h . (K_h c) + q_r . k_r          and adds up  softmax * (V_h c)
    absorbed form:  (K_h^T q_h) . c + q_r . k_r        and gives    V_h (sum of softmax * c)

which are the same numbers in exact arithmetic.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdmesh.kernels.latent_attention import absorbed_attention, mha_attention
from pdmesh.kernels.linear import bmm, linear
from pdmesh.kernels.norm import rms_norm
from pdmesh.kernels.page_copy import append_latents
from pdmesh.kernels.rope import apply_rope
from pdmesh.model.batch import AttentionPart
from pdmesh.model.config import ModelConfig
from pdmesh.model.context import StepContext
from pdmesh.model.rope import softmax_scale

# The published models fix this one, whatever rms_norm_eps is.
LATENT_NORM_EPS = 1e-6


class Mla(nn.Module):
    """Attention of one layer; `layer` is its index in the pages."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.rank, self.q_rank = config.kv_lora_rank, config.q_lora_rank
        self.value_dim = config.v_head_dim
        self.scale = softmax_scale(config)
        hidden, bias = config.hidden_size, config.attention_bias
        width = config.latent_width
        if self.q_rank is None:
            self.q_proj = nn.Linear(hidden, self.heads * config.qk_head_dim, bias=False)
            self.kv_a_proj = nn.Linear(hidden, width, bias=bias)
        else:
            self.qkv_a_proj = nn.Linear(hidden, self.q_rank + width, bias=bias)
            self.q_a_norm = nn.Parameter(torch.ones(self.q_rank))
            self.q_b_proj = nn.Linear(self.q_rank, self.heads * config.qk_head_dim, bias=False)
        self.kv_a_norm = nn.Parameter(torch.ones(self.rank))
        self.k_b_proj = nn.Parameter(torch.empty(self.heads, self.nope, self.rank))
        self.v_b_proj = nn.Parameter(torch.empty(self.heads, self.value_dim, self.rank))
        self.o_proj = nn.Linear(self.heads * self.value_dim, hidden, bias=bias)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x [num_padded, hidden], normalised, to [num_padded, hidden]; writes this layer's latents.

        Both in the model's dtype. Rows beyond step.num_rows are padding.
        """
        attended = self.attend(self.queries(x, step), step)
        return linear(attended, self.o_proj.weight, self.o_proj.bias)

    def queries(self, x: Tensor, step: StepContext) -> list[Tensor]:
        """Everything up to attention itself: writes this layer's latents, projects the queries.

        x [num_padded, hidden], normalised: for each part of the step [m, heads, width] float32,
        scaled; in absorbed form multiplied by the key projection already.
        """
        query, latent = self._query_and_latent(x)
        query_rope, key_rope = query[..., self.nope :], latent[:, None, self.rank :]
        rotated = apply_rope(
            torch.cat([query_rope, key_rope], dim=1), step.cos, step.sin, step.interleave
        )
        compressed = rms_norm(latent[:, : self.rank], self.kv_a_norm, LATENT_NORM_EPS)
        latent = torch.cat([compressed, rotated[:, -1]], dim=-1)
        append_latents(
            step.latents, self.layer, step.write_slots, latent.index_select(0, step.write_rows)
        )
        both = (query[..., : self.nope], rotated[:, :-1].float())
        return [self._query(*both, part) for part in step.parts]

    def attend(self, queries: Sequence[Tensor], step: StepContext) -> Tensor:
        """What `queries` gave to the heads' values [num_padded, heads * v], before o_proj."""
        pairs = zip(queries, step.parts, strict=True)
        pieces = [self._attend(query, part, step.latents) for query, part in pairs]
        return pieces[0] if step.merge is None else torch.cat(pieces)[step.merge]

    def _query(self, query: Tensor, query_rope: Tensor, part: AttentionPart) -> Tensor:
        """query [n, heads, nope], query_rope [n, heads, rope]: the part's [m, heads, width]."""
        if part.rows is not None:
            query, query_rope = query[part.rows], query_rope[part.rows]
        if part.form == "absorbed":
            query = bmm(query.transpose(0, 1), self.k_b_proj).transpose(0, 1)
        return torch.cat([query.float(), query_rope], dim=-1).mul_(self.scale)

    def _attend(self, query: Tensor, part: AttentionPart, latents: Tensor) -> Tensor:
        """query [m, heads, width] float32, as `_query` gives it: [m, heads * v]."""
        dtype = self.k_b_proj.dtype
        if part.form == "mha":
            up = (self.k_b_proj, self.v_b_proj)
            return mha_attention(query, latents, self.layer, part.walk, up).flatten(1).to(dtype)
        values = absorbed_attention(query, latents, self.layer, part.walk, self.rank)
        values = values.to(dtype).transpose(0, 1)
        return bmm(values, self.v_b_proj.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _query_and_latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, hidden]: query [n, heads, nope + rope], latent [n, rank + rope] as projected."""
        if self.q_rank is None:
            query = linear(x, self.q_proj.weight)
            latent = linear(x, self.kv_a_proj.weight, self.kv_a_proj.bias)
        else:
            both = linear(x, self.qkv_a_proj.weight, self.qkv_a_proj.bias)
            compressed = rms_norm(both[:, : self.q_rank], self.q_a_norm, LATENT_NORM_EPS)
            query = linear(compressed, self.q_b_proj.weight)
            latent = both[:, self.q_rank :]
        return query.view(-1, self.heads, self.nope + self.rope), latent

    def dense(self, x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
        """Causal attention without pages, MHA form, differentiable.

        x [b, t, hidden], cos and sin [t, 1, rope] float32: [b, t, hidden].
        """
        batch, length, _ = x.shape
        if self.q_rank is None:
            query, latent = self.q_proj(x), self.kv_a_proj(x)
        else:
            both = self.qkv_a_proj(x)
            compressed = rms_norm(both[..., : self.q_rank], self.q_a_norm, LATENT_NORM_EPS)
            query, latent = self.q_b_proj(compressed), both[..., self.q_rank :]
        query = query.view(batch, length, self.heads, self.nope + self.rope)
        normed = rms_norm(latent[..., : self.rank], self.kv_a_norm, LATENT_NORM_EPS)
        rotated = apply_rope(
            torch.cat([query[..., self.nope :], latent[:, :, None, self.rank :]], dim=2),
            cos,
            sin,
            interleave,
        )
        keys = F.linear(normed, self.k_b_proj.flatten(0, 1)).view(batch, length, self.heads, -1)
        values = F.linear(normed, self.v_b_proj.flatten(0, 1)).view(batch, length, self.heads, -1)
        key_rope = rotated[:, :, -1:].expand(-1, -1, self.heads, -1)
        attended = F.scaled_dot_product_attention(
            torch.cat([query[..., : self.nope], rotated[:, :, :-1]], dim=-1).transpose(1, 2),
            torch.cat([keys, key_rope.to(keys.dtype)], dim=-1).transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
            scale=self.scale,
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

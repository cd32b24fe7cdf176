"""A model's weights put together from a source, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdmesh.kernels.quantised import BlockWeight
from pdmesh.model.config import ModelConfig
from pdmesh.model.device.sources import WeightSource
from pdmesh.model.device.weights import (
    AttentionWeights,
    LayerWeights,
    Linear,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
    empty_blocks,
    heads_of,
    joined_bias,
    place,
    round_up,
    stacked,
)
from pdmesh.wire.errors import ConfigError


def build_weights(
    config: ModelConfig,
    source: WeightSource,
    device: torch.device,
    mtp: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    held: Sequence[Sequence[int]] | None = None,
) -> ModelWeights:
    """All weights of a model.

    Args:
        config: of the model.
        source: where they come from.
        device: where the source puts them.
        mtp: whether to take the MTP layer, where the config has one.
        dtype: of embedding, head, norms and hidden states.
        held: for each layer with routed experts which of them are in its slots; None: all, in
            order. All layers get as many slots as the largest needs.

    Raises:
        ConfigError: a tensor cannot be read, or one that must repeat another does not.
    """
    return _Builder(config, source, device, dtype, held).build(
        mtp and config.num_nextn_predict_layers > 0
    )


def build_expert(
    config: ModelConfig, source: WeightSource, layer: int, expert: int, device: torch.device
) -> MlpWeights:
    """One routed expert of a layer, as `build_weights` puts it into a slot.

    Raises:
        ConfigError: it cannot be read.
    """
    builder = _Builder(config, source, device, torch.bfloat16, None)
    prefix = f"model.layers.{layer}.mlp.experts.{expert}"
    return builder.mlp(prefix, config.moe_intermediate_size)


class _Builder:
    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        held: Sequence[Sequence[int]] | None,
    ) -> None:
        self._held = None if held is None else iter(held)
        self._slots = config.n_routed_experts if held is None else max(map(len, held), default=0)
        self._dtype = dtype
        self._config = config
        self._source = source
        self._device = device

    def build(self, mtp: bool) -> ModelWeights:
        config = self._config
        table = (config.vocab_size, config.hidden_size)
        embedding = self._plain("model.embed_tokens.weight", table)
        layers = tuple(self._layer(i) for i in range(config.num_hidden_layers))
        norm = self._norm("model.norm.weight")
        head = embedding
        if config.tie_word_embeddings:
            self._repeats("lm_head.weight", embedding)
        else:
            head = self._plain("lm_head.weight", table)
        extra = self._mtp(embedding, head) if mtp else None
        return ModelWeights(embedding, head, norm, layers, extra)

    def _mtp(self, embedding: Tensor, head: Tensor) -> MtpWeights:
        index, hidden = self._config.num_hidden_layers, self._config.hidden_size
        prefix = f"model.layers.{index}"
        built = MtpWeights(
            self._norm(f"{prefix}.enorm.weight"),
            self._norm(f"{prefix}.hnorm.weight"),
            self._plain(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)),
            self._norm(f"{prefix}.shared_head.norm.weight"),
            self._layer(index),
        )
        self._repeats(f"{prefix}.embed_tokens.weight", embedding)
        self._repeats(f"{prefix}.shared_head.head.weight", head)
        return built

    def _repeats(self, name: str, tensor: Tensor) -> None:
        """A checkpoint may hold the embedding and the head again; they must be the same."""
        if self._source.has(name) and not torch.equal(self._plain(name, tensor.shape), tensor):
            raise ConfigError(f"{name} must hold the same numbers as the model's embedding or head")

    def _layer(self, layer: int) -> LayerWeights:
        prefix, config = f"model.layers.{layer}", self._config
        mlp: MlpWeights | MoeWeights
        norm = self._norm(f"{prefix}.input_layernorm.weight")
        attention = self._attention(f"{prefix}.self_attn")
        if config.is_moe_layer(layer):
            mlp = self._moe(f"{prefix}.mlp")
        else:
            mlp = self.mlp(f"{prefix}.mlp", config.intermediate_size)
        return LayerWeights(
            norm, self._norm(f"{prefix}.post_attention_layernorm.weight"), attention, mlp
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        c, heads = self._config, self._config.num_attention_heads
        query_rows, per_head = heads * c.qk_head_dim, c.qk_nope_head_dim + c.v_head_dim
        latent = (f"{prefix}.kv_a_proj_with_mqa", c.latent_width)
        q_norm = q_b = None
        if c.q_lora_rank is None:
            rows, name = query_rows, f"{prefix}.q_proj"
        else:
            rows, name = c.q_lora_rank, f"{prefix}.q_a_proj"
            q_norm = self._norm(f"{prefix}.q_a_layernorm.weight", rows)
            q_b = self._matrix(f"{prefix}.q_b_proj", query_rows, rows)
        parts = [
            self._matrix(named, count, c.hidden_size) for named, count in ((name, rows), latent)
        ]
        with_bias = c.q_lora_rank is not None
        biases = [self._bias(name, rows) if with_bias else None, self._bias(*latent)]
        kv_b = self._matrix(f"{prefix}.kv_b_proj", heads * per_head, c.kv_lora_rank)
        k_b, v_b = heads_of(kv_b, heads, c.qk_nope_head_dim, c.v_head_dim, self._dtype)
        return AttentionWeights(
            first=Linear(stacked(parts), joined_bias(biases, (rows, c.latent_width))),
            first_rows=rows,
            latent_at=round_up(rows),
            q_norm=q_norm,
            q_b=q_b,
            kv_norm=self._norm(f"{prefix}.kv_a_layernorm.weight", c.kv_lora_rank),
            kv_b=kv_b,
            k_b=k_b,
            v_b=v_b,
            o=Linear(
                self._matrix(f"{prefix}.o_proj", c.hidden_size, heads * c.v_head_dim),
                self._bias(f"{prefix}.o_proj", c.hidden_size),
            ),
        )

    def mlp(self, prefix: str, size: int) -> MlpWeights:
        """A SwiGLU of this intermediate size."""
        hidden, wide = self._config.hidden_size, round_up(size)
        gate_up = empty_blocks(2 * wide, hidden, device=self._device)
        down = empty_blocks(hidden, wide, device=self._device)
        self._swiglu(prefix, size, gate_up, down)
        return MlpWeights(gate_up, down)

    def _swiglu(self, prefix: str, size: int, gate_up: BlockWeight, down: BlockWeight) -> None:
        hidden = self._config.hidden_size
        place(gate_up, self._matrix(f"{prefix}.gate_proj", size, hidden))
        place(gate_up, self._matrix(f"{prefix}.up_proj", size, hidden), round_up(size))
        place(down, self._matrix(f"{prefix}.down_proj", hidden, size))

    def _moe(self, prefix: str) -> MoeWeights:
        c, size = self._config, self._config.moe_intermediate_size
        assert c.gate is not None
        count, hidden, wide = c.n_routed_experts, c.hidden_size, round_up(size)
        router = self._source.plain(f"{prefix}.gate.weight", (count, hidden))
        bias = None
        if c.gate.method == "noaux_tc":
            bias = self._source.plain(f"{prefix}.gate.e_score_correction_bias", (count,)).float()
        gate_up = empty_blocks(self._slots, 2 * wide, hidden, device=self._device)
        down = empty_blocks(self._slots, hidden, wide, device=self._device)
        for slot, expert in enumerate(range(count) if self._held is None else next(self._held)):
            one = (BlockWeight(w.values[slot], w.scales[slot]) for w in (gate_up, down))
            self._swiglu(f"{prefix}.experts.{expert}", size, *one)
        shared = None
        if c.n_shared_experts:
            shared = self.mlp(f"{prefix}.shared_experts", size * c.n_shared_experts)
        return MoeWeights(router, bias, gate_up, down, shared)

    def _matrix(self, prefix: str, rows: int, columns: int) -> BlockWeight:
        return self._source.matrix(f"{prefix}.weight", (rows, columns))

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.plain(name, tuple(shape)).to(self._dtype)

    def _norm(self, name: str, size: int | None = None) -> Tensor:
        return self._plain(name, (size or self._config.hidden_size,))

    def _bias(self, prefix: str, rows: int) -> Tensor | None:
        return self._plain(f"{prefix}.bias", (rows,)) if self._config.attention_bias else None

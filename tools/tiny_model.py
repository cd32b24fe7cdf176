"""The small model as the serving code has it, and its parameters for the training forward."""

from __future__ import annotations

from pathlib import Path

import torch

from pdmesh.model.block import Block
from pdmesh.model.config import ModelConfig
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.mla import Mla
from pdmesh.model.moe import Moe
from pdmesh.model.weights import load_model, save_checkpoint
from pdmesh.tools.tiny_network import (
    AttentionWeights,
    LayerWeights,
    MoeWeights,
    Network,
    NetworkWeights,
)

SHARD_BYTES = 14_500_000


def build_model(folder: Path, device: torch.device, seed: int) -> DeepseekV3:
    """A model with random weights for the folder's config.json, float32."""
    torch.manual_seed(seed)
    model = DeepseekV3(ModelConfig.from_path(folder), mtp=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
                parameter.mul_((2.0 * model.config.num_hidden_layers) ** -0.5)
    return model.to(device)


def network_of(model: DeepseekV3) -> Network:
    """The training forward over this model's parameters (views, not copies)."""
    assert model.mtp is not None
    assert model.lm_head is not None
    mtp = model.mtp
    *trunk, last = [_layer(block) for block in model.blocks()]
    weights = NetworkWeights(
        model.embed_tokens,
        tuple(trunk),
        model.norm,
        model.lm_head,
        last,
        (mtp.enorm, mtp.hnorm, mtp.eh_proj.weight, mtp.head_norm),
    )
    return Network(model.config, weights)


def _layer(block: Block) -> LayerWeights:
    attention = _attention(block.self_attn)
    if isinstance(block.mlp, Moe):
        return LayerWeights(block.input_norm, block.post_norm, attention, None, _moe(block.mlp))
    dense = (block.mlp.gate_up_proj.weight, block.mlp.down_proj.weight)
    return LayerWeights(block.input_norm, block.post_norm, attention, dense, None)


def _attention(mla: Mla) -> AttentionWeights:
    return AttentionWeights(
        mla.qkv_a_proj.weight,
        mla.q_a_norm,
        mla.kv_a_norm,
        mla.q_b_proj.weight,
        mla.k_b_proj,
        mla.v_b_proj,
        mla.o_proj.weight,
    )


def _moe(moe: Moe) -> MoeWeights:
    bias, shared = moe.gate.e_score_correction_bias, moe.shared_experts
    assert bias is not None
    assert shared is not None
    return MoeWeights(
        moe.gate.weight,
        bias,
        moe.gate_up_proj,
        moe.down_proj,
        shared.gate_up_proj.weight,
        shared.down_proj.weight,
    )


def save_quantised(model: DeepseekV3, folder: Path) -> None:
    """FP8 blocks with scales, the rest bfloat16, in shards of at most SHARD_BYTES."""
    save_checkpoint(model, folder, fp8=True, max_shard_bytes=SHARD_BYTES)


def load_quantised(folder: Path, device: torch.device) -> DeepseekV3:
    """What `save_quantised` wrote, as float32 weights."""
    return load_model(folder, torch.float32, device, mtp=True)

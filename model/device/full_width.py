"""The published DeepSeek-V3 shapes with any number of layers, for weights that are random."""

from __future__ import annotations

from typing import Any

from pdmesh.model.config import ModelConfig

_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
}
"""The config.json of DeepSeek-V3 (deepseek-ai/DeepSeek-V3 on Hugging Face)."""
DENSE_LAYERS = 3


def full_width(layers: int, experts: int = 256) -> ModelConfig:
    """DeepSeek-V3 with `layers` layers, of which the first three at most have no experts.

    Fewer experts than 256 are those of one rank; 8 of them are chosen for a token nevertheless.
    """
    groups = {} if experts == 256 else {"n_group": 1, "topk_group": 1}
    return ModelConfig.from_hf(
        _DEEPSEEK_V3
        | {
            "num_hidden_layers": layers,
            "first_k_dense_replace": min(DENSE_LAYERS, layers),
            "n_routed_experts": experts,
        }
        | groups
    )

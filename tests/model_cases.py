"""Tiny models and batches that several test files use."""

from typing import Any

import torch
from torch import Tensor

from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.config import ModelConfig
from pdmesh.model.deepseek import DeepseekV3

TINY: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 1024,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000.0,
}

V2: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "num_nextn_predict_layers": 0,
}


def yarn(factor: float = 4.0, original: int = 64, **more: Any) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    } | more


def tiny_model(seed: int = 0, std: float = 0.08, **changes: Any) -> DeepseekV3:
    """A random model whose router, norms and biases all matter."""
    torch.manual_seed(seed)
    model = DeepseekV3(ModelConfig.from_hf(TINY | changes)).requires_grad_(False).eval()
    model.init_weights(std)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for gate in model.gates():
        gate.weight.mul_(4.0)
        if gate.e_score_correction_bias is not None:
            gate.e_score_correction_bias.normal_(0.0, 0.05)
    return model


def tokens_of(count: int, seed: int = 0, vocab: int = 131) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(0, vocab, (count,), generator=generator)]


def one_slice(
    pages: tuple[int, ...], start: int, end: int, write_from: int | None = None
) -> SequenceSlice:
    return SequenceSlice(pages, start, end, start if write_from is None else write_from)


def run(
    model: DeepseekV3, latents: Tensor, form: Any, *items: tuple[SequenceSlice, list[int]]
) -> list[Tensor]:
    """Hidden states [rows, hidden] of each (slice, tokens of the whole sequence)."""
    slices = [item for item, _ in items]
    tokens = [whole[item.start : item.end] for item, whole in items]
    batch = Batch.build(slices, tokens, latents.shape[2])
    return list(model(batch, latents, form).split([item.end - item.start for item in slices]))


def stale_pool(model: DeepseekV3, num_pages: int, page_size: int = 64) -> Tensor:
    """Pages full of NaN, as a page may be that another owner left."""
    return model.new_latents(num_pages, page_size).fill_(float("nan"))


def equal(left: Tensor, right: Tensor) -> bool:
    """The same bits, and no NaN."""
    return torch.equal(left, right) and not bool(left.isnan().any())


def same_latents(left: Tensor, right: Tensor) -> bool:
    """The same bits; NaN equals NaN."""
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        left.nan_to_num(0.0), right.nan_to_num(0.0)
    )


def various_models() -> dict[str, DeepseekV3]:
    """Shapes for which libraries choose different loops."""
    return {
        "four heads": tiny_model(),
        "three heads, odd sizes, no q_lora": tiny_model(
            1,
            num_attention_heads=3,
            num_key_value_heads=3,
            q_lora_rank=None,
            hidden_size=52,
            moe_intermediate_size=12,
            kv_lora_rank=36,
            qk_nope_head_dim=12,
            v_head_dim=28,
            qk_rope_head_dim=4,
        ),
        "softmax router": tiny_model(2, **V2, hidden_size=72, intermediate_size=76),
        "bfloat16": tiny_model(3).bfloat16(),
        "latents of 512 + 64": tiny_model(
            4,
            std=0.03,
            num_hidden_layers=2,
            hidden_size=256,
            q_lora_rank=192,
            kv_lora_rank=512,
            qk_nope_head_dim=48,
            qk_rope_head_dim=64,
            v_head_dim=48,
            num_attention_heads=8,
            num_key_value_heads=8,
            intermediate_size=1024,
            moe_intermediate_size=128,
            n_routed_experts=32,
            num_experts_per_tok=4,
        ),
    }

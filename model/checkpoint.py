"""Write a model as a Hugging Face directory."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pdmesh.kernels.fp8 import BLOCK, quantise_blocks
from pdmesh.model.bindings import Binding, bindings
from pdmesh.model.config import ModelConfig
from pdmesh.model.config_reader import FP8_BLOCK
from pdmesh.model.deepseek import DeepseekV3

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def save_checkpoint(
    model: DeepseekV3,
    path: str | Path,
    fp8: bool = False,
    max_shard_bytes: int = 4 << 30,
    dtype: torch.dtype | None = None,
) -> None:
    """Write config.json and safetensors under the published tensor names.

    Args:
        model: its MTP layer is written where it has one.
        path: made if absent; a checkpoint that is there is replaced.
        fp8: matrices as FP8 e4m3 with 128 x 128 scales. Embedding, head, norms, routers, biases and
            the MTP's eh_proj stay bfloat16, score correction biases float32.
        max_shard_bytes: a file is closed before it would grow beyond this.
        dtype: of the other tensors; None is bfloat16 with fp8 and the model's dtype without.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    plain = dtype or (torch.bfloat16 if fp8 else model.dtype)
    shards = list(_shards(model, fp8, plain, max_shard_bytes))
    for stale in [*path.glob("model-*-of-*.safetensors"), path / SINGLE_FILE, path / INDEX_FILE]:
        stale.unlink(missing_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = SINGLE_FILE if len(shards) == 1 else file
        tensors = {n: t for binding in shard for n, t in _stored(binding, fp8, plain)}
        partial = path / f"{file}.partial"
        save_file(tensors, str(partial), metadata={"format": "pt"})
        partial.chmod(0o644)  # the library makes files that their owner alone may read
        os.replace(partial, path / file)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(path / INDEX_FILE, index)
    _write_json(path / "config.json", config_to_hf(model.config, fp8, plain, model.mtp is not None))


def _shards(
    model: DeepseekV3, fp8: bool, plain: torch.dtype, max_shard_bytes: int
) -> Iterator[list[Binding]]:
    shard: list[Binding] = []
    size = 0
    for binding in bindings(model):
        if binding.copy:
            continue
        own = _stored_bytes(binding, fp8, plain)
        if shard and size + own > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(binding)
        size += own
    yield shard


def _stored_bytes(binding: Binding, fp8: bool, plain: torch.dtype) -> int:
    count = 1
    for size in binding.shape:
        count *= size
    if fp8 and binding.matrix:
        rows, columns = binding.shape
        return count + 4 * -(-rows // BLOCK) * -(-columns // BLOCK)
    return count * (4 if binding.keep_float32 else plain.itemsize)


def _stored(binding: Binding, fp8: bool, plain: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    tensor = binding.read().detach().cpu()
    if fp8 and binding.matrix:
        quantised, scales = quantise_blocks(tensor.float())
        yield binding.name, quantised
        yield f"{binding.name}_scale_inv", scales
        return
    stored = tensor.to(torch.float32 if binding.keep_float32 else plain)
    yield binding.name, stored.contiguous().clone()


def config_to_hf(
    config: ModelConfig, fp8: bool, dtype: torch.dtype, mtp: bool = True
) -> dict[str, Any]:
    """The fields of a `config.json` that ModelConfig.from_hf reads back to the same config."""
    v2 = config.model_type == "deepseek_v2"
    raw: dict[str, Any] = {
        "architectures": ["DeepseekV2ForCausalLM" if v2 else "DeepseekV3ForCausalLM"],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "first_k_dense_replace": config.first_k_dense_replace,
        "moe_layer_freq": config.moe_layer_freq,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_interleave": config.rope_interleave,
        "rope_scaling": _rope_scaling(config),
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "num_nextn_predict_layers": config.num_nextn_predict_layers if mtp else 0,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _eos(config),
        **_moe_fields(config),
    }
    if fp8:
        raw["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(FP8_BLOCK),
        }
    return raw


def _eos(config: ModelConfig) -> int | list[int] | None:
    ids = config.eos_token_ids
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    yarn = config.yarn
    if yarn is None:
        return None
    return {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
        "truncate": yarn.truncate,
    } | ({} if yarn.attention_factor is None else {"attention_factor": yarn.attention_factor})


def _moe_fields(config: ModelConfig) -> dict[str, Any]:
    rule = config.gate
    if rule is None:
        return {}
    return {
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts": config.n_shared_experts,
        "num_experts_per_tok": rule.top_k,
        "n_group": rule.num_groups,
        "topk_group": rule.top_groups,
        "scoring_func": "sigmoid" if rule.method == "noaux_tc" else "softmax",
        "topk_method": rule.method,
        "norm_topk_prob": rule.normalise,
        "routed_scaling_factor": rule.scale,
    }


def _write_json(file: Path, value: object) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)

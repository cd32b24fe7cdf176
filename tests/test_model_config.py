"""Configs: published ones are read, and what is not served is refused by its name."""

import dataclasses
import json
import math

import pytest
import torch
from model_cases import TINY, V2, yarn

from pdmesh.model.checkpoint import config_to_hf
from pdmesh.model.config import ModelConfig
from pdmesh.model.rope import rope_table, softmax_scale
from pdmesh.wire.errors import ConfigError

YARN_40 = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN_40,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_published_deepseek_v3_config_is_read():
    config = ModelConfig.from_hf(DEEPSEEK_V3)
    assert config.latent_width == 576
    assert config.fp8
    assert config.gate is not None
    assert (config.gate.method, config.gate.num_groups, config.gate.top_groups) == (
        "noaux_tc",
        8,
        4,
    )
    assert config.gate.normalise
    assert [config.is_moe_layer(i) for i in (2, 3, 60, 61)] == [False, True, True, True]
    # (0.1 ln 40 + 1)^2 / sqrt(192)
    assert softmax_scale(config) == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert config.eos_token_ids == (1,)


def test_the_deepseek_v2_lite_config_is_read():
    raw = DEEPSEEK_V3 | {
        "model_type": "deepseek_v2",
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "quantization_config": None,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "pretraining_tp": 1,
        "num_nextn_predict_layers": 0,
    }
    config = ModelConfig.from_hf(raw)
    assert config.q_lora_rank is None
    assert config.gate is not None
    assert config.gate.method == "greedy"
    assert not config.fp8


def test_rope_may_stand_in_rope_parameters():
    old = ModelConfig.from_hf(TINY | {"rope_theta": 500.0, "rope_scaling": yarn()})
    new = {name: value for name, value in TINY.items() if name != "rope_theta"}
    parameters = yarn() | {"rope_theta": 500.0, "rope_type": "yarn"}
    assert ModelConfig.from_hf(new | {"rope_parameters": parameters}) == old
    plain = {"rope_type": "default", "rope_theta": 500.0}
    assert ModelConfig.from_hf(new | {"rope_parameters": plain}) == ModelConfig.from_hf(
        TINY | {"rope_theta": 500.0}
    )


@pytest.mark.parametrize(
    "changes",
    [{}, V2, {"rope_scaling": yarn(attention_factor=1.1)}, {"first_k_dense_replace": 9}],
)
def test_a_written_config_is_read_back_equal(changes):
    config = ModelConfig.from_hf(TINY | changes)
    assert ModelConfig.from_hf(config_to_hf(config, False, torch.float32)) == config
    fp8 = ModelConfig.from_hf(config_to_hf(config, True, torch.bfloat16))
    assert fp8 == dataclasses.replace(config, fp8=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "index_topk"),
        ({"index_n_heads": 64}, "sparse attention"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ({"num_mtp_layers": 0}, "num_nextn_predict_layers and num_mtp_layers differ"),
        ({"scoring_func": "softmax", "topk_method": "noaux_tc"}, "scoring_func 'softmax'"),
        ({"scoring_func": "sigmoid", "topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"n_group": 3}, "n_group 3 does not divide n_routed_experts 8"),
        ({"topk_group": 5}, "topk_group 5"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        ({"n_group": 8, "topk_group": 4}, "two experts in a group"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_scaling": yarn(low_freq_factor=1.0)}, "low_freq_factor"),
        ({"rope_scaling": yarn() | {"factor": "40"}}, "factor must be a number"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "original_max_position_embeddings",
        ),
        ({"rope_scaling": yarn(), "rope_parameters": yarn(8.0)}, "rope_parameters differ"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": FP8 | {"quant_method": "awq"}}, "quant_method 'awq'"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            r"'modelopt' \(NVFP4\)",
        ),
        ({"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, "weight_block_size"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt 'e5m2'"),
        ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "activation_scheme"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"hidden_size": 62}, "hidden_size must be a multiple of 4"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be finite"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"moe_layer_freq": 0}, "moe_layer_freq"),
        ({"vocab_size": True}, "vocab_size"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes, named):
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf(TINY | changes)


JUNK = [None, -1, 0, 1, 7, 1.5, "x", [], [1, 2], {}, {"type": "yarn"}, True, False, 1e308, math.inf]


@pytest.mark.parametrize("name", sorted(DEEPSEEK_V3))
def test_no_value_of_a_field_ends_in_another_error(name):
    for value in JUNK:
        try:
            config = ModelConfig.from_hf(DEEPSEEK_V3 | {name: value})
        except ConfigError:
            continue
        assert config.vocab_size > 0


@pytest.mark.parametrize("name", sorted(YARN_40))
def test_no_value_of_a_yarn_field_ends_in_another_error(name):
    for value in JUNK:
        try:
            config = ModelConfig.from_hf(TINY | {"rope_scaling": YARN_40 | {name: value}})
        except ConfigError:
            continue
        assert rope_table(config, torch.device("cpu")).cos.isfinite().all()


def test_an_nvfp4_export_that_says_so_in_its_own_file_only_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    path = tmp_path / "hf_quant_config.json"
    for harmless in ({"quantization": {"quant_algo": None}}, {}):
        path.write_text(json.dumps(harmless))
        assert ModelConfig.from_path(tmp_path) == ModelConfig.from_hf(TINY)
    path.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    with pytest.raises(ConfigError, match=r"hf_quant_config.json: quant_algo 'NVFP4' is not serv"):
        ModelConfig.from_path(tmp_path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"hf_quant_config.json cannot be read"):
        ModelConfig.from_path(tmp_path)

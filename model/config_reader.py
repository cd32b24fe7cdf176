"""Reads a Hugging Face `config.json` into a ModelConfig.

Every field that changes the result is honoured or refused by name; a field that is not known is
refused too, because it may change the result.
"""

import math
from collections.abc import Mapping
from typing import Any

from pdmesh.kernels.gate import GateRule, Method
from pdmesh.kernels.linear import INNER_MULTIPLE
from pdmesh.kernels.rope import Yarn, cos_sin_factor, softmax_scale
from pdmesh.model.config import ModelConfig
from pdmesh.wire.errors import ConfigError

FP8_BLOCK = (128, 128)

# Sizes that some matrix product sums over.
_SUMMED = (
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "moe_intermediate_size",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields that say something about training, saving, or another program, not about the result.
_HARMLESS = _names(
    "_name_or_path architectures attention_dropout auto_map aux_loss_alpha bos_token_id "
    "chunk_size_feed_forward dtype ep_size eos_token_id head_dim id2label initializer_range "
    "is_encoder_decoder label2id model_type output_attentions output_hidden_states "
    "output_router_logits pad_token_id pretraining_tp problem_type qk_head_dim return_dict seq_aux "
    "torch_dtype transformers_version use_cache"
)
_HONOURED = _names(
    "attention_bias first_k_dense_replace hidden_act hidden_size intermediate_size kv_lora_rank "
    "max_position_embeddings mlp_bias moe_intermediate_size moe_layer_freq n_group "
    "n_routed_experts n_shared_experts norm_topk_prob num_attention_heads num_experts "
    "num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts num_mtp_layers "
    "num_nextn_predict_layers q_lora_rank qk_nope_head_dim qk_rope_head_dim quantization_config "
    "rms_norm_eps rope_interleave rope_parameters rope_scaling rope_theta routed_scaling_factor "
    "scoring_func tie_word_embeddings topk_group topk_method v_head_dim vocab_size"
)
_YARN_FIELDS = _names(
    "attention_factor beta_fast beta_slow factor mscale mscale_all_dim "
    "original_max_position_embeddings partial_rotary_factor rope_theta rope_type truncate "
    "type"
)


class ConfigReader:
    """Reads typed fields out of a raw config and names the field in every refusal."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def config(self) -> ModelConfig:
        self._refuse()
        num_layers = self.integer("num_hidden_layers")
        num_experts = self.alias("n_routed_experts", "num_local_experts", "num_experts")
        theta, yarn = self._rope()
        config = ModelConfig(
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=self.integer("num_attention_heads"),
            q_lora_rank=self.optional_integer("q_lora_rank"),
            kv_lora_rank=self.integer("kv_lora_rank"),
            qk_nope_head_dim=self.integer("qk_nope_head_dim"),
            qk_rope_head_dim=self.integer("qk_rope_head_dim"),
            v_head_dim=self.integer("v_head_dim"),
            intermediate_size=self.integer("intermediate_size"),
            moe_intermediate_size=self.integer("moe_intermediate_size") if num_experts else 0,
            n_routed_experts=num_experts,
            n_shared_experts=self.integer("n_shared_experts", 0) if num_experts else 0,
            first_k_dense_replace=self.integer("first_k_dense_replace", 0),
            moe_layer_freq=self.integer("moe_layer_freq", 1, least=1),
            gate=self._gate(num_experts) if num_experts else None,
            max_position_embeddings=self.integer("max_position_embeddings"),
            rope_theta=theta,
            rope_interleave=self.boolean("rope_interleave", True),
            yarn=yarn,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            attention_bias=self.boolean("attention_bias", False),
            tie_word_embeddings=self.boolean("tie_word_embeddings", False),
            num_nextn_predict_layers=self.alias("num_nextn_predict_layers", "num_mtp_layers"),
            fp8=self._fp8(),
            model_type=str(self.raw.get("model_type", "deepseek_v3")),
            bos_token_id=self.optional_integer("bos_token_id"),
            eos_token_ids=self._eos(),
        )
        self._check(config)
        return config

    def integer(self, name: str, default: int | None = None, least: int = 0) -> int:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"config.json has no {name}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.raw.get(name) is None else self.integer(name)

    def number(self, name: str, default: float, within: Mapping[str, Any] | None = None) -> float:
        value = (self.raw if within is None else within).get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number, not {value!r}")
        if not math.isfinite(value):
            raise ConfigError(f"{name} must be finite, not {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool, within: Mapping[str, Any] | None = None) -> bool:
        value = (self.raw if within is None else within).get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, not {value!r}")
        return value

    def alias(self, *names: str) -> int:
        """A count that is written under one of several names; 0 where it is absent."""
        present = [name for name in names if self.raw.get(name) is not None]
        values = {self.integer(name) for name in present}
        if len(values) > 1:
            raise ConfigError(f"{' and '.join(present)} differ; keep one of them")
        return values.pop() if values else 0

    def _eos(self) -> tuple[int, ...]:
        eos = self.raw.get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise ConfigError(f"eos_token_id must be a token id or a list of them, not {eos!r}")
        return tuple(ids)

    def _refuse(self) -> None:
        raw = self.raw
        model_type = raw.get("model_type", "deepseek_v3")
        if any(name.startswith("index_") and raw[name] is not None for name in raw):
            raise ConfigError(
                "sparse attention (index_topk, index_n_heads, index_head_dim of DeepSeek-V3.2) is "
                "not served"
            )
        if model_type not in ("deepseek_v2", "deepseek_v3"):
            raise ConfigError(
                f"model_type {model_type!r} is not served; deepseek_v2 and deepseek_v3 are"
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act {raw['hidden_act']!r} is not served; only silu is")
        if raw.get("mlp_bias"):
            raise ConfigError("mlp_bias true is not served")
        heads = raw.get("num_key_value_heads")
        if heads is not None and heads != raw.get("num_attention_heads"):
            raise ConfigError(
                f"num_key_value_heads {heads!r} must equal num_attention_heads: every head reads "
                "the same latent"
            )
        known = _HARMLESS | _HONOURED
        unknown = sorted(n for n in raw if n not in known and raw[n] is not None)
        if unknown:
            raise ConfigError(
                f"config.json has fields that are not known: {', '.join(unknown)}; remove them if "
                "they do not change the result"
            )

    def _check(self, config: ModelConfig) -> None:
        positive = (
            "vocab_size hidden_size num_hidden_layers num_attention_heads kv_lora_rank "
            "qk_nope_head_dim qk_rope_head_dim v_head_dim max_position_embeddings"
        )
        for name in positive.split():
            if self.raw[name] < 1:
                raise ConfigError(f"{name} must be at least 1")
        if config.q_lora_rank == 0:
            raise ConfigError("q_lora_rank must be null or at least 1")
        uneven = [name for name in _SUMMED if (self.raw.get(name) or 0) % INNER_MULTIPLE]
        if uneven:
            raise ConfigError(
                f"{' and '.join(uneven)} must be a multiple of {INNER_MULTIPLE}: sums of another "
                "length depend on the rows beside them"
            )
        if config.num_nextn_predict_layers > 1:
            raise ConfigError(
                "num_nextn_predict_layers above 1 is not served, this one has "
                f"{config.num_nextn_predict_layers}"
            )

    def _rope(self) -> tuple[float, Yarn | None]:
        scaling = self.raw.get("rope_scaling")
        parameters = self.raw.get("rope_parameters")
        if scaling and parameters and scaling != parameters:
            raise ConfigError("rope_scaling and rope_parameters differ; keep one of them")
        rope = parameters or scaling or {}
        if not isinstance(rope, dict):
            raise ConfigError(f"rope_parameters must be an object, not {rope!r}")
        theta = self.number("rope_theta", self.number("rope_theta", 10000.0), rope)
        if theta <= 1.0:
            raise ConfigError(f"rope_theta must be above 1, not {theta}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        unknown = sorted(name for name in rope if name not in _YARN_FIELDS)
        if unknown:
            raise ConfigError(f"rope_parameters has fields that are not known: {unknown}")
        if self.number("partial_rotary_factor", 1.0, rope) != 1.0:
            raise ConfigError("partial_rotary_factor other than 1 is not served")
        if kind == "default":
            return theta, None
        if kind != "yarn":
            raise ConfigError(f"rope type {kind!r} is not served; default and yarn are")
        return theta, self._yarn(rope)

    def _yarn(self, rope: Mapping[str, Any]) -> Yarn:
        original = rope.get("original_max_position_embeddings")
        if isinstance(original, bool) or not isinstance(original, int) or original < 1:
            raise ConfigError(
                f"yarn needs original_max_position_embeddings of at least 1, not {original!r}"
            )
        stretched = self.integer("max_position_embeddings") / original
        factor = self.number("factor", stretched, rope)
        given = rope.get("attention_factor")
        yarn = Yarn(
            factor=factor,
            original_max_position=original,
            beta_fast=self.number("beta_fast", 32.0, rope),
            beta_slow=self.number("beta_slow", 1.0, rope),
            mscale=self.number("mscale", 1.0, rope),
            mscale_all_dim=self.number("mscale_all_dim", 0.0, rope),
            attention_factor=None if given is None else self.number("attention_factor", 1.0, rope),
            truncate=self.boolean("truncate", True, rope),
        )
        for name in ("factor", "beta_fast", "beta_slow"):
            if not 0 < getattr(yarn, name) < 1e6:
                raise ConfigError(
                    f"yarn {name} must be above 0 and below 1e6, not {getattr(yarn, name)}"
                )
        scales = (cos_sin_factor(yarn), softmax_scale(1, yarn))
        if not all(1e-6 < scale < 1e6 for scale in scales):
            raise ConfigError(
                "yarn factor, mscale, mscale_all_dim and attention_factor give scales of "
                f"{scales[0]:g} and {scales[1]:g}, which cannot be meant"
            )
        return yarn

    def _gate(self, num_experts: int) -> GateRule:
        sigmoid = self.raw.get("model_type", "deepseek_v3") == "deepseek_v3"
        scoring = self.raw.get("scoring_func") or ("sigmoid" if sigmoid else "softmax")
        method: Method = self.raw.get("topk_method") or (
            "noaux_tc" if scoring == "sigmoid" else "greedy"
        )
        if (scoring, method) not in (
            ("sigmoid", "noaux_tc"),
            ("softmax", "greedy"),
            ("softmax", "group_limited_greedy"),
        ):
            raise ConfigError(
                f"scoring_func {scoring!r} with topk_method {method!r} is not served; sigmoid with "
                "noaux_tc, and softmax with greedy or group_limited_greedy, are"
            )
        groups = self.integer("n_group", 1, least=1)
        top_groups = self.integer("topk_group", groups, least=1)
        if method == "greedy":
            groups = top_groups = 1
        rule = GateRule(
            method=method,
            num_experts=num_experts,
            top_k=self.integer("num_experts_per_tok", least=1),
            num_groups=groups,
            top_groups=top_groups,
            normalise=self.boolean("norm_topk_prob", sigmoid),
            scale=self.number("routed_scaling_factor", 1.0),
        )
        _check_gate(rule)
        return rule

    def _fp8(self) -> bool:
        quantization = self.raw.get("quantization_config")
        if not quantization:
            return False
        if not isinstance(quantization, dict):
            raise ConfigError(f"quantization_config must be an object, not {quantization!r}")
        method = quantization.get("quant_method")
        if method != "fp8":
            detail = quantization.get("quant_algo")
            named = f"{method!r}" + (f" ({detail})" if detail else "")
            raise ConfigError(
                f"quantization_config quant_method {named} is not served; fp8 e4m3 with blocks of "
                "128 x 128 is"
            )
        form = quantization.get("fmt", "e4m3")
        if form != "e4m3":
            raise ConfigError(f"quantization_config fmt {form!r} is not served; e4m3 is")
        if quantization.get("activation_scheme", "dynamic") != "dynamic":
            raise ConfigError(
                "quantization_config activation_scheme "
                f"{quantization['activation_scheme']!r} is not served; dynamic is"
            )
        block = quantization.get("weight_block_size")
        if not isinstance(block, list | tuple) or tuple(block) != FP8_BLOCK:
            raise ConfigError(
                f"quantization_config weight_block_size {block!r} is not served; [128, 128] is"
            )
        return True


def _check_gate(rule: GateRule) -> None:
    if rule.num_experts % rule.num_groups:
        raise ConfigError(
            f"n_group {rule.num_groups} does not divide n_routed_experts {rule.num_experts}"
        )
    size = rule.num_experts // rule.num_groups
    if rule.top_groups > rule.num_groups:
        raise ConfigError(f"topk_group {rule.top_groups} is above n_group {rule.num_groups}")
    if rule.top_k > rule.top_groups * size:
        raise ConfigError(
            f"num_experts_per_tok {rule.top_k} is above the {rule.top_groups * size} experts of "
            f"{rule.top_groups} groups"
        )
    if rule.method == "noaux_tc" and rule.top_groups < rule.num_groups and size < 2:
        raise ConfigError("topk_method noaux_tc needs at least two experts in a group")
    if rule.method != "noaux_tc" and rule.normalise and rule.scale != 1.0:
        raise ConfigError(
            "norm_topk_prob with a routed_scaling_factor other than 1 is not served for softmax "
            "scores: public implementations disagree on it"
        )

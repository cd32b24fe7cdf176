"""The configuration of a model of the DeepSeek-V2/V3 family."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.rope import Yarn
from pdmesh.wire.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and rules of one model. Lengths are in tokens, dims in values."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    first_k_dense_replace: int
    moe_layer_freq: int
    gate: GateRule | None
    max_position_embeddings: int
    rope_theta: float
    rope_interleave: bool
    yarn: Yarn | None
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    num_nextn_predict_layers: int
    fp8: bool
    model_type: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def latent_width(self) -> int:
        """Values per token per layer in a page."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key of one head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether `layer` (the MTP layer is num_hidden_layers) has routed experts."""
        return (
            self.n_routed_experts > 0
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    @staticmethod
    def from_path(path: str | Path) -> "ModelConfig":
        """Read `config.json` of the directory `path`.

        Raises:
            ConfigError: no such directory or file, unreadable JSON, or a field is refused.
        """
        return ModelConfig.from_hf(read_config(Path(path)))

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> "ModelConfig":
        """From the fields of a `config.json`.

        Raises:
            ConfigError: a field is missing, of a wrong type, unknown, or asks for something that
                is not served; the message names the field.
        """
        from pdmesh.model.config_reader import ConfigReader

        return ConfigReader(raw).config()


def read_config(path: Path) -> dict[str, Any]:
    """The fields of `config.json` in the directory `path`.

    Raises:
        ConfigError: there is no such directory or file, it holds a LoRA adapter, no JSON object,
            or a quantised export that is not served.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory with a model")
    if (path / "adapter_config.json").exists():
        raise ConfigError(
            f"{path} holds a LoRA adapter (adapter_config.json); merge it into its base model first"
        )
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} has no config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    _refuse_modelopt(path)
    return raw


def _refuse_modelopt(path: Path) -> None:
    """Such an export may say how it is quantised in a file of its own only."""
    file = path / "hf_quant_config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    quantization = raw.get("quantization") if isinstance(raw, dict) else None
    algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else None
    if algorithm is not None:
        raise ConfigError(
            f"{file}: quant_algo {algorithm!r} is not served; fp8 e4m3 with blocks of 128 x 128, "
            "bfloat16 and float32 are"
        )

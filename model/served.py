"""A checkpoint as a worker serves it: the model, and the format of its pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pdmesh.model.config import ModelConfig
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.spread import Spread
from pdmesh.model.grammar import Grammars
from pdmesh.model.page_format import page_format
from pdmesh.model.random_weights import random_model, served_config, served_fingerprint
from pdmesh.model.rows_check import check_rows
from pdmesh.model.shared_weights import SharedWeights, Wanted, shared_weights
from pdmesh.model.weights import Progress, load_model
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import Arithmetic, PageFormat, Precision
from pdmesh.wire.random_weights import RandomWeights


@dataclass(frozen=True)
class Placing:
    """Where and in what a model computes.

    Attributes:
        device: "cpu", "cuda" or "cuda:N".
        precision: "plain", "fp8", or "auto": FP8 on a CUDA device.
        latents: "plain", or "fp8": packed, on models with latents of 512 + 64.
    """

    device: str = "cpu"
    precision: str = "auto"
    latents: str = "plain"

    @property
    def chosen(self) -> Precision:
        """The precision, "auto" resolved."""
        if self.precision == "auto":
            return "fp8" if torch.device(self.device).type == "cuda" else "plain"
        return "fp8" if self.precision == "fp8" else "plain"

    @property
    def packed(self) -> bool:
        """Whether latents are kept in FP8."""
        return self.latents == "fp8"


def load_served_model(
    path: Path,
    name: str,
    *,
    dtype: str,
    placing: Placing,
    mtp: bool,
    page_size: int,
    arithmetic: Arithmetic,
    progress: Progress,
    experts: bool = True,
    spread: Spread | None = None,
    random: RandomWeights | None = None,
    shared: SharedWeights | None = None,
) -> tuple[DeepseekV3 | DeviceModel, PageFormat]:
    """Loads a checkpoint, or makes or maps weights, and warns if rows vary on this processor.

    Args:
        path: checkpoint directory.
        name: the name that clients use.
        dtype: "float32", "bfloat16" or "float16"; in FP8 the rest is bfloat16.
        placing: where the model computes, and in what.
        mtp: whether the MTP layer is loaded and its latents are kept.
        page_size: tokens a page.
        arithmetic: "fast" or "exact".
        progress, experts: as in `load_model`.
        spread: in FP8, the rank that this worker is.
        random: weights to make instead of reading them; then `path` holds a `config.json` at least.
        shared: those that another process holds, of the whole model; mapped instead.

    Raises:
        ConfigError: the checkpoint cannot be served, or not so.
    """
    precision = placing.chosen
    config = served_config(path, random)
    _check(placing, arithmetic, config)
    model: DeepseekV3 | DeviceModel
    fp8, latent_bytes = precision == "fp8", 1 if placing.packed else 2
    dtype = "bfloat16" if fp8 else dtype
    named = ""
    if shared is not None:
        named = served_fingerprint(path, random)
        weights = shared_weights(Wanted(path, fp8, dtype, mtp, random, named), shared)
        if isinstance(weights, DeepseekV3):
            model = weights
        else:
            model = DeviceModel.of(config, weights, page_size, latent_bytes)
    elif fp8:
        held = None if spread is None else spread.held
        model = DeviceModel.load(
            path, placing.device, mtp, progress, page_size, latent_bytes, held, random
        )
    else:
        rest = (getattr(torch, dtype), torch.device(placing.device), mtp, progress, experts)
        if random is None:
            model = load_model(path, *rest)
        else:
            model = random_model(config, random.seed, *rest)
    if isinstance(model, DeepseekV3):
        check_rows(model)
    named = named or served_fingerprint(path, random)
    return model, page_format(
        model.config, name, named, dtype, mtp, page_size, arithmetic, precision, placing.packed
    )


def store_dtype(fmt: PageFormat) -> torch.dtype:
    """The dtype of a pool of pages of this format."""
    if fmt.packed:
        return torch.uint8
    dtype: torch.dtype = getattr(torch, fmt.dtype)
    return dtype


def _check(placing: Placing, arithmetic: Arithmetic, config: ModelConfig) -> None:
    fp8 = placing.chosen == "fp8"
    if fp8 and arithmetic == "exact":
        raise ConfigError(
            "exact arithmetic gives a row the same bits in any batch, which FP8 products do not; "
            "use fast arithmetic, or plain precision"
        )
    if placing.packed and not fp8:
        raise ConfigError("FP8 latents go with FP8 precision; use both, or neither")
    wide = (config.kv_lora_rank, config.qk_rope_head_dim)
    if placing.packed and wide != (512, 64):
        raise ConfigError(
            f"FP8 latents are packed for 512 + 64 values, and this model has {wide[0]} + {wide[1]}"
        )


def served_grammars(path: Path, vocab_size: int) -> Grammars | None:
    """The grammars of a checkpoint; None where it has no tokenizer to follow them with."""
    return Grammars(path, vocab_size) if (path / "tokenizer.json").is_file() else None

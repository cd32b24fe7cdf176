"""A model's weights in FP8 from a checkpoint or from nothing; or what they will be, without any."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from pdmesh.model.config import ModelConfig
from pdmesh.model.device.building import build_weights
from pdmesh.model.device.sources import (
    CheckpointSource,
    RandomSource,
    ShapeSource,
    WeightSource,
    num_tensors,
)
from pdmesh.model.device.weights import ModelWeights
from pdmesh.model.weights import Progress
from pdmesh.wire.random_weights import RandomWeights


def load_weights(
    path: Path,
    config: ModelConfig,
    device: torch.device,
    mtp: bool = True,
    progress: Progress | None = None,
    held: Sequence[Sequence[int]] | None = None,
    random: RandomWeights | None = None,
) -> ModelWeights:
    """Reads or makes the weights; the arguments are those of `DeviceModel.load`.

    Raises:
        ConfigError: as `load_model`.
    """
    with ExitStack() as stack:
        source: WeightSource
        if random is None:
            source = CheckpointSource(stack, path, config, device, mtp, progress)
        else:
            source = RandomSource(device, random.seed, progress, num_tensors(config, mtp))
        weights = build_weights(config, source, device, mtp, held=held)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # no step needs pieces of the sizes that loading did
    return weights


def expected_weights(
    path: Path, config: ModelConfig, mtp: bool = True, random: RandomWeights | None = None
) -> ModelWeights:
    """What `load_weights` would give, on the device "meta": names, dtypes, shapes and strides.

    Raises:
        ConfigError: as `load_model`; only the heads of a checkpoint's files are read.
    """
    source = ShapeSource(None if random is not None else path, config, mtp)
    return build_weights(config, source, torch.device("meta"), mtp)

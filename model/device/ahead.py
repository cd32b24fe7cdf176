"""Experts that a rank reads before it is to hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from pdmesh.model.config import ModelConfig
from pdmesh.model.device.building import build_expert
from pdmesh.model.device.sources import CheckpointSource, RandomSource, WeightSource
from pdmesh.model.device.weights import MlpWeights
from pdmesh.wire.random_weights import RandomWeights

Reader = Callable[[int, int], MlpWeights]
"""An expert of a MoE layer, by their numbers."""


class Ahead:
    """Experts that were read before they are placed, in memory of the host."""

    def __init__(self, reader: Reader | None) -> None:
        self._reader = reader
        self._held: dict[tuple[int, int], MlpWeights] = {}

    def read(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Reads what is missing."""
        for layer, _, expert in moves:
            if (layer, expert) not in self._held:
                self._held[layer, expert] = self._from_source(layer, expert)

    def expert(self, layer: int, expert: int) -> MlpWeights:
        """One of them, or read now: another plan may have come between."""
        held = self._held.get((layer, expert))
        return self._from_source(layer, expert) if held is None else held

    def drop(self) -> None:
        """They are placed."""
        self._held = {}

    def _from_source(self, layer: int, expert: int) -> MlpWeights:
        assert self._reader is not None
        return self._reader(layer, expert)


def expert_reader(
    path: Path, config: ModelConfig, mtp: bool, random: RandomWeights | None = None
) -> Reader:
    """Reads experts of a checkpoint to the host. Its files are opened here and stay open, so that
    all are of one checkpoint, whatever takes its names later. Random weights are made instead.

    Raises:
        ConfigError: as `load_model`.
    """
    host = torch.device("cpu")
    source: WeightSource
    if random is None:
        source = CheckpointSource(ExitStack(), path, config, host, mtp)
    else:
        source = RandomSource(host, random.seed)
    count = config.num_hidden_layers + (1 if mtp and config.num_nextn_predict_layers else 0)
    layers = [layer for layer in range(count) if config.is_moe_layer(layer)]

    def read(layer: int, expert: int) -> MlpWeights:
        return build_expert(config, source, layers[layer], expert, host)

    return read

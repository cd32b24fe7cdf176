"""Where weights come from: a checkpoint, a model in memory, or a generator of random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from pdmesh.kernels.fp8 import quantise_blocks
from pdmesh.kernels.quantised import BlockWeight
from pdmesh.model.bindings import Binding, bindings
from pdmesh.model.config import ModelConfig
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.random_weights import RandomTensors
from pdmesh.model.weight_files import FP8, SCALE, Entry, open_checked
from pdmesh.model.weights import Progress
from pdmesh.wire.errors import ConfigError

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    FP8: torch.float8_e4m3fn,
}


class WeightSource(Protocol):
    """Tensors by their published names, on the device where they are to be."""

    def plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """In the dtype that it is stored in."""

    def matrix(self, name: str, shape: tuple[int, int]) -> BlockWeight:
        """In FP8: as stored, or quantised now."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""


class CheckpointSource:
    """The files of a checkpoint, read straight onto the device one tensor at a time.

    Args:
        stack: closes the files.
        progress: called after every tensor.

    Raises:
        ConfigError: as `load_model`.
    """

    def __init__(
        self,
        stack: ExitStack,
        path: Path,
        config: ModelConfig,
        device: torch.device,
        mtp: bool = True,
        progress: Progress | None = None,
    ) -> None:
        with torch.device("meta"):
            model = DeepseekV3(config, mtp)
        self._wanted: Mapping[str, Binding] = {b.name: b for b in bindings(model)}
        self._files, self._present = open_checked(
            stack, path, self._wanted, config, mtp, str(device)
        )
        self._progress = progress
        self._read = 0
        self._total = sum(name in self._present for name in self._wanted)

    def plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource`."""
        tensor = self._get(name)
        self._count(name)
        return tensor

    def matrix(self, name: str, shape: tuple[int, int]) -> BlockWeight:
        """See `WeightSource`."""
        values = self._get(name)
        if self._present[name].dtype == FP8:
            scales = self._get(name + SCALE, self._present[name + SCALE].file).float()
        else:
            values, scales = quantise_blocks(values)
        self._count(name)
        return BlockWeight(values, scales.contiguous())

    def has(self, name: str) -> bool:
        """See `WeightSource`."""
        return name in self._present

    def _get(self, name: str, file: str | None = None) -> Tensor:
        file = file or self._present[name].file
        try:
            tensor: Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: {name} cannot be read: {error}") from error
        return tensor

    def _count(self, name: str) -> None:
        self._read += 1
        if self._progress is not None:
            self._progress(name, self._read, self._total)


class ShapeSource:
    """Tensors without numbers, on the device "meta".

    Args:
        path: of a checkpoint, whose dtypes they have; None: those of random weights.

    Raises:
        ConfigError: as `load_model`.
    """

    def __init__(self, path: Path | None, config: ModelConfig, mtp: bool = True) -> None:
        self._present: Mapping[str, Entry] = {}
        if path is not None:
            with torch.device("meta"):
                model = DeepseekV3(config, mtp)
            wanted = {b.name: b for b in bindings(model)}
            with ExitStack() as stack:
                _, self._present = open_checked(stack, path, wanted, config, mtp)

    def plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource`."""
        entry = self._present.get(name)
        dtype = torch.bfloat16 if entry is None else _DTYPES[entry.dtype]
        return torch.empty(shape, dtype=dtype, device="meta")

    def matrix(self, name: str, shape: tuple[int, int]) -> BlockWeight:
        """See `WeightSource`."""
        blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
        values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        return BlockWeight(values, torch.empty(blocks, dtype=torch.float32, device="meta"))

    def has(self, name: str) -> bool:
        """See `WeightSource`; what repeats another tensor is not kept."""
        return False


def num_tensors(config: ModelConfig, mtp: bool) -> int:
    """Tensors of a model, those that repeat others not counted."""
    with torch.device("meta"):
        model = DeepseekV3(config, mtp)
    return sum(not binding.copy for binding in bindings(model))


class ModelSource:
    """A model in memory; its matrices are quantised."""

    def __init__(self, model: DeepseekV3, device: torch.device | str = "cpu") -> None:
        self._bindings = {b.name: b for b in bindings(model)}
        self._device = device

    def plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource`."""
        return self._bindings[name].read().detach().to(self._device)

    def matrix(self, name: str, shape: tuple[int, int]) -> BlockWeight:
        """See `WeightSource`."""
        return BlockWeight(*quantise_blocks(self.plain(name, shape)))

    def has(self, name: str) -> bool:
        """See `WeightSource`."""
        return name in self._bindings


class RandomSource:
    """Random weights, made on the device: see `RandomTensors`.

    Args:
        device: where they are to be.
        seed: of the weights.
        progress: called after every tensor.
        total: how many there will be.
    """

    def __init__(
        self,
        device: torch.device | str,
        seed: int = 0,
        progress: Progress | None = None,
        total: int = 0,
    ) -> None:
        self._device = torch.device(device)
        self._tensors = RandomTensors(seed, device)
        self._progress = progress
        self._made, self._total = 0, total

    def plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource`."""
        self._count(name)
        return self._tensors.dense(name, shape, torch.bfloat16)

    def matrix(self, name: str, shape: tuple[int, int]) -> BlockWeight:
        """See `WeightSource`."""
        self._count(name)
        blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
        scales = torch.full(blocks, self._tensors.scale(name, shape), device=self._device)
        return BlockWeight(self._tensors.codes(name, shape), scales)

    def has(self, name: str) -> bool:
        """See `WeightSource`; no tensor is made a second time under another name."""
        return False

    def _count(self, name: str) -> None:
        self._made += 1
        if self._progress is not None:
            self._progress(name, self._made, self._total)

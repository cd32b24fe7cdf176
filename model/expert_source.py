"""Where the weights of routed experts come from: the model in memory, or its checkpoint's files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pdmesh.kernels.fp8 import dequantise_blocks
from pdmesh.model.bindings import expert_name
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.moe import Moe
from pdmesh.model.weight_files import SCALE, weight_files
from pdmesh.wire.errors import ConfigError

Experts = tuple[Tensor, Tensor]
"""gate_up [slots, 2 i, h] and down [slots, h, i] of some slots in one MoE layer."""


class ExpertSource(Protocol):
    """Any experts of any layer, at any time, on any thread."""

    def read(self, moe_layer: int, experts: Sequence[int]) -> Experts:
        """The weights of `experts`, in order, one a slot; MoE layers count from 0, MTP's last.

        Raises:
            ConfigError: they cannot be read.
        """


class ModelExperts:
    """Those of a model that has them all; all of them in order are not copied."""

    def __init__(self, model: DeepseekV3) -> None:
        self._moes = [block.mlp for block in model.blocks() if isinstance(block.mlp, Moe)]

    def read(self, moe_layer: int, experts: Sequence[int]) -> Experts:
        """See `ExpertSource`."""
        moe = self._moes[moe_layer]
        gate_up, down = moe.gate_up_proj.detach(), moe.down_proj.detach()
        if tuple(experts) == tuple(range(moe.num_experts)):
            return gate_up, down
        index = torch.tensor(list(experts), dtype=torch.int64, device=gate_up.device)
        return gate_up.index_select(0, index), down.index_select(0, index)


@dataclass(frozen=True)
class _File:
    """An open file, and what it was like when it was opened."""

    name: str
    descriptor: int
    size: int
    changed_ns: int


class StoredExperts:
    """Those of a checkpoint, read when they are needed.

    Its files are opened here and stay open, so another checkpoint that takes their names changes
    nothing. They are not mapped between two reads, so they count to no process's memory.

    Args:
        path: a directory that `load_model` has read.
        model: what it was read into: for its layers, dtype and device.

    Raises:
        ConfigError: a file cannot be opened.
    """

    def __init__(self, path: str | Path, model: DeepseekV3) -> None:
        self._path = Path(path)
        self._dtype, self._device = model.dtype, model.device
        moes = [(n, b.mlp) for n, b in enumerate(model.blocks()) if isinstance(b.mlp, Moe)]
        self._layers = [f"model.layers.{number}.mlp" for number, _ in moes]
        self._shapes = [(m.gate_up_proj.shape[1:], m.down_proj.shape[1:]) for _, m in moes]
        self._files: dict[str, _File] = {}
        for name in weight_files(self._path):
            file = self._open(name)
            with self._reading(file) as handle:
                self._files.update(dict.fromkeys(handle.keys(), file))

    def read(self, moe_layer: int, experts: Sequence[int]) -> Experts:
        """See `ExpertSource`: FP8 weights are dequantised, as `load_model` does."""
        prefix, (wide, narrow) = self._layers[moe_layer], self._shapes[moe_layer]
        dtype, device = self._dtype, self._device
        gate_up = torch.empty((len(experts), *wide), dtype=dtype, device=device)
        down = torch.empty((len(experts), *narrow), dtype=dtype, device=device)
        half = wide[0] // 2
        with ExitStack() as stack:
            handles: dict[str, Any] = {}
            for slot, expert in enumerate(experts):
                targets = (gate_up[slot, :half], gate_up[slot, half:], down[slot])
                for part, target in zip(
                    ("gate_proj", "up_proj", "down_proj"), targets, strict=True
                ):
                    self._copy(stack, handles, expert_name(prefix, expert, part), target)
        return gate_up, down

    def close(self) -> None:
        """Nothing can be read any more."""
        for descriptor in {file.descriptor for file in self._files.values()}:
            os.close(descriptor)
        self._files = {}

    def _open(self, name: str) -> _File:
        try:
            descriptor = os.open(self._path / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{self._path / name} cannot be read: {error.strerror}") from error
        found = os.fstat(descriptor)
        return _File(name, descriptor, found.st_size, found.st_mtime_ns)

    def _copy(self, stack: ExitStack, handles: dict[str, Any], name: str, target: Tensor) -> None:
        try:
            tensor: Tensor = self._handle(stack, handles, name).get_tensor(name)
            if tensor.dtype == torch.float8_e4m3fn:
                scale = name + SCALE
                scales = self._handle(stack, handles, scale).get_tensor(scale)
                tensor = dequantise_blocks(tensor, scales)
        except (SafetensorError, OSError, KeyError) as error:
            raise ConfigError(f"{self._path}: {name} cannot be read: {error}") from error
        target.copy_(tensor)

    def _handle(self, stack: ExitStack, handles: dict[str, Any], name: str) -> Any:  # noqa: ANN401
        file = self._files[name]
        if file.name not in handles:
            handles[file.name] = stack.enter_context(self._reading(file))
        return handles[file.name]

    @contextmanager
    def _reading(self, file: _File) -> Iterator[Any]:
        """The open file as safetensors, whatever stands at its path by now."""
        found = os.fstat(file.descriptor)
        if (found.st_size, found.st_mtime_ns) != (file.size, file.changed_ns):
            raise ConfigError(
                f"{self._path / file.name} was changed since it was read; its experts are not "
                "those of the model any more"
            )
        source = f"/dev/fd/{file.descriptor}"
        try:
            with safe_open(source, framework="pt", device="cpu") as handle:
                yield handle
        except SafetensorError as error:
            raise ConfigError(
                f"{self._path / file.name} is not a complete safetensors file ({error})"
            ) from error


def drop_experts(model: DeepseekV3) -> None:
    """Leaves the routed experts of `model` out: [0, 2 i, h] and [0, h, i] in their place."""
    for block in model.blocks():
        if isinstance(block.mlp, Moe):
            for name in ("gate_up_proj", "down_proj"):
                whole = getattr(block.mlp, name)
                empty = whole.new_empty((0, *whole.shape[1:]))
                setattr(block.mlp, name, nn.Parameter(empty, requires_grad=False))

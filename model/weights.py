"""Weights from a Hugging Face directory: checked as a whole first, then read."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from pdmesh.kernels.fp8 import dequantise_blocks
from pdmesh.model.bindings import Binding, bindings
from pdmesh.model.checkpoint import save_checkpoint
from pdmesh.model.config import ModelConfig
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.expert_source import drop_experts
from pdmesh.model.weight_files import (
    FP8,
    SCALE,
    Entry,
    open_checked,
    weight_files,
)
from pdmesh.wire.errors import ConfigError

__all__ = ["fingerprint", "load_model", "save_checkpoint"]

Progress = Callable[[str, int, int], None]
"""Called with the name of the tensor just read, how many are read, and how many there are."""

_HASHED_WHOLE = 256 << 20
_SAMPLE = 1 << 20


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    mtp: bool = True,
    progress: Progress | None = None,
    experts: bool = True,
) -> DeepseekV3:
    """Read the model in the directory `path`.

    Args:
        path: holds config.json and one or more safetensors files.
        dtype: of the weights in memory; routers stay float32. FP8 weights are dequantised.
        device: where the weights go.
        mtp: whether to read the MTP layer, where the config has one.
        progress: called after every tensor.
        experts: whether to read the routed experts. A model without them is for a rank that reads
            its own (see `expert_source`); the directory is checked as a whole all the same.

    Raises:
        ConfigError: the directory, its config or its files are not what is served; missing, extra,
            misshapen and wrongly typed tensors are all listed in one message.
    """
    path = Path(path)
    config = ModelConfig.from_path(path)
    model, wanted = empty_model(config, dtype, device, mtp, experts)
    read = {binding.name: binding for binding in bindings(model)}
    with ExitStack() as stack:
        files, present = open_checked(stack, path, wanted, config, mtp)
        _read_all(read, present, files, progress)
    return model.eval()


def empty_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    mtp: bool,
    experts: bool = True,
) -> tuple[DeepseekV3, dict[str, Binding]]:
    """A model whose weights are memory that nothing was written to yet.

    Args:
        config, dtype, device, mtp, experts: as in `load_model`.

    Returns:
        The model, and the tensors of its checkpoint by name, the routed experts' always among them.
    """
    with torch.device("meta"):
        model = DeepseekV3(config, mtp)
    wanted = {binding.name: binding for binding in bindings(model)}
    if not experts:
        drop_experts(model)
    model = model.to(dtype).to_empty(device=device)
    for gate in model.gates():
        gate.float()
    model.requires_grad_(False)
    return model, wanted


def _read_all(
    wanted: Mapping[str, Binding],
    present: Mapping[str, Entry],
    files: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    names = [name for name in wanted if name in present]
    different: list[str] = []
    # Copies come last, so that what they must equal has been read.
    for number, name in enumerate(sorted(names, key=lambda name: wanted[name].copy)):
        entry = present[name]
        try:
            tensor: Tensor = files[entry.file].get_tensor(name)
            if entry.dtype == FP8:
                scale_entry = present[name + SCALE]
                scales = files[scale_entry.file].get_tensor(name + SCALE)
                tensor = dequantise_blocks(tensor, scales)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{entry.file}: {name} cannot be read: {error}") from error
        binding = wanted[name]
        if not binding.copy:
            binding.write(tensor)
        elif not torch.equal(tensor.to(binding.views[0]), binding.views[0]):
            different.append(name)
        if progress is not None:
            progress(name, number + 1, len(names))
    if different:
        raise ConfigError(
            f"{', '.join(different)} must hold the same numbers as the model's embedding or head"
        )


def fingerprint(path: str | Path) -> str:
    """32 hexadecimal digits that differ where config or weights do.

    Hashes the fields of the config that change the result, and of every weight file its name,
    size, header and data; of a file above 256 MiB, 1 MiB in every 64 instead of all data.

    Raises:
        ConfigError: as load_model does for the directory, the config and the list of files.
    """
    path = Path(path)
    config = ModelConfig.from_path(path)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for name in weight_files(path):
        size = (path / name).stat().st_size
        digest.update(f"{name} {size}".encode())
        step = _SAMPLE if size <= _HASHED_WHOLE else 64 * _SAMPLE
        with (path / name).open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header, size)))
            for offset in range(file.tell(), size, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()

"""Weights from a Hugging Face directory: checked as a whole first, then read."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdmesh.kernels.fp8 import BLOCK, dequantise_blocks
from pdmesh.model.bindings import Binding, bindings
from pdmesh.model.checkpoint import INDEX_FILE, SINGLE_FILE, save_checkpoint
from pdmesh.model.config import ModelConfig
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.wire.errors import ConfigError

__all__ = ["fingerprint", "load_model", "save_checkpoint"]

Progress = Callable[[str, int, int], None]
"""Called with the name of the tensor just read, how many are read, and how many there are."""

_SCALE = "_scale_inv"
_FLOATS = frozenset({"F32", "F16", "BF16"})
_FP8 = "F8_E4M3"
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
_HASHED_WHOLE = 256 << 20
_SAMPLE = 1 << 20


@dataclass(frozen=True)
class _Entry:
    """A tensor's file, dtype as safetensors writes it, and shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    mtp: bool = True,
    progress: Progress | None = None,
) -> DeepseekV3:
    """Read the model in the directory `path`.

    Args:
        path: holds config.json and one or more safetensors files.
        dtype: of the weights in memory; routers stay float32. FP8 weights are dequantised.
        device: where the weights go.
        mtp: whether to read the MTP layer, where the config has one.
        progress: called after every tensor.

    Raises:
        ConfigError: the directory, its config or its files are not what is served; missing, extra,
            misshapen and wrongly typed tensors are all listed in one message.
    """
    path = Path(path)
    config = ModelConfig.from_path(path)
    with torch.device("meta"):
        model = DeepseekV3(config, mtp)
    model = model.to(dtype).to_empty(device=device)
    for gate in model.gates():
        gate.float()
    model.requires_grad_(False)
    wanted = {binding.name: binding for binding in bindings(model)}
    with ExitStack() as stack:
        files = {name: _open(stack, path / name) for name in _weight_files(path)}
        present = _entries(path, files)
        problems = _problems(wanted, present, config, mtp)
        if problems:
            raise ConfigError(
                f"{path} does not hold the weights of its config.json: {'; '.join(problems)}"
            )
        _read_all(wanted, present, files, progress)
    return model.eval()


def _weight_files(path: Path) -> list[str]:
    """Names of the safetensors files, by the index where there is one."""
    index = path / INDEX_FILE
    if index.exists():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} cannot be read: {error}") from error
        gone = [name for name in names if not (path / str(name)).is_file()]
        if gone:
            raise ConfigError(f"{path} lacks weight files of its index: {', '.join(gone)}")
        return names
    if (path / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    raise ConfigError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _open(stack: ExitStack, file: Path) -> Any:  # noqa: ANN401 - safetensors ships no types
    try:
        return stack.enter_context(safe_open(str(file), framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file} is not a complete safetensors file ({error}); fetch it again"
        ) from error


def _entries(path: Path, files: Mapping[str, Any]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for file, handle in files.items():
        for name in handle.keys():  # noqa: SIM118 - not a dict
            if name in entries:
                raise ConfigError(f"{path}: {name} is in both {entries[name].file} and {file}")
            part = handle.get_slice(name)
            entries[name] = _Entry(file, str(part.get_dtype()), tuple(part.get_shape()))
    return entries


def _problems(
    wanted: Mapping[str, Binding], present: Mapping[str, _Entry], config: ModelConfig, mtp: bool
) -> list[str]:
    """Everything wrong with the tensors, in one list of phrases."""
    problems: list[str] = []
    scales: set[str] = set()
    for name, binding in wanted.items():
        entry = present.get(name)
        if entry is None:
            problems += [] if binding.copy else [f"missing {name}"]
            continue
        if entry.shape != binding.shape:
            problems.append(f"{name} is {list(entry.shape)}, not {list(binding.shape)}")
        if entry.dtype == _FP8:
            scales.add(name + _SCALE)
            problems += _scale_problems(name, binding, present, config)
        elif entry.dtype not in _FLOATS:
            problems.append(f"{name} has dtype {entry.dtype}")
    unread = f"model.layers.{config.num_hidden_layers}."
    skip_mtp = config.num_nextn_predict_layers > 0 and not mtp
    for name in sorted(set(present) - set(wanted) - scales):
        if not (_IGNORED.search(name) or (skip_mtp and name.startswith(unread))):
            problems.append(f"extra {name}")
    return problems


def _scale_problems(
    name: str, binding: Binding, present: Mapping[str, _Entry], config: ModelConfig
) -> list[str]:
    if not config.fp8:
        return [f"{name} is FP8, but config.json has no quantization_config"]
    if len(binding.shape) != 2:
        return [f"{name} has dtype {_FP8}, which is read for matrices only"]
    scale = present.get(name + _SCALE)
    if scale is None:
        return [f"missing {name}{_SCALE}"]
    blocks = tuple(-(-size // BLOCK) for size in binding.shape)
    if scale.shape != blocks:
        return [f"{name}{_SCALE} is {list(scale.shape)}, not {list(blocks)}"]
    if scale.dtype not in _FLOATS:
        return [f"{name}{_SCALE} has dtype {scale.dtype}"]
    return []


def _read_all(
    wanted: Mapping[str, Binding],
    present: Mapping[str, _Entry],
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
            if entry.dtype == _FP8:
                scale_entry = present[name + _SCALE]
                scales = files[scale_entry.file].get_tensor(name + _SCALE)
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
    for name in _weight_files(path):
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

"""The safetensors files of a Hugging Face directory, checked as a whole before anything is read."""

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.model.bindings import Binding
from pdmesh.model.checkpoint import INDEX_FILE, SINGLE_FILE
from pdmesh.model.config import ModelConfig
from pdmesh.wire.errors import ConfigError

SCALE = "_scale_inv"
FP8 = "F8_E4M3"
_FLOATS = frozenset({"F32", "F16", "BF16"})
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Entry:
    """A tensor's file, dtype as safetensors writes it, and shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def weight_files(path: Path) -> list[str]:
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


def open_checked(
    stack: ExitStack,
    path: Path,
    wanted: Mapping[str, Binding],
    config: ModelConfig,
    mtp: bool,
    device: str = "cpu",
) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The open files by name, and every tensor in them; tensors are read onto `device`.

    Raises:
        ConfigError: a file is missing or broken, or the tensors are not those that are wanted; all
            that is wrong with them is in one message.
    """
    files = {name: _open_file(stack, path / name, device) for name in weight_files(path)}
    present = _entries_of(path, files)
    problems = _problems_of(wanted, present, config, mtp)
    if problems:
        raise ConfigError(
            f"{path} does not hold the weights of its config.json: {'; '.join(problems)}"
        )
    return files, present


def _open_file(stack: ExitStack, file: Path, device: str) -> Any:
    try:
        return stack.enter_context(safe_open(str(file), framework="pt", device=device))
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file} is not a complete safetensors file ({error}); fetch it again"
        ) from error


def _entries_of(path: Path, files: Mapping[str, Any]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file, handle in files.items():
        for name in handle.keys():  # noqa: SIM118 - not a dict
            if name in entries:
                raise ConfigError(f"{path}: {name} is in both {entries[name].file} and {file}")
            part = handle.get_slice(name)
            entries[name] = Entry(file, str(part.get_dtype()), tuple(part.get_shape()))
    return entries


def _problems_of(
    wanted: Mapping[str, Binding], present: Mapping[str, Entry], config: ModelConfig, mtp: bool
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
        if entry.dtype == FP8:
            scales.add(name + SCALE)
            problems += _scale_problems_of(name, binding, present, config)
        elif entry.dtype not in _FLOATS:
            problems.append(f"{name} has dtype {entry.dtype}")
    unread = f"model.layers.{config.num_hidden_layers}."
    skip_mtp = config.num_nextn_predict_layers > 0 and not mtp
    for name in sorted(set(present) - set(wanted) - scales):
        if not (_IGNORED.search(name) or (skip_mtp and name.startswith(unread))):
            problems.append(f"extra {name}")
    return problems


def _scale_problems_of(
    name: str, binding: Binding, present: Mapping[str, Entry], config: ModelConfig
) -> list[str]:
    if not config.fp8:
        return [f"{name} is FP8, but config.json has no quantization_config"]
    if len(binding.shape) != 2:
        return [f"{name} has dtype {FP8}, which is read for matrices only"]
    scale = present.get(name + SCALE)
    if scale is None:
        return [f"missing {name}{SCALE}"]
    blocks = tuple(-(-size // BLOCK) for size in binding.shape)
    if scale.shape != blocks:
        return [f"{name}{SCALE} is {list(scale.shape)}, not {list(blocks)}"]
    if scale.dtype not in _FLOATS:
        return [f"{name}{SCALE} has dtype {scale.dtype}"]
    return []

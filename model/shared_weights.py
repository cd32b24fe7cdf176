"""Weights that one process holds and others use: which, and a model put together of them.

Workers of both roles keep all weights in one form (in FP8 `kv_b` for prompts and `k_b` and `v_b`
for answers, since either role may compute both), so all of them are shared. What a process makes
for itself is small and no weight: the table of rotations, and its plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pdmesh.model.config import ModelConfig
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.device.loading import expected_weights, load_weights
from pdmesh.model.device.weights import ModelWeights
from pdmesh.model.random_weights import random_model, served_config, served_fingerprint
from pdmesh.model.weights import Progress, empty_model, load_model
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.held_weights import HeldModel, HeldTensor, HeldWeights
from pdmesh.wire.random_weights import RandomWeights


class SharedWeights(Protocol):
    """What another process holds."""

    @property
    def held(self) -> HeldWeights:
        """What it says."""

    @property
    def device(self) -> str:
        """As in `HeldModel`: that of this process."""

    def map(self) -> Sequence[Tensor]:
        """The regions, [bytes] uint8 each, to be read only.

        Raises:
            ConfigError: they cannot be mapped.
        """


@dataclass(frozen=True)
class Wanted:
    """Which weights a worker is to have.

    Attributes:
        path: of the checkpoint, or of the config of random weights.
        fp8: whether matrices stay in FP8.
        dtype: of the rest, as torch writes it.
        mtp: whether the MTP layer is among them, where the config has one.
        random: weights to make instead of reading them.
        fingerprint: `served_fingerprint` of them, if it is known: it takes a while.
    """

    path: Path
    fp8: bool
    dtype: str
    mtp: bool
    random: RandomWeights | None = None
    fingerprint: str = ""

    def config(self) -> ModelConfig:
        """Of the model."""
        return served_config(self.path, self.random)

    def identity(self, device: str) -> HeldModel:
        """What has to be the same for two processes to share them.

        Args:
            device: as in `HeldModel`.
        """
        extra = self.config().num_nextn_predict_layers > 0
        return HeldModel(
            weights=self.fingerprint or served_fingerprint(self.path, self.random),
            precision="fp8" if self.fp8 else "plain",
            dtype=self.dtype,
            mtp=self.mtp and extra,
            device=device,
        )


Weights = DeepseekV3 | ModelWeights


def load_to_hold(
    wanted: Wanted, device: torch.device | str, progress: Progress | None = None
) -> dict[str, Tensor]:
    """Reads or makes weights on a device, for others to map: contiguous tensors by name.

    Raises:
        ConfigError: as `load_model`.
    """
    config, where = wanted.config(), torch.device(device)
    if wanted.fp8:
        weights = load_weights(
            wanted.path, config, where, wanted.mtp, progress, random=wanted.random
        )
        found = _contiguous(weights)
    else:
        rest = (getattr(torch, wanted.dtype), where, wanted.mtp, progress)
        if wanted.random is None:
            found = _contiguous(load_model(wanted.path, *rest))
        else:
            found = _contiguous(random_model(config, wanted.random.seed, *rest))
    if where.type == "cuda":
        torch.cuda.empty_cache()  # what loading took besides is for the workers
    return found


def described(
    tensors: Mapping[str, Tensor], places: Sequence[tuple[int, int]]
) -> tuple[HeldTensor, ...]:
    """What `HeldWeights` says of tensors that lie at these places (region, offset)."""
    return tuple(
        HeldTensor(name, *_form(tensor), *place)
        for (name, tensor), place in zip(tensors.items(), places, strict=True)
    )


def shared_weights(wanted: Wanted, shared: SharedWeights) -> Weights:
    """The weights that another process holds, as this one would have loaded them.

    Raises:
        ConfigError: they are not the ones that are wanted, or cannot be mapped.
    """
    _check_model(shared.held.model, wanted.identity(shared.device))
    expected: Weights
    if wanted.fp8:
        expected = expected_weights(wanted.path, wanted.config(), wanted.mtp, wanted.random)
    else:
        dtype: torch.dtype = getattr(torch, wanted.dtype)
        expected, _ = empty_model(wanted.config(), dtype, "meta", wanted.mtp)
    _check_tensors(shared.held, named_tensors(expected))
    regions = shared.map()
    there = {tensor.name: _view(regions, tensor) for tensor in shared.held.tensors}
    if isinstance(expected, DeepseekV3):
        expected.load_state_dict(there, assign=True)
        return expected.eval()
    return replaced(expected, there)


def named_tensors(weights: Weights) -> dict[str, Tensor]:
    """All tensors by the places that they have in the model; of several places the first."""
    if isinstance(weights, DeepseekV3):
        return {name: tensor.detach() for name, tensor in weights.state_dict().items()}
    found: dict[str, Tensor] = {}
    _collect(weights, "", found, set())
    return found


def replaced(weights: ModelWeights, tensors: Mapping[str, Tensor]) -> ModelWeights:
    """Weights with others in their places; `tensors` are named as by `named_tensors`."""
    changed: ModelWeights = _replaced(weights, "", tensors, {})
    return changed


def _collect(part: Any, name: str, found: dict[str, Tensor], seen: set[int]) -> None:
    if isinstance(part, Tensor):
        if id(part) not in seen:
            seen.add(id(part))
            found[name] = part
        return
    for key, inner in _parts(part):
        _collect(inner, f"{name}.{key}" if name else key, found, seen)


def _replaced(part: Any, name: str, tensors: Mapping[str, Tensor], done: dict[int, Tensor]) -> Any:
    if isinstance(part, Tensor):
        if id(part) not in done:
            done[id(part)] = tensors[name]
        return done[id(part)]
    inner = {
        key: _replaced(value, f"{name}.{key}" if name else key, tensors, done)
        for key, value in _parts(part)
    }
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return dataclasses.replace(part, **inner)
    if hasattr(part, "_replace"):
        return part._replace(**inner)
    return tuple(inner.values()) if isinstance(part, tuple) else part


def _parts(part: Any) -> list[tuple[str, Any]]:
    """Of a dataclass, a named tuple or a tuple; of anything else none."""
    if dataclasses.is_dataclass(part):
        return [(field.name, getattr(part, field.name)) for field in dataclasses.fields(part)]
    if hasattr(part, "_fields"):
        return list(zip(part._fields, part, strict=True))
    return [(str(n), value) for n, value in enumerate(part)] if isinstance(part, tuple) else []


def _contiguous(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in named_tensors(weights).items()}


def _form(tensor: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride()


def _check_model(theirs: HeldModel, ours: HeldModel) -> None:
    for field in ("weights", "precision", "dtype", "mtp", "device"):
        there, here = getattr(theirs, field), getattr(ours, field)
        if there != here:
            raise ConfigError(
                f"the weights that are held are not this worker's: {field} is {there!r} there and "
                f"{here!r} here; start their holder with this worker's model and settings, or let "
                "the worker load its own"
            )


def _check_tensors(held: HeldWeights, expected: Mapping[str, Tensor]) -> None:
    there = {t.name: (t.dtype, tuple(t.shape), tuple(t.strides)) for t in held.tensors}
    here = {name: _form(tensor.contiguous()) for name, tensor in expected.items()}
    for name in [*here, *there]:
        if there.get(name) != here.get(name):
            raise ConfigError(
                f"the weights that are held have another form than this worker's: {name} is "
                f"{_words(there.get(name))} there and {_words(here.get(name))} here; start their "
                "holder with the same version of pdmesh"
            )
    for tensor in held.tensors:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        size = math.prod(tensor.shape) * dtype.itemsize
        within = 0 <= tensor.region < len(held.regions) and tensor.offset >= 0
        if not within or tensor.offset + size > held.regions[tensor.region].size:
            raise ConfigError(f"the weights that are held have no place for {tensor.name}")


def _words(form: tuple[str, tuple[int, ...], tuple[int, ...]] | None) -> str:
    return "missing" if form is None else f"{list(form[1])} {form[0]}, strides {list(form[2])}"


def _view(regions: Sequence[Tensor], tensor: HeldTensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    end = tensor.offset + math.prod(tensor.shape) * dtype.itemsize
    return regions[tensor.region][tensor.offset : end].view(dtype).view(tensor.shape)

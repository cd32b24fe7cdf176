"""Weights that no file holds: the same numbers for the same tensor wherever it is made.

A tensor is put together of pieces of one block of FP8 noise that every process makes alike. Which
pieces follows from the seed and the tensor's published name, so it depends neither on the device
nor on what was made before: ranks of a group may each make their own experts only. On a device
that is one gathering copy, so a full-width model is there in seconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdmesh.model.bindings import bindings, expert_name
from pdmesh.model.config import ModelConfig, read_config
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.expert_source import Experts
from pdmesh.model.moe import Moe
from pdmesh.model.weights import Progress, empty_model, fingerprint
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.random_weights import RandomWeights

SPREAD = 64.0
"""Noise is kept times this: then few numbers are subnormal in e4m3, and none is beyond 448."""
_NOISE = 1 << 24
_PIECE = 1 << 14
"""Bytes of the noise, and of the piece of it that a tensor takes at a time."""
_WORD = 8
"""Pieces begin at multiples of so many bytes."""
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


@cache
def _noise() -> Tensor:
    """[_NOISE] uint8: normal numbers of deviation SPREAD in e4m3."""
    drawn = np.random.Philox(key=0).random_raw(_NOISE // 4).astype("<u8").view("<u2")
    quantiles = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    normal = torch.special.ndtri(quantiles).mul(SPREAD).float().to(torch.float8_e4m3fn)
    return torch.from_numpy(normal.view(torch.uint8).numpy()[drawn])


class RandomTensors:
    """Tensors by their published names; products of unit rows with matrices have unit rows.

    Args:
        seed: other numbers for another seed.
        device: where they are made.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._seed, self._device = seed, torch.device(device)
        words = _noise().to(self._device).view(torch.int64)
        length = _PIECE // _WORD
        self._windows = words.as_strided((words.numel() - length + 1, length), (1, 1))

    def codes(self, name: str, shape: Sequence[int]) -> Tensor:
        """`shape` in e4m3, normal with deviation SPREAD."""
        count = math.prod(shape)
        digest = blake2b(f"{self._seed} {name}".encode(), digest_size=16).digest()
        draw = np.random.Philox(key=int.from_bytes(digest, "little"))
        starts = draw.random_raw(-(-count // _PIECE)) % np.uint64(len(self._windows))
        index = torch.from_numpy(starts.astype(np.int64)).to(self._device)
        words = self._windows.index_select(0, index)
        taken = words.view(torch.uint8).flatten()[:count]
        return taken.view(torch.float8_e4m3fn).view(tuple(shape))

    def scale(self, name: str, shape: Sequence[int]) -> float:
        """What the codes of a matrix are to be multiplied by."""
        deviation = 1.0 if name == "model.embed_tokens.weight" else float(shape[-1]) ** -0.5
        return deviation / SPREAD

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """`shape` in `dtype`: ones in norms, zeros in biases, else the numbers of `codes`."""
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(tuple(shape), fill, dtype=dtype, device=self._device)
        return self.codes(name, shape).to(dtype).mul_(self.scale(name, shape))


class RandomExperts:
    """Those of a model of random weights, made when they are needed: an `ExpertSource`.

    Args:
        seed: of the weights.
        model: for its layers, dtype and device.
    """

    def __init__(self, seed: int, model: DeepseekV3) -> None:
        self._tensors = RandomTensors(seed, model.device)
        self._dtype = model.dtype
        moes = [(n, b.mlp) for n, b in enumerate(model.blocks()) if isinstance(b.mlp, Moe)]
        self._layers = [f"model.layers.{number}.mlp" for number, _ in moes]
        self._shapes = [(m.gate_up_proj.shape[1] // 2, m.gate_up_proj.shape[2]) for _, m in moes]

    def read(self, moe_layer: int, experts: Sequence[int]) -> Experts:
        """See `ExpertSource`."""
        prefix, (half, hidden) = self._layers[moe_layer], self._shapes[moe_layer]

        def made(expert: int, part: str, *shape: int) -> Tensor:
            return self._tensors.dense(expert_name(prefix, expert, part), shape, self._dtype)

        gate_up = [
            torch.cat([made(e, part, half, hidden) for part in ("gate_proj", "up_proj")])
            for e in experts
        ]
        down = [made(e, "down_proj", hidden, half) for e in experts]
        return torch.stack(gate_up), torch.stack(down)


def random_model(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    mtp: bool = True,
    progress: Progress | None = None,
    experts: bool = True,
) -> DeepseekV3:
    """A model of random weights; the arguments are those of `load_model`."""
    model, _ = empty_model(config, dtype, device, mtp, experts)
    tensors = RandomTensors(seed, device)
    wanted = [binding for binding in bindings(model) if not binding.copy]
    for number, binding in enumerate(wanted):
        kept = binding.views[0].dtype
        binding.write(tensors.dense(binding.name, binding.shape, kept))
        if progress is not None:
            progress(binding.name, number + 1, len(wanted))
    return model.eval()


def resized(raw: Mapping[str, Any], layers: int = 0, experts: int = 0) -> ModelConfig:
    """A config of so many layers and routed experts; 0: as it says.

    The first layers stay those without experts. Another number of experts is one group.

    Args:
        raw: fields of a `config.json`.

    Raises:
        ConfigError: as `ModelConfig.from_hf`, or it has no experts.
    """
    changed = dict(raw)
    if layers:
        changed["num_hidden_layers"] = layers
        dense = changed.get("first_k_dense_replace")
        if isinstance(dense, int):
            changed["first_k_dense_replace"] = min(dense, layers)
    if experts:
        has = next((n for name in _EXPERTS if (n := changed.get(name))), 0)
        if not has:
            raise ConfigError("the config has no routed experts, so there can be no other number")
        if has != experts:
            for name in _EXPERTS:
                changed.pop(name, None)
            changed |= {"n_routed_experts": experts, "n_group": 1, "topk_group": 1}
    return ModelConfig.from_hf(changed)


def served_config(path: Path, random: RandomWeights | None) -> ModelConfig:
    """Of the checkpoint in a directory, or of random weights for its `config.json`.

    Raises:
        ConfigError: as `ModelConfig.from_path`, or `resized`.
    """
    if random is None:
        return ModelConfig.from_path(path)
    return resized(read_config(path), random.layers, random.experts)


def served_fingerprint(path: Path, random: RandomWeights | None) -> str:
    """As `fingerprint`; that of random weights says what they are, and differs where they do.

    Raises:
        ConfigError: as `fingerprint`, or `resized`.
    """
    if random is None:
        return fingerprint(path)
    config = served_config(path, random)
    digest = blake2b(digest_size=16)
    digest.update(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    digest.update(f"random {random.seed} {SPREAD} {_PIECE} {_WORD} ".encode())
    digest.update(_noise().numpy().tobytes())
    return (
        f"random, seed {random.seed}, {config.num_hidden_layers} layers, "
        f"{config.n_routed_experts} experts: {digest.hexdigest()}"
    )

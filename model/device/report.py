"""What a device is, and which backend each operation of a model uses there."""

from __future__ import annotations

from pathlib import Path

import torch

from pdmesh.model.device.memory import GB, weight_bytes
from pdmesh.model.device.model import shapes_of
from pdmesh.model.machine import backends_for, check_machine, remarks, this_machine
from pdmesh.model.planning import memory_of
from pdmesh.model.random_weights import served_config
from pdmesh.model.served import Placing
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.random_weights import RandomWeights


def device_report(
    path: Path,
    device: str | None,
    latents: str | None,
    precision: str | None = None,
    random: RandomWeights | None = None,
) -> list[str]:
    """Lines about torch, the device (by default the best one there is) and the backends.

    Raises:
        ConfigError: the device cannot compute the model in this precision, has not enough memory
            for one worker, lacks a backend that $PDMESH_BACKENDS names, or the checkpoint cannot
            be read.
    """
    config = served_config(path, random)
    machine = this_machine()
    placing = Placing(device or ("cuda" if machine.devices else "cpu"), precision or "auto")
    check_machine(machine, placing.device, placing.chosen)
    where = torch.device(placing.device)
    lines = [f"torch {machine.torch}, CUDA {machine.cuda or 'none'}"]
    fp8 = weight_bytes(config)
    if where.type == "cuda":
        name, capability = machine.devices[where.index or 0]
        free, total = memory_of(placing.device)
        lines.append(
            f"{name}, capability {capability[0]}.{capability[1]}, {total / GB:.1f} GB, "
            f"{free / GB:.1f} free"
        )
        if placing.chosen == "fp8" and fp8 > free:
            raise ConfigError(
                f"the weights of {path.name} take {fp8 / GB:.1f} GB in FP8, and {free / GB:.1f} GB "
                f"of the {name} are free; give fewer layers, or another device"
            )
    lines.append(f"{path.name}: weights in FP8 take {fp8 / GB:.3f} GB")
    lines += remarks(machine, placing.device, placing.chosen)
    shapes = shapes_of(config, latent_bytes=1 if latents == "fp8" else 2)
    return lines + backends_for(where, shapes).describe()

"""What a device is, and which backend each operation of a model uses there."""

from __future__ import annotations

from pathlib import Path

import torch

from pdmesh.kernels.backends import choose_backends
from pdmesh.model.config import ModelConfig
from pdmesh.model.device.memory import GB, weight_bytes
from pdmesh.model.device.model import shapes_of
from pdmesh.wire.errors import ConfigError


def device_report(path: Path, device: str | None, latents: str | None) -> list[str]:
    """Lines about torch, the device (by default the best one there is) and the backends.

    Raises:
        ConfigError: there is no such device, or the checkpoint cannot be read.
    """
    config = ModelConfig.from_path(path)
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(chosen)
    lines = [f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"]
    if where.type == "cuda":
        if not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"there is no {chosen}")
        found = torch.cuda.get_device_properties(where)
        lines.append(
            f"{found.name}, capability {found.major}.{found.minor}, "
            f"{found.total_memory / GB:.1f} GB"
        )
    lines.append(f"{path.name}: weights in FP8 take {weight_bytes(config) / GB:.3f} GB")
    shapes = shapes_of(config, latent_bytes=1 if latents == "fp8" else 2)
    return lines + choose_backends(where, shapes).describe()

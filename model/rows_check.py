"""Whether this processor keeps the promise of `linear` for the shapes of a loaded model."""

from __future__ import annotations

import logging
import time

from pdmesh.kernels.linear import varying_shapes
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

_MAX_OUTPUTS = 1024
"""Weights are tried with so many outputs at most; a row's sums do not get longer with them."""
_BUDGET_S = 0.5


def check_rows(model: DeepseekV3) -> list[tuple[int, int]]:
    """Tries the (outputs, inputs) of the model's matrices, and warns once if rows vary.

    Call it with the threads that will compute. It takes well under a second: large weights are cut
    to fewer outputs, and shapes that the time does not allow for are left out. On another device
    than a CPU nothing is promised, and nothing tried.

    Returns:
        Those shapes for which a row's result depends on its neighbours.
    """
    if model.device.type != "cpu":
        return []
    began, varying = time.monotonic(), list[tuple[int, int]]()
    for shape in _shapes(model):
        varying += varying_shapes([shape], model.dtype)
        if time.monotonic() - began > _BUDGET_S:
            break
    if varying:
        event(
            log,
            "rows vary on this processor: the same tokens may not come out bit for bit in another "
            "batch, chunk or after a prefix hit",
            level=logging.WARNING,
            shapes=",".join(f"{outputs}x{inputs}" for outputs, inputs in varying),
        )
    return varying


def _shapes(model: DeepseekV3) -> list[tuple[int, int]]:
    """Distinct shapes of matrices, a stack of experts counted by one of them, smallest first."""
    found = {
        (min(parameter.shape[-2], _MAX_OUTPUTS), parameter.shape[-1])
        for parameter in model.parameters()
        if parameter.dim() >= 2
    }
    return sorted(found, key=lambda shape: shape[0] * shape[1])

"""How many rows every expert is asked for, gathered while the model runs."""

from __future__ import annotations

import torch
from torch import Tensor


class ExpertLoad:
    """Rows for each logical expert of each MoE layer since the last `take`."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._counts = torch.zeros((num_layers, num_experts), dtype=torch.int64)

    def add(self, moe_layer: int, ids: Tensor) -> None:
        """Count the choices ids [n, k] of one layer."""
        flat = ids.flatten().to(self._counts.device)
        self._counts[moe_layer] += torch.bincount(flat, minlength=self._counts.shape[1])

    def take(self) -> Tensor:
        """The counts [layers, experts] int64; they begin at zero again."""
        counts, self._counts = self._counts, torch.zeros_like(self._counts)
        return counts

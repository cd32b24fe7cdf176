"""What code that runs a model calls: a whole one, or one rank of a group that stands for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pdmesh.model.batch import Batch, Form
from pdmesh.model.config import ModelConfig


class ComputingModel(Protocol):
    """`DeepseekV3` is such, and in `parallel` `Member`, `SpreadModel` and `GroupModel`."""

    @property
    def config(self) -> ModelConfig:
        """As `DeepseekV3.config`."""

    def forward(
        self,
        batch: Batch,
        latents: Tensor,
        form: Form,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `DeepseekV3.forward`."""

    def mtp_forward(
        self, batch: Batch, previous_hidden: Tensor, latents: Tensor, form: Form
    ) -> Tensor:
        """As `DeepseekV3.mtp_forward`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """As `DeepseekV3.logits`."""

    def mtp_logits(self, hidden: Tensor) -> Tensor:
        """As `DeepseekV3.mtp_logits`."""

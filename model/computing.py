"""What code that runs a model calls: a whole one, or one rank of a group that stands for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from pdmesh.model.batch import Batch, Form
from pdmesh.model.config import ModelConfig


class ComputingModel(Protocol):
    """`DeepseekV3` and `DeviceModel` are such, and each `StandIn`."""

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


_Model = TypeVar("_Model", bound=ComputingModel)


class StandIn(Generic[_Model]):
    """Stands for a model whose layers are computed with other ranks; what follows them, here alone.

    In `parallel`: `Member`, `DeviceMember`, `SpreadModel` and `GroupModel`.
    """

    def __init__(self, model: _Model) -> None:
        self._model = model

    @property
    def config(self) -> ModelConfig:
        """As `DeepseekV3.config`."""
        return self._model.config

    def logits(self, hidden: Tensor) -> Tensor:
        """As `DeepseekV3.logits`."""
        return self._model.logits(hidden)

    def mtp_logits(self, hidden: Tensor) -> Tensor:
        """As `DeepseekV3.mtp_logits`."""
        return self._model.mtp_logits(hidden)

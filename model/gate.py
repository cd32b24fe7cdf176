"""The router of a mixture-of-experts layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdmesh.kernels.gate import choose_experts
from pdmesh.kernels.linear import linear
from pdmesh.model.config import ModelConfig


class Gate(nn.Module):
    """Chooses experts for every row; scores are float32 whatever the model's dtype.

    `e_score_correction_bias` [experts] float32 (None for softmax scores) is a buffer: training
    without an auxiliary loss (arXiv:2408.15664) moves it by hand, no gradient reaches it.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.gate is not None
        self.rule = config.gate
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        with_bias = self.rule.method == "noaux_tc"
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(config.n_routed_experts) if with_bias else None
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, hidden]: ids [n, k] int64 and weights [n, k] float32; a row depends on itself."""
        return choose_experts(linear(x.float(), self.weight.float()), self._bias(), self.rule)

    def dense(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As forward, differentiable, outside of autocast."""
        with torch.autocast(device_type=x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
            return choose_experts(logits, self._bias(), self.rule)

    def _bias(self) -> Tensor | None:
        bias = self.e_score_correction_bias
        return None if bias is None else bias.float()

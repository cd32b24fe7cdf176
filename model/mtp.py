"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), depth 1.

The row of position j takes the hidden state of position j - 1 and the token at j, and predicts the
token at j + 1. Its latent goes to slot j of the extra layer; slot 0 of a sequence stays empty, so
what a page holds depends on its own tokens and its past only.
"""

import torch
from torch import Tensor, nn

from pdmesh.kernels.linear import linear
from pdmesh.kernels.norm import rms_norm
from pdmesh.kernels.rope import RopeTable
from pdmesh.model.block import Block
from pdmesh.model.config import ModelConfig
from pdmesh.model.context import StepContext
from pdmesh.model.moe import MoeImpl


class Mtp(nn.Module):
    """The extra layer; embedding and head are the model's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.eps = config.rms_norm_eps
        self.enorm = nn.Parameter(torch.ones(hidden))
        self.hnorm = nn.Parameter(torch.ones(hidden))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = Block(config, config.num_hidden_layers)
        self.head_norm = nn.Parameter(torch.ones(hidden))

    def forward(self, embedded: Tensor, previous: Tensor, step: StepContext) -> Tensor:
        """Embedding of the token at j and hidden state of j - 1, both [n, hidden]: [n, hidden]."""
        x = linear(self.joined(embedded, previous), self.eh_proj.weight)
        return self.block.feed_forward(self.block.attention(x, step), step.num_rows)

    def dense(
        self, embedded: Tensor, previous: Tensor, table: RopeTable, impl: MoeImpl
    ) -> tuple[Tensor, Tensor | None]:
        """Differentiable: rows of positions 1..t, [b, t, hidden] each; `table` starts at 1."""
        return self.block.dense(self.eh_proj(self.joined(embedded, previous)), table, impl)

    def joined(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """What `eh_proj` takes: both normalised, side by side [..., 2 hidden]."""
        token = rms_norm(embedded, self.enorm, self.eps)
        return torch.cat([token, rms_norm(previous, self.hnorm, self.eps)], dim=-1)

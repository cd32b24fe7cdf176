"""One decoder layer: attention and feed-forward, each behind a norm and added to its input."""

import torch
from torch import Tensor, nn

from pdmesh.kernels.norm import rms_norm
from pdmesh.kernels.rope import RopeTable
from pdmesh.model.config import ModelConfig
from pdmesh.model.context import StepContext
from pdmesh.model.mla import Mla
from pdmesh.model.moe import Mlp, Moe, MoeImpl


class Block(nn.Module):
    """Layer `layer` of the model (num_layers is the MTP layer)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.layer = layer
        self.input_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.self_attn = Mla(config, layer)
        self.post_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.mlp: Moe | Mlp
        if config.is_moe_layer(layer):
            self.mlp = Moe(config)
        else:
            self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def attention(self, x: Tensor, step: StepContext) -> Tensor:
        """x plus attention; the layer's latents are in the pages when it returns."""
        attended: Tensor = self.self_attn(rms_norm(x, self.input_norm, self.eps), step)
        return x + attended

    def feed_forward(self, x: Tensor, num_rows: int) -> Tensor:
        """x [n, hidden] plus the feed-forward part."""
        normed = rms_norm(x, self.post_norm, self.eps)
        output: Tensor = (
            self.mlp(normed, num_rows) if isinstance(self.mlp, Moe) else self.mlp(normed)
        )
        return x + output

    def dense(self, x: Tensor, table: RopeTable, impl: MoeImpl) -> tuple[Tensor, Tensor | None]:
        """Differentiable, unpaged: x [b, t, hidden], a table of t rows; rows per expert or None."""
        cos, sin = table.cos.unsqueeze(1), table.sin.unsqueeze(1)
        normed = rms_norm(x, self.input_norm, self.eps)
        x = x + self.self_attn.dense(normed, cos, sin, table.interleave)
        normed = rms_norm(x, self.post_norm, self.eps)
        if isinstance(self.mlp, Moe):
            output, load = self.mlp.dense(normed, impl)
            return x + output, load
        return x + self.mlp.dense(normed), None

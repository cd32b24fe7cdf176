"""The DeepSeek-V3 family: embedding, layers, head, and the MTP layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdmesh.kernels.linear import linear
from pdmesh.kernels.norm import rms_norm
from pdmesh.kernels.rope import RopeTable
from pdmesh.model.batch import Batch, Form
from pdmesh.model.block import Block
from pdmesh.model.config import ModelConfig
from pdmesh.model.context import StepContext
from pdmesh.model.gate import Gate
from pdmesh.model.moe import Moe, MoeImpl
from pdmesh.model.mtp import Mtp
from pdmesh.model.rope import rope_table


@dataclass(frozen=True)
class DenseOutput:
    """What `dense_forward` gives.

    Attributes:
        hidden: [b, t, hidden] before the final norm.
        mtp_hidden: [b, t, hidden] or None; row j predicts token j + 1, row 0 is zeros.
        expert_load: rows per expert, [experts] float32, for each MoE layer in order, MTP last.
    """

    hidden: Tensor
    mtp_hidden: Tensor | None
    expert_load: list[Tensor]


class DeepseekV3(nn.Module):
    """The model without any scheduling. Weights start random (normal, 0.02), norms at one."""

    def __init__(self, config: ModelConfig, mtp: bool = True) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(
            Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Parameter(torch.empty_like(self.embed_tokens))
        self.mtp = Mtp(config) if mtp and config.num_nextn_predict_layers else None
        self._table: RopeTable | None = None
        self.init_weights()

    @property
    def num_latent_layers(self) -> int:
        """Layers a page holds: num_layers, plus one with MTP."""
        return self.config.num_hidden_layers + (self.mtp is not None)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states and latents."""
        return self.embed_tokens.dtype

    @torch.no_grad()
    def init_weights(self, std: float = 0.02) -> None:
        """Matrices normal with deviation std; norms and biases stay as they are made."""
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if parameter.dim() > 1:
                parameter.normal_(0.0, std)
            elif name.endswith(".bias"):
                parameter.zero_()

    def new_latents(self, num_pages: int, page_size: int = 64) -> Tensor:
        """An empty pool [num_pages, num_latent_layers, page_size, width] of the model's dtype."""
        shape = (num_pages, self.num_latent_layers, page_size, self.config.latent_width)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def blocks(self) -> list[Block]:
        """All layers in order, the MTP layer last."""
        layers = [cast(Block, layer) for layer in self.layers]
        return layers if self.mtp is None else [*layers, self.mtp.block]

    def gates(self) -> list[Gate]:
        """The routers in the order of DenseOutput.expert_load."""
        return [block.mlp.gate for block in self.blocks() if isinstance(block.mlp, Moe)]

    @torch.no_grad()
    def forward(
        self,
        batch: Batch,
        latents: Tensor,
        form: Form,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Compute the batch's rows over their pages.

        Args:
            batch: the rows.
            latents: the pool [num_pages, num_latent_layers, page_size, width], the model's dtype.
            form: 'mha' or 'absorbed', for the slices that name no form of their own.
            on_layer: called with i once layer i's latents of this batch are in the pages.

        Returns:
            [T, hidden] before the final norm.
        """
        self.check_pool(latents)
        step = StepContext.build(batch, latents, self.rope_table(), form, first_key=0)
        x = F.embedding(batch.padded_tokens, self.embed_tokens)
        for index, layer in enumerate(self.layers):
            block = cast(Block, layer)
            x = block.attention(x, step)
            if on_layer is not None:
                on_layer(index)
            x = block.feed_forward(x, step.num_rows)
        return x[: batch.num_rows]

    @torch.no_grad()
    def mtp_forward(
        self, batch: Batch, previous_hidden: Tensor, latents: Tensor, form: Form
    ) -> Tensor:
        """The MTP layer for rows of positions >= 1; writes the MTP latents to their slots.

        Args:
            batch: rows; the token of a row is the one at its position.
            previous_hidden: [T, hidden], of the position before each row, before the final norm.
            latents, form: as in forward.

        Returns:
            [T, hidden]; the row of position j predicts token j + 1.

        Raises:
            ValueError: the model has no MTP layer, or a row is at position 0.
        """
        self.check_mtp(batch)
        assert self.mtp is not None
        self.check_pool(latents)
        step = StepContext.build(batch, latents, self.rope_table(), form, first_key=1)
        missing = batch.padded_tokens.shape[0] - batch.num_rows
        previous = F.pad(previous_hidden, (0, 0, 0, missing))
        embedded = F.embedding(batch.padded_tokens, self.embed_tokens)
        hidden: Tensor = self.mtp(embedded, previous, step)
        return hidden[: batch.num_rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] before the final norm: [..., vocab] float32."""
        return self._head(hidden, self.norm)

    def mtp_logits(self, hidden: Tensor) -> Tensor:
        """As logits, for what mtp_forward gives; the head is shared, the norm is the MTP's."""
        if self.mtp is None:
            raise ValueError("this model has no MTP layer")
        return self._head(hidden, self.mtp.head_norm)

    def check_mtp(self, batch: Batch) -> None:
        """Raises ValueError where `mtp_forward` says so."""
        if self.mtp is None:
            raise ValueError("this model has no MTP layer")
        if any(item.start == 0 for item in batch.slices):
            raise ValueError("the MTP layer has no row for position 0")

    def check_pool(self, latents: Tensor) -> None:
        """Raises ValueError unless latents is a pool of this model's layers and width."""
        layers, width = self.num_latent_layers, self.config.latent_width
        right = latents.dim() == 4 and latents.shape[1] == layers and latents.shape[3] == width
        if not right or not latents.is_contiguous():
            raise ValueError(
                f"latents must be a contiguous [pages, {layers}, page_size, {width}] tensor, this "
                f"one is {list(latents.shape)}"
            )

    def _head(self, hidden: Tensor, norm: Tensor) -> Tensor:
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        normed = rms_norm(hidden, norm, self.config.rms_norm_eps)
        logits = linear(normed.reshape(-1, normed.shape[-1]), head).float()
        return logits.view(*hidden.shape[:-1], -1)

    def dense_forward(self, tokens: Tensor, moe_impl: MoeImpl = "dense") -> DenseOutput:
        """Causal forward without pages, differentiable, for training.

        tokens [b, t] int64. moe_impl 'dense' computes every expert and masks, 'grouped' sorts rows
        by expert (compiled, only under bfloat16 autocast). Works under bfloat16 autocast.
        """
        length = tokens.shape[1]
        table = self.rope_table()
        x = embedded = F.embedding(tokens, self.embed_tokens)
        loads: list[Tensor] = []
        here = RopeTable(table.cos[:length], table.sin[:length], table.interleave)
        for layer in self.layers:
            x, load = cast(Block, layer).dense(x, here, moe_impl)
            loads += [] if load is None else [load]
        if self.mtp is None:
            return DenseOutput(x, None, loads)
        later = RopeTable(table.cos[1:length], table.sin[1:length], table.interleave)
        rows, load = self.mtp.dense(embedded[:, 1:], x[:, :-1], later, moe_impl)
        loads += [] if load is None else [load]
        return DenseOutput(x, F.pad(rows, (0, 0, 1, 0)), loads)

    def rope_table(self) -> RopeTable:
        """cos and sin for all positions on the model's device; made at the first call."""
        if self._table is None or self._table.cos.device != self.device:
            self._table = rope_table(self.config, self.device)
        return self._table

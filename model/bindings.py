"""The tensors of a Hugging Face checkpoint, and where each stands in the model.

In memory projections are fused and experts stacked; on disk every tensor has its published name.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pdmesh.model.block import Block
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.mla import Mla
from pdmesh.model.moe import Mlp, Moe


@dataclass(frozen=True)
class Binding:
    """One tensor of a checkpoint.

    Attributes:
        name: its name on disk.
        views: the parts of the model's tensors that hold it, along its first axis, in order.
            Views share memory with the model, so writing to them loads it.
        heads: 0, or the number of heads whose rows alternate between the two views on disk.
        matrix: stored as FP8 in an FP8 checkpoint.
        keep_float32: never stored in a shorter dtype.
        copy: the same numbers as another tensor, which may be absent.
    """

    name: str
    views: tuple[Tensor, ...]
    heads: int = 0
    matrix: bool = False
    keep_float32: bool = False
    copy: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape on disk."""
        if self.heads:
            rows = sum(view.shape[0] * view.shape[1] for view in self.views)
            return (rows, self.views[0].shape[-1])
        return (sum(view.shape[0] for view in self.views), *self.views[0].shape[1:])

    def read(self) -> Tensor:
        """As on disk; a new tensor where it is put together."""
        if self.heads:
            return torch.cat(self.views, dim=1).flatten(0, 1)
        return self.views[0] if len(self.views) == 1 else torch.cat(self.views)

    @torch.no_grad()
    def write(self, tensor: Tensor) -> None:
        """Load a tensor of the right shape into the model."""
        if self.heads:
            per_head = tensor.reshape(self.heads, -1, tensor.shape[-1])
            first = self.views[0].shape[1]
            self.views[0].copy_(per_head[:, :first])
            self.views[1].copy_(per_head[:, first:])
            return
        parts = torch.split(tensor, [view.shape[0] for view in self.views])
        for view, part in zip(self.views, parts, strict=True):
            view.copy_(part)


def bindings(model: DeepseekV3) -> Iterator[Binding]:
    """Every tensor of the model's checkpoint."""
    yield Binding("model.embed_tokens.weight", (model.embed_tokens.detach(),))
    for layer, block in enumerate(model.blocks()):
        yield from _block(f"model.layers.{layer}", block)
    yield Binding("model.norm.weight", (model.norm.detach(),))
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    yield Binding("lm_head.weight", (head.detach(),), copy=model.lm_head is None)
    if model.mtp is None:
        return
    prefix = f"model.layers.{model.config.num_hidden_layers}"
    for name, parameter in (("enorm", model.mtp.enorm), ("hnorm", model.mtp.hnorm)):
        yield Binding(f"{prefix}.{name}.weight", (parameter.detach(),))
    yield Binding(f"{prefix}.eh_proj.weight", (model.mtp.eh_proj.weight.detach(),))
    yield Binding(f"{prefix}.shared_head.norm.weight", (model.mtp.head_norm.detach(),))
    yield Binding(f"{prefix}.embed_tokens.weight", (model.embed_tokens.detach(),), copy=True)
    yield Binding(f"{prefix}.shared_head.head.weight", (head.detach(),), copy=True)


def _block(prefix: str, block: Block) -> Iterator[Binding]:
    yield Binding(f"{prefix}.input_layernorm.weight", (block.input_norm.detach(),))
    yield from _attention(f"{prefix}.self_attn", block.self_attn)
    yield Binding(f"{prefix}.post_attention_layernorm.weight", (block.post_norm.detach(),))
    if isinstance(block.mlp, Moe):
        yield from _moe(f"{prefix}.mlp", block.mlp)
    else:
        yield from _mlp(f"{prefix}.mlp", block.mlp)


def _linear(prefix: str, layer: nn.Linear, rows: slice = slice(None)) -> Iterator[Binding]:
    yield Binding(f"{prefix}.weight", (layer.weight.detach()[rows],), matrix=True)
    if layer.bias is not None:
        yield Binding(f"{prefix}.bias", (layer.bias.detach()[rows],))


def _attention(prefix: str, attention: Mla) -> Iterator[Binding]:
    if attention.q_rank is None:
        yield from _linear(f"{prefix}.q_proj", attention.q_proj)
        yield from _linear(f"{prefix}.kv_a_proj_with_mqa", attention.kv_a_proj)
    else:
        fused, rank = attention.qkv_a_proj, attention.q_rank
        yield from _linear(f"{prefix}.q_a_proj", fused, slice(0, rank))
        yield from _linear(f"{prefix}.kv_a_proj_with_mqa", fused, slice(rank, None))
        yield Binding(f"{prefix}.q_a_layernorm.weight", (attention.q_a_norm.detach(),))
        yield from _linear(f"{prefix}.q_b_proj", attention.q_b_proj)
    yield Binding(f"{prefix}.kv_a_layernorm.weight", (attention.kv_a_norm.detach(),))
    up = (attention.k_b_proj.detach(), attention.v_b_proj.detach())
    yield Binding(f"{prefix}.kv_b_proj.weight", up, heads=attention.heads, matrix=True)
    yield from _linear(f"{prefix}.o_proj", attention.o_proj)


def _mlp(prefix: str, mlp: Mlp) -> Iterator[Binding]:
    half = mlp.gate_up_proj.weight.shape[0] // 2
    yield from _linear(f"{prefix}.gate_proj", mlp.gate_up_proj, slice(0, half))
    yield from _linear(f"{prefix}.up_proj", mlp.gate_up_proj, slice(half, None))
    yield from _linear(f"{prefix}.down_proj", mlp.down_proj)


def expert_name(prefix: str, expert: int, part: str) -> str:
    """Of a routed expert's "gate_proj", "up_proj" or "down_proj" in the layer part `prefix`."""
    return f"{prefix}.experts.{expert}.{part}.weight"


def _moe(prefix: str, moe: Moe) -> Iterator[Binding]:
    yield Binding(f"{prefix}.gate.weight", (moe.gate.weight.detach(),))
    bias = moe.gate.e_score_correction_bias
    if bias is not None:
        yield Binding(f"{prefix}.gate.e_score_correction_bias", (bias,), keep_float32=True)
    half = moe.gate_up_proj.shape[1] // 2
    gate_up, down = moe.gate_up_proj.detach(), moe.down_proj.detach()
    parts: tuple[tuple[str, Callable[[int], Tensor]], ...] = (
        ("gate_proj", lambda e: gate_up[e, :half]),
        ("up_proj", lambda e: gate_up[e, half:]),
        ("down_proj", lambda e: down[e]),
    )
    for expert in range(gate_up.shape[0]):  # none where the model was loaded without them
        for name, view in parts:
            full = expert_name(prefix, expert, name)
            yield Binding(full, (view(expert),), matrix=True)
    if moe.shared_experts is not None:
        yield from _mlp(f"{prefix}.shared_experts", moe.shared_experts)

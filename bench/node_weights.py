"""Random weights, latents and ends of a model on one rank, made on the device.

Scales are such that products of unit rows have unit rows, so hidden states stay finite through any
number of layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from node_plan import PAGE, QUERY
from torch import Tensor

from pdmesh.kernels.backends import Backends
from pdmesh.kernels.quantised import BlockWeight
from pdmesh.model.config import ModelConfig


def random_blocks(draw: torch.Generator, *shape: int) -> BlockWeight:
    """[..., n, k] in FP8; a product with unit rows has unit rows."""
    *batch, n, k = shape
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=draw.device)
    for part in values.view(-1, n, k):
        part.copy_(torch.randn(n, k, device=draw.device, generator=draw, dtype=torch.bfloat16))
    scales = torch.rand((*batch, -(-n // 128), -(-k // 128)), device=draw.device, generator=draw)
    return BlockWeight(values, (scales + 0.5) * k**-0.5)


@dataclass(frozen=True)
class LayerWeights:
    """Of one layer on one rank, all heads; `up` and `down` are the rank's experts or the dense MLP.

    Attributes:
        gate, bias: [experts, hidden] float32 and [experts]; None in a dense layer.
        shared_up, shared_down: None in a dense layer.
    """

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor
    kv_norm: Tensor
    qkv_a: BlockWeight
    q_b: BlockWeight
    key: BlockWeight
    value: BlockWeight
    o_proj: BlockWeight
    up: BlockWeight
    down: BlockWeight
    gate: Tensor | None = None
    bias: Tensor | None = None
    shared_up: BlockWeight | None = None
    shared_down: BlockWeight | None = None


def random_layer(
    c: ModelConfig, ranks: int, rank: int, layer: int, device: torch.device, *, dense: bool = False
) -> LayerWeights:
    """What all ranks hold is alike on all, heads and experts are the rank's own."""
    alike = torch.Generator(device).manual_seed(1000 * layer + 1)
    own = torch.Generator(device).manual_seed(1000 * layer + 100 + rank)
    h, heads, lora, up = c.hidden_size, c.num_attention_heads, c.q_lora_rank or 0, c.kv_lora_rank
    width = c.intermediate_size if dense else c.moe_intermediate_size

    def norm(size: int) -> Tensor:
        return (torch.rand(size, device=device, generator=alike) + 0.5).to(torch.bfloat16)

    norms = [norm(size) for size in (h, h, lora, up)]
    attention = (
        random_blocks(alike, lora + c.latent_width, h),
        random_blocks(own, heads * c.qk_head_dim, lora),
        random_blocks(own, heads, up, c.qk_nope_head_dim),
        random_blocks(own, heads, c.v_head_dim, up),
        random_blocks(own, h, heads * c.v_head_dim),
    )
    if dense:
        mlp = random_blocks(alike, 2 * width, h), random_blocks(alike, h, width)
        return LayerWeights(*norms, *attention, *mlp)
    experts = c.n_routed_experts
    held = experts // ranks
    gate = torch.randn(experts, h, device=device, generator=alike) * h**-0.5
    return LayerWeights(
        *norms,
        *attention,
        random_blocks(own, held, 2 * width, h),
        random_blocks(own, held, h, width),
        gate,
        torch.rand(experts, device=device, generator=alike) * 0.1,
        random_blocks(alike, 2 * width, h),
        random_blocks(alike, h, width),
    )


def first_heads(w: LayerWeights, c: ModelConfig, tp: int) -> LayerWeights:
    """The same memory as the weights of a member of a group of `tp`: random numbers stay random.

    o_proj's first rows are read as columns of the narrower matrix; its scales stay those of all
    heads, so that the members' sum has the size of the whole product.
    """
    if tp == 1:
        return w
    heads = c.num_attention_heads // tp
    h, columns = c.hidden_size, heads * c.v_head_dim
    rows = heads * c.qk_head_dim
    blocks = -(-h // 128), -(-columns // 128)
    changed = {
        "q_b": BlockWeight(w.q_b.values[:rows], w.q_b.scales[: -(-rows // 128)]),
        "key": BlockWeight(w.key.values[:heads], w.key.scales[:heads]),
        "value": BlockWeight(w.value.values[:heads], w.value.scales[:heads]),
        "o_proj": BlockWeight(
            w.o_proj.values.flatten()[: h * columns].view(h, columns),
            w.o_proj.scales.flatten()[: blocks[0] * blocks[1]].view(blocks),
        ),
    }
    return LayerWeights(**{**w.__dict__, **changed})


class Pages:
    """Latents of one microbatch's sequences: pool, page table, positions, random."""

    def __init__(
        self, c: ModelConfig, batch: int, kv: int, layers: int, seed: int, device: torch.device
    ) -> None:
        draw = torch.Generator(device).manual_seed(seed)
        each = -(-kv // PAGE)
        shape = (batch * each, layers, PAGE, c.latent_width)
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for layer in range(layers):
            self.pool[:, layer].normal_(generator=draw)
        order = torch.randperm(batch * each, device=device, generator=draw)
        self.table = order.view(batch, each).to(torch.int32)
        self.lengths = torch.full((batch,), kv, dtype=torch.int32, device=device)
        last = torch.arange(kv - QUERY, kv, device=device)
        self.positions = last.repeat(batch)
        self.slots = self.table.long()[:, last // PAGE].flatten() * (layers * PAGE)
        self.slots += self.positions % PAGE

    def part(self, begin: int, end: int) -> Pages:
        """The sequences from `begin` to `end` in the same pool."""
        some = copy.copy(self)
        rows = slice(begin * QUERY, end * QUERY)
        some.table, some.lengths = self.table[begin:end], self.lengths[begin:end]
        some.positions, some.slots = self.positions[rows], self.slots[rows]
        return some


def even_choices(c: ModelConfig, layers: int, rows: int, seed: int, device: torch.device) -> Tensor:
    """[layers, rows, k] int64: experts drawn evenly at random."""
    draw = torch.Generator(device).manual_seed(seed)
    assert c.gate is not None
    shape = (layers, rows, c.n_routed_experts)
    return torch.rand(shape, device=device, generator=draw).topk(c.gate.top_k, dim=-1).indices


@dataclass
class Ends:
    """Embedding, head and the draft's projection: what a step has beside its layers."""

    embedding: Tensor
    head: Tensor
    norm: Tensor
    eh_proj: Tensor

    @staticmethod
    def random(c: ModelConfig, device: torch.device) -> Ends:
        draw = torch.Generator(device).manual_seed(7)
        h = c.hidden_size

        def matrix(n: int, k: int, scale: float) -> Tensor:
            made = torch.empty(n, k, dtype=torch.bfloat16, device=device)
            return made.normal_(std=scale, generator=draw)

        norm = torch.ones(h, dtype=torch.bfloat16, device=device)
        return Ends(
            matrix(c.vocab_size, h, 1.0),
            matrix(c.vocab_size, h, h**-0.5),
            norm,
            matrix(h, 2 * h, (2 * h) ** -0.5),
        )

    def start(self, tokens: int, seed: int) -> Tensor:
        """[tokens, hidden]: embeddings of random tokens."""
        draw = torch.Generator(self.embedding.device).manual_seed(seed)
        ids = torch.randint(
            self.embedding.shape[0], (tokens,), device=self.embedding.device, generator=draw
        )
        return F.embedding(ids, self.embedding)

    def rest(self, hidden: Tensor, tp: int, ops: Backends, eps: float) -> Tensor:
        """Both greedy choices and the draft's projection; a member has a part of the vocabulary."""
        head = self.head[: self.head.shape[0] // tp]
        chosen = F.linear(ops.rms_norm(hidden, self.norm, eps), head).float().argmax(dim=-1)
        token = ops.rms_norm(F.embedding(chosen, self.embedding), self.norm, eps)
        both = torch.cat([token, ops.rms_norm(hidden, self.norm, eps)], dim=-1)
        draft = ops.rms_norm(F.linear(both, self.eh_proj), self.norm, eps)
        return F.linear(draft, head).float().argmax(dim=-1)

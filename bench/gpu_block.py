"""One layer of full-width DeepSeek-V3 as a rank of expert parallelism runs it when decoding.

Every step goes through `Block.run(name, ...)`, which calls what was chosen for it and can note the
arguments, so that a step can be timed by itself on the values it has within the layer. Dispatch and
combine are copies within the device of what the rank would receive and send.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from bounds import (
    DENSE_WIDTH,
    EXPERTS,
    HEADS,
    HIDDEN,
    LATENT,
    NOPE,
    Q_LORA,
    RANK,
    ROPE,
    TOP_K,
    VALUE,
    WIDTH,
)
from gpu_latents import PAGE, random_pool
from torch import Tensor

from pdmesh.kernels import deep_gemm_backend
from pdmesh.kernels.fp8 import dequantise_blocks
from pdmesh.kernels.quantised import BlockWeight, Rows, new_scales, quantise_rows

EPS = 1e-6
SCALE = (NOPE + ROPE) ** -0.5
MAX_POSITION = 32768


@dataclass(frozen=True)
class Rank:
    """What a rank runs.

    Attributes:
        name: of it in tables.
        ranks: of expert parallelism; the rank holds 256 / ranks experts.
        batch: sequences of the rank.
        query: rows of a sequence.
        kv: latents of a sequence.
        heads: of the rank: 128 over the ranks that share its attention.
        senders: ranks that share one batch (tensor parallelism), so that a rank's share of the
            rows is less by this factor.
    """

    name: str
    ranks: int
    batch: int = 128
    query: int = 2
    kv: int = 5000
    heads: int = HEADS
    senders: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * self.query

    @property
    def experts(self) -> int:
        return EXPERTS // self.ranks

    @property
    def pairs(self) -> int:
        """Rows of all of the rank's experts, if the load is even."""
        return max(1, self.tokens * TOP_K // self.senders)

    @property
    def active(self) -> int:
        """Experts of the rank that get any row."""
        return min(self.experts, self.pairs)

    @property
    def rows(self) -> int:
        """Of an expert that gets any."""
        return -(-self.pairs // self.active)


def padded_rows(rows: int) -> int:
    """Rows of an expert in the masked layout: a tile of 64 or of 128 may not reach the next one."""
    return 64 if rows <= 64 else -(-rows // 128) * 128


def random_weight(*shape: int, generator: torch.Generator) -> BlockWeight:
    """[..., n, k] with a scale for each block; a product with unit rows has unit rows."""
    *batch, n, k = shape
    device = generator.device
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    for part in values.view(-1, n, k):
        part.copy_(torch.randn(n, k, device=device, generator=generator, dtype=torch.bfloat16))
    blocks = (*batch, -(-n // 128), -(-k // 128))
    scales = torch.rand(blocks, device=device, generator=generator) + 0.5
    return BlockWeight(values, scales * k**-0.5)


class Weights:
    """A layer's weights, random, and its own inputs of a step that other ranks would send."""

    def __init__(self, rank: Rank, seed: int, *, dense: bool = False, device: str = "cuda") -> None:
        draw = torch.Generator(device).manual_seed(seed)

        def weight(*shape: int) -> BlockWeight:
            return random_weight(*shape, generator=draw)

        def norm(size: int) -> Tensor:
            return (torch.rand(size, device=device, generator=draw) + 0.5).to(torch.bfloat16)

        self.input_norm, self.post_norm = norm(HIDDEN), norm(HIDDEN)
        self.q_norm, self.kv_norm = norm(Q_LORA), norm(RANK)
        self.qkv_a = weight(Q_LORA + LATENT, HIDDEN)
        self.q_b = weight(rank.heads * (NOPE + ROPE), Q_LORA)
        self.key = weight(rank.heads, RANK, NOPE)
        self.value = weight(rank.heads, VALUE, RANK)
        self.key_bf16, self.value_bf16 = (bf16_transposed(w) for w in (self.key, self.value))
        self.o_proj = weight(HIDDEN, rank.heads * VALUE)
        if dense:
            self.dense_up = weight(2 * DENSE_WIDTH, HIDDEN)
            self.dense_down = weight(HIDDEN, DENSE_WIDTH)
            return
        self.gate = torch.randn(EXPERTS, HIDDEN, device=device, generator=draw) * HIDDEN**-0.5
        self.gate_bf16 = self.gate.to(torch.bfloat16)
        self.gate_bias = torch.rand(EXPERTS, device=device, generator=draw) * 0.1
        self.shared_up, self.shared_down = weight(2 * WIDTH, HIDDEN), weight(HIDDEN, WIDTH)
        self.up = weight(rank.experts, 2 * WIDTH, HIDDEN)
        self.down = weight(rank.experts, HIDDEN, WIDTH)
        self._receive(rank, draw)

    def _receive(self, rank: Rank, draw: torch.Generator) -> None:
        device, rows = draw.device, padded_rows(rank.rows)
        arrived = torch.randn(rank.experts, rows, HIDDEN, device=device, generator=draw)
        self.arrived = quantise_rows(arrived)
        used = slice(rank.active), slice(rank.rows)
        self.received = Rows(self.arrived.values[used], self.arrived.scales[used])
        self.counts = torch.zeros(rank.experts, dtype=torch.int32, device=device)
        self.counts[: rank.active] = rank.rows
        self.pairs, sent = rank.pairs, rank.tokens * TOP_K
        order = torch.randperm(max(sent, self.pairs), device=device, generator=draw)
        self.origin = (order[:sent] % self.pairs).view(rank.tokens, TOP_K).to(torch.int32)

    def sized(self, rank: Rank, seed: int) -> Weights:
        """The same weights with what a rank of another batch receives."""
        other = copy.copy(self)
        other._receive(rank, torch.Generator(self.q_norm.device).manual_seed(seed))
        return other


def bf16_transposed(weight: BlockWeight) -> Tensor:
    """[heads, k, n] bfloat16 of [heads, n, k]: what a plain batched product takes."""
    wide = [dequantise_blocks(v, s).to(torch.bfloat16).t() for v, s in zip(*weight, strict=True)]
    return torch.stack(wide)


class State:
    """A step's inputs, shared by all layers: pool of latents, page table, positions.

    With `packed` the pool holds latents of 656 bytes, else bfloat16.
    """

    def __init__(
        self,
        rank: Rank,
        layers: int,
        seed: int = 1,
        *,
        packed: bool = False,
        device: str = "cuda",
    ) -> None:
        draw = torch.Generator(device).manual_seed(seed)
        each = -(-rank.kv // PAGE)
        pages = rank.batch * each
        self.pool = random_pool(pages, layers, packed, draw)
        order = torch.randperm(pages, device=device, generator=draw)
        self.table = order.view(rank.batch, each).to(torch.int32)
        self.lengths = torch.full((rank.batch,), rank.kv, dtype=torch.int32, device=device)
        last = torch.arange(rank.kv - rank.query, rank.kv, device=device)
        self.positions = last.repeat(rank.batch)
        page = self.table.long()[:, last // PAGE].flatten()
        self.slots = page * (layers * PAGE) + self.positions % PAGE
        angle = torch.arange(MAX_POSITION, device=device)[:, None] * (
            10000.0 ** (-torch.arange(0, ROPE, 2, device=device) / ROPE)
        )
        self.cos = angle.cos().repeat_interleave(2, dim=-1)
        self.sin = torch.stack([-angle.sin(), angle.sin()], dim=-1).flatten(1)
        self.layers = layers
        self.x, self.residual = (
            torch.randn(rank.tokens, HIDDEN, device=device, generator=draw, dtype=torch.bfloat16)
            for _ in range(2)
        )


class Block:
    """A layer's steps over one set of weights."""

    def __init__(
        self, rank: Rank, weights: Weights, state: State, layer: int, ops: Mapping[str, Any]
    ) -> None:
        self.rank, self.w, self.state, self.layer, self.ops = rank, weights, state, layer, ops
        self.noted: dict[str, tuple[Any, ...]] | None = None
        self.shared_processors: int | None = None

    def run(self, name: str, *arguments: Any) -> Any:
        """Calls what was chosen for the step."""
        if self.noted is not None:
            self.noted[name] = arguments
        return self.ops[name](*arguments)

    def attention(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [tokens, 7168], the residual changed in place: [tokens, 7168] before the next norm."""
        return self.attend(self.project(x, residual))

    def project(self, x: Tensor, residual: Tensor) -> Tensor:
        """Up to the absorbed query [tokens, heads, 576]; appends the latents."""
        rank, w, state = self.rank, self.w, self.state
        rows, _ = self.run("input_norm", x, residual, w.input_norm, EPS)
        projected = self.run("qkv_a", rows, w.qkv_a)
        rows, _ = self.run("q_norm", projected[:, :Q_LORA], w.q_norm, EPS)
        query = self.run("q_b", rows, w.q_b).view(rank.tokens, rank.heads, NOPE + ROPE)
        rotated = self.run(
            "rope_append",
            query[..., NOPE:],
            projected[:, Q_LORA:],
            w.kv_norm,
            state.cos,
            state.sin,
            state.positions,
            state.slots,
            state.pool,
            self.layer,
        )
        return self.run("absorb", query[..., :NOPE], w, rotated)

    def attend(self, absorbed: Tensor) -> Tensor:
        """From the absorbed query to what o_proj gives."""
        rank, w, state = self.rank, self.w, self.state
        seen = self.run(
            "mla",
            absorbed,
            state.pool[:, self.layer],
            state.table,
            state.lengths,
            rank.query,
            SCALE,
        )
        rows = self.run("values", seen, w)
        return self.run("o_proj", rows, w.o_proj)

    def shared(self, rows: Rows) -> Tensor:
        """The shared expert; DeepGEMM's part of it on `shared_processors`, if that is given."""
        with processors(self.shared_processors):
            middle = self.run("shared_act", self.run("shared_up", rows, self.w.shared_up))
            return self.run("shared_down", middle, self.w.shared_down)

    def experts(self, arrived: Rows) -> Tensor:
        """The routed experts of this rank: [experts, rows, 7168]."""
        w, expected = self.w, self.rank.rows
        middle = self.run("routed_up", arrived, w.up, w.counts, expected)
        middle = self.run("routed_act", middle, w.counts)
        return self.run("routed_down", middle, w.down, w.counts, expected)

    def combine(self, done: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
        """Rows sent back, and their weighted sum with the shared expert's."""
        used = done[: self.rank.active, : self.rank.rows]  # no row that nobody has written
        flat = self.run("combine_send", used).flatten(0, 1)[: self.w.pairs]
        return self.run("combine_sum", flat, self.w.origin, weights, shared)

    def __call__(
        self, x: Tensor, residual: Tensor, side: torch.cuda.Stream | None = None
    ) -> Tensor:
        """The layer; its result is not yet added to the residual.

        Args:
            x: [tokens, 7168] bfloat16.
            residual: [tokens, 7168] bfloat16, changed in place.
            side: a stream for the shared expert, beside gate, dispatch and routed experts.
        """
        out = self.attention(x, residual)
        rows, normed = self.run("post_norm", out, residual, self.w.post_norm, EPS)
        if side is not None:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                shared = self.shared(rows)
        _, weights = self.run("gate", normed, self.w)
        self.run("dispatch", self.w.received)
        done = self.experts(self.w.arrived)
        if side is None:
            shared = self.shared(rows)
        else:
            main.wait_stream(side)
        return self.combine(done, weights, shared)

    def dense(self, x: Tensor, residual: Tensor) -> Tensor:
        """A layer with a dense MLP in place of the experts."""
        out = self.attention(x, residual)
        rows, _ = self.run("post_norm", out, residual, self.w.post_norm, EPS)
        middle = self.run("dense_act", self.run("dense_up", rows, self.w.dense_up))
        return self.run("dense_down", middle, self.w.dense_down)


@contextlib.contextmanager
def processors(count: int | None) -> Iterator[None]:
    """Multiprocessors that DeepGEMM's kernels launched here may take, if it is there."""
    if count is None or deep_gemm_backend.unavailable():
        yield
        return
    import deep_gemm

    before = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(count)
    try:
        yield
    finally:
        deep_gemm.set_num_sms(before)


def copied_rows(arrived: Rows) -> Rows:
    """Dispatch within the device: every received row and its scales copied once."""
    scales = new_scales(*arrived.scales.shape, device=arrived.scales.device)
    scales.copy_(arrived.scales)
    return Rows(arrived.values.clone(), scales)


def weighted_sum(flat: Tensor, origin: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    """shared + sum over j of weights[:, j] times flat[origin[:, j]], flat [rows, k]: bfloat16."""
    total = shared.float()
    for column in range(origin.shape[1]):
        total = total + flat[origin[:, column].long()].float() * weights[:, column, None]
    return total.to(torch.bfloat16)


Step = Callable[..., Any]

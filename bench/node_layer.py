"""The layers of a decode step on one rank, stage by stage, by the chosen kernels.

A rank of a TP group has `heads / tp` heads.
A stage is a generator: where ranks of the group have to put their parts together it yields what is
to be done (`Sum`, `Gather`) and goes on with the result, so that ranks of one process can run in
turn, and ranks with a GPU each by NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from node_plan import QUERY, halves
from node_weights import LayerWeights, Pages
from torch import Tensor

from pdmesh.kernels.backends import Backends
from pdmesh.kernels.quantised import Rows
from pdmesh.kernels.rope import RopeTable
from pdmesh.model.config import ModelConfig
from pdmesh.model.mla import LATENT_NORM_EPS
from pdmesh.model.parallel.exchange import Channel
from pdmesh.model.parallel.nvshmem import NvshmemExperts, ReceivedMasked
from pdmesh.model.parallel.schedule import WHOLE, Item, Mode, Stage, plan_schedule
from pdmesh.model.rope import softmax_scale


class Sum(NamedTuple):
    """The members' [rows, hidden] bfloat16 are to be summed."""

    part: Tensor


class Gather(NamedTuple):
    """The members' [share, hidden] bfloat16 are to stand under each other."""

    part: Tensor


Steps = Generator[Sum | Gather, Tensor, None]


@dataclass(frozen=True)
class Kit:
    """What all of a rank's microbatches share.

    Attributes:
        member: number within the TP group.
        weights: by layer, dense ones first.
        even: [layers, rows of a share + 1, k] int64 experts drawn at random that take the place of
            the router's, or None.
    """

    config: ModelConfig
    ops: Backends
    table: RopeTable
    exchange: NvshmemExperts
    tp: int
    member: int
    weights: Sequence[LayerWeights]
    even: Tensor | None = None


class Flow:
    """One microbatch (or the whole batch) on its way through the layers of one rank.

    Args:
        number: of the microbatch, WHOLE for all.
        start: [rows, hidden] bfloat16, what the step begins with, alike on a group's ranks.
        drawn_from: row of the drawn experts that is the first one's.
    """

    def __init__(
        self, kit: Kit, pages: Pages, number: int, start: Tensor, drawn_from: int = 0
    ) -> None:
        self.kit, self.pages, self.number, self.start = kit, pages, number, start
        self.noted: dict[str, list[tuple[Any, ...]]] | None = None
        c, rows = kit.config, start.shape[0]
        self.heads = c.num_attention_heads // kit.tp
        self.share = -(-rows // kit.tp)
        first = kit.member * self.share
        self.real = max(0, min(self.share, rows - first))
        self._drawn = slice(drawn_from, drawn_from + self.share)
        self._padded = self.share * kit.tp - rows
        self._mine = slice(first, first + self.share)
        self._none = torch.arange(self.share, device=start.device)[:, None] >= self.real
        plan = getattr(kit.ops.mla_decode, "plan", None)
        planned = plan(pages.lengths, QUERY, self.heads) if plan is not None else None
        self._plan = {} if planned is None else {"plan": planned}
        self.residual = torch.empty_like(start)
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self.residual.copy_(self.start)
        self.x = torch.zeros_like(self.start)

    def hidden(self) -> Tensor:
        """What the step made: [rows, hidden]."""
        return self.residual + self.x

    def run(self, stage: Stage, layer: int) -> Steps:
        """One stage of the schedule."""
        w = self.kit.weights[layer]
        match stage:
            case Stage.DENSE:
                yield from self._dense(w, layer)
            case Stage.PROJECT:
                self._query = self._project(w, layer)
            case Stage.ATTEND:
                yield from self._attend(w, layer)
                self._choose(w, layer)
            case Stage.SEND:
                self._dispatch(layer)
                self._shared = self._shared_expert(w)
            case Stage.SHARED_FIRST:
                self._shared = self._shared_expert(w)
                self._dispatch(layer)
            case Stage.EXPERTS:
                self._experts(w)
            case Stage.RECEIVE:
                self.x = yield from self._receive()

    def _call(self, name: str, op: Any, *arguments: Any, **options: Any) -> Any:
        if self.noted is not None:
            self.noted.setdefault(name, []).append((op, arguments, options))
        return op(*arguments, **options)

    def _project(self, w: LayerWeights, layer: int) -> Tensor:
        """Up to the absorbed query [rows, heads, latent width]; writes the latents."""
        kit, ops, c, pages = self.kit, self.kit.ops, self.kit.config, self.pages
        lora = c.q_lora_rank or 0
        rows, _ = self._call(
            "input_norm",
            ops.add_rms_norm_quantise,
            self.x,
            self.residual,
            w.input_norm,
            c.rms_norm_eps,
        )
        both = self._call("qkv_a", ops.fp8_gemm, rows, w.qkv_a)
        low, _ = self._call(
            "q_norm", ops.rms_norm_quantise, both[:, :lora], w.q_norm, LATENT_NORM_EPS
        )
        query = self._call("q_b", ops.fp8_gemm, low, w.q_b).view(-1, self.heads, c.qk_head_dim)
        nope = c.qk_nope_head_dim
        rotated = self._call(
            "rope_append",
            ops.rope_append,
            query[..., nope:],
            both[:, lora:],
            w.kv_norm,
            kit.table.cos,
            kit.table.sin,
            pages.positions,
            pages.slots,
            pages.pool,
            layer,
            interleave=kit.table.interleave,
            eps=LATENT_NORM_EPS,
        )
        return self._call("absorb", ops.absorb_query, query[..., :nope], w.key, rotated, 1.0)

    def _attend(self, w: LayerWeights, layer: int) -> Steps:
        """From the query to the post norm, over all heads of the group."""
        ops, c, pages = self.kit.ops, self.kit.config, self.pages
        seen = self._call(
            "mla",
            ops.mla_decode,
            self._query,
            pages.pool[:, layer],
            pages.table,
            pages.lengths,
            QUERY,
            softmax_scale(c),
            rank=c.kv_lora_rank,
            **self._plan,
        )
        rows = self._call("values", ops.project_values_quantise, seen, w.value)
        out = self._call("o_proj", ops.fp8_gemm, rows, w.o_proj)
        if self.kit.tp > 1:
            out = yield Sum(out)
        self._rows, self._normed = self._call(
            "post_norm",
            ops.add_rms_norm_quantise,
            out,
            self.residual,
            w.post_norm,
            c.rms_norm_eps,
        )

    def _part(self, x: Tensor) -> Tensor:
        """The member's share of rows, zeros behind the last."""
        return F.pad(x, (0, 0, 0, self._padded))[self._mine] if self.kit.tp > 1 else x

    def _choose(self, w: LayerWeights, layer: int) -> None:
        """The member's share of rows, and which experts they are for."""
        kit, rule = self.kit, self.kit.config.gate
        self._sent = self._part(self._normed)
        found = self._call("gate", kit.ops.gate_topk, self._sent, w.gate, w.bias, rule)
        ids, self._weights = found.ids, found.weights
        if kit.even is not None:
            ids = kit.even[layer, self._drawn]
        if self.real < self.share:
            ids = ids.masked_fill(self._none, -1)
        self._ids = ids

    def _shared_expert(self, w: LayerWeights) -> Tensor:
        ops = self.kit.ops
        assert w.shared_up is not None
        assert w.shared_down is not None
        rows = self._rows if self.kit.tp == 1 else ops.quantise_rows(self._sent)
        both = self._call("shared_up", ops.fp8_gemm, rows, w.shared_up)
        middle = self._call("shared_act", ops.silu_mul_quantise, both)
        return self._call("shared_down", ops.fp8_gemm, middle, w.shared_down)

    def _dispatch(self, layer: int) -> None:
        channel = Channel("dispatch", 0, layer, self.number)
        self._handle = self.kit.exchange.dispatch_send(channel, 0, self._sent, self._ids)

    def _experts(self, w: LayerWeights) -> None:
        kit, ops = self.kit, self.kit.ops
        received = kit.exchange.dispatch_recv(self._handle)
        assert isinstance(received, ReceivedMasked)
        rows, counts, _ = received.arrived
        size = kit.exchange.size
        sent = self.share * size.top_k
        expected = max(1, sent // size.slots)
        both = self._call("routed_up", ops.masked_grouped_gemm, rows, w.up, counts, expected)
        middle = self._call("routed_act", ops.masked_silu_mul_quantise, both, counts)
        made = self._call("routed_down", ops.masked_grouped_gemm, middle, w.down, counts, expected)
        self._back = kit.exchange.combine_send(self._handle, received, made)

    def _receive(self) -> Generator[Sum | Gather, Tensor, Tensor]:
        done = self.kit.exchange.combine_recv(self._back, self._weights, self._shared)
        if self.kit.tp == 1:
            return done
        whole = yield Gather(done)
        return whole[: self.start.shape[0]]

    def _dense(self, w: LayerWeights, layer: int) -> Steps:
        self._query = self._project(w, layer)
        yield from self._attend(w, layer)
        ops = self.kit.ops
        rows: Rows = self._rows if self.kit.tp == 1 else ops.quantise_rows(self._part(self._normed))
        middle = self._call(
            "dense_act",
            ops.silu_mul_quantise,
            self._call("dense_up", ops.fp8_gemm, rows, w.up),
        )
        done = self._call("dense_down", ops.fp8_gemm, middle, w.down)
        self.x = done if self.kit.tp == 1 else (yield Gather(done))[: self.start.shape[0]]


def flows_of(kit: Kit, pages: Pages, start: Tensor, mode: Mode) -> dict[int, Flow]:
    """The microbatches of a mode."""
    batch = start.shape[0] // QUERY
    if mode != "microbatch":
        return {WHOLE: Flow(kit, pages, WHOLE, start)}
    cut = halves(batch)[0]
    return {
        number: Flow(
            kit, pages.part(b, e), number, start[b * QUERY : e * QUERY], -(-b * QUERY // kit.tp)
        )
        for number, (b, e) in enumerate(((0, cut), (cut, batch)))
    }


def schedule_of(dense: int, moe: int, mode: Mode) -> tuple[Item, ...]:
    """Dense layers, which run on each microbatch by itself, then MoE layers."""
    return plan_schedule([(n, n >= dense) for n in range(dense + moe)], mode)


def chosen(flows: Mapping[int, Flow], item: Item) -> list[Flow]:
    """The flows that an item of the schedule is for."""
    return [flows[item.microbatch]] if item.microbatch in flows else list(flows.values())


def drive(
    flows: Mapping[int, Flow],
    schedule: Sequence[Item],
    together: Callable[[Sum | Gather], Tensor],
) -> list[Tensor]:
    """A step of this rank: [rows, hidden] of each flow."""
    for flow in flows.values():
        flow.begin()
    for item in schedule:
        for flow in chosen(flows, item):
            steps = flow.run(item.stage, item.layer)
            wanted = next(steps, None)
            while wanted is not None:
                try:
                    wanted = steps.send(together(wanted))
                except StopIteration:
                    wanted = None
    return [flow.hidden() for flow in flows.values()]

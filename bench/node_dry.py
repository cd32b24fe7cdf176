"""The node's step without a GPU: tiny sizes, ranks of one process, definitions in plain torch.

Dispatch and combine are the real kernels in Triton's interpreter over symmetric heaps of one
process; all else is what the definitions of `pdmesh.kernels` give. Compared are the modes with each
other and with layers that know nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from node_layer import Flow, Gather, Kit, Sum, chosen, flows_of, schedule_of
from node_plan import PAGE, QUERY, Cell, exchange_size, modes_of
from node_weights import (
    Ends,
    LayerWeights,
    Pages,
    even_choices,
    first_heads,
    random_layer,
)
from torch import Tensor

from pdmesh.kernels.backends import PLAIN, Backends, Choice
from pdmesh.kernels.quantised import BlockWeight, Rows
from pdmesh.kernels.symmetric import in_process_heaps
from pdmesh.model.config import ModelConfig
from pdmesh.model.device.full_width import DEEPSEEK_V3 as PUBLISHED
from pdmesh.model.mla import LATENT_NORM_EPS
from pdmesh.model.parallel.nvshmem import NvshmemExperts
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable
from pdmesh.model.parallel.schedule import Item, Mode
from pdmesh.model.rope import rope_table, softmax_scale

CPU = torch.device("cpu")
TOLERANCE = 2e-2
"""Of the Frobenius norm; 0 is what is found where products do not depend on the number of rows."""
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 8192,
}


def tiny_config() -> ModelConfig:
    """Aligned like the published shapes, and small."""
    return ModelConfig.from_hf(PUBLISHED | TINY)


def plain_ops() -> Backends:
    """The definitions."""
    return Backends([Choice(op, "torch", "plain torch", call) for op, call in PLAIN.items()])


@dataclass
class DryNode:
    """Ranks of one process and a cell."""

    config: ModelConfig
    ranks: int
    cell: Cell
    dense: int
    moe: int
    kv: int
    kits: list[Kit]
    starts: list[Tensor]

    @staticmethod
    def make(
        ranks: int, cell: Cell, dense: int = 1, moe: int = 2, kv: int = 70, even: bool = False
    ) -> DryNode:
        config, ops = tiny_config(), plain_ops()
        size = exchange_size(config, ranks, cell.share, even=False)
        tables = [ReplicaTable.build(Placement.even(1, config.n_routed_experts, ranks), 0)]
        rope, ends, kits, starts = rope_table(config, CPU), Ends.random(config, CPU), [], []
        for rank, heap in enumerate(in_process_heaps(ranks)):
            weights = [
                first_heads(
                    random_layer(config, ranks, rank, layer, CPU, dense=layer < dense),
                    config,
                    cell.tp,
                )
                for layer in range(dense + moe)
            ]
            exchange = NvshmemExperts(heap, tables, size, lanes=2, timeout_s=4)
            drawn = even_choices(config, dense + moe, cell.share + 1, rank, CPU) if even else None
            kits.append(Kit(config, ops, rope, exchange, cell.tp, rank % cell.tp, weights, drawn))
            starts.append(ends.start(cell.tokens, seed=rank // cell.tp))
        return DryNode(config, ranks, cell, dense, moe, kv, kits, starts)

    def pages(self, rank: int) -> Pages:
        """Latents, alike within a group."""
        layers = self.dense + self.moe
        return Pages(self.config, self.cell.batch, self.kv, layers, rank // self.cell.tp, CPU)

    def step(self, mode: Mode) -> list[Tensor]:
        """[rows, hidden] of every rank."""
        flows = [
            flows_of(kit, self.pages(rank), self.starts[rank], mode)
            for rank, kit in enumerate(self.kits)
        ]
        for item in schedule_of(self.dense, self.moe, mode):
            self._item(flows, item)
        for kit in self.kits:
            kit.exchange.check()
        return [torch.cat([flow.hidden() for flow in mine.values()]) for mine in flows]

    def _item(self, flows: Sequence[Mapping[int, Flow]], item: Item) -> None:
        """All ranks up to where a group puts its parts together, then on."""
        for several in zip(*(chosen(mine, item) for mine in flows), strict=True):
            running = [flow.run(item.stage, item.layer) for flow in several]
            wanted = [next(steps, None) for steps in running]
            while any(one is not None for one in wanted):
                results = self._together(wanted)
                wanted = [
                    _sent(steps, result) for steps, result in zip(running, results, strict=True)
                ]

    def _together(self, wanted: Sequence[Sum | Gather | None]) -> list[Tensor]:
        results: list[Tensor] = []
        for first in range(0, self.ranks, self.cell.tp):
            group = wanted[first : first + self.cell.tp]
            parts = [one.part for one in group if one is not None]
            if len(parts) < len(group):
                raise RuntimeError("members of a group are at different places")
            if isinstance(group[0], Sum):
                whole = torch.stack(parts).float().sum(0).to(torch.bfloat16)
            else:
                whole = torch.cat(parts)
            results += [whole.clone() for _ in group]
        return results

    def plain(self, group: int) -> Tensor:
        """[rows, hidden] of a group, by layers that know nothing of ranks; the router's choices."""
        members = self.kits[group * self.cell.tp : (group + 1) * self.cell.tp]
        pages = self.pages(group * self.cell.tp)
        residual = self.starts[group * self.cell.tp].clone()
        x = torch.zeros_like(residual)
        for layer in range(self.dense + self.moe):
            parts = [kit.weights[layer] for kit in members]
            x = self._plain_layer(parts, x, residual, pages, layer)
        return residual + x

    def _plain_layer(
        self, parts: Sequence[LayerWeights], x: Tensor, residual: Tensor, pages: Pages, layer: int
    ) -> Tensor:
        c, ops, w, table = self.config, self.kits[0].ops, parts[0], self.kits[0].table
        lora, nope = c.q_lora_rank or 0, c.qk_nope_head_dim
        rows, _ = ops.add_rms_norm_quantise(x, residual, w.input_norm, c.rms_norm_eps)
        both = ops.fp8_gemm(rows, w.qkv_a)
        low, _ = ops.rms_norm_quantise(both[:, :lora], w.q_norm, LATENT_NORM_EPS)
        query = ops.fp8_gemm(low, _joined([p.q_b for p in parts]))
        query = query.view(-1, c.num_attention_heads, c.qk_head_dim)
        rotated = ops.rope_append(
            query[..., nope:], both[:, lora:], w.kv_norm, table.cos, table.sin, pages.positions,
            pages.slots, pages.pool, layer, interleave=table.interleave, eps=LATENT_NORM_EPS,
        )  # fmt: skip
        absorbed = ops.absorb_query(
            query[..., :nope], _joined([p.key for p in parts]), rotated, 1.0
        )
        seen = ops.mla_decode(
            absorbed, pages.pool[:, layer], pages.table, pages.lengths, QUERY, softmax_scale(c),
            rank=c.kv_lora_rank,
        )  # fmt: skip
        values = ops.project_values_quantise(seen, _joined([p.value for p in parts]))
        out = _summed(ops, values, [p.o_proj for p in parts])
        rows, normed = ops.add_rms_norm_quantise(out, residual, w.post_norm, c.rms_norm_eps)
        if w.gate is None:
            return _mlp(ops, rows, w.up, w.down)
        found = ops.gate_topk(normed, w.gate, w.bias, c.gate)
        total = torch.zeros(normed.shape, dtype=torch.float32)
        held = c.n_routed_experts // self.ranks
        for column in range(found.ids.shape[1]):
            for row, expert in enumerate(found.ids[:, column].tolist()):
                there = self.kits[expert // held].weights[layer]
                one = Rows(rows.values[row : row + 1], rows.scales[row : row + 1])
                up, down = (
                    BlockWeight(m.values[expert % held], m.scales[expert % held])
                    for m in (there.up, there.down)
                )
                made = _mlp(ops, one, up, down)[0].float()
                total[row] += found.weights[row, column] * made
        assert w.shared_up is not None
        assert w.shared_down is not None
        return total.to(torch.bfloat16) + _mlp(ops, rows, w.shared_up, w.shared_down)


def _sent(steps: Any, result: Tensor) -> Any:
    try:
        return steps.send(result)
    except StopIteration:
        return None


def _joined(parts: Sequence[BlockWeight], dim: int = 0) -> BlockWeight:
    """Heads of several ranks in one matrix."""
    values = torch.cat([part.values.view(torch.uint8) for part in parts], dim=dim)
    scales = torch.cat([part.scales for part in parts], dim=dim)
    return BlockWeight(values.view(torch.float8_e4m3fn), scales)


def _summed(ops: Backends, rows: Rows, parts: Sequence[BlockWeight]) -> Tensor:
    """The members' products, each rounded as it is before it goes over NVLink, and their sum."""
    values, scales = rows.values.chunk(len(parts), 1), rows.scales.chunk(len(parts), 1)
    products = [
        ops.fp8_gemm(Rows(v.contiguous(), s), w)
        for v, s, w in zip(values, scales, parts, strict=True)
    ]
    return torch.stack(products).float().sum(0).to(torch.bfloat16)


def _mlp(ops: Backends, rows: Rows, up: BlockWeight, down: BlockWeight) -> Tensor:
    output: Tensor = ops.fp8_gemm(ops.silu_mul_quantise(ops.fp8_gemm(rows, up)), down)
    return output


def distance(got: Tensor, wanted: Tensor) -> float:
    """Relative, of the Frobenius norm; infinite if anything is not finite."""
    far = (got.float() - wanted.float()).norm() / wanted.float().norm()
    return float(far) if bool(torch.isfinite(far)) else float("inf")


def check(node: DryNode) -> dict[str, float]:
    """By mode, the largest distance of any rank from the plain layers."""
    wanted = [node.plain(group) for group in range(node.ranks // node.cell.tp)]
    return {
        mode: max(
            distance(got, wanted[rank // node.cell.tp]) for rank, got in enumerate(node.step(mode))
        )
        for mode in modes_of(node.cell)
    }


def dry_run() -> bool:
    """Prints a line a node; whether all is right."""
    right = True
    for ranks, cell in ((1, Cell(1, 2)), (2, Cell(1, 3)), (2, Cell(2, 2)), (4, Cell(4, 1))):
        found = check(DryNode.make(ranks, cell))
        good = all(far <= TOLERANCE for far in found.values())
        right &= good
        words = ", ".join(f"{mode} {far:.1e}" for mode, far in found.items())
        print(
            f"{ranks} ranks TP{cell.tp} batch {cell.batch}: from plain layers {words}", flush=True
        )
    print(f"dry run: {'as it should be' if right else 'WRONG'}; pages of {PAGE}, {QUERY} rows")
    return right

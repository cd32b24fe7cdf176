"""What a node's decode pool is measured at, and what fits: pure, nothing is allocated here.

A *cell* is a width of tensor parallelism (TP) and a batch a GPU; it is measured in every mode. A
batch a GPU is the sequences whose latents the GPU holds: with TP, those of its group, whose members
hold the same latents and share the heads. A node of R GPUs then serves R / TP times the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import bounds

from pdmesh.kernels.expert_exchange import ExchangeSize
from pdmesh.model.config import ModelConfig
from pdmesh.model.parallel.schedule import Mode

PAGE = 64
QUERY, KV = 2, 5000
"""Rows of a sequence (one draft), latents of a sequence."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
WIDTHS = (1, 2, 4, 8)
MODES: tuple[Mode, ...] = ("dispatch_overlap", "microbatch", "no_overlap")
WHOLE_LAYERS = bounds.MOE_LAYERS + bounds.MTP_LAYERS
"""MoE layers of a step, the draft's among them."""
KEPT, RESERVE = 0.05, 6_000_000_000
"""Share of a device, and bytes, that are left to the driver, NCCL, libraries and NVSHMEM's heap."""
GB = 1e9


@dataclass(frozen=True)
class Cell:
    """A point of the grid: TP, and sequences a GPU."""

    tp: int
    batch: int

    @property
    def tokens(self) -> int:
        """Rows of a TP group."""
        return self.batch * QUERY

    @property
    def share(self) -> int:
        """Of these, the rows whose experts one member asks for."""
        return -(-self.tokens // self.tp)

    def requests(self, ranks: int) -> int:
        """Of the node."""
        return ranks // self.tp * self.batch


def halves(batch: int) -> tuple[int, int]:
    """Sequences of the two microbatches."""
    return batch - batch // 2, batch // 2


def modes_of(cell: Cell, modes: Sequence[Mode] = MODES) -> tuple[Mode, ...]:
    """One sequence cannot be two microbatches."""
    return tuple(mode for mode in modes if mode != "microbatch" or cell.batch > 1)


def grid(
    ranks: int, widths: Sequence[int] = WIDTHS, batches: Sequence[int] = BATCHES
) -> tuple[Cell, ...]:
    """The cells of a node in the order of importance.

    First those that the ends of the Pareto front are made of: the largest batch without TP, one
    sequence with all of it. Then the batches without TP, with the widest one, and with those
    between, where large batches come last: there TP only costs.
    """
    allowed = sorted(width for width in set(widths) if width <= ranks and ranks % width == 0)
    sizes = sorted(set(batches))
    if not allowed or not sizes:
        return ()
    low, wide = allowed[0], allowed[-1]
    order = [Cell(low, sizes[-1]), Cell(wide, sizes[0])]
    order += [Cell(low, batch) for batch in (*sizes[::-2], *sizes[-2::-2])]
    order += [Cell(wide, batch) for batch in sizes]
    order += [Cell(width, batch) for batch in sizes for width in allowed[1:-1]]
    return tuple(dict.fromkeys(order))


def padded_rows(rows: int) -> int:
    """A tile of a grouped product may be of 128 rows and must not reach the next expert's."""
    return 64 if rows <= 64 else -(-rows // 128) * 128


def exchange_size(config: ModelConfig, ranks: int, share: int, even: bool = True) -> ExchangeSize:
    """Of a cell's exchange.

    Args:
        share: rows that a rank dispatches.
        even: experts are drawn evenly at random, so a third and six standard deviations above the
            mean is room enough; else there is room for every row of every rank.
    """
    gate = config.gate
    assert gate is not None
    mean = ranks * share * gate.top_k / config.n_routed_experts
    most = min(ranks * share, int(1.33 * mean + 6 * mean**0.5 + 16)) if even else ranks * share
    slots = config.n_routed_experts // ranks
    return ExchangeSize(ranks, slots, share, config.hidden_size, gate.top_k, padded_rows(most))


def symmetric_bytes(size: ExchangeSize) -> int:
    """Of one lane with every peer mapped: signals, inboxes by parity and peer, returned outputs."""
    parts = [2 * size.ranks * 8] * 2 + [size.ranks * 8, 2 * size.ranks * size.slots * 4]
    parts += [size.ranks * size.slots * 4, 8, 2 * size.ranks * size.inbox_bytes]
    parts += [size.tokens * size.top_k * size.hidden * 2]
    return sum(-(-part // 128) * 128 for part in parts)


def exchange_bytes(size: ExchangeSize, lanes: int = 2) -> int:
    """Symmetric memory, and the masked layout that rows arrive in (FP8) and leave in (bfloat16)."""
    rows = size.slots * size.max_rows
    return lanes * (symmetric_bytes(size) + rows * (3 * size.hidden + size.hidden // 32 + 4))


def _blocks(n: int, k: int) -> int:
    """A matrix in FP8 with its scales."""
    return n * k + 4 * -(-n // 128) * -(-k // 128)


def attention_bytes(c: ModelConfig) -> int:
    """Projections of one layer, all heads, and the two norms around it."""
    heads, lora = c.num_attention_heads, c.q_lora_rank or 0
    up = c.kv_lora_rank
    total = _blocks(lora + c.latent_width, c.hidden_size) + _blocks(heads * c.qk_head_dim, lora)
    total += heads * (_blocks(up, c.qk_nope_head_dim) + _blocks(c.v_head_dim, up))
    return (
        total + _blocks(c.hidden_size, heads * c.v_head_dim) + 2 * (2 * c.hidden_size + lora + up)
    )


def _mlp(c: ModelConfig, width: int) -> int:
    return _blocks(2 * width, c.hidden_size) + _blocks(c.hidden_size, width)


def moe_layer_bytes(c: ModelConfig, ranks: int) -> int:
    """A MoE layer of one rank: a share of the routed experts, all else whole."""
    experts = c.n_routed_experts // ranks * _mlp(c, c.moe_intermediate_size)
    router = 4 * c.n_routed_experts * (c.hidden_size + 1)
    return attention_bytes(c) + experts + _mlp(c, c.moe_intermediate_size) + router


def dense_layer_bytes(c: ModelConfig) -> int:
    """A layer without experts."""
    return attention_bytes(c) + _mlp(c, c.intermediate_size)


def ends_bytes(c: ModelConfig) -> int:
    """Embedding, head and the draft's projection in bfloat16."""
    return 2 * c.hidden_size * (2 * c.vocab_size + 2 * c.hidden_size + 4)


def latent_bytes(c: ModelConfig, batch: int, kv: int = KV) -> int:
    """One layer's latents in bfloat16, whole pages."""
    return batch * -(-kv // PAGE) * PAGE * c.latent_width * 2


def working_bytes(c: ModelConfig, size: ExchangeSize, cell: Cell) -> int:
    """What is computed on the way, generously: eager, and once more in a graph's own memory."""
    heads = c.num_attention_heads // cell.tp
    attention = (
        2 * cell.tokens * heads * (2 * c.qk_head_dim + 2 * c.latent_width + 2 * c.v_head_dim)
    )
    routed = size.slots * size.max_rows * (5 * c.moe_intermediate_size + 2 * c.hidden_size)
    dense = cell.tokens * (24 * c.hidden_size + 6 * c.intermediate_size)
    return 2 * (attention + routed + dense) + 10 * cell.tokens * c.vocab_size


@dataclass(frozen=True)
class CellPlan:
    """What a cell runs.

    Attributes:
        moe: layers with experts that its latents leave room for; 0: it does not fit.
        whole: all layers of the model fit: it can be served, not only measured.
        needs: bytes of the cell with these layers, weights included.
        note: for the table, if it is not whole.
    """

    cell: Cell
    moe: int
    whole: bool
    needs: int
    note: str = ""


@dataclass(frozen=True)
class NodePlan:
    """What a node runs: the same on every rank.

    Attributes:
        budget: bytes of a device that may be used.
        moe, dense: layers whose weights are made.
        weights: their bytes, embedding and head included.
        cells: in the order of importance.
    """

    ranks: int
    budget: int
    moe: int
    dense: int
    weights: int
    cells: tuple[CellPlan, ...]

    def describe(self) -> str:
        """What is printed before anything is allocated."""
        lines = [
            f"{self.ranks} GPUs, {self.budget / GB:.1f} GB usable of each: weights of {self.dense}"
            f" dense and {self.moe} MoE layers (of {bounds.DENSE_LAYERS} and {WHOLE_LAYERS}),"
            f" embedding and head {self.weights / GB:.1f} GB"
        ]
        if not self.moe:
            lines.append("not even one MoE layer fits: nothing will be measured")
        for plan in self.cells:
            if plan.note and (self.moe == WHOLE_LAYERS or plan.moe < self.moe):
                lines.append(f"  TP{plan.cell.tp} batch {plan.cell.batch}: {plan.note}")
        return "\n".join(lines)


def usable(total: int, free: int) -> int:
    """Bytes of a device for this process, of all and of those that are free."""
    return max(0, min(int(total * (1 - KEPT)), free) - RESERVE)


def plan_node(
    config: ModelConfig,
    ranks: int,
    budget: int,
    cells: Sequence[Cell],
    layers: int | None = None,
    kv: int = KV,
    even: bool = True,
) -> NodePlan:
    """Layers and cells that fit.

    Args:
        config: the shapes; its number of layers does not matter.
        budget: bytes of a device, see `usable`.
        layers: MoE layers; None: all if there is room for them with some cell of 32 sequences or
            of the largest batch below, else as many as there is room for with the largest cell.
    """
    moe_each, dense_each = moe_layer_bytes(config, ranks), dense_layer_bytes(config)

    def extra(cell: Cell) -> int:
        size = exchange_size(config, ranks, cell.share, even)
        return exchange_bytes(size) + working_bytes(config, size, cell)

    def weights(moe: int, dense: int) -> int:
        return ends_bytes(config) + moe * moe_each + dense * dense_each

    def fitting(cell: Cell, moe: int, dense: int) -> int:
        """MoE layers whose latents fit beside the weights of `moe`."""
        each = latent_bytes(config, cell.batch, kv)
        room = budget - weights(moe, dense) - extra(cell) - dense * each
        return max(0, min(moe, room // each))

    def most(cell: Cell) -> int:
        each = moe_each + latent_bytes(config, cell.batch, kv)
        room = budget - weights(0, 1) - extra(cell) - latent_bytes(config, cell.batch, kv)
        return max(0, min(WHOLE_LAYERS, room // each))

    whole, dense = WHOLE_LAYERS, bounds.DENSE_LAYERS
    if layers is None:
        ordered = sorted(cells, key=lambda cell: (cell.batch, -cell.tp))
        served = [c for c in ordered if c.batch <= 32] or ordered[:1]
        if served and fitting(served[-1], whole, dense) == whole:
            layers = whole
        else:
            layers = next((n for c in reversed(ordered) if (n := most(c))), 0)
    layers = min(layers, whole)
    dense = dense if layers == whole else 1
    plans = []
    for cell in cells:
        fits = fitting(cell, layers, dense) if layers else 0
        # Whether the whole model could be served at this batch, measured or not.
        served_whole = fitting(cell, whole, bounds.DENSE_LAYERS) == whole
        needs = weights(layers, dense) + extra(cell)
        needs += (dense + max(fits, 1)) * latent_bytes(config, cell.batch, kv)
        note = "" if served_whole else "the whole model does not fit at this batch"
        if not fits:
            short = max(0, needs - budget)
            note = f"does not fit: needs {needs / GB:.1f} GB, {short / GB:.1f} more than there is"
        elif fits < layers:
            note += f"; {fits} of {layers} layers measured"
        plans.append(CellPlan(cell, fits, served_whole, needs, note))
    return NodePlan(ranks, budget, layers, dense, weights(layers, dense), tuple(plans))


def goes_on(began: float, now: float, budget_s: float, last_s: float, kept_s: float = 15.0) -> bool:
    """Whether another cell, like the last, ends within the budget with `kept_s` left to finish."""
    return now - began + 1.25 * last_s + kept_s <= budget_s


def product_shapes(config: ModelConfig, cells: Sequence[Cell], ranks: int) -> list[tuple[int, ...]]:
    """(experts or 0, rows, n, k) of the products of these cells, for compilers to begin with."""
    c = config
    lora, h = c.q_lora_rank or 0, c.hidden_size
    found: dict[tuple[int, ...], None] = {}
    for cell in cells:
        for batch in dict.fromkeys((cell.batch, *halves(cell.batch))):
            one = Cell(cell.tp, batch)
            if not batch:
                continue
            heads = c.num_attention_heads // cell.tp
            whole = [(lora + c.latent_width, h), (heads * c.qk_head_dim, lora)]
            whole += [(h, heads * c.v_head_dim)]
            up, down = (2 * c.moe_intermediate_size, h), (h, c.moe_intermediate_size)
            dense = [(2 * c.intermediate_size, h), (h, c.intermediate_size)]
            found |= dict.fromkeys((0, one.tokens, *shape) for shape in whole)
            found |= dict.fromkeys((0, one.share, *shape) for shape in (up, down, *dense))
        size = exchange_size(config, ranks, cell.share)
        found |= dict.fromkeys((size.slots, size.max_rows, *shape) for shape in (up, down))
    return list(found)

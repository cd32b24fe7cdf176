"""What fits on a device, counted before anything is allocated. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.model.config import ModelConfig
from pdmesh.model.device.weights import round_up
from pdmesh.wire.errors import ConfigError

GB = 1e9
KEPT = 0.05
"""Share of a device's memory that is left to the driver, libraries and fragments."""


def _blocks(rows: int, columns: int) -> int:
    """Bytes of a matrix in FP8 with its scales."""
    return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)


def weight_bytes(config: ModelConfig, mtp: bool = True, slots: int | None = None) -> int:
    """Bytes of the weights as `building` puts them together, with so many routed experts a layer
    (None: all)."""
    c = config
    layers = range(c.num_hidden_layers + (1 if mtp and c.num_nextn_predict_layers else 0))
    table = 2 * c.vocab_size * c.hidden_size
    total = table if c.tie_word_embeddings else 2 * table
    if len(layers) > c.num_hidden_layers:
        total += 4 * c.hidden_size * c.hidden_size
    return total + sum(_attention_bytes(c) + _mlp_bytes(c, layer, slots) for layer in layers)


def _attention_bytes(c: ModelConfig) -> int:
    heads = c.num_attention_heads
    query = heads * c.qk_head_dim
    first = query if c.q_lora_rank is None else c.q_lora_rank
    total = _blocks(round_up(first) + c.latent_width, c.hidden_size)
    if c.q_lora_rank is not None:
        total += _blocks(query, c.q_lora_rank)
    up = _blocks(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    aligned = c.qk_nope_head_dim % 128 == 0 and c.v_head_dim % 128 == 0
    return total + (2 if aligned else 3) * up + _blocks(c.hidden_size, heads * c.v_head_dim)


def _mlp_bytes(c: ModelConfig, layer: int, slots: int | None) -> int:
    def swiglu(size: int) -> int:
        return _blocks(2 * round_up(size), c.hidden_size) + _blocks(c.hidden_size, round_up(size))

    if not c.is_moe_layer(layer):
        return swiglu(c.intermediate_size)
    shared = swiglu(c.moe_intermediate_size * c.n_shared_experts) if c.n_shared_experts else 0
    router = 4 * c.n_routed_experts * c.hidden_size
    held = c.n_routed_experts if slots is None else slots
    return held * swiglu(c.moe_intermediate_size) + shared + router


def plain_weight_bytes(
    config: ModelConfig, mtp: bool, value_bytes: int, ranks: int = 1, redundant: int = 0
) -> int:
    """Bytes of the weights as `DeepseekV3` has them, in a dtype of so many bytes.

    Args:
        ranks, redundant: a process has an even part of the routed experts and of so many copies.
    """
    c, hidden = config, config.hidden_size
    heads, first = c.num_attention_heads, c.q_lora_rank or c.num_attention_heads * c.qk_head_dim
    attention = hidden * (first + c.latent_width + heads * c.v_head_dim)
    attention += (c.q_lora_rank or 0) * heads * c.qk_head_dim
    attention += heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    held = -(-(c.n_routed_experts + redundant) // ranks)
    expert = 3 * hidden * c.moe_intermediate_size
    extra = 1 if mtp and c.num_nextn_predict_layers else 0
    total = c.vocab_size * hidden * (1 if c.tie_word_embeddings else 2) + extra * 2 * hidden**2
    routers = 0
    for layer in range(c.num_hidden_layers + extra):
        total += attention
        if c.is_moe_layer(layer):
            total += expert * (held + c.n_shared_experts)
            routers += 4 * c.n_routed_experts * hidden
        else:
            total += 3 * hidden * c.intermediate_size
    return value_bytes * total + routers


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on a device.

    Attributes:
        budget: what this process may use.
        weights, steps: what weights and steps need.
        pages: number of pages that are allocated.
        page: bytes of one.
        shared: bytes of weights that another process holds for all on the device, beside `budget`.
    """

    budget: int
    weights: int
    steps: int
    pages: int
    page: int
    shared: int = 0

    def describe(self) -> str:
        """One line for the log."""
        kept = self.pages * self.page
        needed = self.weights + self.steps + kept
        weights = f"weights {self.weights / GB:.1f}"
        if self.shared:
            weights = f"weights shared (one copy of {self.shared / GB:.1f} GB besides)"
        return (
            f"{needed / GB:.1f} of {self.budget / GB:.1f} GB: {weights}, "
            f"steps {self.steps / GB:.1f}, {self.pages} pages {kept / GB:.1f}"
        )


def plan_memory(
    total: int,
    free: int,
    share: float,
    weights: int,
    steps: int,
    page: int,
    pages: int,
    most_pages: int,
    shared: int = 0,
) -> MemoryPlan:
    """How many pages a worker gets.

    Args:
        total: bytes of the device.
        free: of these, what nobody has taken yet.
        share: part of it that is this process's.
        weights, steps: bytes that they need.
        page: bytes of a page.
        pages: pages that were asked for; 0: as many as there is room for.
        most_pages: no more than these are of use.
        shared: bytes of weights that another process holds for all that are on the device: what
            they leave of `total` is shared, and they are not in `free`.

    Raises:
        ConfigError: it does not fit.
    """
    budget = max(0, min(int(total * share * (1 - KEPT)) - int(shared * share), free))
    room = budget - weights - steps
    fitting = room // page
    wanted = pages or min(fitting, most_pages)
    if fitting < max(2, wanted):
        needed = f"{max(2, wanted)} pages of {page / 1e6:.1f} MB"
        taken = f" beside {shared / GB:.1f} GB of shared weights" if shared else ""
        raise ConfigError(
            f"the model does not fit{taken}: weights need {weights / GB:.1f} GB, steps "
            f"{steps / GB:.1f} GB and {needed}, and this worker may use {budget / GB:.1f} GB of "
            f"the device's {total / GB:.1f}, of which {free / GB:.1f} are free; use fewer workers "
            "on a device, fewer pages, a smaller batch, or more devices"
        )
    return MemoryPlan(budget, weights, steps, wanted, page, shared)


def check_all_fit(plans: Sequence[tuple[int, MemoryPlan]], free: int) -> None:
    """Looks at all workers of one device together.

    Args:
        plans: how many workers, and the plan of each.
        free: bytes that nobody has taken yet.

    Raises:
        ConfigError: with two pages each they do not fit.
    """
    workers = sum(count for count, _ in plans)
    needed = sum(count * (plan.weights + plan.steps + 2 * plan.page) for count, plan in plans)
    shared = max((plan.shared for _, plan in plans), default=0)
    needed += shared
    if needed > free:
        what = "one copy of the weights, and steps" if shared else "weights, steps"
        raise ConfigError(
            f"{workers} workers need {needed / GB:.1f} GB for {what} and two pages each, "
            f"and {free / GB:.1f} GB of the device are free; use fewer workers, a smaller batch, "
            "or end what takes the rest"
        )

"""The choice of experts from logits that a program holds; used by the gate's kernels.

Definition: `pdmesh.kernels.gate.choose_experts`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.triton.launch import power_of_two

NONE = tl.constexpr(-(2**31))
"""Below the key of any number, minus infinity included."""


@triton.jit
def key_of(value):
    """float32 to int32 in the same order, -0 equal to 0 and NaN largest."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def value_of(key):
    """What `key_of` made the key from."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def expert_columns(
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
):
    """[1, columns]: the expert of each column, groups padded to SIZE_PADDED, and if it exists."""
    column = tl.arange(0, GROUPS_PADDED * SIZE_PADDED)[None, :]
    group, number = column // SIZE_PADDED, column % SIZE_PADDED
    return group * SIZE + number, (group < GROUPS) & (number < SIZE)


@triton.jit
def choose_rows(
    logits,
    correction,
    inside,
    scale,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
):
    """Experts and weights [ROWS, TOP_PADDED] for logits [ROWS, columns] float32.

    correction: [1, columns] float32, added for the choice. inside: [1, columns], as
    `expert_columns` gives it.
    """
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = scores + correction
    else:
        logits = tl.where(inside, logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = scores / tl.sum(scores, axis=1)[:, None]
        choice = scores
    column = tl.arange(0, GROUPS_PADDED * SIZE_PADDED)[None, :]
    keys = tl.where(inside, key_of(choice), NONE)
    if TOP_GROUPS < GROUPS:
        cube = tl.reshape(keys, (ROWS, GROUPS_PADDED, SIZE_PADDED))
        first = tl.max(cube, axis=2)
        rank = value_of(first)
        if SIGMOID:
            equals = tl.sum((cube == first[:, :, None]).to(tl.int32), axis=2)
            second = tl.max(tl.where(cube < first[:, :, None], cube, NONE), axis=2)
            rank += value_of(tl.where(equals > 1, first, second))
        group = tl.arange(0, GROUPS_PADDED)[None, :]
        order = tl.where(group < GROUPS, key_of(rank), NONE)
        mine, other = order[:, :, None], order[:, None, :]
        ahead = (other > mine) | ((other == mine) & (group[:, None, :] < group[:, :, None]))
        kept = tl.sum(ahead.to(tl.int32), axis=2) < TOP_GROUPS
        least = tl.where(cube == NONE, NONE, key_of(tl.full((1, 1, 1), float("-inf"), tl.float32)))
        keys = tl.reshape(
            tl.where(kept[:, :, None], cube, least), (ROWS, GROUPS_PADDED * SIZE_PADDED)
        )
    place = tl.arange(0, TOP_PADDED)[None, :]
    chosen = tl.zeros((ROWS, TOP_PADDED), dtype=tl.int32)
    for i in tl.static_range(TOP):
        # Reductions of 32-bit integers over a warp are one instruction.
        best = tl.max(keys, axis=1)[:, None]
        at = tl.min(tl.where(keys == best, column, 65535), axis=1)[:, None]
        chosen = tl.where(place == i, at, chosen)
        keys = tl.where(column == at, NONE, keys)
    weights = tl.where(place < TOP, tl.gather(scores, chosen, axis=1), 0.0)
    if NORMALISE:
        weights = weights / (tl.sum(weights, axis=1)[:, None] + 1e-20)
    return (chosen // SIZE_PADDED) * SIZE + chosen % SIZE_PADDED, weights * scale


def rule_constants(rule: GateRule) -> dict[str, Any]:
    """The constants of `choose_rows`, but for ROWS."""
    limited = rule.top_groups < rule.num_groups
    size = rule.num_experts // rule.num_groups if limited else rule.num_experts
    groups = rule.num_experts // size
    return {
        "SIGMOID": rule.method == "noaux_tc",
        "NORMALISE": rule.normalise,
        "TOP": rule.top_k,
        "TOP_PADDED": power_of_two(rule.top_k),
        "GROUPS": groups,
        "GROUPS_PADDED": power_of_two(groups),
        "TOP_GROUPS": rule.top_groups if limited else 1,
        "SIZE": size,
        "SIZE_PADDED": power_of_two(size),
    }

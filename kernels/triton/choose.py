"""The choice of experts from logits that a program holds; used by the gate's kernels.

Definition: `pdmesh.kernels.gate.choose_experts`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.triton.launch import power_of_two

NONE = tl.constexpr(-(2**63))


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
def pack(key, number):
    """int64 that is larger for a larger key, and for a smaller number where keys are equal."""
    return (key.to(tl.int64) << 16) | (65535 - number).to(tl.int64)


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
    if TOP_GROUPS < GROUPS:
        packed = tl.where(inside, pack(key_of(choice), column), NONE)
        cube = tl.reshape(packed, (ROWS, GROUPS_PADDED, SIZE_PADDED))
        first = tl.max(cube, axis=2)
        rank = value_of((first >> 16).to(tl.int32))
        if SIGMOID:
            second = tl.max(tl.where(cube == first[:, :, None], NONE, cube), axis=2)
            rank += value_of((second >> 16).to(tl.int32))
        group = tl.arange(0, GROUPS_PADDED)[None, :]
        order = tl.where(group < GROUPS, pack(key_of(rank), group), NONE)
        better = tl.sum((order[:, None, :] > order[:, :, None]).to(tl.int32), axis=2)
        cube = tl.reshape(choice, (ROWS, GROUPS_PADDED, SIZE_PADDED))
        cube = tl.where((better < TOP_GROUPS)[:, :, None], cube, float("-inf"))
        choice = tl.reshape(cube, (ROWS, GROUPS_PADDED * SIZE_PADDED))
    packed = tl.where(inside, pack(key_of(choice), column), NONE)
    place = tl.arange(0, TOP_PADDED)[None, :]
    chosen = tl.zeros((ROWS, TOP_PADDED), dtype=tl.int32)
    for i in tl.static_range(TOP):
        best = tl.max(packed, axis=1)[:, None]
        chosen = tl.where(place == i, 65535 - (best & 65535).to(tl.int32), chosen)
        packed = tl.where(packed == best, NONE, packed)
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

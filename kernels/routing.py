"""Rows to experts and back, in plain torch: the gate, where its choices stand, and the layouts.

DeepSeek-V3 report (arXiv:2412.19437), section 2.1.2. Two layouts take the rows of experts: masked
[experts, max_rows], of which the first counts[e] rows of expert e are used, and contiguous, one
expert's rows after another's, each beginning at a multiple of 128.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.kernels.gate import GateRule, choose_experts
from pdmesh.kernels.linear import linear
from pdmesh.kernels.quantised import Rows, new_scales

ALIGNMENT = 128
"""An expert's rows begin at a multiple of this in the contiguous layout."""


class Places(NamedTuple):
    """Where choices stand among those of their expert.

    Attributes:
        counts: [experts] int32, choices of each expert.
        offsets: [experts] int32, choices of the experts before it.
        places: int32 in the shape of the ids: the number of the choice within its expert, in the
            order of the rows; -1 for an id below zero.
    """

    counts: Tensor
    offsets: Tensor
    places: Tensor


class Routing(NamedTuple):
    """What a gate decided.

    Attributes:
        ids: [m, k] int32, the experts of each row, best first; -1 in rows that do not count.
        weights: [m, k] float32; 0 in rows that do not count.
        counts, offsets, places: those of `Places`.
    """

    ids: Tensor
    weights: Tensor
    counts: Tensor
    offsets: Tensor
    places: Tensor


class Permuted(NamedTuple):
    """Rows in a layout of experts.

    Attributes:
        rows: masked [experts, max_rows, k] or contiguous [capacity, k]; what no choice stands in is
            undefined.
        targets: [m, k] int32, the flat row of each choice; -1 for none.
        row_expert: [capacity] int32, the expert of each row of the contiguous layout, -1 for
            padding; None in the masked layout.
    """

    rows: Rows
    targets: Tensor
    row_expert: Tensor | None


def gate_topk(
    x: Tensor, weight: Tensor, bias: Tensor | None, rule: GateRule, num_rows: Tensor | None = None
) -> Routing:
    """Projects rows to experts, chooses, and counts.

    Args:
        x: [m, hidden] bfloat16 or float32.
        weight: [experts, hidden] bfloat16 or float32; products are summed in float32.
        bias: [experts] float32, see `choose_experts`.
        rule: how experts are chosen.
        num_rows: int32 on the device, one number: rows from there on are padding and do not count;
            None: all rows count.
    """
    logits = linear(x.float(), weight.float())
    ids, weights = choose_experts(logits, None if bias is None else bias.float(), rule)
    if num_rows is not None:
        counts = (torch.arange(x.shape[0], device=x.device) < num_rows).unsqueeze(1)
        ids, weights = torch.where(counts, ids, -1), torch.where(counts, weights, 0.0)
    return Routing(ids.int(), weights, *place_choices(ids, rule.num_experts))


def place_choices(ids: Tensor, num_experts: int) -> Places:
    """Counts the choices ids [m, k] of each expert and numbers them in the order of the rows.

    An id below zero stands for no choice.
    """
    hits = ids.flatten().unsqueeze(1) == torch.arange(num_experts, device=ids.device)
    numbers = (hits.cumsum(dim=0) * hits).sum(dim=1) - 1
    counts = hits.sum(dim=0)
    offsets = counts.cumsum(dim=0) - counts
    return Places(counts.int(), offsets.int(), numbers.int().view_as(ids))


def contiguous_capacity(rows: int, choices: int, num_experts: int) -> int:
    """Rows that the contiguous layout of `rows` x `choices` needs at most."""
    most = rows * choices
    return -(-(most + min(num_experts, most) * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT


def permute_masked(x: Rows, ids: Tensor, places: Tensor, experts: int, max_rows: int) -> Permuted:
    """Copies rows to the masked layout.

    Args:
        x: [m, k] and its scales.
        ids: [m, choices] int32, -1 for none.
        places: [m, choices] int32, of `Places`; a choice at max_rows or beyond is left out.
        experts, max_rows: of the layout.
    """
    fits = (ids >= 0) & (places < max_rows)
    targets = torch.where(fits, ids * max_rows + places, -1)
    groups = x.scales.shape[1]
    values = x.values.new_empty((experts, max_rows, x.values.shape[1]))
    scales = new_scales(experts, max_rows, groups, device=x.values.device)
    row, choice = fits.nonzero(as_tuple=True)
    expert, place = ids[row, choice].long(), places[row, choice].long()
    values.view(torch.uint8)[expert, place] = x.values.view(torch.uint8)[row]
    scales[expert, place] = x.scales[row]
    return Permuted(Rows(values, scales), targets.int(), None)


def permute_contiguous(
    x: Rows, ids: Tensor, places: Tensor, counts: Tensor, capacity: int
) -> Permuted:
    """Copies rows to the contiguous layout.

    Args:
        x: [m, k] and its scales.
        ids: [m, choices] int32, -1 for none.
        places: [m, choices] int32, of `Places`.
        counts: [experts] int32, of `Places`.
        capacity: rows of the layout, a multiple of 128; see `contiguous_capacity`. A choice beyond
            it is left out.
    """
    padded = -(-counts.long() // ALIGNMENT) * ALIGNMENT
    starts = padded.cumsum(dim=0) - padded
    flat = torch.where(ids >= 0, starts[ids.clamp_min(0).long()] + places, -1)
    targets = torch.where(flat < capacity, flat, -1)
    values = x.values.new_empty((capacity, x.values.shape[1]))
    scales = new_scales(capacity, x.scales.shape[1], device=x.values.device)
    row, choice = (targets >= 0).nonzero(as_tuple=True)
    to = targets[row, choice]
    values.view(torch.uint8)[to] = x.values.view(torch.uint8)[row]
    scales[to] = x.scales[row]
    row_expert = torch.full((capacity,), -1, dtype=torch.int32, device=ids.device)
    row_expert[to] = ids[row, choice].int()
    return Permuted(Rows(values, scales), targets.int(), row_expert)


def unpermute(
    parts: Tensor, targets: Tensor, weights: Tensor, plus: Tensor | None = None
) -> Tensor:
    """The weighted sum of what the experts gave for each row.

    Args:
        parts: [rows, h] or [experts, max_rows, h] bfloat16, in the layout that `targets` is of.
        targets: [m, choices] int32, of `Permuted`; -1 adds nothing.
        weights: [m, choices] float32.
        plus: [m, h] bfloat16, what every row gets besides: that of the shared experts.

    Returns:
        [m, h] bfloat16, added in float32 in the order of the choices, a product rounded by itself;
        `plus` is added to the rounded sum.
    """
    flat = parts.reshape(-1, parts.shape[-1])
    total = torch.zeros((targets.shape[0], flat.shape[1]), device=flat.device)
    for choice in range(targets.shape[1]):
        at = targets[:, choice].long()
        part = flat[at.clamp_min(0)].float() * weights[:, choice, None]
        total = total + torch.where((at >= 0).unsqueeze(1), part, 0.0)
    summed = total.to(parts.dtype)
    return summed if plus is None else summed + plus

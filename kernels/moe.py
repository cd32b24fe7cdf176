"""Routed experts: rows sorted by expert, one product for each expert that has any."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.kernels.activation import silu_mul
from pdmesh.kernels.linear import padded_rows, reads_on


@dataclass(frozen=True)
class ExpertOrder:
    """Where each (token, choice) pair stands among rows grouped by expert.

    Attributes:
        slots: [n, k] int64, the grouped row of token i's choice j.
        groups: (expert, first row, row after the last) of each expert that has tokens; every share
            is padded to a multiple of four rows.
    """

    slots: Tensor
    groups: tuple[tuple[int, int, int], ...]

    @property
    def num_rows(self) -> int:
        """Rows in all, padding included."""
        return self.groups[-1][2] if self.groups else 0


def order_by_expert(ids: Tensor, num_experts: int) -> ExpertOrder:
    """Sort ids [n, k] by expert, stable, with each expert's rows padded."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    groups, shifts = [], [0] * num_experts
    begin = placed = 0
    for expert, count in enumerate(counts):
        if count:
            end = begin + padded_rows(count)
            groups.append((expert, begin, end))
            shifts[expert] = begin - placed
            begin, placed = end, placed + count
    shift = torch.tensor(shifts, device=ids.device).index_select(0, flat.index_select(0, order))
    rows = torch.arange(flat.shape[0], device=ids.device) + shift
    slots = torch.empty_like(rows).scatter_(0, order, rows)
    return ExpertOrder(slots.view_as(ids), tuple(groups))


def routed_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Weighted sum of the chosen experts' SwiGLU outputs.

    Args:
        x: [n, h].
        ids: [n, k] int64, the experts of each row, each at most once a row.
        weights: [n, k] float32.
        gate_up: [experts, 2 i, h], gate rows then up rows.
        down: [experts, h, i].

    Returns:
        [n, h] in x's dtype. The choices are added in the order of `ids` in float32, so a row's
        result depends on that row alone.
    """
    return weighted_sum(expert_outputs(x, ids, gate_up, down), weights)


def expert_outputs(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The chosen experts' SwiGLU outputs of each row, not added up: [n, k, h] in x's dtype.

    x, ids, gate_up and down are as in `routed_experts`. A result depends on its row and its expert
    alone, so it is the same wherever that expert and others are held.
    """
    order = order_by_expert(ids, gate_up.shape[0])
    grouped = x.new_zeros((order.num_rows, x.shape[1]))
    grouped.index_copy_(0, order.slots.flatten(), x.repeat_interleave(ids.shape[1], dim=0))
    hidden = silu_mul(_grouped_linear(grouped, gate_up, order))
    return _grouped_linear(hidden, down, order)[order.slots]


def weighted_sum(parts: Tensor, weights: Tensor, plus: Tensor | None = None) -> Tensor:
    """parts [n, k, h] times weights [n, k] float32, added in float32 in the order of k: [n, h].

    `plus` [n, h] of the same dtype is added to the sum in that dtype.
    """
    scaled = parts.float() * weights.unsqueeze(-1)
    total = scaled[:, 0]
    for choice in range(1, weights.shape[1]):
        total = total + scaled[:, choice]
    summed = total.to(parts.dtype)
    return summed if plus is None else summed + plus


def _grouped_linear(x: Tensor, weights: Tensor, order: ExpertOrder) -> Tensor:
    """x [rows, k], grouped by expert, times weights [experts, m, k] transposed: [rows, m]."""
    if reads_on(x):
        return _grouped_linear(x.float(), weights.float(), order).to(x.dtype)
    output = x.new_empty((x.shape[0], weights.shape[1]))
    for expert, begin, end in order.groups:
        torch.mm(x[begin:end], weights[expert].t(), out=output[begin:end])
    return output

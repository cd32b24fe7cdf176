"""Routed experts: rows sorted by expert, one grouped product for all experts of a layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.kernels.activation import silu_mul
from pdmesh.kernels.linear import ROW_MULTIPLE


@dataclass(frozen=True)
class ExpertOrder:
    """Where each (token, choice) pair stands among rows grouped by expert.

    Attributes:
        slots: [n, k] int64, the grouped row of token i's choice j.
        ends: [num_experts] int32, the row after the last of each expert's rows. Every expert's
            share is padded to a multiple of four rows; an expert without tokens has no rows.
        num_rows: rows in all.
    """

    slots: Tensor
    ends: Tensor
    num_rows: int


def order_by_expert(ids: Tensor, num_experts: int) -> ExpertOrder:
    """Sort ids [n, k] by expert, stable, with each expert's rows padded."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    padded = (counts + (ROW_MULTIPLE - 1)) // ROW_MULTIPLE * ROW_MULTIPLE
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    rows = torch.arange(flat.shape[0], device=ids.device) + shift[flat[order]]
    slots = torch.empty_like(rows).scatter_(0, order, rows)
    return ExpertOrder(slots.view_as(ids), ends.to(torch.int32), int(ends[-1]))


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
    num_choices = ids.shape[1]
    order = order_by_expert(ids, gate_up.shape[0])
    grouped = x.new_zeros((order.num_rows, x.shape[1]))
    grouped.index_copy_(0, order.slots.flatten(), x.repeat_interleave(num_choices, dim=0))
    hidden = silu_mul(F.grouped_mm(grouped, gate_up.transpose(1, 2), offs=order.ends))
    output = F.grouped_mm(hidden, down.transpose(1, 2), offs=order.ends)
    parts = output[order.slots].float() * weights.unsqueeze(-1)
    total = parts[:, 0]
    for choice in range(1, num_choices):
        total = total + parts[:, choice]
    return total.to(x.dtype)

"""Choice of experts: DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) and DeepSeek-V2 (2405.04434)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pdmesh.kernels.activation import sigmoid

Method = Literal["noaux_tc", "greedy", "group_limited_greedy"]


@dataclass(frozen=True)
class GateRule:
    """How experts are chosen and weighted.

    noaux_tc scores with a sigmoid, chooses with a correction bias added, ranks a group by the sum
    of its two best experts; the two others score with a softmax and rank a group by its best.
    """

    method: Method
    num_experts: int
    top_k: int
    num_groups: int
    top_groups: int
    normalise: bool
    scale: float


def choose_experts(logits: Tensor, bias: Tensor | None, rule: GateRule) -> tuple[Tensor, Tensor]:
    """Experts and their weights for logits [n, num_experts] float32: ids [n, k] int64, [n, k].

    `bias` [num_experts] is added for the choice only, never to the weights. Experts come best
    first; of equals the lower id does, among groups as among experts, and a NaN counts as largest.
    Differentiable in logits.
    """
    if rule.method == "noaux_tc":
        scores = torch.sigmoid(logits) if logits.requires_grad else sigmoid(logits)
        choice = scores if bias is None else scores + bias
    else:
        scores = choice = torch.softmax(logits, dim=-1)
    if rule.top_groups < rule.num_groups:
        choice = _only_best_groups(choice, rule)
    ids = _largest(choice, rule.top_k)
    weights = scores.gather(-1, ids)
    if rule.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights if rule.scale == 1.0 else weights * rule.scale


def _only_best_groups(choice: Tensor, rule: GateRule) -> Tensor:
    """choice [n, experts] with minus infinity outside of the best `top_groups` groups."""
    size = choice.shape[1] // rule.num_groups
    grouped = choice.view(-1, rule.num_groups, size)
    if rule.method == "noaux_tc":
        rank = grouped.topk(2, dim=-1).values.sum(dim=-1)
    else:
        rank = grouped.amax(dim=-1)
    best = _largest(rank, rule.top_groups)
    dropped = torch.ones_like(rank, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)


def _largest(values: Tensor, count: int) -> Tensor:
    """Places [n, count] of the largest of values [n, m], of equals the first.

    torch.topk does not say which of equals it takes, and takes others on a CPU than on a device.
    """
    return values.detach().sort(dim=-1, descending=True, stable=True).indices[:, :count]

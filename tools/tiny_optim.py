"""Muon for the matrices and AdamW for everything else, with the matrices batched by shape.

Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers"): momentum, then the nearest
semi-orthogonal matrix by a quintic Newton-Schulz iteration. The update is scaled to the size of an
AdamW update (Liu et al. 2025, "Muon is scalable for LLM training", equation 4), so both kinds
share one learning-rate schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """The orthogonal factor of each matrix [B, M, N], roughly: singular values in 0.7..1.2."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    oriented: Tensor = x.mT if tall else x
    return oriented.to(matrices.dtype)


@dataclass(frozen=True)
class Rates:
    """Peak rates and decay; `decay` is decoupled, multiplied with the rate."""

    muon: float = 5e-3
    adam: float = 4e-3
    muon_decay: float = 0.2
    adam_decay: float = 0.05


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Muon takes every matrix but the embedding, the head and the gates."""
    excluded = ("embed", "lm_head", "gate.weight", "router")
    return parameter.ndim >= 2 and not any(word in name for word in excluded)


class MuonAdam:
    """One step over all parameters. State lives in flat batches, one a matrix shape."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], rates: Rates) -> None:
        self.rates = rates
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        rest: list[nn.Parameter] = []
        for name, parameter in named:
            if is_matrix(name, parameter):
                shape = (int(parameter.shape[-2]), int(parameter.shape[-1]))
                self.groups.setdefault(shape, []).append(parameter)
            elif parameter.requires_grad:
                rest.append(parameter)
        self.momentum = {
            shape: torch.cat([torch.zeros_like(p).view(-1, *shape) for p in group])
            for shape, group in self.groups.items()
        }
        decayed = [p for p in rest if p.ndim >= 2]
        plain = [p for p in rest if p.ndim < 2]
        self.adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": rates.adam_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=rates.adam,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=any(p.is_cuda for p in rest),
        )

    def step(self, scale: float, momentum: float = 0.95) -> None:
        """Apply gradients; `scale` in 0..1 multiplies both peak rates. Gradients are cleared."""
        rate = self.rates.muon * scale
        for shape, group in self.groups.items():
            gradient = torch.cat([_gradient(p).view(-1, *shape) for p in group])
            update = _muon_update(gradient, self.momentum[shape], momentum)
            counts = [p.numel() // (shape[0] * shape[1]) for p in group]
            updates = torch.split_with_sizes(update, counts)
            with torch.no_grad():
                torch._foreach_mul_(group, 1.0 - rate * self.rates.muon_decay)
                deltas = [u.view_as(p) for u, p in zip(updates, group, strict=True)]
                torch._foreach_add_(group, deltas, alpha=-rate)
        for part in self.adam.param_groups:
            part["lr"] = self.rates.adam * scale
        self.adam.step()
        for group in self.groups.values():
            for parameter in group:
                parameter.grad = None
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for shape, value in state["momentum"].items():
            self.momentum[shape].copy_(value)
        self.adam.load_state_dict(state["adam"])


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _muon_update(gradient: Tensor, momentum_state: Tensor, momentum: float) -> Tensor:
    """Nesterov momentum, orthogonalised, scaled to an RMS of 0.2. Changes `momentum_state`."""
    momentum_state.lerp_(gradient, 1.0 - momentum)
    direction = gradient.lerp(momentum_state, momentum)
    rows, columns = direction.shape[-2:]
    scale = 0.2 * math.sqrt(max(rows, columns))
    return orthogonalise(direction) * scale

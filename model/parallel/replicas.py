"""Which copy of an expert a row goes to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdmesh.model.parallel.placement import Placement


@dataclass(frozen=True)
class ReplicaTable:
    """Where the copies of a layer's experts are.

    Attributes:
        ranks, slots: [experts, most copies] int64; unused entries repeat the first.
        counts: [experts] int64.
    """

    ranks: Tensor
    slots: Tensor
    counts: Tensor
    _begins: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def build(placement: Placement, layer: int, device: torch.device | str = "cpu") -> ReplicaTable:
        """For one MoE layer of a placement."""
        copies = placement.copies(layer)
        most = max(len(found) for found in copies)
        padded = torch.tensor(
            [found + found[:1] * (most - len(found)) for found in copies], device=device
        )
        counts = torch.tensor([len(found) for found in copies], device=device)
        return ReplicaTable(padded[..., 0].contiguous(), padded[..., 1].contiguous(), counts)

    def choose(self, ids: Tensor, home: int) -> tuple[Tensor, Tensor]:
        """The rank and slot [n, k] of a copy of each of ids [n, k], for rows of the rank `home`.

        A rank's rows for an expert go to its copies in turn, and homes begin with different ones;
        so copies share evenly and nobody has to be asked.
        """
        flat = ids.flatten()
        copy = turns(flat, self._begin(home), self.counts)
        return self.ranks[flat, copy].view_as(ids), self.slots[flat, copy].view_as(ids)

    def _begin(self, home: int) -> Tensor:
        """The copy of each expert [experts] that `home` begins with."""
        if home not in self._begins:
            first = [first_copy(home, *pair) for pair in enumerate(self.counts.tolist())]
            self._begins[home] = torch.tensor(first, device=self.counts.device)
        return self._begins[home]


def turns(ids: Tensor, begins: Tensor, counts: Tensor) -> Tensor:
    """The copy of each of ids [p], which take the `counts` [experts] copies of an expert in turn,
    beginning with `begins` [experts]."""
    order = ids.argsort(stable=True)
    totals = torch.bincount(ids, minlength=counts.shape[0])
    first = totals.cumsum(0) - totals
    sorted_ids = ids.index_select(0, order)
    turn = torch.arange(ids.shape[0], device=ids.device) - first.index_select(0, sorted_ids)
    turn += begins.index_select(0, sorted_ids)
    chosen = turn % counts.index_select(0, sorted_ids)
    return torch.empty_like(chosen).scatter_(0, order, chosen)


def first_copy(home: int, expert: int, count: int) -> int:
    """Which of an expert's `count` copies the rank `home` begins with: a hash of the two.

    A plain remainder would send all first rows to one copy where only every n-th rank has any, as
    in TP groups with fewer rows than members. (The hash is MurmurHash3's finaliser.)
    """
    mixed = (home * 0x9E3779B1 + expert * 0xC2B2AE3D + 1) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * factor & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) % count

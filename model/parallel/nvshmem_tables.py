"""What kernels of the symmetric exchange look up on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.kernels.expert_exchange import ExchangeSize
from pdmesh.model.parallel.replicas import ReplicaTable, first_copy
from pdmesh.wire.errors import ConfigError


@dataclass
class Tables:
    """What all lanes of a rank share.

    Attributes:
        lost: [ranks + 1] int32 in memory that host and device see; see `wait_rows_kernel`.
        members: [ranks] int32.
        bound: of a wait: nanoseconds, or polls for kernels on a CPU.
    """

    lost: Tensor
    members: Tensor
    bound: int


class LayerTable:
    """Where a layer's experts are: `ReplicaTable` as kernels read it, in memory that stays.

    Attributes:
        ranks, slots: [experts, most] int32.
        copies, begins: [experts] int32, how many and which one this rank begins with.
        used: [ranks] int32, the slots of each rank that hold an expert.
    """

    def __init__(self, size: ExchangeSize, experts: int, most: int, device: torch.device) -> None:
        self.experts = experts
        self.most = most
        self._size = size

        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.ranks = table(experts, most)
        self.slots = table(experts, most)
        self.copies = table(experts)
        self.begins = table(experts)
        self.used = table(size.ranks)

    def fill(self, source: ReplicaTable, home: int) -> None:
        """Takes over a placement, as rows of the rank `home` see it.

        Raises:
            ConfigError: more copies of an expert, slots or ranks than there is room for.
        """
        width = source.ranks.shape[1]
        slots = int(source.slots.max()) + 1
        if width > self.most or slots > self._size.slots:
            raise ConfigError(
                f"{width} copies of an expert in {slots} slots of a rank; there is room for "
                f"{self.most} in {self._size.slots}"
            )
        if int(source.ranks.max()) >= self._size.ranks:
            raise ConfigError(f"experts stand on rank {int(source.ranks.max())}")
        self.ranks[:, :width].copy_(source.ranks)
        self.slots[:, :width].copy_(source.slots)
        self.copies.copy_(source.counts)
        counts = enumerate(source.counts.tolist())
        self.begins.copy_(torch.tensor([first_copy(home, *pair) for pair in counts]))
        used = torch.zeros(self._size.ranks, dtype=torch.int64)
        used.scatter_reduce_(
            0, source.ranks.flatten().cpu(), source.slots.flatten().cpu() + 1, "amax"
        )
        self.used.copy_(used)

"""Steps that a prefill worker on a GPU computes before it takes any work: kernels are compiled for
numbers of rows, and a first request should not wait for that."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.model.batch import Batch, Form, SequenceSlice
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.rank import DeviceRank
from pdmesh.model.device.step_memory import expert_bytes
from pdmesh.model.parallel.schedule import Mode
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

SMALLEST = 16
"""Rows of the smallest prompt."""


class _Computes(Protocol):
    def forward(self, batch: Batch, latents: Tensor, form: Form) -> Tensor: ...

    def mtp_forward(
        self, batch: Batch, previous_hidden: Tensor, latents: Tensor, form: Form
    ) -> Tensor: ...


@dataclass(frozen=True)
class _InMode:
    """A rank in steps of one schedule."""

    rank: DeviceRank
    mode: Mode

    def forward(self, batch: Batch, latents: Tensor, form: Form) -> Tensor:
        return self.rank.forward(self.mode, batch, latents, form)

    def mtp_forward(
        self, batch: Batch, previous_hidden: Tensor, latents: Tensor, form: Form
    ) -> Tensor:
        return self.rank.mtp_forward(self.mode, batch, previous_hidden, latents, form)


def warm_up(model: DeviceModel, pool: Tensor, most: int, called: _Computes | None = None) -> None:
    """Computes prompts of up to `most` tokens that are written nowhere.

    Args:
        pool: the pages.
        called: computes in the place of `model`. The number of calls follows from `most` alone.
    """
    called = called or model
    page_size, sizes = pool.shape[2], [most]
    while sizes[-1] // 2 >= min(most, SMALLEST):
        sizes.append(sizes[-1] // 2)
    # Those first whose experts take most, so that what others take are pieces of theirs.
    for tokens in sorted(sizes, key=lambda rows: expert_bytes(model.config, rows), reverse=True):
        began = time.monotonic()
        rows = min(tokens, pool.shape[0] * page_size, model.config.max_position_embeddings)
        table = tuple(range(-(-rows // page_size)))
        item = SequenceSlice(table, 0, rows, rows)
        batch = Batch.build([item], [[0] * rows], page_size, model.device)
        hidden = called.forward(batch, pool, "mha")
        if model.weights.mtp is not None and tokens > 1:
            later = SequenceSlice(table, 1, rows, rows)
            batch = Batch.build([later], [[0] * (rows - 1)], page_size, model.device)
            called.mtp_forward(batch, hidden[:-1], pool, "mha")
        model.logits(hidden[-1:]).argmax().item()
        event(log, "warmed up", rows=rows, seconds=round(time.monotonic() - began, 2))


def warm_up_rank(rank: DeviceRank, pool: Tensor, most: int, modes: Sequence[Mode]) -> None:
    """The same of a worker that is a rank: all of its group do it together, in each schedule, and
    once without rows.

    Args:
        most: alike on all ranks.
        modes: schedules that steps may have.
    """
    with torch.no_grad():
        for mode in modes:
            warm_up(rank.model, pool, most, _InMode(rank, mode))
            rank.forward(mode)
            if rank.model.weights.mtp is not None:
                rank.mtp_forward(mode)

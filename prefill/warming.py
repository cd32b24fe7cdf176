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

from pdmesh.kernels.compiling import Compilation
from pdmesh.model.batch import Batch, Form, SequenceSlice
from pdmesh.model.config import ModelConfig
from pdmesh.model.device.compiling import compiling, of_prompts
from pdmesh.model.device.layers import MASKED_ROWS
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.rank import DeviceRank
from pdmesh.model.device.step import HEADS, MOST_KEYS, heads_at_once
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
    """Computes prompts of up to `most` tokens, and the ends of long ones, that are written nowhere.

    Args:
        pool: the pages.
        called: computes in the place of `model`.
    """
    spans = _spans(model.config, pool, most)
    with compiling(_compilations(model, spans)):
        _compute(model, pool, spans, called or model)


def _spans(config: ModelConfig, pool: Tensor, most: int) -> list[tuple[int, int]]:
    """First and last token of what is computed; how many there are follows from `most` and the
    model alone."""
    longest = min(pool.shape[0] * pool.shape[2], config.max_position_embeddings)
    whole = [(0, min(tokens, longest)) for tokens in _sizes(config, most)]
    return whole + [(keys - min(most, SMALLEST), keys) for keys in _long(config)]


def _compilations(
    model: DeviceModel, spans: Sequence[tuple[int, int]], halved: bool = False
) -> list[Compilation]:
    """What these steps compile before they compute; the MTP layer has no row for position 0.

    Args:
        halved: whether each may be computed in two halves.
    """
    rows = [end - first for start, end in spans for first in (start, max(1, start)) if first < end]
    if halved:
        rows += [half for count in rows for half in (-(-count // 2), count // 2) if half]
    return of_prompts(model, rows)


def _compute(
    model: DeviceModel, pool: Tensor, spans: Sequence[tuple[int, int]], called: _Computes
) -> None:
    page_size = pool.shape[2]
    for start, end in spans:
        began = time.monotonic()
        # Nobody has such prompts in a smaller pool, but all ranks compute the same: pages recur.
        table = tuple(n % pool.shape[0] for n in range(-(-end // page_size)))

        def batch(first: int, end: int = end, table: tuple[int, ...] = table) -> Batch:
            item = SequenceSlice(table, first, end, end)
            return Batch.build([item], [[0] * (end - first)], page_size, model.device)

        hidden = called.forward(batch(start), pool, "mha")
        if model.weights.mtp is not None and end > 1:
            first = max(1, start)
            called.mtp_forward(batch(first), hidden[: end - first], pool, "mha")
        model.logits(hidden[-1:]).argmax().item()
        seconds = round(time.monotonic() - began, 2)
        event(log, "warmed up", rows=end - start, keys=end, seconds=seconds)


def _sizes(config: ModelConfig, most: int) -> list[int]:
    """Tokens of prompts: `most`, halved again and again, and the fewest that are sorted by expert,
    since a kernel of its own has few of one. Those first whose experts take most memory, so that
    what others take are pieces of theirs."""
    sizes = [most]
    while sizes[-1] // 2 >= min(most, SMALLEST):
        sizes.append(sizes[-1] // 2)
    if most > MASKED_ROWS:
        sizes.append(MASKED_ROWS + 1)
    return sorted(dict.fromkeys(sizes), key=lambda rows: expert_bytes(config, rows), reverse=True)


def _long(config: ModelConfig) -> list[int]:
    """For each number of heads that are projected at a time, but all: the fewest such keys."""
    found: list[int] = []
    heads = config.num_attention_heads
    while (keys := MOST_KEYS * HEADS // heads + 1) <= config.max_position_embeddings:
        fewer = heads_at_once(config, keys)
        if fewer == heads:
            break
        found.append(keys)
        heads = fewer
    return found


def warm_up_rank(rank: DeviceRank, pool: Tensor, most: int, modes: Sequence[Mode]) -> None:
    """The same of a worker that is a rank: all of its group do it together, in each schedule, and
    once without rows.

    Args:
        most: alike on all ranks.
        modes: schedules that steps may have.
    """
    spans = _spans(rank.model.config, pool, most)
    compilations = _compilations(rank.model, spans, halved="microbatch" in modes)
    with torch.no_grad(), compiling(compilations):
        for mode in modes:
            _compute(rank.model, pool, spans, _InMode(rank, mode))
            rank.forward(mode)
            if rank.model.weights.mtp is not None:
                rank.mtp_forward(mode)

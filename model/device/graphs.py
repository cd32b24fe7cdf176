"""Decode steps as CUDA graphs, one for each padded number of sequences.

A graph reads fixed buffers and writes a fixed one. A replay copies the step's numbers in, replays,
and copies the rows' hidden states out; it allocates only those and waits for no computation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.model.batch import Batch
from pdmesh.model.device.padding import padded, padded_size
from pdmesh.model.device.staging import StepStaging
from pdmesh.model.device.step import DeviceStep, Paged, Part, halved
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

Steps = tuple[DeviceStep, ...]
"""A step, and its two halves where it is computed in microbatches."""
Compute = Callable[[Steps, Tensor | None], Tensor]
"""Hidden states [m, hidden] of a step; for the MTP layer with the hidden states before."""


class Capture(Protocol):
    """Records what a call does on the device."""

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What does it again, and the tensor that it writes each time."""


def cuda_capture(pool: object, between: Callable[[], None] | None = None) -> Capture:
    """Captures CUDA graphs that share the memory `pool` (`torch.cuda.graph_pool_handle`).

    `between` is called before anything is recorded, once what is to be recorded has been computed;
    then other threads may go on using the device while it is.
    """
    mode = "global" if between is None else "thread_local"
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # memory is kept for each stream

    def capture(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles kernels, and makes libraries allocate what they keep
                compute()
        torch.cuda.current_stream().wait_stream(side)
        if between is not None:
            between()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):  # type: ignore[arg-type]
            output = compute()
        return graph.replay, output

    return capture


def plain_capture(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Calls it again: the same contract on any device, for tests."""
    output = compute().clone()

    def replay() -> None:
        output.copy_(compute())

    return replay, output


@dataclass(frozen=True)
class _Buffers:
    """What a graph of one size reads; `previous` [m, hidden] is of the MTP layer alone."""

    staging: StepStaging
    previous: Tensor | None


def half_of(sequences: int) -> int:
    """How many of a padded step's sequences its first microbatch has."""
    return -(-sequences // 2)


class StepGraphs:
    """The graphs of one kind of step: of the main model, or of the MTP layer.

    Args:
        compute: what a step does.
        rows: rows of every sequence.
        sizes: ascending numbers of sequences.
        pages: pages that a sequence may have.
        previous: an empty tensor [0, hidden] of the hidden states before the rows, or None.
        first_key: position of the first key.
        device: where.
        plan: plans attention for a step; what it gives is refreshed at the head of each replay.
        capture: records.
        halves: plans a step's halves too, cut behind the first half of its sequences.
    """

    def __init__(
        self,
        compute: Compute,
        rows: int,
        sizes: Sequence[int],
        pages: int,
        previous: Tensor | None,
        first_key: int,
        device: torch.device,
        plan: Callable[[DeviceStep], DeviceStep],
        capture: Capture,
        halves: bool = False,
    ) -> None:
        self._halves = halves
        self.rows = rows
        self.sizes = tuple(sizes)
        self.pages = pages
        self._compute = compute
        self._previous = previous
        self._first_key = first_key
        self._device = device
        self._plan = plan
        self._capture = capture
        self._buffers: dict[int, _Buffers] = {}
        self._steps: list[Steps] = []  # a graph writes to what was planned, and keeps nothing
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}

    def warm_up(self, what: str) -> None:
        """Captures all sizes, the largest first, so that the others fit in its memory."""
        for number, size in enumerate(sorted(self.sizes, reverse=True), start=1):
            began = time.monotonic()
            self._graphs[size] = self._captured(size)
            event(
                log,
                "captured a decode graph",
                step=what,
                sequences=size,
                rows=self.rows,
                graphs=f"{number}/{len(self.sizes)}",
                seconds=round(time.monotonic() - began, 2),
            )

    def run(self, batch: Batch, num_layers: int, previous: Tensor | None = None) -> Tensor:
        """The hidden states [T, hidden] of the batch's rows: a tensor of their own.

        Args:
            batch: that `padding.fits`.
            num_layers: that a page holds.
            previous: [T, hidden], for the MTP layer.
        """
        size = padded_size(len(batch.slices), self.sizes)
        assert size is not None
        buffers = self._buffers[size]
        replay, output = self._graphs[size]
        tables = buffers.staging.tables(batch.slices)
        step = padded(batch, batch.host_tokens, self.rows, self.sizes, num_layers, tables)
        at = buffers.staging.put(step)
        if buffers.previous is not None:
            assert previous is not None
            buffers.previous.zero_()
            buffers.previous.index_copy_(0, at, previous)
        replay()
        return output.index_select(0, at)

    def _captured(self, size: int) -> tuple[Callable[[], None], Tensor]:
        staging = StepStaging(size, self.rows, self.pages, self._device)
        previous = self._previous
        if previous is not None:
            previous = previous.new_zeros((size * self.rows, previous.shape[1]))
        self._buffers[size] = _Buffers(staging, previous)
        paged = Paged(self.rows, staging.page_table, staging.lengths)
        tokens, positions, slots = staging.values
        whole = DeviceStep(
            tokens,
            positions,
            slots,
            staging.num_rows,
            self._first_key,
            (Part(None, paged),),
            None,
        )
        halves = halved(whole, half_of(size)) if self._halves and size > 1 else ()
        steps = tuple(self._plan(step) for step in (whole, *halves))
        self._steps.append(steps)

        def compute() -> Tensor:
            for step in steps:
                attention = step.parts[0].attention
                if isinstance(attention, Paged) and attention.plan is not None:
                    attention.plan.refresh(attention.lengths)
            return self._compute(steps, previous)

        return self._capture(compute)

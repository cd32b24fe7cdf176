"""What captured steps of one number of sequences read: written on the host, copied at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdmesh.model.batch import SequenceSlice
from pdmesh.model.device.padding import PaddedStep

ALIGNED = 256
"""Bytes at whose multiples each part begins, as an allocation of its own would."""


class StepStaging:
    """Buffers of a graph on a device, and the same on the host.

    A step's numbers are one copy. Page tables are kept on the host from step to step: a row is
    written and copied when its sequence is another or has got a page.

    Args:
        size, rows, pages: sequences, rows of each, and pages that a sequence may have.
        device: where the graph reads.

    Attributes:
        values: [3, size * rows] int64 on the device: token, position, and slot of each row.
        at: [size * rows] int64: where the batch's rows stand, as many as it has.
        lengths: [size] int32.
        num_rows: [1] int32.
        page_table: [size, pages] int32.
    """

    def __init__(self, size: int, rows: int, pages: int, device: torch.device) -> None:
        m = size * rows
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sizes = (3 * m * 8, m * 8, size * 4, 4)
        starts = np.cumsum([0, *(-(-n // ALIGNED) * ALIGNED for n in sizes)]).tolist()
        self._host = self._pinned((starts[-1],), torch.uint8)
        self._there = torch.zeros(starts[-1], dtype=torch.uint8, device=device)

        def parts(whole: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            pieces = [whole[a : a + n] for a, n in zip(starts, sizes, strict=False)]
            values, at = (piece.view(torch.int64) for piece in pieces[:2])
            lengths, num_rows = (piece.view(torch.int32) for piece in pieces[2:])
            return values.view(3, m), at, lengths, num_rows

        self.values, self.at, self.lengths, self.num_rows = parts(self._there)
        here = [part.numpy() for part in parts(self._host)]
        self._values, self._at, self._lengths, self._num_rows = here
        self._host_table = self._pinned((size, pages), torch.int32)
        self._table: NDArray[np.int32] = self._host_table.numpy()
        self.page_table = torch.zeros((size, pages), dtype=torch.int32, device=device)
        self._held: list[tuple[int, ...]] = [()] * size
        self._changed = (size, 0)
        self._values[1] = np.tile(np.arange(rows), size)
        self._values[2] = -1
        self._lengths[:] = rows
        self._there.copy_(self._host)

    def tables(self, items: Sequence[SequenceSlice]) -> NDArray[np.int32]:
        """The page tables of a step [size, pages], its sequences first; `put` copies them."""
        # Most are the very tuples of the step before, which is told without looking into them.
        changed = [
            i
            for i, item in enumerate(items)
            if self._held[i] is not item.page_table and self._held[i] != item.page_table
        ]
        if changed:
            self._wait()
            pages = self._table.shape[1]
            for i in changed:
                table = items[i].page_table
                self._table[i, : len(table)] = table[:pages]
                self._held[i] = table
            first, end = self._changed
            self._changed = min(first, changed[0]), max(end, changed[-1] + 1)
        return self._table

    def put(self, step: PaddedStep) -> Tensor:
        """Copies a step; where its rows stand, [T] int64 on the device."""
        self._wait()
        count = len(step.at)
        self._values[:] = step.values
        self._at[:count] = step.at
        self._lengths[:] = step.lengths
        self._num_rows[0] = step.num_rows
        self._there.copy_(self._host, non_blocking=True)
        first, end = self._changed
        if first < end:
            self.page_table[first:end].copy_(self._host_table[first:end], non_blocking=True)
            self._changed = len(self._held), 0
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._there.device))
        return self.at[:count]

    def _pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._event is not None)

    def _wait(self) -> None:
        """Until the copies of the step before have read the host's numbers: long ago, usually."""
        if self._event is not None:
            self._event.synchronize()

"""A decode step of any size as one of a few sizes, so that captured graphs can take it. Pure.

Every sequence gets the same number of rows: one that has fewer gets rows before its first one,
which are computed and written nowhere. Sequences up to the padded number have as many keys as rows,
in whatever page their row of the tables has been left with, which is never read for a result; their
rows come last, are not routed to experts, and are written nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdmesh.model.batch import Batch, Form
from pdmesh.model.device.step import page_tables


def graph_sizes(most: int) -> tuple[int, ...]:
    """Numbers of sequences to capture: powers of two up to 16, then steps of a half, and `most`."""
    sizes = {most}
    size = 1
    while size < most:
        sizes |= {size, size + size // 2} if size >= 16 else {size}
        size *= 2
    return tuple(sorted(s for s in sizes if s <= most))


def padded_size(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds `count`; None if none does."""
    return next((size for size in sizes if size >= count), None)


@dataclass(frozen=True)
class PaddedStep:
    """A step of `size` sequences with `rows` rows each, m = size * rows.

    Attributes:
        values: [3, m] int64: token, position and slot of each row.
        page_table: [sequences, pages] int32, of the real sequences, as wide as they need.
        lengths: [size] int32.
        num_rows: rows of the real sequences.
        at: [T] int64, where the batch's rows stand.
    """

    size: int
    rows: int
    values: NDArray[np.int64]
    page_table: NDArray[np.int32]
    lengths: NDArray[np.int32]
    num_rows: int
    at: NDArray[np.int64]


def fits(batch: Batch, form: Form, rows: int, sizes: Sequence[int], pages: int) -> bool:
    """Whether `padded` can take the batch: absorbed chains of at most `rows` rows and `pages`."""
    if len(batch.slices) > sizes[-1]:
        return False
    if not all((i.form or form) == "absorbed" and i.parents is None for i in batch.slices):
        return False
    starts, ends = batch.bounds[:, 0], batch.bounds[:, 1]
    most = -(-int(ends.max()) // batch.page_size)
    return int((ends - starts).max()) <= rows <= int(ends.min()) and most <= pages


def padded(
    batch: Batch,
    tokens: NDArray[np.int64],
    rows: int,
    sizes: Sequence[int],
    num_layers: int,
    tables: NDArray[np.int32] | None = None,
) -> PaddedStep:
    """The padded step of a batch that `fits`.

    Args:
        tokens: [T], the batch's, on the host.
        rows, sizes: as of `fits`.
        num_layers: that a page holds.
        tables: the pages of the sequences, if they are there already: [sequences or more, pages].
    """
    size = padded_size(len(batch.slices), sizes)
    assert size is not None
    page_size, items = batch.page_size, batch.slices
    starts, ends, write_from = (batch.bounds[:, n : n + 1] for n in range(3))
    columns = int(-(-ends.max() // page_size))
    table = page_tables(items, columns) if tables is None else tables[: len(items), :columns]
    positions = ends - rows + np.arange(rows)
    pages = np.take_along_axis(table, positions // page_size, axis=1).astype(np.int64)
    slots = pages * (num_layers * page_size) + positions % page_size
    slots[positions < np.maximum(starts, write_from)] = -1
    real = positions.size
    at = np.flatnonzero((positions >= starts).ravel())
    values = np.zeros((3, size * rows), np.int64)
    values[0, at] = tokens
    values[1, :real] = positions.ravel()
    values[2] = -1
    values[2, :real] = slots.ravel()
    lengths = np.full(size, rows, np.int32)
    lengths[: len(items)] = ends[:, 0]
    return PaddedStep(size, rows, values, table, lengths, real, at)

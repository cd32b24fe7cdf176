"""The router's projection of rows to experts.

It is cut along the hidden size into a fixed number of chunks whose sums are added in a fixed order,
by one program where there are many rows and by the choosing program where there are few: a row's
logits do not depend on the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from pdmesh.kernels.triton.launch import rows_of

CHUNKS = 16
"""Parts of the hidden size."""
WHOLE_ROWS = 1024
"""From this number of rows on one program adds up all chunks of its tile."""
WIDE_TILE_ROWS = 512
"""From here on tiles of 128 experts are faster with a bfloat16 weight: 16.2 us, not 18.3."""


class Tile(NamedTuple):
    """How the projection is cut: experts and rows of a tile, the step along the hidden size."""

    experts: int
    rows: int
    step: int
    warps: int
    stages: int


def tile_for(rows: int, wide: bool) -> Tile:
    """The tile for a number of rows; `wide` where weights are float32."""
    if rows <= 32:
        return Tile(64, 16 if rows <= 16 else 32, 64, 4, 4)
    return Tile(64 if wide or rows < WIDE_TILE_ROWS else 128, 64, 64, 4, 4)


@triton.jit
def project_chunk(
    x,
    weight,
    of_row,
    of_expert,
    first,
    hidden,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One chunk's sums [EXPERTS, ROWS] float32, of the columns from `first` on."""
    sums = tl.zeros((EXPERTS, ROWS), dtype=tl.float32)
    for step in range(0, CHUNK, STEP):
        column = first + step + tl.arange(0, STEP)
        if EVEN:
            w = tl.load(weight + of_expert + column[None, :])
            v = tl.load(x + of_row + column[:, None])
        else:
            some = column < hidden
            w = tl.load(weight + of_expert + column[None, :], mask=some[None, :], other=0.0)
            v = tl.load(x + of_row + column[:, None], mask=some[:, None], other=0.0)
        if w.dtype == tl.float32:
            # Three bfloat16 parts hold all 24 bits of a float32.
            high = w.to(tl.bfloat16)
            rest = w - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            sums = tl.dot(low, v, sums)
            sums = tl.dot(middle, v, sums)
            sums = tl.dot(high, v, sums)
        else:
            sums = tl.dot(w, v, sums)
    return sums


@triton.jit
def project_kernel(
    x,
    weight,
    partials,
    rows,
    hidden,
    experts,
    x_row,
    CHUNK: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    # What is beyond the last row or expert is read from the last: nothing of it is kept.
    of_expert = tl.minimum(expert, experts - 1)[:, None] * hidden
    of_row = tl.minimum(row, rows - 1)[None, :] * x_row
    total = tl.zeros((EXPERTS, ROWS), dtype=tl.float32)
    for part in range(PER_PROGRAM):
        first = (tl.program_id(2) * PER_PROGRAM + part) * CHUNK
        total += project_chunk(
            x, weight, of_row, of_expert, first, hidden, CHUNK, EVEN, EXPERTS, ROWS, STEP
        )
    to = partials + (tl.program_id(2) * rows + row)[None, :] * experts + expert[:, None]
    tl.store(to, total, mask=(expert < experts)[:, None] & (row < rows)[None, :])


def workspace(rows: int, experts: int, device: torch.device | str) -> Tensor:
    """The chunks' sums of logits [parts, rows, experts], added up in their order the logits."""
    parts = CHUNKS if rows < WHOLE_ROWS else 1
    return torch.empty((parts, rows, experts), dtype=torch.float32, device=device)


def project(x: Tensor, weight: Tensor, work: Tensor, tile: Tile, chained: bool) -> None:
    """The sums of each chunk of the hidden size, or of all, into `work`."""
    rows, stride = rows_of(x)
    experts, hidden = weight.shape
    parts = work.shape[0]
    chunk = -(-hidden // (CHUNKS * tile.step)) * tile.step
    grid = (-(-experts // tile.experts), -(-rows // tile.rows), parts)
    project_kernel[grid](
        x,
        weight,
        work,
        rows,
        hidden,
        experts,
        stride,
        CHUNK=chunk,
        PER_PROGRAM=CHUNKS // parts,
        EVEN=chunk * CHUNKS == hidden,
        EXPERTS=tile.experts,
        ROWS=tile.rows,
        STEP=tile.step,
        CHAINED=chained,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )

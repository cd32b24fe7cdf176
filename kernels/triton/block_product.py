"""The inner loop of the FP8 products: a tile of x times a tile of a block-scaled weight.

DeepSeek-V3 report (arXiv:2412.19437), section 3.3.2: a matrix instruction sums 128 products in the
tensor core's own accumulator, and that sum is scaled and added in float32 by the ordinary lanes.
One step of the loop is therefore one group of 128 values: one scale a row of x, one for the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

# TMA moves rows whose length and start are multiples of this.
BULK_ALIGNMENT = 16


@triton.jit
def load_tile(
    source,
    row,
    end,
    column,
    width,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BULK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """[ROWS, COLUMNS] of a matrix from (row, column) on, zeros from row `end` on.

    `source` is a tensor descriptor with that block shape if BULK, else a pointer to a matrix whose
    rows are `stride` apart. EVEN: no tile reaches beyond the last column, `width`. A descriptor
    gives zeros beyond the matrix, not beyond `end`.
    """
    if BULK:
        tile = source.load([row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        pointers = source + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        mask = rows[:, None] < end
        if not EVEN:
            mask = mask & (columns[None, :] < width)
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def block_product(
    x,
    w,
    x_scale,
    w_scale,
    x_row,
    x_end,
    w_row,
    w_end,
    k,
    x_stride,
    x_scale_row,
    x_scale_step,
    first,
    last,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    BULK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Sums over the groups first to last: float32 [BLOCK_M, BLOCK_N], transposed if SWAP.

    Args:
        x, w: see `load_tile`; rows of w are k apart.
        x_scale: pointer to the scale of row 0 and group 0.
        w_scale: pointer to the scale of the tile's block and group 0; a tile lies in one block.
        x_row, x_end, w_row, w_end: where the tiles begin, and the rows that are not read.
        SWAP: the weight takes the matrix instruction's 64 rows, x its columns: for few rows.
    """
    rows = x_row + tl.arange(0, BLOCK_M)
    valid = rows < x_end
    scales = x_scale + rows.to(tl.int64) * x_scale_row
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # A step's scales are asked for one step ahead: nothing waits for them.
    next_x = tl.load(scales + first * x_scale_step, mask=valid & (first < last), other=0.0)
    next_w = tl.load(w_scale + first, mask=first < last, other=0.0)
    for step in range(first, last):
        scale = next_x * next_w
        more = step + 1 < last
        next_x = tl.load(scales + (step + 1) * x_scale_step, mask=valid & more, other=0.0)
        next_w = tl.load(w_scale + step + 1, mask=more, other=0.0)
        x_tile = load_tile(x, x_row, x_end, step * 128, k, x_stride, BLOCK_M, 128, BULK, EVEN)
        w_tile = load_tile(w, w_row, w_end, step * 128, k, k, BLOCK_N, 128, BULK, EVEN)
        if SWAP:
            total += tl.dot(w_tile, x_tile.T) * scale[None, :]
        else:
            total += tl.dot(x_tile, w_tile.T) * scale[:, None]
    return total

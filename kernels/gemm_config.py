"""Tiles of the split FP8 product by its shape: pure, from measurements on an H200."""

from __future__ import annotations

from typing import NamedTuple

from pdmesh.kernels.fp8 import BLOCK

PROCESSORS = 132
"""Multiprocessors of an H100 or H200, which the rule for unknown shapes fills once."""


class SplitConfig(NamedTuple):
    """How `triton.splitk_gemm` cuts a product.

    Attributes:
        block_m, block_n: rows of x and of the weight in a tile; block_n divides 128.
        split: thread blocks that share a tile's sum.
        warps, stages: of a thread block; steps whose tiles are in flight.
        swap: the weight takes the matrix instruction's rows: for fewer than 64 rows of x.
        bulk: load by the copy engine (TMA) where the matrices are aligned for it.
        dependent: programmatic dependent launch: the prologue overlaps the kernel before.
    """

    block_m: int
    block_n: int
    split: int
    warps: int
    stages: int
    swap: bool = False
    bulk: bool = True
    dependent: bool = False


class ClusterTile(NamedTuple):
    """How `cuda_gemm` cuts a product: tiles of 128 rows.

    Attributes:
        block_n: columns, a multiple of 8 up to 136.
        split: thread blocks that share the sum, 1, 2, 4 or 8.
        pair: 2 if two tiles of rows share the weight that is read, else 1.
        stages: steps of 128 values in flight.
        dependent: programmatic dependent launch: weights are asked for while the kernel before
            still runs. That kernel must not write the weights.
    """

    block_n: int
    split: int
    pair: int
    stages: int = 6
    dependent: bool = False


def split_config(m: int, n: int, k: int) -> SplitConfig:
    return unmeasured(m, n, k)


def unmeasured(m: int, n: int, k: int) -> SplitConfig:
    """The rule for a shape that was not measured: as many thread blocks as multiprocessors."""
    swap = m <= 32
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 else 128
    block_n = 64
    tiles = -(-m // block_m) * -(-n // block_n)
    groups = -(-k // BLOCK)
    split = max(1, min(PROCESSORS // tiles, groups // 4, 16))
    return SplitConfig(block_m, block_n, split, 4 if block_m <= 64 else 8, 4, swap)


_STAGE_BYTES = 200 << 10
_MOST_STAGES = 8
_STEP_US, _COLUMN_US, _START_US, _SPLIT_US = 0.10, 0.0015, 2.5, 0.4


def cluster_tile(m: int, n: int, k: int) -> ClusterTile:
    """The tile whose waves of steps are expected to be over first."""
    pair = 2 if m > 128 else 1
    groups_m, steps = -(-m // (128 * pair)), -(-k // BLOCK)
    best: tuple[float, ClusterTile] | None = None
    for block_n in (128, 136, 112, 96, 72, 64, 56):
        for split in (1, 2, 4, 8):
            if split * pair > 8 or split > steps:
                continue
            programs = -(-n // block_n) * groups_m * split * pair
            waves = -(-programs // (PROCESSORS if split * pair == 1 else PROCESSORS - 4))
            step_us = _STEP_US + _COLUMN_US * block_n
            cost = waves * (-(-steps // split) * step_us + _START_US) + _SPLIT_US * (split > 1)
            stages = min(_MOST_STAGES, _STAGE_BYTES // ((128 + block_n) * BLOCK))
            if best is None or cost < best[0]:
                best = cost, ClusterTile(block_n, split, pair, stages)
    assert best is not None
    return best[1]

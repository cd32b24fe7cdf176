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

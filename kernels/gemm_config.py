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
    """How `cuda_gemm` cuts a product: tiles of 128 rows, or of 64.

    Attributes:
        block_n: columns, a multiple of 8 up to 136.
        split: thread blocks that share the sum, 1, 2, 4 or 8.
        pair: 2 if two tiles of rows share the weight that is read, else 1.
        stages: steps of 128 values in flight, as have room beside the sums (`cluster_stages`).
        short: tiles of 64 rows, whose steps the two warpgroups share: a split of 2 or 4, no pair,
            an even number of stages.
    """

    block_n: int
    split: int
    pair: int
    stages: int = 4
    short: bool = False


SPLITS: dict[tuple[int, int], dict[int, SplitConfig]] = {
    (2112, 7168): {
        16: SplitConfig(16, 64, 12, 4, 6, True, True, True),
        64: SplitConfig(64, 64, 4, 4, 4, False, True, True),
        128: SplitConfig(64, 64, 4, 4, 5, False, True, False),
        256: SplitConfig(64, 128, 3, 4, 4, False, True, False),
    },
    (24576, 1536): {
        16: SplitConfig(16, 64, 1, 4, 6, True, True, True),
        64: SplitConfig(64, 64, 1, 4, 4, False, True, True),
        128: SplitConfig(128, 64, 1, 4, 4, False, True, True),
        256: SplitConfig(128, 64, 1, 4, 4, False, True, False),
    },
    (7168, 16384): {
        16: SplitConfig(16, 128, 4, 4, 5, True, True, False),
        64: SplitConfig(64, 64, 3, 4, 4, False, True, False),
        128: SplitConfig(64, 128, 2, 4, 4, False, True, False),
        256: SplitConfig(128, 64, 1, 4, 4, False, True, False),
    },
    (4096, 7168): {
        16: SplitConfig(16, 64, 6, 4, 6, True, True, True),
        64: SplitConfig(64, 64, 4, 4, 4, False, True, False),
        128: SplitConfig(64, 64, 2, 4, 5, False, True, False),
        256: SplitConfig(64, 128, 2, 4, 4, False, True, False),
    },
    (7168, 2048): {
        16: SplitConfig(16, 64, 3, 4, 6, True, True, True),
        64: SplitConfig(64, 64, 2, 4, 4, False, True, False),
        128: SplitConfig(128, 64, 1, 4, 4, False, True, False),
        256: SplitConfig(128, 64, 1, 4, 4, False, True, False),
    },
}
"""By (n, k), up to so many rows: bench/gpu_gemm.py --tune on one H200."""

CLUSTERS: dict[tuple[int, int], dict[int, ClusterTile]] = {
    (2112, 7168): {
        64: ClusterTile(32, 2, 1, 8, short=True),
        128: ClusterTile(32, 2, 1, 8),
        256: ClusterTile(64, 2, 1, 7),
    },
    (24576, 1536): {
        64: ClusterTile(64, 1, 1, 8),
        128: ClusterTile(96, 1, 1, 6),
        256: ClusterTile(128, 1, 2, 5),
    },
    (7168, 16384): {
        64: ClusterTile(56, 1, 1, 8),
        128: ClusterTile(128, 2, 1, 4),
        256: ClusterTile(128, 1, 2, 5),
    },
    (4096, 7168): {
        64: ClusterTile(64, 2, 1, 8, short=True),
        128: ClusterTile(64, 2, 1, 7),
        256: ClusterTile(64, 1, 2, 8),
    },
    (7168, 2048): {
        128: ClusterTile(64, 1, 1, 8),
        256: ClusterTile(128, 1, 2, 5),
    },
}
"""The same for `cuda_gemm`, launched as a dependent."""


def split_config(m: int, n: int, k: int) -> SplitConfig:
    """The tile that was measured to be fastest, or the rule's."""
    for rows, config in SPLITS.get((n, k), {}).items():
        if m <= rows:
            return config
    return unmeasured_split(m, n, k)


def unmeasured_split(m: int, n: int, k: int) -> SplitConfig:
    """The rule for a shape that was not measured: what the measured ones have in common."""
    groups = -(-k // BLOCK)
    if m <= 32:
        block_m, programs, fewest = 16 if m <= 16 else 32, 3 * PROCESSORS, 4
    else:
        block_m, programs, fewest = 64 if m <= 128 else 128, 2 * PROCESSORS, 8
    tiles = -(-m // block_m) * -(-n // 64)
    split = max(1, min(programs // tiles, groups // fewest, 16))
    return SplitConfig(block_m, 64, split, 4, 6 if m <= 32 else 4, swap=m <= 32)


_SHARED_BYTES = 222 << 10
_MOST_STAGES = 8
_ROOM = {1: PROCESSORS, 2: PROCESSORS, 4: 120, 8: 112}
"""Thread blocks that run at a time, by the size of their clusters: grids of 128 in clusters of four
or eight took twice as long as one of 120 in clusters of four. The limits are inferred from that."""
_STEP_US, _COLUMN_US, _START_US, _SPLIT_US = 0.10, 0.0015, 2.5, 0.4


def cluster_stages(block_n: int, split: int, short: bool = False) -> int:
    """Steps in flight that shared memory has room for, beside a tile's result."""
    rows, shares = (64, 2 * split) if short else (128, split)
    sums = rows // split * shares * (block_n + 8) * (4 if split > 1 else 2)
    stages = min(_MOST_STAGES, (_SHARED_BYTES - sums) // ((rows + block_n) * BLOCK + 512))
    return stages // 2 * 2 if short else stages


def cluster_tile(m: int, n: int, k: int) -> ClusterTile:
    """The tile that was measured to be fastest, or the rule's."""
    for rows, tile in CLUSTERS.get((n, k), {}).items():
        if m <= rows:
            return tile
    return unmeasured_cluster(m, n, k)


def unmeasured_cluster(m: int, n: int, k: int) -> ClusterTile:
    """The tile whose waves of steps are expected to be over first."""
    pair = 2 if m > 128 else 1
    groups_m, steps = -(-m // (128 * pair)), -(-k // BLOCK)
    best: tuple[float, ClusterTile] | None = None
    for block_n in (128, 136, 112, 96, 72, 64, 56):
        for split in (1, 2, 4, 8):
            if split * pair > 8 or split > steps:
                continue
            programs = -(-n // block_n) * groups_m * split * pair
            waves = -(-programs // _ROOM[split * pair])
            step_us = _STEP_US + _COLUMN_US * block_n
            cost = waves * (-(-steps // split) * step_us + _START_US) + _SPLIT_US * (split > 1)
            if best is None or cost < best[0]:
                best = cost, ClusterTile(block_n, split, pair, cluster_stages(block_n, split))
    assert best is not None
    return best[1]

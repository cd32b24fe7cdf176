"""The block-scaled FP8 product in CUDA C++ for few rows: clusters share a tile's sum and weights.

kernels/cuda/fp8_gemm.cu is compiled for a tile when that tile is first used (`cuda_build`): use it
once before a CUDA graph is recorded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.kernels import cuda_build
from pdmesh.kernels.compiling import Compilation
from pdmesh.kernels.cuda_build import unavailable
from pdmesh.kernels.gemm_config import ClusterTile, cluster_tile
from pdmesh.kernels.quantised import BlockWeight, Rows

__all__ = ["clusters", "compilation", "fp8_gemm", "source", "unavailable", "unsupported"]


def unsupported(n: int, k: int) -> str | None:
    """Why it does not take a weight [n, k]; None if it does."""
    if n % 8 or k % 16:
        return f"it takes n in 8s and k in 16s, not {n} x {k}"
    return None


def source(tile: ClusterTile) -> str:
    """The whole translation unit."""
    sizes = {name.upper(): int(value) for name, value in tile._asdict().items()}
    return cuda_build.unit("fp8_gemm", tile.block_n, "e4m3", sizes)


def compilation(tile: ClusterTile) -> Compilation:
    """What a first use of the tile compiles."""
    sizes = "x".join(str(int(value)) for value in tile)
    return cuda_build.compilation(f"fp8_gemm {sizes}", source(tile))


class _Functions(NamedTuple):
    launch: Callable[..., int]
    clusters: Callable[[], int]


@functools.cache
def _functions(tile: ClusterTile) -> _Functions:
    library = cuda_build.loaded(source(tile))
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.fp8_gemm_launch.argtypes = [
        *(pointer, pointer, wide, pointer, pointer, number, pointer, wide),
        *(number, number, number, number, pointer),
    ]
    return _Functions(library.fp8_gemm_launch, library.fp8_gemm_clusters)


def clusters(tile: ClusterTile) -> int:
    """How many clusters of the tile a device runs at a time."""
    return _functions(tile).clusters()


def fp8_gemm(
    x: Rows,
    weight: BlockWeight,
    *,
    out: Tensor | None = None,
    tile: ClusterTile | None = None,
    dependent: bool = False,
) -> Tensor:
    """`quantised.fp8_gemm`: [m, n] bfloat16, in `out` if given, whose rows are contiguous.

    Args:
        tile: by default `gemm_config.cluster_tile` of the shape.
        dependent: programmatic dependent launch: weights are asked for while the kernel before
            still runs. That kernel must not write the weights.

    Raises:
        ValueError: the scales of x do not lie as `quantised.new_scales` lays them.
        RuntimeError: it does not compile or cannot be launched.
    """
    (m, k), n = x.values.shape, weight.values.shape[0]
    if out is None:
        out = x.values.new_empty((m, n), dtype=torch.bfloat16)
    if m == 0:
        return out
    tile = tile or cluster_tile(m, n, k)
    step = x.scales.stride(1)
    if (m > 1 and x.scales.stride(0) != 1) or step % 4:
        raise ValueError(f"the scales of x have strides {x.scales.stride()}, not column by column")
    code = _functions(tile).launch(
        x.values.data_ptr(),
        x.scales.data_ptr(),
        step,
        weight.values.data_ptr(),
        weight.scales.data_ptr(),
        weight.scales.stride(0),
        out.data_ptr(),
        out.stride(0),
        m,
        n,
        k,
        int(dependent),
        torch.cuda.current_stream().cuda_stream,
    )
    if code:
        raise RuntimeError(f"the product [{m}, {k}] x [{n}, {k}] by {tile} failed with code {code}")
    return out

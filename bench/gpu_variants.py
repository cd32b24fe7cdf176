"""Candidates of a step that are forms of one kernel: tiles, launches, some without a time yet."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_timing import Candidate
from torch import Tensor

from pdmesh.kernels import cublaslt_backend, deep_gemm_backend
from pdmesh.kernels.gemm_config import untimed
from pdmesh.kernels.quantised import BlockWeight, Rows

UNTIMED_TILES = 4
"""Of `gemm_config.untimed`."""
ABSORB_VARIANTS = {
    "CUDA, early": {"early": True},
    "CUDA, whole": {"whole": True},
    "CUDA, whole, early": {"whole": True, "early": True},
}


def own(module: str, name: str, label: str | None = None, wrap: Any = None) -> list[Candidate]:
    """This project's kernel as a candidate, if it is there."""
    try:
        function = getattr(importlib.import_module(f"pdmesh.kernels.{module}"), name)
    except (ImportError, AttributeError):
        return []
    return [Candidate(label or module, wrap(function) if wrap else function, own=True)]


def dense_candidates() -> list[Candidate]:
    found = [
        Candidate("DeepGEMM", deep_gemm_backend.fp8_gemm),
        Candidate("cuBLASLt", cublaslt_backend.fp8_gemm),
    ]
    found += own("triton.splitk_gemm", "fp8_gemm", "split-K")
    found += own("cuda_gemm", "fp8_gemm", "cluster")
    # As dependents: they ask for their weights before the kernel ahead is done.
    found += own("cuda_gemm", "fp8_gemm", "cluster, dependent", having(dependent=True))
    for place in range(UNTIMED_TILES):
        found += own("cuda_gemm", "fp8_gemm", f"cluster, untimed {place}", _untimed_tile(place))
    return found


def having(**options: Any) -> Callable[[Any], Any]:
    return lambda run: partial(run, **options)


def _untimed_tile(place: int) -> Callable[[Any], Any]:
    """The product by one of the tiles that no table has yet."""

    def of(run: Any) -> Callable[..., Tensor]:
        def product(x: Rows, weight: BlockWeight) -> Tensor:
            (m, k), n = x.values.shape, weight.values.shape[0]
            tiles = untimed(m, n, k)
            if place >= len(tiles):
                raise ValueError("no such tile of this shape")
            result: Tensor = run(x, weight, tile=tiles[place], dependent=True)
            return result

        return product

    return of

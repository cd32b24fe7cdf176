"""Which backend computes a dense FP8 product, by its shape. Pure."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from torch import Tensor

from pdmesh.kernels import cublaslt_backend, deep_gemm_backend
from pdmesh.kernels.quantised import BlockWeight, Rows

FEW_ROWS = 128
"""Up to so many rows a weight has too few tiles for a device, and split sums pay off."""
MANY_ROWS = 512
"""Up to so many rows cuBLASLt is ahead of DeepGEMM on the large projections."""


def gemm_backend(m: int, n: int, k: int, usable: Collection[str]) -> str:
    """One of `usable` for x [m, k] times weight [n, k]; "triton" takes every shape."""
    if m > FEW_ROWS or "triton" not in usable:
        fits = cublaslt_backend.unsupported(m, n, k) is None
        if "cublaslt" in usable and fits and m <= MANY_ROWS:
            return "cublaslt"
        if "deep_gemm" in usable and deep_gemm_backend.unsupported(n, k) is None:
            return "deep_gemm"
    return "triton"


class Fp8Gemm:
    """`quantised.fp8_gemm` by whichever backend suits the shape."""

    def __init__(self, usable: Collection[str]) -> None:
        from pdmesh.kernels.triton import splitk_gemm

        calls: dict[str, Any] = {
            "triton": splitk_gemm.fp8_gemm,
            "cublaslt": cublaslt_backend.fp8_gemm,
            "deep_gemm": deep_gemm_backend.fp8_gemm,
        }
        self._usable = frozenset(usable)
        self._calls = {name: calls[name] for name in usable}
        self._backend = cache(gemm_backend)

    def __call__(self, x: Rows, weight: BlockWeight) -> Tensor:
        """See `quantised.fp8_gemm`."""
        m, k = x.values.shape
        name = self._backend(m, weight.values.shape[0], k, self._usable)
        product: Tensor = self._calls[name](x, weight)
        return product

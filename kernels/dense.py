"""The dense FP8 product of a device: for each shape by the backend that suits it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor

from pdmesh.kernels import cublaslt_backend, cuda_gemm, deep_gemm_backend, gemm_choice
from pdmesh.kernels.compiling import Compilation
from pdmesh.kernels.gemm_choice import Choice
from pdmesh.kernels.gemm_config import cluster_tile
from pdmesh.kernels.quantised import BlockWeight, Rows

UNMEASURED = ("deep_gemm", "cublaslt", "split")
"""The order for shapes that `gemm_choice.MEASURED` does not name."""


def _missing(m: int, n: int, k: int) -> dict[str, str]:
    problems = {
        "cluster": cuda_gemm.unavailable() or cuda_gemm.unsupported(n, k),
        "deep_gemm": deep_gemm_backend.unavailable() or deep_gemm_backend.unsupported(n, k),
        "cublaslt": cublaslt_backend.unavailable() or cublaslt_backend.unsupported(m, n, k),
    }
    return {name: problem for name, problem in problems.items() if problem is not None}


@cache
def choose(m: int, n: int, k: int) -> Choice:
    """The backend of x [m, k] times weight [n, k], and why."""
    missing = _missing(m, n, k)
    if (n, k) in gemm_choice.MEASURED:
        return gemm_choice.choose_dense(m, n, k, missing)
    name = next(name for name in UNMEASURED if name not in missing)
    return Choice(name, "; ".join(missing.values()) or "ahead for most shapes that were measured")


def compilation(m: int, n: int, k: int) -> Compilation | None:
    """What the first product of this shape compiles, if it does so without a device."""
    if choose(m, n, k).backend != "cluster":
        return None
    return cuda_gemm.compilation(cluster_tile(m, n, k))


@cache
def _call(name: str) -> Callable[..., Any]:
    modules = {
        "cluster": "cuda_gemm",
        "split": "triton.splitk_gemm",
        "deep_gemm": "deep_gemm_backend",
        "cublaslt": "cublaslt_backend",
        "torch": "quantised",
    }
    call: Callable[..., Any] = importlib.import_module(f"pdmesh.kernels.{modules[name]}").fp8_gemm
    # As it was measured; the kernel ahead writes rows, never a weight.
    return partial(call, dependent=True) if name == "cluster" else call


def fp8_gemm(x: Rows, weight: BlockWeight) -> Tensor:
    """See `quantised.fp8_gemm`."""
    m, k = x.values.shape
    product: Tensor = _call(choose(m, weight.values.shape[0], k).backend)(x, weight)
    return product

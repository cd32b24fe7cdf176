"""Candidates of a step that are forms of one kernel: tiles, launches, some without a time yet."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_timing import Candidate

from pdmesh.kernels import cublaslt_backend, deep_gemm_backend


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
    return found


def having(**options: Any) -> Callable[[Any], Any]:
    return lambda run: partial(run, **options)

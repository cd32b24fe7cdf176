"""The block-scaled FP8 products by DeepGEMM (module deep_gemm), which compiles when first called.

Versions name the same functions differently; the first name that is there is taken.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.quantised import BlockWeight, Rows

_DENSE = ("fp8_gemm_nt", "fp8_fp4_gemm_nt")
_MASKED = (
    "m_grouped_fp8_gemm_nt_masked",
    "fp8_m_grouped_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nt_masked",
)
_CONTIGUOUS = ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous")


@functools.cache
def unavailable() -> str | None:
    """Why it cannot be used here, in a sentence; None if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability()[0] < 9:
        return "DeepGEMM needs a device of capability 9.0 or later"
    try:
        importlib.import_module("deep_gemm")
    except Exception as error:  # noqa: BLE001 - a wheel for another torch fails in many ways
        return f"deep_gemm cannot be imported: {error}"
    return None


def unsupported(n: int, k: int) -> str | None:
    """Why it does not take a weight [n, k]; None if it does."""
    if n % 64 or k % BLOCK:
        return f"DeepGEMM takes n in 64s and k in {BLOCK}s, not {n} x {k}"
    return None


def unsupported_masked(rows: int, n: int, k: int) -> str | None:
    """Why it does not take experts with space for so many rows each; None if it does.

    Its tile of up to 128 rows is stored whole: where the space is not a multiple of that, the rows
    beyond it overwrite the next expert's (seen with 0.1.5.post1 and 16 rows: wrong results).
    """
    if rows % 128 and rows != 64:
        return f"DeepGEMM needs space for 64 rows of an expert or for 128s, not for {rows}"
    return unsupported(n, k)


@functools.cache
def _function(names: tuple[str, ...]) -> Callable[..., Any]:
    module = importlib.import_module("deep_gemm")
    for name in names:
        if hasattr(module, name):
            found: Callable[..., Any] = getattr(module, name)
            return found
    raise RuntimeError(f"this deep_gemm has none of {', '.join(names)}")


def fp8_gemm(x: Rows, weight: BlockWeight, *, out: Tensor | None = None) -> Tensor:
    """`quantised.fp8_gemm`: [m, n] bfloat16, in `out` if given."""
    if out is None:
        shape = (x.values.shape[0], weight.values.shape[0])
        out = x.values.new_empty(shape, dtype=torch.bfloat16)
    if out.numel():
        _function(_DENSE)(tuple(x), tuple(weight), out)
    return out


def masked_grouped_gemm(
    x: Rows,
    weight: BlockWeight,
    counts: Tensor,
    expected: int,
    used: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`quantised.masked_grouped_gemm`: [experts, rows, n] bfloat16, in `out` if given."""
    experts, rows, _ = x.values.shape
    if out is None:
        shape = (experts, rows, weight.values.shape[1])
        out = x.values.new_empty(shape, dtype=torch.bfloat16)
    if out.numel():
        _function(_MASKED)(tuple(x), tuple(weight), out, counts, max(expected, 1))
    return out


def contiguous_grouped_gemm(
    x: Rows,
    weight: BlockWeight,
    row_expert: Tensor,
    expected: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`quantised.contiguous_grouped_gemm`: [m, n] bfloat16, in `out` if given.

    Tiles are of 128 rows. Those of 64, which this library can be set to, took 1.2 to 1.4 times as
    long with 16 to 1,024 rows of an expert on an H200.
    """
    if out is None:
        shape = (x.values.shape[0], weight.values.shape[1])
        out = x.values.new_empty(shape, dtype=torch.bfloat16)
    if out.numel():
        _function(_CONTIGUOUS)(tuple(x), tuple(weight), out, row_expert)
    return out

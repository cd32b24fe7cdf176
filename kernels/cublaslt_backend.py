"""The block-scaled FP8 product by cuBLASLt, through torch's scaled_mm."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.quantised import BlockWeight, Rows


@functools.cache
def unavailable() -> str | None:
    """Why it cannot be used here, in a sentence; None if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "cuBLASLt has these block scales on capability 9.0 alone"
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm with block scales"
    return None


def unsupported(m: int, n: int, k: int) -> str | None:
    """Why it does not take the shape; None if it does."""
    if m % 4 or n % 16 or k % (4 * BLOCK):
        return f"cuBLASLt takes m in 4s, n in 16s and k in {4 * BLOCK}s, not {m} x {n} x {k}"
    return None


def fp8_gemm(x: Rows, weight: BlockWeight, *, out: Tensor | None = None) -> Tensor:
    """`quantised.fp8_gemm`: [m, n] bfloat16; in `out` if given, which costs a copy."""
    functional = torch.nn.functional
    if x.values.shape[0] == 0:
        shape = (0, weight.values.shape[0])
        return x.values.new_empty(shape, dtype=torch.bfloat16) if out is None else out
    kinds = functional.ScalingType
    product: Tensor = functional.scaled_mm(
        x.values,
        weight.values.t(),
        x.scales,
        kinds.BlockWise1x128,
        weight.scales.t(),
        kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return product if out is None else out.copy_(product)

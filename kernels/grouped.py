"""The experts' products of a device: by the backend that suits the rows that an expert has."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from pdmesh.kernels import deep_gemm_backend
from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.gemm_choice import FEW_ROWS, Choice, choose_grouped
from pdmesh.kernels.quantised import BlockWeight, Rows


@cache
def choose_masked(experts: int, space: int, expected: int, n: int, k: int) -> Choice:
    """The backend for experts [n, k] with space for `space` rows each, `expected` of them used."""
    problem = deep_gemm_backend.unavailable()
    problem = problem or deep_gemm_backend.unsupported_masked(space, n, k)
    return choose_grouped(experts, expected, {} if problem is None else {"deep_gemm": problem})


@cache
def choose_contiguous(n: int, k: int) -> Choice:
    """The backend for experts [n, k] whose rows are sorted."""
    problem = deep_gemm_backend.unavailable() or deep_gemm_backend.unsupported(n, k)
    return choose_grouped(0, FEW_ROWS + 1, {} if problem is None else {"deep_gemm": problem})


def masked_grouped_gemm(
    x: Rows, weight: BlockWeight, counts: Tensor, expected: int, *, out: Tensor | None = None
) -> Tensor:
    """See `quantised.masked_grouped_gemm`."""
    from pdmesh.kernels.triton import grouped_gemm

    experts, n, k = weight.values.shape
    chosen = choose_masked(experts, x.values.shape[1], expected, n, k).backend
    module = deep_gemm_backend if chosen == "deep_gemm" else grouped_gemm
    output: Tensor = module.masked_grouped_gemm(x, weight, counts, expected, out=out)
    return output


def contiguous_grouped_gemm(
    x: Rows,
    weight: BlockWeight,
    row_expert: Tensor,
    expected: int = BLOCK,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `quantised.contiguous_grouped_gemm`."""
    from pdmesh.kernels.triton import grouped_gemm

    _, n, k = weight.values.shape
    chosen = choose_contiguous(n, k).backend
    module = deep_gemm_backend if chosen == "deep_gemm" else grouped_gemm
    output: Tensor = module.contiguous_grouped_gemm(x, weight, row_expert, expected, out=out)
    return output

"""The experts' products of a device: by the backend that suits the rows that an expert has."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from pdmesh.kernels import deep_gemm_backend, gemm_choice
from pdmesh.kernels.quantised import BlockWeight, Rows


@cache
def choose_masked(experts: int, space: int, expected: int, n: int, k: int) -> gemm_choice.Choice:
    """The backend for experts [n, k] with space for `space` rows each, `expected` of them used."""
    problem = deep_gemm_backend.unavailable()
    problem = problem or deep_gemm_backend.unsupported_masked(space, n, k)
    missing = {} if problem is None else {"deep_gemm": problem}
    return gemm_choice.choose_masked(experts, expected, missing)


@cache
def choose_contiguous(expected: int, n: int, k: int) -> gemm_choice.Choice:
    """The backend for experts [n, k] whose rows are sorted, `expected` of each (0: many)."""
    problem = deep_gemm_backend.unavailable() or deep_gemm_backend.unsupported(n, k)
    missing = {} if problem is None else {"deep_gemm": problem}
    return gemm_choice.choose_contiguous(expected, missing)


def masked_grouped_gemm(
    x: Rows,
    weight: BlockWeight,
    counts: Tensor,
    expected: int,
    used: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `quantised.masked_grouped_gemm`."""
    from pdmesh.kernels.triton import grouped_gemm

    experts, n, k = weight.values.shape
    chosen = choose_masked(experts, x.values.shape[1], expected, n, k).backend
    module = deep_gemm_backend if chosen == "deep_gemm" else grouped_gemm
    output: Tensor = module.masked_grouped_gemm(x, weight, counts, expected, used, out=out)
    return output


def contiguous_grouped_gemm(
    x: Rows,
    weight: BlockWeight,
    row_expert: Tensor,
    expected: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `quantised.contiguous_grouped_gemm`."""
    from pdmesh.kernels.triton import grouped_gemm

    _, n, k = weight.values.shape
    chosen = choose_contiguous(expected, n, k).backend
    module = deep_gemm_backend if chosen == "deep_gemm" else grouped_gemm
    output: Tensor = module.contiguous_grouped_gemm(x, weight, row_expert, expected, out=out)
    return output

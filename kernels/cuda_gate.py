"""The gate in CUDA C++, for DeepSeek-V3's rule: logits whole from one launch, the rest in another.

kernels/cuda/gate.cu: clusters add up the parts of a sum before it is written; one cluster chooses,
counts and numbers. Compiled when first used (`cuda_build`): use it once before a CUDA graph is
recorded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from pdmesh.kernels import cuda_build
from pdmesh.kernels.cuda_build import unavailable
from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.routing import Routing

__all__ = ["gate_topk", "source", "unavailable", "unsupported", "workspace"]

EXPERTS, TOP, GROUPS, TOP_GROUPS = 256, 8, 8, 4
MOST_ROWS = 1024


def unsupported(rule: GateRule, rows: int) -> str | None:
    """Why it does not take a rule or a number of rows; None if it does."""
    sizes = (rule.num_experts, rule.top_k, rule.num_groups, rule.top_groups)
    if (rule.method, *sizes) != ("noaux_tc", EXPERTS, TOP, GROUPS, TOP_GROUPS):
        return f"it takes {TOP} of {EXPERTS} experts in {GROUPS} groups by noaux_tc, not {rule}"
    if not rule.normalise:
        return "it takes weights that are normalised"
    return f"it takes {MOST_ROWS} rows, not {rows}" if rows > MOST_ROWS else None


def source() -> str:
    """The whole translation unit."""
    return cuda_build.unit("gate", 48, "bf16", {})


@functools.cache
def _launcher() -> Callable[..., int]:
    launch: Callable[..., int] = cuda_build.loaded(source()).gate_launch
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    launch.argtypes = [  # type: ignore[attr-defined]
        *(pointer, wide, pointer, pointer, pointer, ctypes.c_float),
        *(number, number, *[pointer] * 6, number, pointer),
    ]
    return launch


def workspace(rows: int, device: torch.device | str) -> Tensor:
    """Logits [rows, 256] float32."""
    return torch.empty((rows, EXPERTS), dtype=torch.float32, device=device)


def gate_topk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    rule: GateRule,
    num_rows: Tensor | None = None,
    *,
    out: Routing | None = None,
    work: Tensor | None = None,
    dependent: bool = False,
) -> Routing:
    """Projects rows to experts, chooses, and counts: `routing.gate_topk`.

    A row's logits have the same bits however many rows there are; they are added in another order
    than Triton's gate adds them.

    Args:
        x: [m, hidden] bfloat16, m up to 1,024; start and rows in 8s, a row's elements consecutive.
        weight: [256, hidden] bfloat16, contiguous.
        bias: [256] float32, contiguous.
        num_rows: int32 on the device: rows from there on are padding.
        out: where the result goes; made if it is None.
        work: see `workspace`; made if it is None.
        dependent: see `cuda_gemm.fp8_gemm`.

    Raises:
        ValueError: another rule, more rows, other types or layouts.
        RuntimeError: it does not compile or cannot be launched.
    """
    (m, hidden), device = x.shape, x.device
    if problem := unsupported(rule, m):
        raise ValueError(problem)
    if x.dtype != torch.bfloat16 or x.stride(1) != 1 or x.stride(0) % 8 or hidden % 8:
        raise ValueError(f"rows {x.dtype} {x.shape} {x.stride()}")
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or bias.dtype != torch.float32:
        raise ValueError(f"a weight {weight.dtype} {weight.stride()} and a bias {bias.dtype}")
    if out is None:
        ids = torch.empty((m, TOP), dtype=torch.int32, device=device)
        counts = torch.empty(EXPERTS, dtype=torch.int32, device=device)
        weights = torch.empty((m, TOP), dtype=torch.float32, device=device)
        out = Routing(ids, weights, counts, torch.empty_like(counts), torch.empty_like(ids))
    if m == 0:
        out.counts.zero_()
        out.offsets.zero_()
        return out
    work = workspace(m, device) if work is None else work
    code = _launcher()(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        bias.data_ptr(),
        None if num_rows is None else num_rows.data_ptr(),
        rule.scale,
        m,
        hidden,
        work.data_ptr(),
        *(tensor.data_ptr() for tensor in out),
        int(dependent),
        torch.cuda.current_stream().cuda_stream,
    )
    if code:
        raise RuntimeError(f"the gate of {m} rows failed with code {code}")
    return out

"""The gate in CUDA C++, for DeepSeek-V3's rule: logits whole from one launch, the rest in another.

kernels/cuda/gate.cu: clusters add up the parts of a sum before it is written; one cluster chooses,
counts and numbers. Compiled when first used (`cuda_build`): use it once before a CUDA graph is
recorded.
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
from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.routing import Routing

__all__ = [
    "FORMS",
    "Form",
    "compilation",
    "gate_topk",
    "source",
    "unavailable",
    "unsupported",
    "workspace",
]

EXPERTS, TOP, GROUPS, TOP_GROUPS = 256, 8, 8, 4
ROWS_A_BLOCK = 32
"""That a thread block can choose for, a warp each."""


class Form(NamedTuple):
    """How the work is cut.

    Attributes:
        parts: of the hidden size, the thread blocks of a cluster.
        blocks: the most thread blocks that choose, 8 or 16.
    """

    parts: int
    blocks: int


FORMS = (Form(6, 16), Form(7, 16))
"""The usual one first, then what a search tries.

256 rows are 16 tiles: in clusters of six all run at a time, of seven only 15 do on an H200.
"""


def unsupported(rule: GateRule, rows: int, form: Form = FORMS[0]) -> str | None:
    """Why it does not take a rule or a number of rows; None if it does."""
    sizes = (rule.num_experts, rule.top_k, rule.num_groups, rule.top_groups)
    if (rule.method, *sizes) != ("noaux_tc", EXPERTS, TOP, GROUPS, TOP_GROUPS):
        return f"it takes {TOP} of {EXPERTS} experts in {GROUPS} groups by noaux_tc, not {rule}"
    if not rule.normalise:
        return "it takes weights that are normalised"
    most = form.blocks * ROWS_A_BLOCK
    return f"it takes {most} rows, not {rows}" if rows > most else None


def source(form: Form = FORMS[0]) -> str:
    """The whole translation unit."""
    constants = dict(zip(("PARTS", "BLOCKS"), form, strict=True))
    return cuda_build.unit("gate", (8, 16, 32, 64), "bf16", constants, "gate_device.cuh")


def compilation() -> Compilation:
    """What a first use of the usual form compiles."""
    return cuda_build.compilation("gate", source())


@functools.cache
def _launcher(form: Form) -> Callable[..., int]:
    launch: Callable[..., int] = cuda_build.loaded(source(form)).gate_launch
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    launch.argtypes = [  # type: ignore[attr-defined]
        *(pointer, wide, pointer, pointer, pointer, ctypes.c_float),
        *(number, number, *[pointer] * 6, number, pointer),
    ]
    return launch


def workspace(rows: int, device: torch.device | str) -> Tensor:
    """Logits [rows, 256] float32."""
    return torch.empty((rows, EXPERTS), dtype=torch.float32, device=device)


def _new_routing(rows: int, device: torch.device | str) -> Routing:
    ids = torch.empty((rows, TOP), dtype=torch.int32, device=device)
    counts = torch.empty(EXPERTS, dtype=torch.int32, device=device)
    weights = torch.empty((rows, TOP), dtype=torch.float32, device=device)
    return Routing(ids, weights, counts, torch.empty_like(counts), torch.empty_like(ids))


def _check(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Raises ValueError for what the kernels cannot take."""
    hidden = x.shape[1]
    if x.dtype != torch.bfloat16 or x.stride(1) != 1 or x.stride(0) % 8 or hidden % 8:
        raise ValueError(f"rows {x.dtype} {tuple(x.shape)} with strides {x.stride()}")
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        raise ValueError(f"a weight {weight.dtype} with strides {weight.stride()}")
    if weight.shape != (EXPERTS, hidden):
        raise ValueError(f"a weight {tuple(weight.shape)} for rows of {hidden}")
    if bias.dtype != torch.float32 or bias.shape != (EXPERTS,) or not bias.is_contiguous():
        raise ValueError(f"a bias {bias.dtype} {tuple(bias.shape)}")


def gate_topk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    rule: GateRule,
    num_rows: Tensor | None = None,
    *,
    out: Routing | None = None,
    work: Tensor | None = None,
    form: Form = FORMS[0],
    dependent: bool = False,
) -> Routing:
    """Projects rows to experts, chooses, and counts: `routing.gate_topk`.

    A row's logits have the same bits however many rows there are; they are added in another order
    than Triton's gate adds them.

    Args:
        x: [m, hidden] bfloat16, m up to 512; start and rows in 8s, a row's elements consecutive.
        weight: [256, hidden] bfloat16, contiguous.
        bias: [256] float32, contiguous.
        num_rows: int32 on the device: rows from there on are padding.
        out: where the result goes, counts and offsets from multiples of 16 bytes on; made if None.
        work: see `workspace`; made if it is None.
        form: for tuning.
        dependent: see `cuda_gemm.fp8_gemm`; the second launch is one in any case.

    Raises:
        ValueError: another rule, more rows, other types or layouts.
        RuntimeError: it does not compile or cannot be launched.
    """
    (m, hidden), device = x.shape, x.device
    if problem := unsupported(rule, m, form):
        raise ValueError(problem)
    _check(x, weight, bias)
    out = _new_routing(m, device) if out is None else out
    if m == 0:
        out.counts.zero_()
        out.offsets.zero_()
        return out
    work = workspace(m, device) if work is None else work
    code = _launcher(form)(
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

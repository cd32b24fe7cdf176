"""The per-head products of absorbed attention in CUDA C++, for DeepSeek-V3's sizes.

kernels/cuda/absorb_query.cu and project_values.cu read a head's FP8 weight once, keep it as
bfloat16 (which holds e4m3 exactly) and take rows past it. Compiled when first used (`cuda_build`):
use both products once before a CUDA graph is recorded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from pdmesh.kernels import cuda_build
from pdmesh.kernels.compiling import Compilation
from pdmesh.kernels.cuda_build import unavailable
from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.quantised import BlockWeight, Rows, new_scales

__all__ = [
    "absorb_query",
    "compilation",
    "project_values_quantise",
    "shares",
    "unavailable",
    "unsupported",
]

NOPE, RANK, ROPE, VALUE = 128, 512, 64, 128
TILE_ROWS = 64
PROCESSORS = 132


def unsupported(nope: int, rank: int, rope: int, value: int) -> str | None:
    """Why it does not take a model of these sizes; None if it does."""
    if (nope, rank, rope, value) != (NOPE, RANK, ROPE, VALUE):
        return (
            f"it takes heads of {NOPE} + {ROPE} and {VALUE} values and a rank of {RANK},"
            f" not {nope} + {rope}, {value} and {rank}"
        )
    return None


def shares(m: int, heads: int) -> tuple[int, int]:
    """Thread blocks of one head: parts of its tiles of 64 rows, and parts of a query's outputs.

    As many as fill a device.
    """
    room = max(1, PROCESSORS // heads)
    rows = min(-(-m // TILE_ROWS), room)
    parts = max(part for part in (1, 2, 4, 8) if part == 1 or rows * part <= room)
    return rows, parts


def source(name: str) -> str:
    """The whole translation unit of "absorb_query" or "project_values"."""
    columns = {"absorb_query": 64, "project_values": 128}[name]
    return cuda_build.unit(name, columns, "bf16", {})


def compilation(name: str) -> Compilation:
    """What a first use of "absorb_query" or "project_values" compiles."""
    return cuda_build.compilation(name, source(name))


@functools.cache
def _launcher(name: str) -> Callable[..., int]:
    library = cuda_build.loaded(source(name))
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    launch: Callable[..., int] = library[f"{name}_launch"]
    if name == "absorb_query":
        types = [pointer, wide, wide, pointer, pointer, pointer, wide, wide, pointer]
        types += [ctypes.c_float, *[number] * 5, pointer]
    else:
        types = [pointer, wide, wide, pointer, pointer, pointer, pointer, wide]
        types += [number, number, number, number, pointer]
    launch.argtypes = types  # type: ignore[attr-defined]
    return launch


def _checked(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with code {code}")


def absorb_query(
    query: Tensor,
    weight: BlockWeight,
    rotated: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    next_may_begin: bool = False,
) -> Tensor:
    """`quantised.absorb_query`: [m, heads, 576] bfloat16.

    A dependent launch: it asks for its weights before the kernel ahead has ended, which must not
    write them.

    Args:
        query, rotated: [m, heads, 128 and 64] bfloat16; starts and strides in 8s, the last one.
        out: bfloat16, contiguous, written and returned.
        next_may_begin: whether a dependent behind it may begin before the result is written, and
            waits: FlashMLA's decode does not.

    Raises:
        RuntimeError: it does not compile or cannot be launched.
    """
    m, heads, _ = query.shape
    if out is None:
        out = query.new_empty((m, heads, RANK + ROPE))
    if m == 0:
        return out
    rows, parts = shares(m, heads)
    code = _launcher("absorb_query")(
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        weight.values.data_ptr(),
        weight.scales.data_ptr(),
        rotated.data_ptr(),
        rotated.stride(0),
        rotated.stride(1),
        out.data_ptr(),
        scale,
        m,
        heads,
        rows,
        parts,
        int(next_may_begin),
        torch.cuda.current_stream().cuda_stream,
    )
    _checked(code, f"the absorbed query of {m} rows and {heads} heads")
    return out


def project_values_quantise(
    latent: Tensor,
    weight: BlockWeight,
    *,
    out: Rows | None = None,
    dependent: bool = False,
) -> Rows:
    """`quantised.project_values_quantise`: values [m, heads * 128], a scale a head.

    Args:
        latent: [m, heads, 512] bfloat16; start and strides in 8s, the last one.
        out: values contiguous, scales as `new_scales` makes them; written and returned.
        dependent: see `cuda_gemm.fp8_gemm`.

    Raises:
        RuntimeError: it does not compile or cannot be launched.
    """
    m, heads, _ = latent.shape
    if out is None:
        values = latent.new_empty((m, heads * BLOCK), dtype=torch.float8_e4m3fn)
        out = Rows(values, new_scales(m, heads, device=latent.device))
    if m == 0:
        return out
    code = _launcher("project_values")(
        latent.data_ptr(),
        latent.stride(0),
        latent.stride(1),
        weight.values.data_ptr(),
        weight.scales.data_ptr(),
        out.values.data_ptr(),
        out.scales.data_ptr(),
        out.scales.stride(1),
        m,
        heads,
        shares(m, heads)[0],
        int(dependent),
        torch.cuda.current_stream().cuda_stream,
    )
    _checked(code, f"the values of {m} rows and {heads} heads")
    return out

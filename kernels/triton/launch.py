"""What the launches of this package share."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import torch
from torch import Tensor

_next_may_begin = False

CPU_PROGRAMS = 4
"""Programs of a persistent kernel in the interpreter, where there is no processor count."""


def unavailable() -> str | None:
    """Why these kernels cannot run in this process; None if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
        return None
    return "there is no CUDA device, and TRITON_INTERPRET is not 1"


@functools.cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def multiprocessors(x: Tensor) -> int:
    """Multiprocessors of the device that `x` is on."""
    return _multiprocessors(x.device.index) if x.is_cuda else CPU_PROGRAMS


@functools.cache
def _chains(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def chains(x: Tensor) -> bool:
    """Whether a launch on the device of `x` may begin before the one ahead has ended."""
    return x.is_cuda and _chains(x.device.index)


@contextlib.contextmanager
def next_may_begin() -> Iterator[None]:
    """Norms and `rope_append` launched in here let a dependent behind them begin at once.

    It may ask for what they do not write, its weights, and has to wait before it reads the rest
    (programmatic dependent launch). Only for a kernel that does: FlashMLA's decode does not.
    """
    global _next_may_begin
    before, _next_may_begin = _next_may_begin, True
    try:
        yield
    finally:
        _next_may_begin = before


def lets_next_begin() -> bool:
    """Whether what is launched now is in `next_may_begin`."""
    return _next_may_begin


def power_of_two(n: int) -> int:
    """The least power of two that is no less than n; 0 of 0.

    Triton's own, like its `cdiv`, is a function of kernels, which costs a launch microseconds.
    """
    return n and 1 << (n - 1).bit_length()


def rows_of(x: Tensor) -> tuple[int, int]:
    """Rows of x [m, k] and the elements from one to the next.

    Raises:
        ValueError: x has other dimensions, or the elements of a row do not stand together.
    """
    if x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(f"need rows [m, k] of consecutive elements, not {x.shape} {x.stride()}")
    return x.shape[0], x.stride(0)

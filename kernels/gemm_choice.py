"""Which backend computes a block-scaled FP8 product, by its shape and by what is there: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

DENSE = ("cluster", "split", "deep_gemm", "cublaslt", "torch")
"""`cuda_gemm`, `triton.splitk_gemm`, `deep_gemm_backend`, `cublaslt_backend`, `quantised`."""
MANY = ("deep_gemm", "cublaslt", "cluster", "split", "torch")
"""The same for many rows."""
GROUPED = ("deep_gemm", "triton", "torch")
"""`deep_gemm_backend`, `triton.grouped_gemm`, `quantised`."""


FEW_ROWS = 64
"""Up to here the generic product is the faster one: 32 experts, 4096 x 7168 and 7168 x 2048, took
233 + 129 us with 64 rows each (DeepGEMM 250 + 137), and 371 + 193 us with 128 (277 + 152)."""


class Choice(NamedTuple):
    """A backend and why, in a sentence without a full stop."""

    backend: str
    reason: str


class Measured(NamedTuple):
    """Median microseconds up to so many rows, by backend, on one H200."""

    rows: int
    times: Mapping[str, float]


MEASURED: dict[tuple[int, int], tuple[Measured, ...]] = {}
"""By (n, k): bench/gpu_gemm.py."""

MANY_ROWS = 512
"""From here on a product has tiles enough without a split."""


def choose_dense(m: int, n: int, k: int, missing: Mapping[str, str]) -> Choice:
    """Backend of x [m, k] times weight [n, k].

    Args:
        missing: why a backend cannot be used for this shape, in a sentence, by its name. `torch`
            can always be used.
    """
    for measured in MEASURED.get((n, k), ()):
        if m <= measured.rows:
            order = sorted(measured.times, key=lambda name: measured.times[name])
            for place, name in enumerate(order):
                if name in missing:
                    continue
                took = f"{measured.times[name]:.1f} us at {measured.rows} rows"
                if place == 0:
                    return Choice(name, f"the fastest that was measured, {took}")
                return Choice(name, f"{took}, the fastest there is: {_why(order[:place], missing)}")
            break
    order = list(DENSE if m < MANY_ROWS else MANY)
    what = "few rows, so sums are split" if m < MANY_ROWS else "many rows, so tiles fill a device"
    return _first(order, what, missing)


def choose_grouped(rows: int, missing: Mapping[str, str]) -> Choice:
    """Backend of the experts' products, masked or contiguous.

    Args:
        rows: how many an expert probably has.
        missing: as in `choose_dense`.
    """
    if rows <= FEW_ROWS:
        order = ["triton", *(name for name in GROUPED if name != "triton")]
        return _first(order, f"the fastest for experts of {FEW_ROWS} rows or fewer", missing)
    return _first(list(GROUPED), f"the fastest for experts of more than {FEW_ROWS} rows", missing)


def _first(order: list[str], what: str, missing: Mapping[str, str]) -> Choice:
    for place, name in enumerate(order):
        if name not in missing or name == "torch":
            reason = what if place == 0 else _why(order[:place], missing)
            return Choice(name, reason)
    raise AssertionError("torch is in every order")


def _why(names: list[str], missing: Mapping[str, str]) -> str:
    return "; ".join(f"not {name}, as {missing[name]}" for name in names if name in missing)

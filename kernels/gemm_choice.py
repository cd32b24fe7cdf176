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


FEW_ROWS, MANY_EXPERTS = 16, 8
"""The generic product is the faster one for so few rows of so many experts: 4096 x 7168 and 7168 x
2048 took 64 + 36 us with 16 rows of 8 experts (DeepGEMM 65 + 37), 66 + 37 with 32 (65 + 37); with 8
rows of 2 experts 33 + 13 (20 + 12). bench/roofline.py on one H200."""


SHORT_TILES = 128
"""Up to so many sorted rows of an expert tiles of 64 or 32 rows are faster than DeepGEMM's of 128:
both products of 256 experts took 2.8 ms with 16 rows on average (DeepGEMM 3.9), 2.9 with 32 (4.3),
3.5 with 64 (4.6), 4.9 with 128 (5.4); of 32 experts with 256 rows 1.01 (0.81). bench/gpu_gemm.py
--only sorted --tune on one H200."""


class Choice(NamedTuple):
    """A backend and why, in a sentence without a full stop."""

    backend: str
    reason: str


class Measured(NamedTuple):
    """Median microseconds up to so many rows, by backend, on one H200."""

    rows: int
    times: Mapping[str, float]


MEASURED: dict[tuple[int, int], tuple[Measured, ...]] = {
    (2112, 7168): (
        Measured(4, {"cluster": 6.8, "split": 8.2, "deep_gemm": 13.1, "cublaslt": 15.7}),
        Measured(16, {"cluster": 6.9, "split": 8.9, "deep_gemm": 10.7, "cublaslt": 15.9}),
        Measured(32, {"cluster": 6.9, "split": 10.8, "deep_gemm": 10.9, "cublaslt": 15.9}),
        Measured(64, {"cluster": 7.2, "split": 11.3, "deep_gemm": 10.1, "cublaslt": 22.6}),
        Measured(128, {"cluster": 8.2, "split": 12.6, "deep_gemm": 11.0, "cublaslt": 22.8}),
        Measured(256, {"cluster": 10.5, "split": 15.9, "deep_gemm": 12.3, "cublaslt": 23.0}),
    ),
    (1536, 7168): (
        Measured(4, {"cluster": 7.3, "split": 8.1, "deep_gemm": 12.5, "cublaslt": 15.6}),
        Measured(16, {"cluster": 7.5, "split": 8.7, "deep_gemm": 10.6, "cublaslt": 15.6}),
        Measured(32, {"cluster": 7.6, "split": 10.0, "deep_gemm": 10.7, "cublaslt": 15.8}),
        Measured(64, {"cluster": 7.7, "split": 10.2, "deep_gemm": 9.9, "cublaslt": 16.2}),
        Measured(128, {"cluster": 9.1, "split": 11.1, "deep_gemm": 10.8, "cublaslt": 22.7}),
        Measured(256, {"cluster": 11.1, "split": 15.2, "deep_gemm": 11.7, "cublaslt": 22.8}),
    ),
    (576, 7168): (
        Measured(4, {"cluster": 4.2, "split": 6.3, "deep_gemm": 10.3, "cublaslt": 15.4}),
        Measured(16, {"cluster": 4.2, "split": 7.0, "deep_gemm": 10.3, "cublaslt": 15.5}),
        Measured(32, {"cluster": 4.3, "split": 8.1, "deep_gemm": 10.3, "cublaslt": 15.6}),
        Measured(64, {"cluster": 4.5, "split": 9.2, "deep_gemm": 9.7, "cublaslt": 15.7}),
        Measured(128, {"cluster": 5.3, "split": 10.2, "deep_gemm": 9.6, "cublaslt": 16.3}),
        Measured(256, {"cluster": 6.8, "split": 14.0, "deep_gemm": 10.6, "cublaslt": 22.5}),
    ),
    (24576, 1536): (
        Measured(4, {"cluster": 11.0, "split": 12.3, "deep_gemm": 15.3, "cublaslt": 16.0}),
        Measured(16, {"cluster": 11.1, "split": 12.5, "deep_gemm": 15.3, "cublaslt": 16.1}),
        Measured(32, {"cluster": 11.3, "split": 14.6, "deep_gemm": 15.5, "cublaslt": 16.4}),
        Measured(64, {"cluster": 11.6, "split": 13.5, "deep_gemm": 14.8, "cublaslt": 16.7}),
        Measured(128, {"cluster": 15.5, "split": 19.6, "deep_gemm": 36.6, "cublaslt": 16.4}),
        Measured(256, {"cluster": 22.0, "split": 28.1, "deep_gemm": 21.0, "cublaslt": 22.2}),
    ),
    (7168, 16384): (
        Measured(4, {"cluster": 31.9, "split": 34.0, "deep_gemm": 39.4, "cublaslt": 39.5}),
        Measured(16, {"cluster": 31.6, "split": 35.3, "deep_gemm": 38.2, "cublaslt": 39.8}),
        Measured(32, {"cluster": 31.6, "split": 40.7, "deep_gemm": 38.5, "cublaslt": 47.9}),
        Measured(64, {"cluster": 32.0, "split": 36.7, "deep_gemm": 38.4, "cublaslt": 48.2}),
        Measured(128, {"cluster": 35.7, "split": 42.2, "deep_gemm": 43.2, "cublaslt": 48.6}),
        Measured(256, {"cluster": 54.3, "split": 71.6, "deep_gemm": 57.1, "cublaslt": 53.0}),
    ),
    (4096, 7168): (
        Measured(4, {"cluster": 10.1, "split": 11.2, "deep_gemm": 15.3, "cublaslt": 16.5}),
        Measured(16, {"cluster": 10.0, "split": 12.0, "deep_gemm": 12.7, "cublaslt": 16.5}),
        Measured(32, {"cluster": 10.0, "split": 15.6, "deep_gemm": 12.6, "cublaslt": 22.9}),
        Measured(64, {"cluster": 10.1, "split": 14.3, "deep_gemm": 12.2, "cublaslt": 22.9}),
        Measured(128, {"cluster": 11.2, "split": 17.1, "deep_gemm": 12.9, "cublaslt": 23.2}),
        Measured(256, {"cluster": 16.1, "split": 20.8, "deep_gemm": 17.8, "cublaslt": 23.3}),
    ),
    (7168, 2048): (
        Measured(4, {"cluster": 5.5, "split": 7.7, "deep_gemm": 7.6, "cublaslt": 9.4}),
        Measured(16, {"cluster": 5.4, "split": 8.0, "deep_gemm": 7.4, "cublaslt": 9.6}),
        Measured(32, {"cluster": 5.5, "split": 9.9, "deep_gemm": 7.6, "cublaslt": 9.7}),
        Measured(64, {"cluster": 5.6, "split": 9.6, "deep_gemm": 7.2, "cublaslt": 9.8}),
        Measured(128, {"cluster": 6.7, "split": 10.5, "deep_gemm": 8.7, "cublaslt": 10.0}),
        Measured(256, {"cluster": 10.0, "split": 12.5, "deep_gemm": 10.9, "cublaslt": 10.2}),
    ),
}
"""By (n, k): bench/roofline.py in one run, `cluster` as a dependent.

But for 7168 x 16384 at 256 rows, where two are within 1 % of each other there: those are means of
four layers (bench/gpu_layer.py), on a card that is hot.
"""

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


def choose_contiguous(rows: int, missing: Mapping[str, str]) -> Choice:
    """Backend of experts' products whose rows are sorted by expert.

    Args:
        rows: how many an expert probably has; 0: many.
        missing: as in `choose_dense`.
    """
    if 0 < rows <= SHORT_TILES:
        order = ["triton", *(name for name in GROUPED if name != "triton")]
        return _first(order, f"tiles of {SHORT_TILES} rows would be half empty", missing)
    return _first(list(GROUPED), f"the fastest for more than {SHORT_TILES} rows", missing)


def choose_masked(experts: int, rows: int, missing: Mapping[str, str]) -> Choice:
    """Backend of experts' products with room of its own for each.

    Args:
        rows: how many an expert probably has.
        missing: as in `choose_dense`.
    """
    few = f"{FEW_ROWS} rows or fewer of {MANY_EXPERTS} experts or more"
    if rows <= FEW_ROWS and experts >= MANY_EXPERTS:
        order = ["triton", *(name for name in GROUPED if name != "triton")]
        return _first(order, f"the fastest for {few}", missing)
    return _first(list(GROUPED), f"the fastest but for {few}", missing)


def _first(order: list[str], what: str, missing: Mapping[str, str]) -> Choice:
    for place, name in enumerate(order):
        if name not in missing or name == "torch":
            reason = what if place == 0 else _why(order[:place], missing)
            return Choice(name, reason)
    raise AssertionError("torch is in every order")


def _why(names: list[str], missing: Mapping[str, str]) -> str:
    return "; ".join(f"not {name}, as {missing[name]}" for name in names if name in missing)

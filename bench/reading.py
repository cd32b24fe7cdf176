"""What is read off measured curves: crossovers, knees, thresholds. Pure; no time, no device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Point = tuple[float, float]

PUBLISHED_EP128: dict[str, tuple[Point, ...]] = {
    "dispatch": ((1, 126), (128, 308), (256, 593)),
    "combine": ((1, 63), (128, 594), (256, 1012)),
}
"""Tokens of a rank and microseconds of 128 ranks over InfiniBand: one and 128 tokens from the
pplx-kernels table (IBGDA), 256 from the breakdown by Perplexity (2025-04-18)."""


def interpolate(points: Sequence[Point], x: float) -> float:
    """Straight lines between points in ascending order, and on beyond the outer two."""
    pairs = list(zip(points[:-1], points[1:], strict=True))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def gain(rows: Mapping[int, Mapping[str, float]], better: str, than: str) -> dict[int, float]:
    """By batch: how much faster `better` is than `than`; 0.1 is 10 %, negative is slower."""
    return {batch: times[than] / times[better] - 1 for batch, times in rows.items()}


def crossover(gains: Mapping[int, float]) -> int | None:
    """The smallest batch from which on there is a gain at every larger one; None without any."""
    found = None
    for batch in sorted(gains, reverse=True):
        if gains[batch] <= 0:
            break
        found = batch
    return found


def auto_loss(rows: Mapping[int, Mapping[str, float]], threshold: int | None) -> float:
    """How much slower than the best mode the rule is at worst.

    The rule: `microbatch` from `threshold` on (None: never), `dispatch_overlap` below.
    """
    worst = 0.0
    for batch, times in rows.items():
        split = threshold is not None and batch >= threshold
        taken = times["microbatch" if split else "dispatch_overlap"]
        worst = max(worst, taken / min(times.values()) - 1)
    return worst


def knee(points: Sequence[Point], slack: float = 0.1) -> float:
    """The largest x up to which y stays within `slack` of its first value."""
    first, reached = points[0][1], points[0][0]
    for x, y in points:
        if y > first * (1 + slack):
            break
        reached = x
    return reached


Row = Mapping[str, str]


def expert_times(rows: Iterable[Row]) -> dict[int, list[Point]]:
    """By EP: batch and microseconds of both routed products, from the CSV of `roofline.py`."""
    sums: dict[int, dict[float, float]] = {}
    for row in rows:
        if row["family"] == "grouped":
            times = sums.setdefault(int(row["ep"]), {})
            batch = float(row["batch"])
            times[batch] = times.get(batch, 0.0) + float(row["us"])
    return {ranks: sorted(times.items()) for ranks, times in sums.items()}


def time_a_token(rows: Iterable[Row]) -> dict[int, dict[int, float]]:
    """By heads and rows a sequence: microseconds of attention over the rows, from the same CSV."""
    found: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["family"] == "mla":
            query = int(row["query"])
            found.setdefault(int(row["heads"]), {})[query] = float(row["us"]) / query
    return found

"""Coefficients of a time, fitted to what was measured: robust, never negative, pure.

The model is ``ms = sum(coefficient * feature)``. The last samples are fitted by least squares of
the relative error, newer ones with more weight and outliers (a process that stood still) with
little, and with a weak pull towards the prior where the samples do not tell coefficients apart.
Before there are enough samples the prior stands.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median

LEAST = 8
"""Samples from which on they count."""
WINDOW = 64
"""Samples that are kept."""
HALF = 32
"""A sample weighs half as much as the one so many samples newer."""
GAP_S = 0.05
"""Samples that come faster are left out, so that the window is not one moment."""
MOST_MS = 1e9
_ROUNDS = 5
_PULL = 0.05
"""Weight of the prior, in samples, where a coefficient would explain everything."""
_LARGE = 1.5
"""Errors above so many standard deviations count the less, the larger they are."""
_SPREAD = (0.02, 0.5)
"""Bounds of the standard deviation of relative errors."""
_MAD = 1.4826
"""From the median of absolute errors to the standard deviation of a normal distribution."""

Vector = Sequence[float]


class Fit:
    """One model and its last samples.

    Args:
        prior: coefficients before there are samples; they keep their proportions when a sample's
            time is another.
        free: the coefficient of a constant feature of which nothing is known beforehand; then the
            other ones of the prior are taken as they are.
    """

    def __init__(self, prior: Vector, *, free: int | None = None) -> None:
        self.prior = tuple(prior)
        self.coefficients = self.prior
        self.scale = 1.0
        """How the times compare with what the prior says: the median."""
        self._free = free
        self._samples: deque[tuple[tuple[float, ...], float]] = deque(maxlen=WINDOW)
        self._last: float | None = None
        self._new = False
        self.seen = 0
        """Samples taken so far."""

    @property
    def ready(self) -> bool:
        """Whether there are enough samples."""
        return len(self._samples) >= LEAST

    def note(self, features: Vector, ms: float, now: float) -> bool:
        """A time was measured at ``now`` seconds; whether it is taken."""
        if not 0 < ms < MOST_MS or not any(features):  # not a number fails too
            return False
        if self._last is not None and now - self._last < GAP_S:
            return False
        self._last = now
        self._samples.append((tuple(features), ms))
        self.seen += 1
        self._new = True
        return True

    def refit(self) -> bool:
        """Takes the samples since the last time into account; whether anything may be new."""
        if not self._new or not self.ready:
            return False
        self._new = False
        rows = [features for features, _ in self._samples]
        times = [ms for _, ms in self._samples]
        count = len(rows)
        ages = [0.5 ** ((count - 1 - i) / HALF) for i in range(count)]
        start = self._start(rows, times)
        self.coefficients = _robust(rows, times, ages, start)
        return True

    def _start(self, rows: Sequence[Vector], times: Vector) -> tuple[float, ...]:
        """The prior, made to agree with most of the samples."""
        said = [_dot(self.prior, row) for row in rows]
        if self._free is not None:
            over = median(t - s for t, s in zip(times, said, strict=True))
            start = list(self.prior)
            start[self._free] = max(0.0, start[self._free] + over)
            return tuple(start)
        ratios = [t / s for t, s in zip(times, said, strict=True) if s > 0]
        if ratios:
            self.scale = median(ratios)
        return tuple(self.scale * value for value in self.prior)


def _robust(
    rows: Sequence[Vector], times: Vector, ages: Vector, start: tuple[float, ...]
) -> tuple[float, ...]:
    """Least squares again and again, each time with the weights that the errors before give."""
    found = start
    floor = 1e-6 * max(times)
    for _ in range(_ROUNDS):
        expected = [max(_dot(found, row), floor) for row in rows]
        errors = [abs(t - e) / e for t, e in zip(times, expected, strict=True)]
        spread = min(max(_MAD * median(errors), _SPREAD[0]), _SPREAD[1])
        limit = _LARGE * spread
        weights = [
            age * (1.0 if error <= limit else (limit / error) ** 2) / (e * e)
            for age, error, e in zip(ages, errors, expected, strict=True)
        ]
        found = _solved(rows, times, weights, start)
    return found


def _solved(
    rows: Sequence[Vector], times: Vector, weights: Vector, start: tuple[float, ...]
) -> tuple[float, ...]:
    """The coefficients of least weighted squares, none negative, pulled towards ``start``."""
    size = len(start)
    total = sum(weights)
    scales = []
    for j in range(size):
        square = sum(w * row[j] * row[j] for w, row in zip(weights, rows, strict=True))
        scales.append(math.sqrt(square / total) if square > 0 else 1.0)
    matrix = [[0.0] * size for _ in range(size)]
    vector = [0.0] * size
    for w, row, t in zip(weights, rows, times, strict=True):
        scaled = [value / scale for value, scale in zip(row, scales, strict=True)]
        for j in range(size):
            vector[j] += w * scaled[j] * t
            for k in range(size):
                matrix[j][k] += w * scaled[j] * scaled[k]
    pull = _PULL * total / len(rows)
    for j in range(size):
        matrix[j][j] += pull
        vector[j] += pull * start[j] * scales[j]
    best: tuple[float, tuple[float, ...]] = (math.inf, start)
    for used in (c for n in range(size, -1, -1) for c in combinations(range(size), n)):
        part = _linear([[matrix[j][k] for k in used] for j in used], [vector[j] for j in used])
        if part is None or any(value < 0 for value in part):
            continue
        found = [0.0] * size
        for j, value in zip(used, part, strict=True):
            found[j] = value
        quadratic = sum(found[j] * matrix[j][k] * found[k] for j in used for k in used)
        loss = quadratic - 2 * _dot(vector, found)
        if loss < best[0]:
            best = loss, tuple(value / scale for value, scale in zip(found, scales, strict=True))
    return best[1]


def _linear(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """The solution of a small positive definite system; None where rounding has made it none."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for i in range(size):
        if rows[i][i] <= 0 or not math.isfinite(rows[i][i]):
            return None
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for k in range(i, size + 1):
                below[k] -= factor * rows[i][k]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][k] * found[k] for k in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return found


def _dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))

"""How loaded a pool of workers is, and what one more millisecond of work costs those who come."""

from __future__ import annotations

import math
from functools import lru_cache

_LOWEST, _HIGHEST = 0.01, 0.95
"""Load outside of it is not told apart: the formula ends at 1, where nothing is at rest."""
_STEPS = 200
"""The price is worked out for so many loads."""
_MEMORY = 1 / 64
"""Weight of the newest request in the averages of gaps and work."""
_SPREAD = (0.5, 10.0)
"""Least and most that variability may multiply the price by."""


class Pressure:
    """What was sent to a pool: its load, and how unevenly it comes.

    Args:
        horizon_s: over which the load is averaged, in seconds.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._busy_s = 0.0
        self._at: float | None = None
        self._seen = 0.0
        self._gap = [0.0, 0.0]
        self._work = [0.0, 0.0]

    def note(self, work_ms: float, now: float) -> None:
        """A request with so much work was sent at ``now`` seconds."""
        gap = 0.0 if self._at is None else max(0.0, now - self._at)
        self._busy_s = self._busy_s * math.exp(-gap / self._horizon_s) + work_ms / 1000
        self._at = now
        self._seen += _MEMORY * (1 - self._seen)
        for averages, value in ((self._gap, gap), (self._work, work_ms)):
            averages[0] += _MEMORY * (value - averages[0])
            averages[1] += _MEMORY * (value * value - averages[1])

    def load(self, workers: int, now: float) -> float:
        """Share of the time that the workers are busy."""
        if self._at is None or not workers:
            return 0.0
        faded = math.exp(-max(0.0, now - self._at) / self._horizon_s)
        return self._busy_s * faded / self._horizon_s / workers

    @property
    def spread(self) -> float:
        """Mean of the squared coefficients of variation of gaps and work; 1 for a Poisson stream
        of exponential work."""
        both = [self._variation(self._gap), self._variation(self._work)]
        return min(max(sum(both) / 2, _SPREAD[0]), _SPREAD[1])

    def price(self, workers: int, now: float, routers: int = 1) -> float:
        """Milliseconds that others wait longer for each millisecond of work added now."""
        load = self.load(workers, now) * routers
        return self.spread * delay_price(workers, round(_clip(load) * _STEPS))

    def _variation(self, averages: list[float]) -> float:
        mean, square = averages
        return self._seen * square / (mean * mean) - 1 if mean > 0 else 1.0


def waiting_share(workers: int, load: float) -> float:
    """Erlang's C: the share of requests that find all workers busy.

    Poisson arrivals, exponential work, one queue; ``load`` is the busy share of each worker.
    """
    offered = workers * load
    blocked = 1.0
    for count in range(1, workers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - load * (1 - blocked))


@lru_cache(maxsize=4096)
def delay_price(workers: int, step: int) -> float:
    """Delay of all others for one unit of work more, at a load of ``step`` / 200.

    The requests that wait at a time are on average ``load * C / (1 - load)``; this is how fast that
    grows with the offered work, which is ``workers * load``.
    """
    at, by = _clip(step / _STEPS), 1e-3

    def waiting(load: float) -> float:
        return load * waiting_share(workers, load) / (1 - load)

    return (waiting(at + by) - waiting(at - by)) / (2 * by) / workers


def _clip(load: float) -> float:
    return min(max(load, _LOWEST), _HIGHEST)

"""Prefixes that many ask for: how many copies are worth their memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE = 0.6
"""Of a worker's time that one prefix may take before a second copy is wanted."""
_FALL = 0.5
"""A copy is given up when the rate is below this part of what made it wanted."""


@dataclass
class _Heat:
    rate: float
    """Requests a second."""
    work_ms: float
    at: float
    copies: int = 1


class HotPrefixes:
    """Rates by anchor, the hash of a prompt's first page: moving averages.

    Args:
        horizon_s: over which they are averaged, in seconds.
        limit: anchors that are remembered; the coldest half goes when there are more.
    """

    def __init__(self, horizon_s: float = 60.0, limit: int = 65536) -> None:
        self._horizon_s = horizon_s
        self._limit = limit
        self._heat: dict[bytes, _Heat] = {}

    def __len__(self) -> int:
        return len(self._heat)

    def seen(self, anchor: bytes, work_ms: float, now: float) -> None:
        """A request with this anchor was sent; ``work_ms`` is left to compute where it hits."""
        heat = self._heat.get(anchor)
        if heat is None:
            if len(self._heat) >= self._limit:
                self._forget(now)
            heat = self._heat[anchor] = _Heat(0.0, work_ms, now)
        heat.rate = heat.rate * self._fade(heat, now) + 1 / self._horizon_s
        heat.work_ms += (work_ms - heat.work_ms) / 8
        heat.at = now

    def rate(self, anchor: bytes, now: float) -> float:
        """Requests a second."""
        heat = self._heat.get(anchor)
        return 0.0 if heat is None else heat.rate * self._fade(heat, now)

    def copies(self, anchor: bytes, now: float) -> int:
        """Copies that are wanted now; at least 1. Rises at once and falls late."""
        heat = self._heat.get(anchor)
        if heat is None:
            return 1
        busy = heat.rate * self._fade(heat, now) * heat.work_ms / 1000 / SHARE
        if busy > heat.copies:
            heat.copies = math.ceil(busy)
        elif busy < _FALL * (heat.copies - 1):
            heat.copies = max(1, math.ceil(busy))
        return heat.copies

    def _fade(self, heat: _Heat, now: float) -> float:
        return math.exp(-max(0.0, now - heat.at) / self._horizon_s)

    def _forget(self, now: float) -> None:
        by_rate = sorted(
            self._heat.items(), key=lambda item: item[1].rate * self._fade(item[1], now)
        )
        self._heat = dict(by_rate[len(by_rate) // 2 :])

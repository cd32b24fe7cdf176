"""When something periodic is due: pure, and unmoved by a clock that jumps."""

from __future__ import annotations


class Ticker:
    """Due ``period`` seconds after the last ``hit``, and at once after a clock went backwards.

    So a step of the clock brings an early turn, never a turn left out.

    Args:
        period: seconds.
        now: the clock's reading at the beginning.
        spent: part of the first period that counts as over, 0 to 1; spreads many tickers.
    """

    def __init__(self, period: float, now: float, spent: float = 0.0) -> None:
        self.period = period
        self._last = now - spent * period
        self._seen = now

    def left(self, now: float) -> float:
        """Seconds until it is due; 0 if it is."""
        if now < self._seen:
            self._last = now - self.period
        self._seen = now
        return max(0.0, self._last + self.period - now)

    def hit(self, now: float) -> None:
        """It has been done."""
        self._last = self._seen = now

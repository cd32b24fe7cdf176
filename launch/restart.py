"""When a process that died is started again: a pure decision over the times of its deaths."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW_S = 60.0
MAX_DEATHS = 5
_FIRST_DELAY_S = 0.2


def restart_delay(deaths: Sequence[float], now: float) -> float | None:
    """Seconds to wait before the next start; None to give up.

    The delay doubles with each death within the last minute (0.2, 0.4, 0.8, 1.6 s); the fifth is
    the last.

    Args:
        deaths: times of death in seconds, this one included.
        now: the present on the same clock.
    """
    recent = sum(1 for death in deaths if now - death < WINDOW_S)
    if recent >= MAX_DEATHS:
        return None
    return _FIRST_DELAY_S * float(2 ** max(0, recent - 1))

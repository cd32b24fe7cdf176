"""When a process that died is started again: a pure decision over its deaths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 60.0
MAX_FAILED_STARTS = 5
MAX_DELAY_S = 3.2
_FIRST_DELAY_S = 0.2


@dataclass(frozen=True)
class Death:
    """One end of a process.

    Attributes:
        at: when, in seconds.
        ready: it had been ready, so that it can start and what ended it came from outside.
    """

    at: float
    ready: bool


def restart_delay(deaths: Sequence[Death], now: float) -> float | None:
    """Seconds to wait before the next start; None to give up.

    The delay doubles with each death within the last minute, from 0.2 to 3.2 s. A process that
    ended five times in a minute without having become ready is given up; one that had been ready
    never is, since it may well serve again.

    Args:
        deaths: in order, the last one included.
        now: the present on the clock of the deaths.
    """
    recent = [death for death in deaths if now - death.at < WINDOW_S]
    failed = 0
    for death in reversed(recent):
        if death.ready:
            break
        failed += 1
    if failed >= MAX_FAILED_STARTS:
        return None
    return min(MAX_DELAY_S, _FIRST_DELAY_S * float(2 ** max(0, len(recent) - 1)))

"""Whether a request is worth beginning, and when to come again if it is not.

A request whose first token cannot come before its deadline only delays others, so it is refused at
once. The estimate is kind: what is queued at the chosen prefill worker and the request's own work,
at the best speed lately seen. Nothing is refused before a speed has been seen.
"""

from __future__ import annotations

from pdmesh.router.policy import OTHERS_REQUEST, Candidate, Route, Snapshot
from pdmesh.wire.errors import Overloaded

LEAST_TOKENS = 64
"""Of shorter prompts the time says little about the speed."""
LEAST_SEEN = 4
RETRY_S = (0.5, 60.0)
_FASTER, _SLOWER = 0.3, 0.02
"""Weights of a new measurement: a time that is shared with other prompts looks slow."""


class Admission:
    """Learns how fast prompts are computed, and refuses what would come too late."""

    def __init__(self) -> None:
        self._token_s = 0.0
        self._seen = 0

    @property
    def token_s(self) -> float | None:
        """Seconds to compute one token of a prompt, at the best lately; None: not known yet."""
        return self._token_s if self._seen >= LEAST_SEEN else None

    def note(self, tokens: int, seconds: float) -> None:
        """A prompt of which so many tokens had to be computed took so long, queueing aside."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        speed = seconds / tokens
        if self._seen == 0:
            self._token_s = speed
        else:
            weight = _FASTER if speed < self._token_s else _SLOWER
            self._token_s += weight * (speed - self._token_s)
        self._seen += 1

    def check(self, route: Route, snapshot: Snapshot, remaining_s: float) -> None:
        """Whether the first token can come in time over this route.

        Args:
            route: as chosen from ``snapshot``.
            remaining_s: seconds to the request's deadline.

        Raises:
            Overloaded: it cannot.
        """
        speed = self.token_s
        if speed is None:
            return
        chosen = route.prefill.instance
        queued = next((_queued(c) for c in snapshot.prefill if c.record.instance == chosen), 0.0)
        expected = (queued + route.tokens_to_compute) * speed
        if expected > remaining_s:
            raise Overloaded(
                f"the first token could come in {expected:.1f} s, after the deadline in "
                f"{remaining_s:.1f} s; retry later or allow more time",
                _bounded(expected - remaining_s),
            )

    def retry_after_s(self, snapshot: Snapshot) -> float:
        """When a request that found no room should come again, in seconds: when the least busy
        prefill worker has done what it has."""
        speed = self.token_s
        if speed is None or not snapshot.prefill:
            return 1.0
        return _bounded(min(map(_queued, snapshot.prefill)) * speed)


def _queued(candidate: Candidate) -> float:
    """Tokens that a prefill worker has to compute first."""
    return candidate.own_tokens + OTHERS_REQUEST * float(candidate.other_requests)


def _bounded(seconds: float) -> float:
    return min(max(seconds, RETRY_S[0]), RETRY_S[1])

"""What a worker was last told about copies of its cached pages elsewhere: a hint that grows old."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from pdmesh.wire.hashes import PageHash

MAX_AGE_S = 15.0
_NONE: frozenset[PageHash] = frozenset()


class ReplicaHints:
    """Pages that another worker had too. Told from one thread, asked from any; never waits.

    A hint that is wrong costs a page that somebody computes again, or a page kept for nothing.

    Args:
        max_age_s: seconds after which nothing is known any more.
        clock: seconds, monotone.
    """

    def __init__(
        self, max_age_s: float = MAX_AGE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_age_s = max_age_s
        self._clock = clock
        self._known: tuple[frozenset[PageHash], float] = _NONE, clock()

    def learn(self, pages: Iterable[PageHash]) -> None:
        """These have copies, as of now; of others nothing is known."""
        self._known = frozenset(pages), self._clock()

    def __call__(self) -> frozenset[PageHash]:
        """Pages with copies elsewhere; none if it was told too long ago."""
        pages, at = self._known
        return pages if 0 <= self._clock() - at <= self._max_age_s else _NONE

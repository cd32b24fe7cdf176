"""Whether it pays to read cached pages from another worker instead of computing them. Pure.

Both sides of the comparison start from constants and follow what was measured. Time is handed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

_START_BYTES_PER_S = 5e8
_START_TOKENS_PER_S = 5e3
_WEIGHT = 0.3
"""Of a new measurement."""
_FORGET_S = 60.0
"""After so long without a measurement, half of it is forgotten: what was slow is tried again."""


@dataclass(frozen=True)
class PullCosts:
    """What is known about reading and computing.

    Attributes:
        overhead_s: of a pull, whatever its size: asking, connecting, validating.
        bytes_per_s: that a read brought.
        measured_at: when, in seconds of any one clock.
        tokens, seconds: computed lately, and in how long; later steps count for more.
    """

    overhead_s: float = 0.005
    bytes_per_s: float = _START_BYTES_PER_S
    measured_at: float = 0.0
    tokens: float = _START_TOKENS_PER_S
    seconds: float = 1.0

    def bandwidth(self, now: float) -> float:
        """Expected bytes per second at ``now``."""
        trust = math.exp2(-max(0.0, now - self.measured_at) / _FORGET_S)
        return _START_BYTES_PER_S + (self.bytes_per_s - _START_BYTES_PER_S) * trust

    def pull_s(self, num_bytes: int, now: float) -> float:
        """Expected seconds of a pull."""
        return self.overhead_s + num_bytes / self.bandwidth(now)

    def compute_s(self, num_tokens: int) -> float:
        """Expected seconds to compute latents of so many positions."""
        return num_tokens * self.seconds / self.tokens

    def worth(self, num_pages: int, page_bytes: int, page_size: int, now: float) -> bool:
        """Whether pulling ``num_pages`` is expected to take less time than computing them."""
        pulling = self.pull_s(num_pages * page_bytes, now)
        return num_pages > 0 and pulling < self.compute_s(num_pages * page_size)

    def after_read(self, num_bytes: int, seconds: float, now: float) -> PullCosts:
        """With a read of ``num_bytes`` that took ``seconds``."""
        measured = num_bytes / max(seconds, 1e-6)
        expected = self.bandwidth(now)
        return replace(
            self, bytes_per_s=expected + _WEIGHT * (measured - expected), measured_at=now
        )

    def after_step(self, tokens: int, seconds: float) -> PullCosts:
        """With a step that computed ``tokens`` in ``seconds``."""
        kept = 1.0 - _WEIGHT
        return replace(
            self, tokens=kept * self.tokens + tokens, seconds=kept * self.seconds + seconds
        )

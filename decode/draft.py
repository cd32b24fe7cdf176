"""How many tokens to draft in a step: what was measured decides. Pure: no clock, no tensors.

The rule. A step of n sequences with k drafts each yields n E(k) tokens, E(k) = 1 + q1 + q1 q2 + ...
+ q1 ... qk, where qd is how often the draft of depth d was right when those before it were. It
takes the seconds that such steps took. The k with most tokens a second is chosen, the smaller one
of two equals. It changes speed only: which tokens come does not depend on k.

* qd is the share over the last rows that were put to the test (half of the weight lies on the last
  ``MEMORY_ROWS``); a depth never tested is taken to be as good as the one before it.
* Seconds are running means for each k and each size of batch (sizes from over two thirds of a
  bucket's largest are one). The longer a mean was not measured, the less it weighs against a new
  measurement: half after ``STALE_STEPS``. Where there is none yet, a straight line through those
  that there are, seconds over rows n (1 + k), fills in.
* What is not chosen is not measured, so every ``PROBE_EVERY``-th step of a size tries a neighbour
  of the best k, above and below in turn; more often while a neighbour was never measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PROBE_EVERY = 32
"""Steps between two probes; a probe costs what a neighbour of the best k is worse."""
FIRST_PROBES_EVERY = 4
MEMORY_ROWS = 32
STALE_STEPS = 64
_FORGET = 0.5 ** (1 / MEMORY_ROWS)
_FIRST_GUESS = 0.5
_STEP = 0.15
"""Weight of a new measurement in a running mean."""
_OUTLIER = 3.0
"""A measurement counts as at most so many times the mean: one hiccup of the machine is no rule."""


@dataclass
class _Mean:
    """A running mean of seconds; ``last`` is the step of its size at which it was measured."""

    seconds: float = 0.0
    count: int = 0
    last: int = 0

    def add(self, seconds: float, step: int) -> None:
        if self.count >= 2:
            seconds = min(seconds, _OUTLIER * self.seconds)
        stale = 1.0 - 0.5 ** ((step - self.last) / STALE_STEPS)
        share = max(1.0 / (self.count + 1), _STEP, stale)
        self.seconds += share * (seconds - self.seconds)
        self.count += 1
        self.last = step


@dataclass
class DraftPolicy:
    """Chooses from 0 to ``max_drafts`` drafts for each step."""

    max_drafts: int
    _tried: list[float] = field(init=False)
    _right: list[float] = field(init=False)
    _means: dict[int, list[_Mean]] = field(default_factory=dict)
    _steps: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tried = [0.0] * self.max_drafts
        self._right = [0.0] * self.max_drafts

    def choose(self, num_sequences: int) -> int:
        """Drafts a sequence for the next step of ``num_sequences`` >= 1. Changes nothing."""
        best = self.best(num_sequences)
        bucket = batch_bucket(num_sequences)
        near = [k for k in (best + 1, best - 1) if 0 <= k <= self.max_drafts]
        means = self._means.get(bucket)
        new = [k for k in near if means is not None and not means[k].count]
        every = FIRST_PROBES_EVERY if new else PROBE_EVERY
        probes, phase = divmod(self._steps.get(bucket, 0), every)
        if not near or phase != every - 1:
            return best
        return (new or near)[probes % len(new or near)]

    def best(self, num_sequences: int) -> int:
        """The k with most expected tokens a second, as far as is known."""
        bucket = batch_bucket(num_sequences)
        line = self._line()
        return max(
            range(self.max_drafts + 1),
            key=lambda k: (self.expected_tokens(k) / self._seconds(bucket, k, line), -k),
        )

    def expected_tokens(self, drafts: int) -> float:
        """E(k): tokens that a sequence gets from a step with ``drafts`` drafts."""
        total = likely = 1.0
        for share in self.acceptance()[:drafts]:
            likely *= share
            total += likely
        return total

    def acceptance(self) -> list[float]:
        """q1, q2, ...: how often a draft is right when those before it are."""
        shares: list[float] = []
        guess = _FIRST_GUESS
        for tried, right in zip(self._tried, self._right, strict=True):
            guess = (right + guess) / (tried + 1.0)
            shares.append(guess)
        return shares

    def observe(
        self,
        num_sequences: int,
        drafts: int,
        tried: Sequence[int],
        right: Sequence[int],
        seconds: float,
    ) -> None:
        """Takes in one step.

        Args:
            num_sequences: its sequences.
            drafts: the k it was run with.
            tried: for each depth from 1, how many drafts were put to the test there.
            right: how many of these were right.
            seconds: what the step took.
        """
        for depth, (total, good) in enumerate(zip(tried, right, strict=True)):
            keep = _FORGET**total
            self._tried[depth] = keep * self._tried[depth] + total
            self._right[depth] = keep * self._right[depth] + good
        bucket = batch_bucket(num_sequences)
        means = self._means.setdefault(bucket, [_Mean() for _ in range(self.max_drafts + 1)])
        self._steps[bucket] = self._steps.get(bucket, 0) + 1
        means[drafts].add(seconds, self._steps[bucket])

    def _seconds(self, bucket: int, drafts: int, line: tuple[float, float]) -> float:
        means = self._means.get(bucket)
        if means is not None and means[drafts].count:
            return max(means[drafts].seconds, 1e-9)
        base, slope = line
        return max(base + slope * bucket * (1 + drafts), 1e-9)

    def _line(self) -> tuple[float, float]:
        """Seconds over rows through all means, least squares; never falling, never below 0."""
        points = [
            (bucket * (1 + drafts), mean.seconds)
            for bucket, means in self._means.items()
            for drafts, mean in enumerate(means)
            if mean.count
        ]
        if not points:
            return 1.0, 0.0
        rows = sum(r for r, _ in points) / len(points)
        seconds = sum(s for _, s in points) / len(points)
        spread = sum((r - rows) ** 2 for r, _ in points)
        if spread == 0.0:
            return seconds, 0.0
        slope = sum((r - rows) * (s - seconds) for r, s in points) / spread
        slope = min(max(slope, 0.0), seconds / rows)
        return seconds - slope * rows, slope


def batch_bucket(num_sequences: int) -> int:
    """The largest batch size that counts as the same: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    size = 1
    while size < num_sequences:
        if size >= 2 and num_sequences <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return size

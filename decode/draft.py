"""How many tokens to draft in a step: what was measured decides. Pure: no clock, no tensors.

The rule. A step of n sequences with k drafts each yields n E(k) tokens, E(k) = 1 + q1 + q1 q2 + ...
+ q1 ... qk, where qd is how often the draft of depth d was right when those before it were. It
takes the seconds that such steps took. The k with most tokens a second is chosen, the smaller one
of two equals. It changes speed only: which tokens come does not depend on k.

* qd is the share over the last rows that were put to the test (half of the weight lies on the last
  ``MEMORY_ROWS``); a depth never tested is taken to be as good as the one before it.
* Seconds are running means for each k and each size of batch (sizes from over two thirds of a
  bucket's largest are one). A mean weighs less the longer it was not measured: half after
  ``STALE_STEPS``. Within a size a draft more costs about the same wherever it is added (its row and
  a pass of the MTP layer), so a straight line over k goes through the means, and each mean is drawn
  towards it: a few noisy measurements of one k do not decide alone.
* How steep the line is starts from the nearest measured size, or, where nothing was measured yet,
  from ``_FIRST_GROWTH``; drafts are taken to be good until some were put to the test, since without
  drafts nothing is learned about them.
* What is not chosen is not measured, so every ``PROBE_EVERY``-th step of a size tries a neighbour
  of the best k, above and below in turn, one never measured first; so do a few early steps, at
  powers of two, the very first of which only where no other size is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PROBE_EVERY = 32
"""Steps between two probes; a probe costs what a neighbour of the best k is worse."""
MEMORY_ROWS = 64
STALE_STEPS = 64
_FORGET = 0.5 ** (1 / MEMORY_ROWS)
_FIRST_GUESS = 0.7
_GUESS_WEIGHT = 4.0
"""Tests that a guess is worth: of depth 1 the one above, of others the depth before."""
_FIRST_GROWTH = 0.15
"""What a draft adds to a step, as a part of a step without drafts, before anything is known."""
_PRIOR_WEIGHT = 3.0
"""Measurements one k apart that the growth known beforehand is worth."""
_LINE_WEIGHT = 4.0
"""Measurements that the line is worth against a mean."""
_STEP = 0.1
"""Weight of a new measurement in a running mean."""
_OUTLIER = 2.0
"""A measurement counts as at most so many times what was expected: one hiccup is no rule."""


@dataclass
class _Mean:
    """A running mean of seconds; ``last`` is the step of its size at which it was measured."""

    seconds: float = 0.0
    count: int = 0
    last: int = 0

    def add(self, seconds: float, step: int) -> None:
        stale = 1.0 - 0.5 ** ((step - self.last) / STALE_STEPS)
        share = max(1.0 / (self.count + 1), _STEP, stale)
        self.seconds += share * (seconds - self.seconds)
        self.count += 1
        self.last = step

    def weight(self, step: int) -> float:
        """Measurements that the mean is worth at a later step."""
        return float(min(self.count, 1.0 / _STEP) * 0.5 ** ((step - self.last) / STALE_STEPS))


@dataclass(frozen=True)
class _Line:
    """Seconds of a step with k drafts: ``base`` (1 + ``growth`` k)."""

    base: float
    growth: float

    def at(self, drafts: int) -> float:
        return self.base * (1.0 + self.growth * drafts)


@dataclass
class _Size:
    """What is known of batches of one size: a mean for each k, and its steps so far."""

    means: list[_Mean]
    steps: int = 0

    @property
    def probes(self) -> int:
        """Grows by one from each step that may probe to the next."""
        return min(self.steps, PROBE_EVERY).bit_length() + self.steps // PROBE_EVERY

    def add(self, drafts: int, seconds: float, expected: float) -> None:
        self.steps += 1
        if self.steps > 2:
            seconds = min(seconds, _OUTLIER * expected)
        elif seconds * _OUTLIER < expected:  # the first step warmed something up
            self.means = [_Mean() for _ in self.means]
        self.means[drafts].add(max(seconds, 1e-9), self.steps)

    def line(self, growth: float) -> _Line:
        """Weighted least squares over k, drawn towards ``growth``; never falling, never below 0."""
        points = [(k, m.seconds, m.weight(self.steps)) for k, m in enumerate(self.means) if m.count]
        total = sum(w for _, _, w in points)
        k0 = sum(w * k for k, _, w in points) / total
        level = sum(w * s for _, s, w in points) / total
        slope = growth * level / (1.0 + growth * k0)
        spread = sum(w * (k - k0) ** 2 for k, _, w in points)
        rise = sum(w * (k - k0) * (s - level) for k, s, w in points)
        slope = (rise + _PRIOR_WEIGHT * slope) / (spread + _PRIOR_WEIGHT)
        slope = min(max(slope, 0.0), level / (k0 + 0.5))
        base = level - slope * k0
        return _Line(base, slope / base)

    def seconds(self, drafts: int, line: _Line) -> float:
        """Expected seconds of a step with ``drafts`` drafts."""
        mean, expected = self.means[drafts], line.at(drafts)
        weight = mean.weight(self.steps) if mean.count else 0.0
        return expected + weight / (weight + _LINE_WEIGHT) * (mean.seconds - expected)


@dataclass
class DraftPolicy:
    """Chooses from 0 to ``max_drafts`` drafts for each step."""

    max_drafts: int
    _tried: list[float] = field(init=False)
    _right: list[float] = field(init=False)
    _sizes: dict[int, _Size] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [0.0] * (self.max_drafts - 1)
        self._tried = [_GUESS_WEIGHT, *unknown][: self.max_drafts]
        self._right = [_GUESS_WEIGHT * _FIRST_GUESS, *unknown][: self.max_drafts]

    def choose(self, num_sequences: int) -> int:
        """Drafts a sequence for the next step of ``num_sequences`` >= 1. Changes nothing."""
        best = self.best(num_sequences)
        size = self._sizes.get(batch_bucket(num_sequences))
        near = [k for k in (best + 1, best - 1) if 0 <= k <= self.max_drafts]
        if not near or size is None or not self._probes(size.steps + 1):
            return best
        near = [k for k in near if not size.means[k].count] or near
        return near[size.probes % len(near)]

    def _probes(self, step: int) -> bool:
        """Whether the ``step``-th step of a size, from 1, tries a neighbour."""
        if step >= PROBE_EVERY:
            return step % PROBE_EVERY == 0
        return step & (step - 1) == 0 and step >= (2 if len(self._sizes) == 1 else 8)

    def best(self, num_sequences: int) -> int:
        """The k with most expected tokens a second, as far as is known."""
        seconds = self._seconds(batch_bucket(num_sequences))
        return max(
            range(self.max_drafts + 1),
            key=lambda k: (self.expected_tokens(k) / seconds[k], -k),
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
        for tried, right in zip(self._tried, self._right, strict=True):
            if shares:
                right, tried = right + _GUESS_WEIGHT * shares[-1], tried + _GUESS_WEIGHT
            shares.append(right / max(tried, 1e-9))
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
        if bucket not in self._sizes:
            self._sizes[bucket] = _Size([_Mean() for _ in range(self.max_drafts + 1)])
        size = self._sizes[bucket]
        expected = self._seconds(bucket)[drafts] if size.steps else seconds
        size.add(drafts, seconds, expected)

    def _seconds(self, bucket: int) -> list[float]:
        """Expected seconds of a step for each k; of a size never measured, in proportion only."""
        size = self._sizes.get(bucket)
        growth = self._growth_near(bucket)
        if size is None:
            return [_Line(1.0, growth).at(k) for k in range(self.max_drafts + 1)]
        line = size.line(growth)
        return [size.seconds(k, line) for k in range(self.max_drafts + 1)]

    def _growth_near(self, bucket: int) -> float:
        """Growth of the nearest other size."""
        others = [b for b in self._sizes if b != bucket]
        if not others:
            return _FIRST_GROWTH
        nearest = min(others, key=lambda b: (max(b, bucket) / min(b, bucket), b))
        return self._sizes[nearest].line(_FIRST_GROWTH).growth


def batch_bucket(num_sequences: int) -> int:
    """The largest batch size that counts as the same: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    size = 1
    while size < num_sequences:
        if size >= 2 and num_sequences <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return size

"""What is learnt of chains that came back: how often, after how long, and what waiting is worth."""

from __future__ import annotations

Kind = tuple[int, int]
"""Class of its turn and of its length."""
BUCKETS = 64
"""Ages that are told apart; what is older is overdue."""
FRESH = 128
"""The indices are worked out again after so many releases."""
TRUST = 50.0
"""Chains of a kind after which their own record counts as much as that of all kinds."""


class ReturnRecord:
    """How many chains of a kind came back, and after how long; and what to make of it."""

    def __init__(self) -> None:
        self._gone: dict[Kind, int] = {}
        self._back: dict[Kind, int] = {}
        self._ages = [2.0 * (1 - i / BUCKETS) for i in range(BUCKETS)]
        self._tips = 1.0
        self._returns = 1.0
        self._since = 0
        self._indices: dict[Kind, list[float]] = {}

    @property
    def tip_share(self) -> float:
        """Of the chains that came back, how many used their last page as well."""
        return self._tips / self._returns

    def released(self, kind: Kind) -> None:
        """A chain was let go."""
        self._gone[kind] = self._gone.get(kind, 0) + 1
        self._since += 1
        if self._since >= FRESH:
            self._since = 0
            self._indices.clear()

    def returned(self, kind: Kind, age: int, with_tip: bool) -> None:
        """It came back after ``age`` buckets of time."""
        self._returns += 1
        self._tips += with_tip
        if age < BUCKETS:
            self._back[kind] = self._back.get(kind, 0) + 1
            self._ages[age] += 1

    def chance(self, kind: Kind) -> float:
        """Of coming back at all: by turn and by length, each shrunk towards that of all."""
        gone, back = sum(self._gone.values()), sum(self._back.values())
        mean = (back + 1) / (gone + 2)

        def of(position: int) -> float:
            kinds = [k for k in self._gone if k[position] == kind[position]]
            n = sum(self._gone[k] for k in kinds)
            came = sum(self._back.get(k, 0) for k in kinds)
            return (came + TRUST * mean) / (n + TRUST)

        own = self._gone.get(kind, 0), self._back.get(kind, 0)
        product = min(0.95, of(0) * of(1) / mean)
        return min(0.95, (own[1] + TRUST * product) / (own[0] + TRUST))

    def index(self, kind: Kind, age: int) -> float:
        """Most hits for the memory from an age on, a page and bucket of time; 0 when overdue."""
        if age >= BUCKETS:
            return 0.0
        indices = self._indices.get(kind)
        if indices is None:
            indices = self._indices[kind] = self._work_out(self.chance(kind))
        return indices[age]

    def _work_out(self, chance: float) -> list[float]:
        total = sum(self._ages)
        back = [chance * count / total for count in self._ages]
        away = [1.0]
        for share in back:
            away.append(max(away[-1] - share, 1e-9))
        indices = []
        for age in range(BUCKETS):
            best = hits = held = 0.0
            for i in range(age, BUCKETS):
                hits += back[i]
                held += (away[i] + away[i + 1]) / 2
                best = max(best, hits / held)
            indices.append(best)
        return indices

"""Counts of the tokens seen so far, and the penalties that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Counts:
    """Distinct token ids and one number for each."""

    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


class TokenCounts:
    """How often each token is in the answer, for the tokens of a prompt and an answer.

    A token takes the next free slot when it is first seen and keeps it, so an accepted token costs
    one dictionary look-up whatever came before.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        """Args: prompt: tokens that are seen, but not in the answer."""
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        size = len(self._slots)
        self._ids = np.empty(max(64, 2 * size), dtype=np.int64)
        self._ids[:size] = list(self._slots)
        self._values = np.zeros(len(self._ids), dtype=np.float64)

    def add(self, tokens: Sequence[int]) -> None:
        """Counts tokens of the answer."""
        for token in tokens:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._values = np.concatenate([self._values, np.zeros_like(self._values)])
            self._ids[slot] = token
            self._values[slot] += 1

    def with_path(self, path: Sequence[int]) -> Counts:
        """The counts with ``path`` after the answer; ``self`` stays as it is."""
        size = len(self._slots)
        fresh: dict[int, int] = {}
        for token in path:
            if token not in self._slots:
                fresh.setdefault(token, size + len(fresh))
        ids = np.concatenate([self._ids[:size], np.fromiter(fresh, np.int64, len(fresh))])
        values = np.concatenate([self._values[:size], np.zeros(len(fresh))])
        for token in path:
            values[self._slots.get(token, fresh.get(token, -1))] += 1
        return Counts(ids, values)

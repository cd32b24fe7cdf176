"""Tokens that ``min_tokens`` and ``bad_words`` rule out at one position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence


class BadWords:
    """Token sequences that an answer must not contain.

    Words are found by the token before their last one, so the work of a position does not grow with
    the number of words.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._single = tuple(dict.fromkeys(word[0] for word in words if len(word) == 1))
        self._longer: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._longer[word[-2]].append((list(word[:-1]), word[-1]))
        self.reach = max((len(word) - 1 for word in words), default=0)
        """How many tokens back a word can begin."""

    def after(self, tail: Sequence[int]) -> list[int]:
        """Tokens that would complete a word after ``tail`` (the last tokens of an answer)."""
        found = list(self._single)
        for begin, last in self._longer.get(tail[-1], ()) if tail else ():
            if list(tail[-len(begin) :]) == begin:
                found.append(last)
        return found


class Forbidden:
    """``min_tokens`` and ``bad_words`` together, along one answer."""

    def __init__(
        self, words: Sequence[tuple[int, ...]], stops: Collection[int], min_tokens: int
    ) -> None:
        self._words = BadWords(words)
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._tail: list[int] = []

    def advance(self, tokens: Sequence[int]) -> None:
        reach = self._words.reach
        if reach:
            self._tail = [*self._tail, *tokens][-reach:]

    def at(self, position: int, path: Sequence[int]) -> tuple[int, ...]:
        """What must not follow ``path``; ``position`` counts the answer's tokens with the path."""
        tail = [*self._tail, *path] if self._words.reach else []
        stops = self._stops if position < self._min_tokens else ()
        return (*stops, *self._words.after(tail))

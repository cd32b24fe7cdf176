"""The text of one answer, a token at a time: whole characters, cut at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.text.detokenizer import IncrementalDetokenizer
from pdmesh.text.stop import StopMatcher
from pdmesh.text.tokenizer import Tokenizer


class OutputText:
    """Detokeniser and stop strings in one; fed single tokens, so a stop ends at a known one.

    A stop string that is complete before token number ``min_tokens`` is text like other.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._left = min_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; the last token added completed it."""
        return self._matcher.hit is not None

    def add(self, token: int) -> str:
        """The text that can be shown after one more token."""
        self._left -= 1
        return self._matcher.add(self._detokenizer.add((token,)), self._left <= 0)[0]

    def add_up_to_stop(self, tokens: Sequence[int]) -> tuple[str, int]:
        """As ``add`` for one after the other, as far as the one that completes a stop string.

        Returns:
            The text that can be shown, and how many tokens were taken.
        """
        if not self._matcher.watching:
            return self._detokenizer.add(tokens), len(tokens)
        text = ""
        for count, token in enumerate(tokens, 1):
            text += self.add(token)
            if self.stopped:
                return text, count
        return text, len(tokens)

    def finish(self) -> str:
        """The rest, once no more tokens come; empty after a stop string."""
        if self.stopped:
            return ""
        text, hit = self._matcher.add(self._detokenizer.finish(), self._left <= 0)
        return text if hit else text + self._matcher.finish()

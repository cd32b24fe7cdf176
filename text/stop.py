"""Stop strings in a stream of text: found wherever they are cut, held back only while needed."""

from __future__ import annotations

from collections.abc import Sequence


class _Needle:
    """One stop string, matched a character at a time (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Length of the longest proper prefix of ``text`` that the stream ends with."""
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def step(self, char: str) -> bool:
        """Reads one character; true if it completes the stop string."""
        while self.matched and char != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)

    def pass_over(self) -> None:
        """Goes on after a match that does not count; its end may begin another."""
        self.matched = self._fallback[self.matched - 1]


class StopMatcher:
    """Finds the first stop string to be completed, however the text is cut.

    Of several completed by the same character the longest counts. Text is held back exactly
    while it is a proper prefix of a stop string (compare vllm-project/vllm#3574).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._needles = [_Needle(text) for text in stops if text]
        self._held = ""
        self.hit: str | None = None
        """The stop string that was found; nothing is emitted from then on."""

    @property
    def watching(self) -> bool:
        """Whether there is any stop string to look for."""
        return bool(self._needles)

    def add(self, text: str, counts: bool = True) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was completed.

        A stop string that is completed in ``text`` while it does not count is text like other.
        """
        if self.hit is not None:
            return "", True
        if not self._needles:
            return text, False
        for i, char in enumerate(text):
            complete = [needle for needle in self._needles if needle.step(char)]
            if not counts:
                for needle in complete:
                    needle.pass_over()
            elif complete:
                self.hit = max((needle.text for needle in complete), key=len)
                seen = self._held + text[: i + 1]
                self._held = ""
                return seen[: len(seen) - len(self.hit)], True
        seen = self._held + text
        shown = len(seen) - max(needle.matched for needle in self._needles)
        self._held = seen[shown:]
        return seen[:shown], False

    def finish(self) -> str:
        """The tail that was held back for a stop string which never came."""
        tail, self._held = self._held, ""
        return tail

"""Incremental detokenisation: token ids in, whole characters out."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pdmesh.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns a stream of token ids into text without ever cutting a character.

    Tokens of a byte-level vocabulary may end inside a UTF-8 character; those bytes wait for the
    rest (compare ai-dynamo/dynamo#12630). The deltas concatenate to ``Tokenizer.decode`` of all
    ids. U+FFFD appears only for bytes that no continuation can mend.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, ids: Iterable[int]) -> str:
        """The characters completed by ``ids``; may be empty."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def finish(self) -> str:
        """What an incomplete last character leaves: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)

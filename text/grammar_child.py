"""Compiles grammars for ``GrammarTrial``; a program of its own, so that it can be killed.

Run by path with the checkpoint's tokenizer.json as its argument. Writes an empty line when it is
ready. Reads grammars from standard input (four bytes of length, big-endian, then UTF-8); answers
each with a line of JSON: the reason why it cannot be used, or "".
"""

from __future__ import annotations

import json
import resource
import sys
from typing import BinaryIO

import llguidance

MAX_MEMORY = 4 << 30
"""Bytes of address space."""


def serve(tokenizer: llguidance.LLTokenizer, source: BinaryIO, out: BinaryIO) -> None:
    """Answers until the input ends."""
    out.write(b"\n")
    out.flush()
    while len(head := source.read(4)) == 4:
        grammar = source.read(int.from_bytes(head, "big")).decode()
        out.write(json.dumps(fault(tokenizer, grammar)[:2000]).encode() + b"\n")
        out.flush()


def fault(tokenizer: llguidance.LLTokenizer, grammar: str) -> str:
    """Why a grammar cannot begin an answer; empty if it can."""
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error()) if matcher.is_error() else ""


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    serve(llguidance.LLTokenizer(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)

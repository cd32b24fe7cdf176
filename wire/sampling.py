"""Sampling parameters of a request and the limits that make them valid."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from pdmesh.wire.errors import InvalidRequest

MAX_TOKENS = 1_000_000
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 64
MAX_GRAMMAR_LENGTH = 65_536


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are chosen and when a sequence ends.

    ``temperature`` 0 means greedy. ``top_k`` 0 and ``top_p`` 1 mean no limit. ``seed`` fixes every
    random choice together with the output position. ``logprobs`` None returns none, k >= 0 returns
    the chosen token's and the k most likely ones'.

    What changes the distribution is applied in this order: grammar, ``min_tokens``, ``bad_words``
    and ``logit_bias``; ``repetition_penalty`` (tokens of prompt and answer), then
    ``frequency_penalty`` and ``presence_penalty`` (tokens of the answer); ``temperature``;
    ``min_p`` (share of the most likely token's probability); ``top_k``; ``top_p``.

    ``logit_bias`` holds (token id, value added). ``bad_words`` holds token id sequences that the
    answer never contains. ``min_tokens`` keeps end-of-text and ``stop_token_ids`` from being chosen
    at the first that many positions of the whole answer; ``max_tokens`` of an attempt that goes on
    with an answer counts what is left, so it may be the smaller of the two. ``grammar`` is one that
    llguidance reads, as ``pdmesh.text.grammar`` makes it; empty means free text.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest, naming the field, its value and what is allowed."""
        _between("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _between("temperature", self.temperature, 0.0, 100.0)
        if not math.isfinite(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p is {self.top_p}; it must be over 0 and at most 1")
        _between("top_k", self.top_k, 0, vocab_size)
        _between("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _between("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"{len(self.stop)} stop strings given; at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"a stop string has {len(text)} characters; 1 to {MAX_STOP_LENGTH} are allowed"
                )
        check_token_ids(self.stop_token_ids, vocab_size, "stop_token_ids")
        self._validate_shaping(vocab_size)

    def _validate_shaping(self, vocab_size: int) -> None:
        """What changes the distribution."""
        _between("min_p", self.min_p, 0.0, 1.0)
        if not 0.0 < self.repetition_penalty <= 2.0:
            raise InvalidRequest(
                f"repetition_penalty is {self.repetition_penalty}; it must be over 0 and at most 2"
            )
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        _at_most("logit_bias", len(self.logit_bias), MAX_BIASED_TOKENS)
        check_token_ids((token for token, _ in self.logit_bias), vocab_size, "logit_bias")
        for token, value in self.logit_bias:
            _between(f"logit_bias of token {token}", value, -100.0, 100.0)
        _at_most("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        for word in self.bad_words:
            if not 0 < len(word) <= MAX_BAD_WORD_LENGTH:
                raise InvalidRequest(
                    f"one of bad_words has {len(word)} tokens; "
                    f"1 to {MAX_BAD_WORD_LENGTH} are allowed"
                )
            check_token_ids(word, vocab_size, "bad_words")
        _at_most("grammar", len(self.grammar), MAX_GRAMMAR_LENGTH, "characters")


def check_token_ids(ids: Iterable[int], vocab_size: int, field: str) -> None:
    """Raises InvalidRequest if an id lies outside [0, vocab_size)."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{field} holds {token}; the model's token ids run from 0 to {vocab_size - 1}"
            )


def _at_most(name: str, count: int, most: int, what: str = "entries") -> None:
    if count > most:
        raise InvalidRequest(f"{name} has {count} {what}; at most {most} are allowed")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}")

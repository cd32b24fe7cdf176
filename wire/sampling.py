"""Sampling parameters of a request and the limits that make them valid."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from pdmesh.wire.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are chosen and when a sequence ends.

    ``temperature`` 0 means greedy. ``top_k`` 0 and ``top_p`` 1 mean no limit. ``seed`` fixes every
    random choice together with the output position. ``logprobs`` None returns none, k >= 0 returns
    the chosen token's and the k most likely ones'.
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

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest, naming the field, its value and what is allowed."""
        _between("max_tokens", self.max_tokens, 1, 1_000_000)
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


def check_token_ids(ids: Iterable[int], vocab_size: int, field: str) -> None:
    """Raises InvalidRequest if an id lies outside [0, vocab_size)."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{field} holds {token}; the model's token ids run from 0 to {vocab_size - 1}"
            )


def _between(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}")

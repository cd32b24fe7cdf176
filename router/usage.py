"""What a request cost, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    seed: int


@dataclass(frozen=True)
class Timing:
    """Where a request's time went, in milliseconds, summed over its attempts."""

    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_ms: float
    router_ms: float
    ttft_ms: float
    prefill_worker: str
    decode_worker: str
    attempts: int
    migrations: int = 0

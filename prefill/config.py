"""Settings of one prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.kvcache.eviction import EvictionName
from pdmesh.kvtransfer.choice import DEFAULT_TRANSPORTS
from pdmesh.wire.worker_config import WorkerConfig

STEP_PROMPTS = 32
"""Prompts that end in one step, at most, in the count of its memory."""


def step_rows(chunk_tokens: int, page_size: int) -> int:
    """Rows of the largest step."""
    return chunk_tokens + page_size


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Everything a prefill worker is told when it starts.

    ``eviction`` says which cached pages go first; ``transports`` which ways pages may go, best
    first; ``chunk_tokens`` the tokens of one step, at least a page; ``max_queue`` how many prompts
    may wait.
    """

    eviction: EvictionName = "lru"
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    chunk_tokens: int = 512
    max_queue: int = 1024

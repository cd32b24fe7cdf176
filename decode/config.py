"""Settings of one decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.kvcache.eviction import EvictionName
from pdmesh.kvtransfer.choice import DEFAULT_TRANSPORTS
from pdmesh.wire.worker_config import WorkerConfig

AUTO = -1
"""``draft_tokens``: as many as pay off."""
MAX_DRAFTS = 4


def most_drafts(draft_tokens: int) -> int:
    """Drafts that a sequence may get in a step."""
    return MAX_DRAFTS if draft_tokens == AUTO else draft_tokens


def step_rows(max_batch: int, draft_tokens: int) -> int:
    """Rows of the largest step."""
    return max_batch * (1 + most_drafts(draft_tokens))


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Everything a decode worker is told when it starts.

    ``eviction`` says which cached pages go first; ``transports`` which ways pages may go, best
    first; ``max_batch`` the most sequences in a step; ``lease_idle_s`` how long a reservation may
    see no write and no reader before it is drained; ``draft_tokens`` the MTP drafts a step and
    sequence, -1 for as many as pay off; ``growth_tokens`` how many tokens are promised ahead of a
    running sequence, 0 for all it may generate; ``park_mb`` the MiB of host memory for pages of
    preempted sequences; ``max_waiting`` how many reservations may wait for pages.
    """

    eviction: EvictionName = "lru"
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    max_batch: int = 32
    lease_idle_s: float = 60.0
    draft_tokens: int = 1
    growth_tokens: int = 0
    park_mb: int = 1024
    max_waiting: int = 1024

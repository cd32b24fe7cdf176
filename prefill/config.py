"""Settings of one prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.kvcache.eviction import EvictionName
from pdmesh.kvtransfer.choice import DEFAULT_TRANSPORTS
from pdmesh.prefill.scheduler import PrefillScheduler
from pdmesh.wire.worker_config import WorkerConfig

STEP_PROMPTS = 32
"""Prompts of one step, at most, on a GPU; those that end in it, in the count of its memory."""
AUTO_CHUNK = 0
"""``chunk_tokens``: what suits the device."""
LEAST_CHUNK = 512
"""Tokens of a step on a CPU, and the fewest that are chosen for any device."""
GPU_CHUNK = 4096
"""Tokens of a step of all ranks of a group on a GPU, which reads the experts' weights once a step;
`bench/gpu_engine.py` gives 30, 48 and 59 thousand tokens/s for steps of 1,024, 2,048 and 4,096."""


def chunk_choices(chunk_tokens: int, device: str, ranks: int) -> tuple[int, ...]:
    """The most tokens that a step may have, best first: the first that fits the memory counts.

    Args:
        chunk_tokens: a number that was given, which nothing changes, or AUTO_CHUNK.
        device: where the worker computes, such as "cpu", "cuda" or "cuda:1".
        ranks: workers that share the routed experts, whose steps are one.
    """
    if chunk_tokens != AUTO_CHUNK:
        return (chunk_tokens,)
    halves = [GPU_CHUNK >> n for n in range((GPU_CHUNK // LEAST_CHUNK).bit_length())]
    most = LEAST_CHUNK if device.startswith("cpu") else max(LEAST_CHUNK, GPU_CHUNK // ranks)
    return tuple(chunk for chunk in halves if chunk <= most)


def step_rows(chunk_tokens: int, page_size: int) -> int:
    """Rows of the largest step: its head and the others have half of it each, or a page."""
    return max(chunk_tokens, page_size) + page_size


def scheduler_on(
    device: str, chunk_tokens: int, page_size: int, max_queue: int
) -> PrefillScheduler:
    """The scheduler of a worker on a device, with steps of up to so many tokens.

    A step on a GPU reads the experts' weights, few rows or many; so prompts join it until it is
    full. They are no more than the count of its memory has.
    """
    if device.startswith("cpu"):
        return PrefillScheduler(chunk_tokens, page_size, max_queue)
    return PrefillScheduler(
        chunk_tokens,
        page_size,
        max_queue,
        join_tokens=chunk_tokens,
        most_prompts=STEP_PROMPTS,
    )


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Everything a prefill worker is told when it starts.

    ``eviction`` says which cached pages go first; ``transports`` which ways pages may go, best
    first; ``chunk_tokens`` the tokens of one step, at least a page, 0 for what suits the device;
    ``max_queue`` how many prompts may wait.
    """

    eviction: EvictionName = "lru"
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    chunk_tokens: int = AUTO_CHUNK
    max_queue: int = 1024

"""What one decode step was: figures for metrics, taken on the event loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeStepFacts:
    """``duration_s``: from building the rows to the last token queued; ``model_s``: of that, inside
    model and sampler. ``num_tokens``: yielded to streams; ``drafted``, ``accepted``: draft tokens
    verified, and of those right; ``pages_used``: of the pool, by anyone, after the step.
    """

    duration_s: float
    model_s: float
    num_sequences: int
    num_tokens: int
    drafted: int
    accepted: int
    pages_used: int

"""What one prefill step was, for whoever counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillStepFacts:
    """Figures of one step, repeated attempts included.

    ``num_tokens`` were computed for ``num_prompts``. ``queue_s`` has the seconds from the arrival
    to the start of each prompt that began with this step, and ``cached_tokens`` counts what the
    prefix cache spared them. ``failed_prompts`` ended here with an error.
    """

    duration_s: float
    num_prompts: int
    num_tokens: int
    cached_tokens: int
    queue_s: tuple[float, ...] = ()
    failed_prompts: int = 0

"""Choosing tokens from logits, with counter-based randomness.

The random number of an output position is a function of (seed, position) alone, so nothing has to
move when a sequence moves, and neither batch nor speculation changes a choice. Philox: Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdmesh.wire.messages import TokenLogprobs
from pdmesh.wire.sampling import SamplingParams


@dataclass(frozen=True)
class Choice:
    """One row to sample: its parameters and the output position it decides."""

    params: SamplingParams
    position: int


def uniform(seed: int, position: int) -> float:
    """A float64 in [0, 1) that depends on ``seed`` (64 bits) and ``position`` alone."""
    generator = np.random.Philox(key=seed, counter=position)
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def sample(
    logits: Tensor, choices: Sequence[Choice]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Token ids and log-probabilities, one for each row.

    Args:
        logits: [n, vocab] float32.
        choices: n rows' parameters.

    Returns:
        n token ids, and for each row that asked for them the log-probabilities under the
        unmodified distribution (temperature 1, no truncation).
    """
    ids = logits.argmax(dim=-1).tolist()
    for row, choice in enumerate(choices):
        if choice.params.temperature > 0.0:
            ids[row] = _sample_row(logits[row], choice)
    return ids, _logprobs(logits, ids, choices)


def _sample_row(logits: Tensor, choice: Choice) -> int:
    """Inverse transform sampling over tokens ordered by probability, ties by id."""
    params = choice.params
    # The largest becomes 0 first, so that no temperature is too small to divide by.
    scaled = (logits.double() - logits.max().double()) / params.temperature
    ordered, ids = torch.sort(scaled, descending=True, stable=True)
    if params.top_k:
        ordered, ids = ordered[: params.top_k], ids[: params.top_k]
    cumulative = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
    if params.top_p < 1.0:
        keep = int(torch.searchsorted(cumulative, params.top_p)) + 1
        cumulative = cumulative[:keep]
    target = uniform(params.seed, choice.position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, target, right=True))
    return int(ids[min(index, cumulative.numel() - 1)])


def _logprobs(
    logits: Tensor, ids: Sequence[int], choices: Sequence[Choice]
) -> list[TokenLogprobs | None]:
    answers: list[TokenLogprobs | None] = []
    for row, choice in enumerate(choices):
        wanted = choice.params.logprobs
        if wanted is None:
            answers.append(None)
            continue
        logprobs = torch.log_softmax(logits[row], dim=-1)
        values, tops = logprobs.topk(wanted) if wanted else (logprobs[:0], logprobs[:0].long())
        answers.append(
            TokenLogprobs(
                logprob=float(logprobs[ids[row]]),
                top_ids=tuple(tops.tolist()),
                top_logprobs=tuple(values.tolist()),
            )
        )
    return answers

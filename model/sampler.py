"""Choosing tokens from logits, with counter-based randomness.

The random number of an output position is a function of (seed, answer, position) alone, so nothing
has to move when a sequence moves, and neither batch nor speculation changes a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pdmesh.model.choice import Choice
from pdmesh.model.philox import uniform
from pdmesh.model.sampling_state import SamplingState
from pdmesh.model.shaping import shape
from pdmesh.model.truncation import draw
from pdmesh.wire.errors import InternalError
from pdmesh.wire.messages import TokenLogprobs

BLOCK = 2**19
"""How many logits are worked on at once in float64, so that they stay in the processor's cache."""

__all__ = ["Choice", "SamplingState", "sample", "uniform"]


def sample(
    logits: Tensor, choices: Sequence[Choice]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Token ids and log-probabilities, one for each row.

    A row's result depends on that row alone, bit for bit: not on its place or its neighbours. What
    changes the distribution applies in the order that ``SamplingParams`` states. Where
    ``min_tokens`` and ``bad_words`` forbid everything that the grammar allows (without one: every
    token), neither applies at that position: the grammar always wins.

    Greedy rows take the most likely token. The others invert the cumulative distribution at
    ``uniform(seed, position, index)``, in float64, over tokens in order of falling probability and
    then id where ``top_k`` or ``top_p`` cut the tail, and in order of id elsewhere.

    Args:
        logits: [n, vocab] float32.
        choices: n rows' parameters.

    Returns:
        n token ids, and for each row that asked for them the log-probabilities under the
        unmodified distribution (temperature 1, no truncation, no penalty, no grammar).

    Raises:
        InternalError: a logit is NaN or infinite, or a grammar allows nothing.
    """
    if not choices:
        return [], []
    plain, rest = _split(choices, lambda c: c.params.temperature == 0.0 and not c.shaped)
    if logits.is_cpu:
        _check_finite(logits)
        ids = [0] * len(choices)
        _greedy(_take(logits, plain), plain, ids)
    else:
        ids = best_tokens(logits)
    block = max(1, BLOCK // logits.shape[1])
    for rows in (rest[i : i + block] for i in range(0, len(rest), block)):
        work = shape(_take(logits, rows).cpu(), [choices[row] for row in rows])
        _choose(work, rows, choices, ids)
    return ids, _logprobs(logits, ids, choices)


def _choose(work: Tensor, rows: list[int], choices: Sequence[Choice], ids: list[int]) -> None:
    """Fills ``ids`` for ``rows`` from their shaped logits [len(rows), vocab]."""
    here = [choices[row] for row in rows]
    greedy, random = _split(here, lambda c: c.params.temperature == 0.0)
    _greedy(_take(work, greedy), [rows[i] for i in greedy], ids)
    if random:
        chosen = [here[i] for i in random]
        numbers = [uniform(c.params.seed, c.position, c.index) for c in chosen]
        drawn = draw(_take(work, random), [c.params for c in chosen], numbers)
        for i, token in zip(random, drawn, strict=True):
            ids[rows[i]] = token


def _greedy(logits: Tensor, rows: list[int], ids: list[int]) -> None:
    if not rows:
        return
    # The same first of equals; numpy's is an order of magnitude faster on a processor.
    best = logits.detach().numpy().argmax(axis=1) if logits.is_cpu else logits.argmax(dim=-1)
    for row, token in zip(rows, best.tolist(), strict=True):
        ids[row] = token


def best_tokens(logits: Tensor) -> list[int]:
    """The likeliest token of each row, the first of equals, with one wait for the device.

    Raises:
        InternalError: a logit is NaN or infinite.
    """
    ends = logits.aminmax(dim=-1)
    best = logits.argmax(dim=-1).double()  # holds every id
    low, high, tokens = torch.stack([ends.min.double(), ends.max.double(), best]).cpu().numpy()
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        _check_finite(logits)
    return [int(token) for token in tokens.tolist()]


def _split(
    choices: Sequence[Choice], test: Callable[[Choice], bool]
) -> tuple[list[int], list[int]]:
    """Rows that pass the test, and the others."""
    passed = [test(choice) for choice in choices]
    return (
        [row for row, ok in enumerate(passed) if ok],
        [row for row, ok in enumerate(passed) if not ok],
    )


def _take(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _check_finite(logits: Tensor) -> None:
    ends = torch.stack([logits.amin(dim=-1), logits.amax(dim=-1)])
    if not bool(torch.isfinite(ends).all()):
        bad = (~torch.isfinite(logits)).nonzero()[0].tolist()
        raise InternalError(
            f"the model gave the logit {float(logits[bad[0], bad[1]])} for token {bad[1]} "
            f"in row {bad[0]} of {len(logits)}"
        )


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

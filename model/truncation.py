"""Random choices from shaped logits: temperature, min_p, top_k, top_p."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdmesh.wire.sampling import SamplingParams

CANDIDATES = (1024, 16384)
"""How many of the most likely tokens are sorted, in turn, before the whole vocabulary is."""


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """Token ids by inverse transform sampling, one for each row.

    ``min_p``, ``top_k`` and ``top_p`` each look at what the one before has left: ``top_k`` keeps
    the first k in order of probability (ties by id), ``top_p`` the shortest prefix of that order
    that holds at least that share. A row's answer does not depend on other rows.

    Args:
        logits: [n, vocab] float64 with a finite largest value in each row; forbidden: -inf.
            Overwritten.
        params: n rows' temperature (over 0), ``min_p``, ``top_k``, ``top_p``.
        numbers: n uniform numbers in [0, 1).
    """
    p = _probabilities(logits, params)
    cut = [bool(q.top_k) or q.top_p < 1.0 for q in params]
    ids = [0] * len(params)
    for sort in (False, True):
        rows = [row for row, one in enumerate(cut) if one is sort]
        if not rows:
            continue
        here = p if len(rows) == len(params) else p[rows]
        u = _column([numbers[row] for row in rows])
        drawn = (
            _cut(here, [params[row] for row in rows], u) if sort else _invert(here.cumsum(-1), u)
        )
        for row, token in zip(rows, drawn.tolist(), strict=True):
            ids[row] = token
    return ids


def _probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[n, vocab] float64 after temperature and ``min_p``; sums to 1 before ``min_p``.

    ``softmax`` works on one row after the other, so its sums do not depend on the batch.
    """
    # The largest becomes 0 first, so that no temperature is too small to divide by.
    logits -= logits.amax(dim=-1, keepdim=True)
    logits /= _column([q.temperature for q in params])
    p = torch.softmax(logits, dim=-1)
    if any(q.min_p for q in params):
        least = _column([q.min_p for q in params]) * p.amax(dim=-1, keepdim=True)
        p.masked_fill_(p < least, 0.0)
    return p


def _cut(p: Tensor, params: Sequence[SamplingParams], numbers: Tensor) -> Tensor:
    """Draws [n] where ``top_k`` or ``top_p`` cut: from the likeliest tokens if they suffice."""
    vocab = p.shape[1]
    ids = torch.empty(len(params), dtype=torch.int64)
    rows = list(range(len(params)))
    for count in (*(c for c in CANDIDATES if c < vocab), vocab):
        here = [params[row] for row in rows]
        values, order = _likeliest(p if len(rows) == len(p) else p[rows], count)
        ids[rows], enough = _draw_sorted(values, order, here, numbers[rows], vocab)
        rows = [row for row, done in zip(rows, enough.tolist(), strict=True) if not done]
        if not rows:
            break
    return ids


def _likeliest(p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row, by falling value and then id, and their ids.

    Which of several equal values at the end are among them is not said.
    """
    if count == p.shape[1]:
        return torch.sort(p, dim=-1, descending=True, stable=True)
    ids, _ = torch.sort(p.topk(count, dim=-1, sorted=False).indices, dim=-1)
    values, places = torch.sort(p.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, places)


def _draw_sorted(
    values: Tensor, order: Tensor, params: Sequence[SamplingParams], numbers: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Draws [n] from the beginning [n, m] of the sorted distribution, and whether it was enough.

    It is enough if the cut falls before the last value and its equals, whose order is not known, or
    if nothing likely comes after.
    """
    size = values.shape[1]
    cumulative = values.cumsum(dim=-1)
    limit = torch.tensor([q.top_k or vocab for q in params]).unsqueeze(1)
    shortened = torch.tensor([bool(q.top_k or q.min_p) for q in params]).unsqueeze(1)
    mass = cumulative.gather(1, limit.clamp(max=size) - 1)
    mass = torch.where(shortened, mass, torch.ones_like(mass))
    top_p = _column([q.top_p for q in params])
    reached = torch.searchsorted(cumulative, top_p * mass) + 1
    kept = torch.where(top_p < 1.0, torch.minimum(reached, limit), limit)
    end = cumulative.gather(1, kept.clamp(max=size) - 1)
    place = _invert(torch.minimum(cumulative, end), numbers).unsqueeze(1)
    known = (values > values[:, -1:]).sum(dim=-1, keepdim=True)
    enough = torch.where(shortened, limit, reached) <= known
    enough |= (values[:, -1:] == 0.0) | torch.tensor(size == vocab)
    return order.gather(1, place).squeeze(1), enough.squeeze(1)


def _invert(cumulative: Tensor, numbers: Tensor) -> Tensor:
    """The first place [n] where the cumulative sum passes its share; never one of probability 0."""
    total = cumulative[:, -1:].contiguous()
    place = torch.searchsorted(cumulative, numbers * total, right=True)
    return torch.minimum(place, torch.searchsorted(cumulative, total)).squeeze(1)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)

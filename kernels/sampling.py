"""Tokens from logits on the device that holds them, in plain torch.

The meaning is that of `pdmesh.model.sampler` for rows whose logits are final: penalties, bias and
masks are applied before (minus infinity forbids a token). Random numbers come from outside: they
are functions of seed, position and answer. Nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

CANDIDATES = 1024
"""How many of the likeliest tokens are sorted where `top_k` or `top_p` cut."""
NO_TOKEN = -1
"""Comes back for a row with a NaN or infinite logit, or in which every token is forbidden."""
UNDECIDED = -2
"""Comes back where a cut lies beyond the sorted tokens: the row has to be drawn on the host."""


def sample(
    logits: Tensor,
    temperatures: Tensor,
    min_p: Tensor,
    numbers: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """Token ids [m] int64, or NO_TOKEN or UNDECIDED.

    Without a cut the first token is drawn at which the cumulative distribution, in the order of the
    ids, passes its share; where `top_k` or `top_p` cut, in the order of falling probability and
    then ids. `min_p`, `top_k` and `top_p` each look at what the one before has left. Sums are
    float64.

    Args:
        logits: [m, vocab] float32.
        temperatures: [m] float64; 0 takes the most likely token, of equals the first.
        min_p: [m] float64, the least share of the most likely token's probability.
        numbers: [m] float64 in [0, 1), the share of the total that has to be passed.
        top_k: [m] int64, tokens that stay, 0 for all; None: all in every row.
        top_p: [m] float64, the share that the tokens that stay have to hold; None: 1 in every row.
    """
    best = logits.argmax(dim=-1)
    top = logits.gather(1, best.unsqueeze(1)).squeeze(1)
    likely = likelihoods(logits, top, temperatures, min_p)
    cumulative = likely.cumsum(dim=-1)
    drawn = _invert(cumulative, numbers)
    if top_k is not None or top_p is not None:
        cut = draw_cut(logits, top, temperatures, min_p, numbers, top_k, top_p, cumulative[:, -1])
        drawn = torch.where(is_cut(temperatures, top_k, top_p), cut, drawn)
    sound = top.isfinite() & ~logits.isnan().any(dim=-1)
    return torch.where(sound, torch.where(temperatures == 0, best, drawn), NO_TOKEN)


def likelihoods(logits: Tensor, top: Tensor, temperatures: Tensor, min_p: Tensor) -> Tensor:
    """exp((logits - top) / temperature), 0 below min_p: [m, n] float64 for the rows' largest `top`.

    Temperatures of 0 count as 1.
    """
    heat = torch.where(temperatures == 0, 1.0, temperatures).unsqueeze(1)
    likely = ((logits.double() - top.double().unsqueeze(1)) / heat).exp()
    return likely.masked_fill(likely < min_p.unsqueeze(1), 0.0)


def is_cut(temperatures: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Which rows [m] are drawn in the order of falling probability."""
    cut = torch.zeros_like(temperatures, dtype=torch.bool)
    cut = cut if top_k is None else cut | (top_k > 0)
    return cut if top_p is None else cut | (top_p < 1.0)


def draw_cut(
    logits: Tensor,
    top: Tensor,
    temperatures: Tensor,
    min_p: Tensor,
    numbers: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    total: Tensor,
) -> Tensor:
    """Draws [m] int64 from the CANDIDATES likeliest tokens of each row; UNDECIDED beyond them.

    It is decided if the cut falls before the last candidate and its equals, whose order is not
    known, or if nothing likely comes after.

    Args:
        logits, temperatures, min_p, numbers, top_k, top_p: as `sample` has them.
        top: [m] float32, the rows' largest logits.
        total: [m] float64, the sums of `likelihoods`.
    """
    vocab = logits.shape[1]
    size = min(CANDIDATES, vocab)
    zeros = torch.zeros_like(numbers, dtype=torch.int64)
    top_k = (zeros if top_k is None else top_k).unsqueeze(1)
    top_p = (torch.ones_like(numbers) if top_p is None else top_p).unsqueeze(1)
    ids, _ = torch.sort(logits.topk(size, dim=-1, sorted=False).indices, dim=-1)
    found = likelihoods(logits.gather(1, ids), top, temperatures, min_p)
    values, places = torch.sort(found, dim=-1, descending=True, stable=True)
    cumulative = values.cumsum(dim=-1)
    limit = torch.where(top_k > 0, top_k, vocab)
    shortened = (top_k > 0) | (min_p.unsqueeze(1) > 0)
    mass = cumulative.gather(1, limit.clamp(max=size) - 1)
    mass = torch.where(shortened, mass, total.unsqueeze(1))
    reached = torch.searchsorted(cumulative, top_p * mass) + 1
    kept = torch.where(top_p < 1.0, torch.minimum(reached, limit), limit)
    end = cumulative.gather(1, kept.clamp(max=size) - 1)
    place = _invert(torch.minimum(cumulative, end), numbers).unsqueeze(1)
    known = (values > values[:, -1:]).sum(dim=-1, keepdim=True)
    decided = torch.where(shortened, limit, reached) <= known
    decided |= (values[:, -1:] == 0.0) | (size == vocab)
    token = ids.gather(1, places.gather(1, place))
    return torch.where(decided, token, UNDECIDED).squeeze(1)


def _invert(cumulative: Tensor, numbers: Tensor) -> Tensor:
    """The first place [m] where the cumulative sum passes its share; never one of probability 0.

    A place all the same where the sums are NaN.
    """
    total = cumulative[:, -1:].contiguous()
    place = torch.searchsorted(cumulative, numbers.unsqueeze(1) * total, right=True)
    place = torch.minimum(place, torch.searchsorted(cumulative, total)).squeeze(1)
    return place.clamp_(max=cumulative.shape[1] - 1)

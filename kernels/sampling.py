"""Tokens from logits on the device that holds them, in plain torch: greedy, temperature, min_p.

The meaning is that of `pdmesh.model.sampler`, whose rows without penalties, `top_k` and `top_p`
these are. Random numbers come from outside: they are functions of seed, position and answer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample(logits: Tensor, temperatures: Tensor, min_p: Tensor, numbers: Tensor) -> Tensor:
    """Token ids [m] int64; -1 for a row with a NaN or infinite logit, or with none allowed.

    Args:
        logits: [m, vocab] float32; minus infinity forbids a token.
        temperatures: [m] float64; 0 takes the most likely token, of equals the first.
        min_p: [m] float64, the least share of the most likely token's probability.
        numbers: [m] float64 in [0, 1): where the cumulative distribution, in the order of the ids
            and in float64, passes this share of its total, the token is drawn.
    """
    best = logits.argmax(dim=-1)
    top = logits.gather(1, best.unsqueeze(1)).double()
    greedy = temperatures == 0
    heat = torch.where(greedy, 1.0, temperatures).unsqueeze(1)
    likely = ((logits.double() - top) / heat).exp()
    likely = likely.masked_fill(likely < min_p.unsqueeze(1), 0.0)
    cumulative = likely.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    place = torch.searchsorted(cumulative, numbers.unsqueeze(1) * total, right=True)
    drawn = torch.minimum(place, torch.searchsorted(cumulative, total)).squeeze(1)
    sound = top.isfinite().squeeze(1) & ~logits.isnan().any(dim=-1)
    return torch.where(sound, torch.where(greedy, best, drawn), -1)

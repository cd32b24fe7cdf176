"""What changes the logits before temperature: biases, penalties, forbidden tokens, grammars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdmesh.model.choice import Choice, Mask
from pdmesh.model.penalties import Counts
from pdmesh.wire.errors import InternalError


def shape(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Logits after grammar, ``min_tokens``, ``bad_words``, biases and penalties.

    Arithmetic is float64. Masks come last here and give the same as first: a forbidden token is
    -inf whatever is added.

    Args:
        logits: [n, vocab] float32, all finite; not changed.
        choices: one for each row.

    Returns:
        [n, vocab] float64; each row has a finite value.

    Raises:
        InternalError: a grammar allows no token of the vocabulary.
    """
    work = logits.to(torch.float64, copy=True)
    _add_bias(work, choices)
    _add_penalties(work, choices)
    _mask(work, choices)
    return work


def _add_bias(work: Tensor, choices: Sequence[Choice]) -> None:
    rows = [row for row, choice in enumerate(choices) if choice.bias is not None]
    if rows:
        entries = [bias for choice in choices if (bias := choice.bias) is not None]
        at, values = _entries(rows, entries)
        work[at] += values


def _add_penalties(work: Tensor, choices: Sequence[Choice]) -> None:
    """Repetition divides positive and multiplies negative logits (Keskar et al., "CTRL", 2019,
    section 4.1, with the sign taken care of); frequency and presence subtract."""
    rows = [row for row, choice in enumerate(choices) if choice.counts is not None]
    if not rows:
        return
    entries = [seen for choice in choices if (seen := choice.counts) is not None]
    at, counts = _entries(rows, entries)
    sizes = [len(entry.ids) for entry in entries]
    params = [choices[row].params for row in rows]

    def each(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float64), sizes))

    repetition = each([p.repetition_penalty for p in params])
    value = work[at]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value = value - each([p.frequency_penalty for p in params]) * counts
    value = value - each([p.presence_penalty for p in params]) * (counts > 0)
    largest = torch.finfo(torch.float64).max
    work[at] = value.clamp(-largest, largest)


def _entries(rows: list[int], entries: Sequence[Counts]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Where the entries of all rows lie in [n, vocab], and their values."""
    row = np.repeat(np.array(rows, dtype=np.int64), [len(entry.ids) for entry in entries])
    ids = np.concatenate([entry.ids for entry in entries])
    values = np.concatenate([entry.values for entry in entries])
    return (torch.from_numpy(row), torch.from_numpy(ids)), torch.from_numpy(values)


def _mask(work: Tensor, choices: Sequence[Choice]) -> None:
    rows = [
        row for row, choice in enumerate(choices) if choice.mask is not None or choice.forbidden
    ]
    if not rows:
        return
    here = [choices[row] for row in rows]
    kept = allowed = _unpack([choice.mask for choice in here], work.shape[1])
    if not bool(allowed.any(dim=1).all()):
        raise InternalError("a grammar allows no token of the vocabulary")
    if any(choice.forbidden for choice in here):
        sizes = [len(choice.forbidden) for choice in here]
        at = torch.from_numpy(np.repeat(np.arange(len(rows)), sizes))
        ids = torch.tensor([token for choice in here for token in choice.forbidden])
        kept = allowed.clone()
        kept[at, ids] = False
        kept = torch.where(kept.any(dim=1, keepdim=True), kept, allowed)
    if len(rows) == len(work):
        work.masked_fill_(~kept, -torch.inf)
    else:
        work[rows] = work[rows].masked_fill_(~kept, -torch.inf)


def _unpack(masks: Sequence[Mask | None], vocab: int) -> Tensor:
    """[n, vocab] bool; a row without a mask allows everything, a mask nothing past its end."""
    size = -(-vocab // 8)
    packed = np.full((len(masks), size), 0xFF, dtype=np.uint8)
    for row, mask in enumerate(masks):
        if mask is not None:
            given = mask.view(np.uint8)[:size]
            packed[row, : len(given)] = given
            packed[row, len(given) :] = 0
    bits = np.unpackbits(packed, axis=1, bitorder="little", count=vocab)
    return torch.from_numpy(bits.view(np.bool_))

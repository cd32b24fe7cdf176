"""What the model card states: held-out bits per byte, MTP acceptance and expert balance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.tools.tiny_pack import Packed


@dataclass(frozen=True)
class Rows:
    """What a forward gives for tokens [1, t].

    Attributes:
        logits: [1, t, v].
        mtp_logits: [1, t, v]; row j sees token j and predicts token j + 1, row 0 means nothing.
        load: [layers, experts], how many tokens each expert of each MoE layer got.
    """

    logits: Tensor
    mtp_logits: Tensor
    load: Tensor


Forward = Callable[[Tensor], Rows]


@dataclass(frozen=True)
class Scores:
    """Bits of all tokens after a document's first, special ones too, over its raw UTF-8 bytes."""

    bits_per_byte: float
    mtp_acceptance: float
    load_max_over_mean: float
    num_bytes: int


def windows(length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first scored) windows that score every position 1..length-1 once.

    A window holds at most `context` tokens; where a document is longer, windows overlap by half.
    """
    begin, scored = 0, 1
    while scored < length:
        end = min(begin + context, length)
        yield begin, end, scored
        scored = end
        begin = max(end - context // 2, 0)


@torch.no_grad()
def score(forward: Forward, held_out: Packed, context: int, documents: Sequence[int]) -> Scores:
    """Score the chosen documents of the held-out set, one window at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bits, accepted, tried = 0.0, 0, 0
    load: Tensor | None = None
    for number in documents:
        ids = held_out.ids[held_out.starts[number] : held_out.starts[number + 1]]
        tokens = torch.from_numpy(ids.astype(np.int64)).to(device)
        for begin, end, scored in windows(len(ids), context):
            rows = forward(tokens[None, begin:end])
            logits = rows.logits[0, scored - begin - 1 : -1].float()
            target = tokens[scored:end]
            bits += float(F.cross_entropy(logits, target, reduction="sum")) / math.log(2)
            hit, count = _mtp_hits(rows, tokens[begin:end], scored - begin)
            accepted, tried = accepted + hit, tried + count
            load = rows.load.double() if load is None else load + rows.load.double()
    num_bytes = int(held_out.raw_bytes[list(documents)].sum())
    balance = 1.0 if load is None else float((load.amax(-1) / load.mean(-1)).mean())
    return Scores(bits / num_bytes, accepted / max(tried, 1), balance, num_bytes)


def _mtp_hits(rows: Rows, tokens: Tensor, first: int) -> tuple[int, int]:
    """How often the MTP layer's best next token is the main model's best, given true tokens.

    Speculation drafts from row j (hidden j - 1, token j) and accepts when the main model, which
    then sees token j, agrees. Counted where the main model's own choice of token j was right, as
    in a greedy generation, for positions from `first` on.
    """
    main = rows.logits[0].argmax(-1)
    draft = rows.mtp_logits[0].argmax(-1)
    first = max(first, 1)
    followed = main[first - 1 : -1] == tokens[first:]
    agreed = (draft[first:] == main[first:]) & followed
    return int(agreed.sum()), int(followed.sum())

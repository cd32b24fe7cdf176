"""Where drafts come from: the model's MTP layer, one pass over all sequences for each depth.

The MTP layer was trained to predict one token further from the main model's hidden state
(DeepSeek-V3 report, section 2.2). For more drafts it is used again on its own output: the row of a
draft takes the hidden state that the MTP row before it gave (as EAGLE does with its one layer, Li
et al. 2024). What such rows leave in the MTP layer's pages is a guess; the rows of accepted
positions are computed again from true hidden states before anything is shared (``due``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.kvcache.store import LatentStore
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.computing import ComputingModel
from pdmesh.model.sampler import SamplingState
from pdmesh.model.tree import TokenTree

_ROOT = (-1,)
"""The parents of a tree without drafts."""


@dataclass
class SequenceRows:
    """One sequence in a step.

    ``tokens`` is the whole sequence; positions below ``computed`` have latents, and
    ``tokens[computed]`` is the last known token. ``sampling`` stands after it. ``room`` is how many
    more tokens the request may get, at least 1. ``pending`` [k, hidden] are the hidden states of
    positions ``computed - k .. computed - 1``, whose successors still lack MTP latents; None where
    MTP is off.
    """

    tokens: Sequence[int]
    page_table: tuple[int, ...]
    computed: int
    sampling: SamplingState
    room: int
    pending: Tensor | None

    def most_drafts(self, page_size: int) -> int:
        """Draft tokens that room and pages allow: the last token of an answer needs no draft."""
        return min(self.room - 1, len(self.page_table) * page_size - self.computed - 1)


class Drafter(Protocol):
    """Guesses what follows."""

    def propose(self, sequences: Sequence[SequenceRows], count: int) -> list[TokenTree]:
        """A tree for each sequence, up to ``count`` drafts deep; its root is the last known token.

        Writes the MTP latents of the pending rows that are ``due``.
        """


def due(sequence: SequenceRows, count: int, page_size: int) -> bool:
    """Whether a step of ``count`` drafts computes the sequence's pending MTP rows.

    It does where it drafts. Otherwise they may wait: until they complete a page, which can then be
    shared.
    """
    if sequence.pending is None:
        return False
    if min(count, sequence.most_drafts(page_size)) > 0:
        return True
    complete = sequence.computed + 1
    return complete // page_size > (complete - sequence.pending.shape[0]) // page_size


class MtpDrafter:
    """Chains of MTP drafts; with ``branches`` > 1 also the next likely tokens at depth 1."""

    def __init__(
        self, model: ComputingModel, store: LatentStore, page_size: int, branches: int = 1
    ) -> None:
        self._model = model
        self._store = store
        self._page_size = page_size
        self._branches = branches

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SequenceRows], count: int) -> list[TokenTree]:
        """See ``Drafter``. A draft that could never be chosen is left out, with all below it."""
        grown = [
            self._grown(s, count) if due(s, count, self._page_size) else None for s in sequences
        ]
        filled = [g for g in grown if g is not None]
        if filled:
            self._grow(filled)
        return [
            TokenTree((s.tokens[s.computed],), _ROOT) if g is None else g.tree()
            for s, g in zip(sequences, grown, strict=True)
        ]

    def _grow(self, filled: Sequence[_Grown]) -> None:
        """Computes the pending rows, and drafts."""
        hidden = self._fill(filled)
        growing = [g for g in filled if g.limit > 0]
        hidden = _rows(hidden, [g.limit > 0 for g in filled])
        while growing:
            logits = self._model.mtp_logits(hidden)
            if self._branches > 1 and not growing[0].chain:
                tops = logits.topk(min(self._branches, logits.shape[-1]), dim=-1).indices.tolist()
            else:
                tops = [[token] for token in logits.argmax(dim=-1).tolist()]
            for g, ranked in zip(growing, tops, strict=True):
                g.add(ranked)
            more = [g.wants_more for g in growing]
            hidden = _rows(hidden, more)
            growing = [g for g, wants in zip(growing, more, strict=True) if wants]
            if growing:
                hidden = self._deeper(growing, hidden)

    def _grown(self, s: SequenceRows, count: int) -> _Grown:
        most = 0 if s.pending is None else s.most_drafts(self._page_size)
        return _Grown(s, most, min(count, most))

    def _fill(self, grown: Sequence[_Grown]) -> Tensor:
        """Computes the pending rows; the hidden state [n, hidden] of each sequence's last one."""
        slices: list[SequenceSlice] = []
        tokens: list[Sequence[int]] = []
        previous: list[Tensor] = []
        ends: list[int] = []
        device, total = self._store.tensor.device, 0
        for s in (g.sequence for g in grown):
            assert s.pending is not None
            start, end = s.computed + 1 - s.pending.shape[0], s.computed + 1
            slices.append(SequenceSlice(s.page_table, start, end, start))
            tokens.append(s.tokens[start:end])
            previous.append(s.pending.to(device))
            total += end - start
            ends.append(total - 1)
        joined = previous[0] if len(previous) == 1 else torch.cat(previous)
        hidden = self._forward(slices, tokens, joined)
        return hidden if total == len(ends) else hidden[ends]

    def _deeper(self, grown: Sequence[_Grown], previous: Tensor) -> Tensor:
        """One more MTP row for each sequence: that of its deepest draft."""
        slices = []
        for g in grown:
            position = g.sequence.computed + len(g.chain)
            slices.append(SequenceSlice(g.sequence.page_table, position, position + 1, position))
        return self._forward(slices, [g.chain[-1:] for g in grown], previous)

    def _forward(
        self, slices: Sequence[SequenceSlice], tokens: Sequence[Sequence[int]], previous: Tensor
    ) -> Tensor:
        latents = self._store.tensor
        batch = Batch.build(slices, tokens, self._page_size, latents.device)
        return self._model.mtp_forward(batch, previous, latents, "absorbed")


class _Grown:
    """The drafts of one sequence so far: the best chain, and others for its first token."""

    def __init__(self, sequence: SequenceRows, most: int, limit: int) -> None:
        self.sequence = sequence
        self.limit = limit
        self._most = most
        self.chain: list[int] = []
        self._others: list[int] = []
        self._ended = False

    @property
    def wants_more(self) -> bool:
        return not self._ended and len(self.chain) < self.limit

    def add(self, ranked: Sequence[int]) -> None:
        """Takes the likely next tokens, best first; what could not follow ends the chain."""
        if not self.chain:
            self._others = [t for t in ranked[1:] if self._possible([t])]
        if self._possible([*self.chain, ranked[0]]):
            self.chain.append(ranked[0])
        else:
            self._ended = True

    def _possible(self, path: list[int]) -> bool:
        """A stop token ends the answer by itself: a row for it would be wasted."""
        state = self.sequence.sampling
        return path[-1] not in state.stop_tokens and state.allowed(path) == len(path)

    def tree(self) -> TokenTree:
        """The chain first, so that a path along it needs no moving of latents."""
        s = self.sequence
        root = s.tokens[s.computed]
        return joined_tree(root, self.chain, self._others[: self._most - len(self.chain)])


def joined_tree(root: int, chain: Sequence[int], others: Sequence[int]) -> TokenTree:
    """A chain under ``root``, and ``others`` as further children of the root."""
    tokens = (root, *chain, *others)
    if not others:
        return TokenTree.chain(tokens)
    return TokenTree(tokens, (*range(-1, len(chain)), *(0 for _ in others)))


def _rows(hidden: Tensor, kept: Sequence[bool]) -> Tensor:
    return hidden if all(kept) else hidden[[i for i, keep in enumerate(kept) if keep]]

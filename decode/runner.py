"""The computing half of a decode worker: one absorbed-form step for many sequences.

A step has two passes. The MTP pass fills the MTP latents of the positions accepted last and drafts
one token; the main pass computes the last known token and the draft, and its logits say which
tokens come next. (DeepSeek-V3 report, section 2.2; used for speculation as in section 5.4.3.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.kvcache.store import LatentStore
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.sampler import Choice, sample
from pdmesh.wire.messages import TokenLogprobs
from pdmesh.wire.sampling import SamplingParams


@dataclass
class SequenceRows:
    """One sequence in a step.

    ``tokens`` is the whole sequence; positions below ``computed`` have latents, and
    ``tokens[computed]`` is the last known token. ``pending`` [k, hidden] are the hidden states of
    positions ``computed - k .. computed - 1``, whose successors still lack MTP latents; None where
    MTP is off.
    """

    tokens: Sequence[int]
    page_table: tuple[int, ...]
    computed: int
    sampling: SamplingParams
    output_position: int
    draft: bool
    pending: Tensor | None


@dataclass(frozen=True)
class StepRows:
    """``chosen`` and ``logprobs`` after each row; ``hidden`` [rows, hidden] of the rows."""

    chosen: list[int]
    logprobs: list[TokenLogprobs | None]
    drafts: list[int]
    hidden: Tensor


class DecodeRunner:
    """Runs the two passes over the latent pages of one worker."""

    def __init__(self, model: DeepseekV3, store: LatentStore, page_size: int) -> None:
        self._model = model
        self._store = store
        self._page_size = page_size

    @torch.inference_mode()
    def step(self, sequences: Sequence[SequenceRows]) -> list[StepRows]:
        """One step; each sequence gets as many rows as it has a draft for, plus one."""
        drafts = self._draft(sequences)
        batch = self._batch(
            [
                (s, s.computed, [s.tokens[s.computed], *draft])
                for s, draft in zip(sequences, drafts, strict=True)
            ]
        )
        hidden = self._model.forward(batch, self._store.tensor, "absorbed")
        choices = [
            Choice(s.sampling, s.output_position + row)
            for s, draft in zip(sequences, drafts, strict=True)
            for row in range(1 + len(draft))
        ]
        ids, logprobs = sample(self._model.logits(hidden), choices)
        results: list[StepRows] = []
        at = 0
        for draft in drafts:
            end = at + 1 + len(draft)
            results.append(StepRows(ids[at:end], logprobs[at:end], draft, hidden[at:end]))
            at = end
        return results

    def _draft(self, sequences: Sequence[SequenceRows]) -> list[list[int]]:
        """Fills pending MTP latents and drafts one token for each sequence that wants one."""
        with_mtp = [s for s in sequences if s.pending is not None]
        if not with_mtp:
            return [[] for _ in sequences]
        rows: list[tuple[SequenceRows, int, Sequence[int]]] = []
        previous: list[Tensor] = []
        ends: list[int] = []
        for s in with_mtp:
            assert s.pending is not None
            start = s.computed + 1 - s.pending.shape[0]
            rows.append((s, start, s.tokens[start : s.computed + 1]))
            previous.append(s.pending.to(self._store.tensor.device))
            ends.append((ends[-1] if ends else 0) + s.pending.shape[0])
        hidden = self._model.mtp_forward(
            self._batch(rows), torch.cat(previous), self._store.tensor, "absorbed"
        )
        wanted = [end - 1 for s, end in zip(with_mtp, ends, strict=True) if s.draft]
        guesses: list[int] = []
        if wanted:
            guesses = self._model.mtp_logits(hidden[wanted]).argmax(dim=-1).tolist()
        supply = iter(guesses)
        return [[next(supply)] if s.draft and s.pending is not None else [] for s in sequences]

    def _batch(self, rows: Sequence[tuple[SequenceRows, int, Sequence[int]]]) -> Batch:
        slices = [
            SequenceSlice(s.page_table, start, start + len(tokens), start)
            for s, start, tokens in rows
        ]
        tokens = [list(t) for _, _, t in rows]
        return Batch.build(slices, tokens, self._page_size, self._store.tensor.device)

"""The computing half of a prefill worker: chunks in, pages and first tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.kvcache.store import LatentStore
from pdmesh.model.batch import Batch, Form, SequenceSlice
from pdmesh.model.computing import ComputingModel
from pdmesh.model.form import prefill_form
from pdmesh.model.sampler import Choice, sample
from pdmesh.wire.hashes import Arithmetic
from pdmesh.wire.messages import TokenLogprobs


@dataclass
class PromptRows:
    """One chunk of one prompt, as the model sees it.

    ``carry`` is the hidden state [hidden] of position ``start - 1`` where an earlier chunk of this
    prompt computed it; ``cached_tokens`` were there before the first chunk; ``push(layer)`` is
    called when a layer's latents are in the pages, ``choices()`` when the last position's logits
    are there: how the first token of each answer is chosen.
    """

    tokens: Sequence[int]
    page_table: tuple[int, ...]
    start: int
    end: int
    write_from: int
    cached_tokens: int
    last: bool
    choices: Callable[[], Sequence[Choice]]
    push: Callable[[int], None]
    carry: Tensor | None = None


@dataclass(frozen=True)
class ChunkResult:
    """The hidden state [hidden] of the chunk's last position; first tokens if it was the end.

    ``logprobs`` has one entry for each token where they were asked for, and else none.
    """

    carry: Tensor
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


class PrefillRunner:
    """Runs chunks of several prompts as one batch, each prompt in its own form of attention.

    In "exact" arithmetic every prompt is computed in absorbed form; in "fast" in the form that
    takes fewer operations for it. The form depends on the whole prompt and on what was cached when
    it started, so all its chunks have the same. ``watch`` is entered for as long as a step takes.
    """

    def __init__(
        self,
        model: ComputingModel,
        store: LatentStore,
        page_size: int,
        mtp: bool,
        arithmetic: Arithmetic = "fast",
        watch: AbstractContextManager[None] | None = None,
    ) -> None:
        self._model = model
        self._store = store
        self._page_size = page_size
        self._mtp = mtp
        self._arithmetic = arithmetic
        self._watch = nullcontext() if watch is None else watch

    def form(self, cached_tokens: int, num_tokens: int) -> Form:
        """The form of a prompt of which ``cached_tokens`` were cached when it started."""
        if self._arithmetic == "exact":
            return "absorbed"
        return prefill_form(self._model.config, cached_tokens, num_tokens)

    def step(self, prompts: Sequence[PromptRows]) -> list[ChunkResult]:
        """One forward pass over all rows; pages are filled and pushed layer by layer."""
        with self._watch, torch.inference_mode():
            return self._step(prompts)

    def _step(self, prompts: Sequence[PromptRows]) -> list[ChunkResult]:
        batch = self._batch(prompts, [p.start for p in prompts])

        def on_layer(layer: int) -> None:
            for prompt in prompts:
                prompt.push(layer)

        hidden = self._model.forward(batch, self._store.tensor, "mha", on_layer)
        ends = _ends([p.end - p.start for p in prompts])
        if self._mtp:
            self._fill_mtp(prompts, hidden, ends)
        last_rows = hidden[torch.tensor([end - 1 for end in ends])]
        return self._results(prompts, last_rows)

    def _batch(self, prompts: Sequence[PromptRows], starts: Sequence[int]) -> Batch:
        pairs = list(zip(prompts, starts, strict=True))
        slices = [
            SequenceSlice(
                p.page_table,
                start,
                p.end,
                max(start, p.write_from),
                form=self.form(p.cached_tokens, len(p.tokens)),
            )
            for p, start in pairs
        ]
        tokens = [p.tokens[start : p.end] for p, start in pairs]
        return Batch.build(slices, tokens, self._page_size, self._store.tensor.device)

    def _fill_mtp(self, prompts: Sequence[PromptRows], hidden: Tensor, ends: list[int]) -> None:
        """Writes MTP latents: slot j comes from (hidden of j-1, token j); slot 0 stays empty."""
        chosen: list[PromptRows] = []
        starts: list[int] = []
        previous: list[Tensor] = []
        for prompt, end in zip(prompts, ends, strict=True):
            start = max(1, prompt.write_from, prompt.start + (prompt.carry is None))
            if start >= prompt.end:
                continue
            offset = end - prompt.end  # row of position p is offset + p
            if start == prompt.start:
                assert prompt.carry is not None
                previous.append(prompt.carry.unsqueeze(0))
                previous.append(hidden[offset + start : offset + prompt.end - 1])
            else:
                previous.append(hidden[offset + start - 1 : offset + prompt.end - 1])
            chosen.append(prompt)
            starts.append(start)
        if chosen:
            batch = self._batch(chosen, starts)
            self._model.mtp_forward(batch, torch.cat(previous), self._store.tensor, "mha")
        layer = self._store.tensor.shape[1] - 1
        for prompt in prompts:
            prompt.push(layer)

    def _results(self, prompts: Sequence[PromptRows], last_rows: Tensor) -> list[ChunkResult]:
        finished = [i for i, prompt in enumerate(prompts) if prompt.last]
        results = [ChunkResult(row.clone()) for row in last_rows]
        if not finished:
            return results
        choices = [prompts[i].choices() for i in finished]
        answers = [row for row, several in enumerate(choices) for _ in several]
        logits = self._model.logits(last_rows[finished])[answers]
        ids, logprobs = sample(logits, [choice for several in choices for choice in several])
        first = 0
        for i, several in zip(finished, choices, strict=True):
            end = first + len(several)
            asked = tuple(entry for entry in logprobs[first:end] if entry is not None)
            results[i] = ChunkResult(results[i].carry, tuple(ids[first:end]), asked)
            first = end
        return results


def _ends(lengths: Sequence[int]) -> list[int]:
    """Cumulative sums: the row after each prompt's last row."""
    total, ends = 0, []
    for length in lengths:
        total += length
        ends.append(total)
    return ends

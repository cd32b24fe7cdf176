"""The computing half of a decode worker: one absorbed-form step for many sequences.

A step drafts a tree of tokens for each sequence, computes the last known token and all drafts in
one pass of the main model, and keeps the path that the model itself chooses. (DeepSeek-V3 report,
sections 2.2 and 5.4.3.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.decode.config import AUTO, MAX_DRAFTS
from pdmesh.decode.draft import DraftPolicy
from pdmesh.decode.drafter import Drafter, MtpDrafter, SequenceRows, due
from pdmesh.decode.speculate import Accepted, accept, judged
from pdmesh.kernels.page_copy import move_latents
from pdmesh.kvcache.store import LatentStore
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.computing import ComputingModel
from pdmesh.model.sampler import Choice, sample
from pdmesh.model.tree import TokenTree
from pdmesh.wire.messages import TokenLogprobs


@dataclass
class StepRows:
    """What a step gave one sequence.

    ``logprobs`` of each accepted node's choice; ``hidden`` [accepted nodes, hidden] of their rows;
    ``filled``: the pending MTP rows were computed. ``model_s``: seconds that the whole step took to
    draft, compute and choose, for all its sequences together.
    """

    tree: TokenTree
    accepted: Accepted
    logprobs: list[TokenLogprobs | None]
    hidden: Tensor
    filled: bool
    model_s: float = 0.0

    @property
    def drafted(self) -> int:
        """Draft tokens that were computed."""
        return len(self.tree.tokens) - 1


class DecodeRunner:
    """Runs steps over the latent pages of one worker.

    Args:
        model, store: the weights and the pool.
        page_size: positions a page.
        draft_tokens: drafts a sequence and step, 0 to 4, or ``AUTO``.
        branches: likely tokens tried at depth 1; more than one makes trees.
        drafter: where drafts come from; by default the model's MTP layer.
        clock: seconds that only grow.
        watch: entered for as long as a step takes.
    """

    def __init__(
        self,
        model: ComputingModel,
        store: LatentStore,
        page_size: int,
        draft_tokens: int = 1,
        branches: int = 1,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        watch: AbstractContextManager[None] | None = None,
    ) -> None:
        if not AUTO <= draft_tokens <= MAX_DRAFTS:
            raise ValueError(f"draft_tokens is {draft_tokens}; it must be {AUTO} to {MAX_DRAFTS}")
        self._model = model
        self._store = store
        self._page_size = page_size
        self._fixed = draft_tokens
        self._policy = DraftPolicy(MAX_DRAFTS) if draft_tokens == AUTO else None
        self._drafter = drafter or MtpDrafter(model, store, page_size, branches)
        self._clock = clock
        self._watch = nullcontext() if watch is None else watch

    def step(self, sequences: Sequence[SequenceRows]) -> list[StepRows]:
        """One step; each sequence gets as many rows as its tree has nodes."""
        with self._watch, torch.inference_mode():
            return self._step(sequences)

    def _step(self, sequences: Sequence[SequenceRows]) -> list[StepRows]:
        began = self._clock()
        count = self._fixed if self._policy is None else self._policy.choose(len(sequences))
        trees = self._drafter.propose(sequences, count)
        hidden = self._model.forward(self._batch(sequences, trees), self._store.tensor, "absorbed")
        chosen, logprobs = sample(self._model.logits(hidden), _choices(sequences, trees))
        results: list[StepRows] = []
        rows = torch.split(hidden, [len(tree.tokens) for tree in trees])
        at = 0
        for s, tree, own in zip(sequences, trees, rows, strict=True):
            end = at + len(tree.tokens)
            accepted = accept(tree, chosen[at:end], s.room, s.sampling.stop_tokens)
            self._compact(s, accepted.path)
            results.append(
                StepRows(
                    tree,
                    accepted,
                    [logprobs[at + node] for node in accepted.path],
                    own if len(accepted.path) == end - at else _path_rows(own, accepted.path),
                    due(s, count, self._page_size),
                )
            )
            at = end
        self._learn(count, results, self._clock() - began)
        return results

    def _batch(self, sequences: Sequence[SequenceRows], trees: Sequence[TokenTree]) -> Batch:
        slices = []
        for s, tree in zip(sequences, trees, strict=True):
            end = s.computed + len(tree.tokens)
            parents = None if tree.is_chain else tree.parents
            slices.append(SequenceSlice(s.page_table, s.computed, end, s.computed, parents))
        tokens = [tree.tokens for tree in trees]
        return Batch.build(slices, tokens, self._page_size, self._store.tensor.device)

    def _compact(self, s: SequenceRows, path: tuple[int, ...]) -> None:
        """Moves the latents of accepted nodes to the positions that they turned out to have."""
        if path[-1] == len(path) - 1:
            return
        moved = [(node, place) for place, node in enumerate(path) if node != place]
        sources = [s.computed + node for node, _ in moved]
        targets = [s.computed + place for _, place in moved]
        move_latents(self._store.tensor, s.page_table, self._page_size, sources, targets)

    def _learn(self, count: int, results: Sequence[StepRows], seconds: float) -> None:
        for result in results:
            result.model_s = seconds
        if self._policy is None:
            return
        tried, right = [0] * MAX_DRAFTS, [0] * MAX_DRAFTS
        for result in results:
            tests, hits = judged(result.tree, result.accepted)
            for depth in range(tests):
                tried[depth] += 1
                right[depth] += depth < hits
        drafted = max(max(result.tree.depths) for result in results)
        if drafted == count or count == 0:
            self._policy.observe(len(results), count, tried, right, seconds)


def _choices(sequences: Sequence[SequenceRows], trees: Sequence[TokenTree]) -> list[Choice]:
    """How the token after each node is chosen."""
    choices: list[Choice] = []
    for s, tree in zip(sequences, trees, strict=True):
        if tree.is_chain:
            drafts = tree.tokens[1:]
            choices += [s.sampling.choice(drafts[:row]) for row in range(len(tree.tokens))]
        else:
            for node in range(len(tree.tokens)):
                path = [tree.tokens[i] for i in tree.path(node)[1:]]
                choices.append(s.sampling.choice(path))
    return choices


def _path_rows(hidden: Tensor, path: tuple[int, ...]) -> Tensor:
    """Rows [nodes, hidden] of a tree's nodes: those of its accepted path."""
    if path[-1] == len(path) - 1:
        return hidden[: len(path)]
    return hidden[list(path)]

"""Greedy generation in one process: what a served request must equal."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from pdmesh.model.batch import Batch, Form, SequenceSlice
from pdmesh.model.deepseek import DeepseekV3


@torch.inference_mode()
def generate_reference(
    model: DeepseekV3,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Collection[int] = (),
    mtp: bool = False,
) -> list[int]:
    """Generate greedily: the prompt in MHA form, then each token alone in absorbed form.

    Args:
        model: the weights; the pool is made here.
        prompt: at least one token.
        max_new_tokens: an upper bound.
        eos: tokens that end the output; the one that does is its last element.
        mtp: draft one token a step with the MTP layer and verify it with two rows a step. The
            output is the same.

    Returns:
        The generated tokens.
    """
    if max_new_tokens < 1:
        return []
    run = _Run(model, prompt, max_new_tokens)
    return run.with_drafts(eos) if mtp else run.plainly(eos)


class _Run:
    """One sequence over its own pages 0, 1, ..."""

    def __init__(self, model: DeepseekV3, prompt: Sequence[int], max_new_tokens: int) -> None:
        self.model = model
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.limit = self.num_prompt + max_new_tokens
        # A draft row may stand one position beyond the last token.
        num_pages = -(-(self.limit + 1) // 64)
        self.latents = model.new_latents(num_pages)
        self.page_table = tuple(range(num_pages))

    def batch(self, tokens: Sequence[int], start: int) -> Batch:
        item = SequenceSlice(self.page_table, start, start + len(tokens), start)
        return Batch.build([item], [tokens], 64, self.model.device)

    def hidden(self, tokens: Sequence[int], start: int, form: Form) -> Tensor:
        hidden: Tensor = self.model(self.batch(tokens, start), self.latents, form)
        return hidden

    def next_tokens(self, hidden: Tensor) -> list[int]:
        chosen: list[int] = self.model.logits(hidden).argmax(dim=-1).tolist()
        return chosen

    def done(self, eos: Collection[int]) -> bool:
        return len(self.tokens) >= self.limit or (
            len(self.tokens) > self.num_prompt and self.tokens[-1] in eos
        )

    def plainly(self, eos: Collection[int]) -> list[int]:
        hidden = self.hidden(self.tokens, 0, "mha")
        self.tokens += self.next_tokens(hidden[-1:])
        while not self.done(eos):
            hidden = self.hidden(self.tokens[-1:], len(self.tokens) - 1, "absorbed")
            self.tokens += self.next_tokens(hidden)
        return self.tokens[self.num_prompt :]

    def draft(self, previous: Tensor, tokens: Sequence[int], start: int, form: Form) -> int:
        """Run MTP rows for `tokens` at start..; the draft that follows the last of them."""
        batch = self.batch(tokens, start)
        hidden = self.model.mtp_forward(batch, previous, self.latents, form)
        return int(self.model.mtp_logits(hidden[-1:]).argmax())

    def with_drafts(self, eos: Collection[int]) -> list[int]:
        hidden = self.hidden(self.tokens, 0, "mha")
        self.tokens += self.next_tokens(hidden[-1:])
        # Rows 1.. of the prompt in MHA form, then the row of the first generated token.
        if self.num_prompt > 1:
            self.draft(hidden[:-1], self.tokens[1 : self.num_prompt], 1, "mha")
        previous, fresh = hidden[-1:], self.tokens[-1:]
        while not self.done(eos):
            start = len(self.tokens) - 1
            draft = self.draft(previous, fresh, start - len(fresh) + 1, "absorbed")
            hidden = self.hidden([self.tokens[-1], draft], start, "absorbed")
            first, second = self.next_tokens(hidden)
            fresh = [first, second] if first == draft else [first]
            previous = hidden[: len(fresh)]
            for number, token in enumerate(fresh):
                self.tokens.append(token)
                if self.done(eos):
                    fresh = fresh[: number + 1]
                    break
        return self.tokens[self.num_prompt :]

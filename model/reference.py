"""Generation in one process: what a served request must equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from pdmesh.model.batch import Batch, Form, SequenceSlice
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.grammar import Grammar
from pdmesh.model.sampler import SamplingState, sample
from pdmesh.wire.hashes import Arithmetic
from pdmesh.wire.sampling import SamplingParams


@torch.inference_mode()
def generate_reference(
    model: DeepseekV3 | DeviceModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Collection[int] = (),
    mtp: bool = False,
    *,
    arithmetic: Arithmetic = "fast",
    sampling: SamplingParams | None = None,
    index: int = 0,
    grammar: Grammar | None = None,
    on_logits: Callable[[Tensor], None] | None = None,
    page_size: int = 64,
) -> list[int]:
    """Generate one answer: the prompt at once, then each token alone in absorbed form.

    Args:
        model: the weights; the pool is made here.
        prompt: at least one token.
        max_new_tokens: an upper bound; that of `sampling` is not looked at.
        eos: tokens that end the output; the one that does is its last element.
        mtp: draft one token a step with the MTP layer and verify it with two rows a step. The
            output is the same.
        arithmetic: "fast": the prompt in MHA form. "exact": in absorbed form too.
        sampling: how tokens are chosen; None is greedily.
        index: which of the answers of a request.
        grammar: what the output must follow; its state is not changed.
        on_logits: called with the logits [1, vocab] that chose each output token, in order.
        page_size: slots a page; the output is the same for all.

    Returns:
        The generated tokens.
    """
    if max_new_tokens < 1:
        return []
    params = SamplingParams() if sampling is None else sampling
    state = SamplingState(params, prompt, eos=eos, index=index, grammar=grammar)
    form: Form = "mha" if arithmetic == "fast" else "absorbed"
    run = _Run(model, prompt, max_new_tokens, state, page_size, on_logits)
    return run.generate(form, mtp)


class _Run:
    """One sequence over its own pages 0, 1, ..."""

    def __init__(
        self,
        model: DeepseekV3 | DeviceModel,
        prompt: Sequence[int],
        max_new_tokens: int,
        state: SamplingState,
        page_size: int,
        on_logits: Callable[[Tensor], None] | None,
    ) -> None:
        self.model = model
        self.state = state
        self.page_size = page_size
        self.on_logits = on_logits
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.limit = self.num_prompt + max_new_tokens
        self.done = False
        # A draft row may stand one position beyond the last token.
        num_pages = -(-(self.limit + 1) // page_size)
        self.latents = model.new_latents(num_pages, page_size)
        self.page_table = tuple(range(num_pages))

    def generate(self, form: Form, mtp: bool) -> list[int]:
        """`form` is that of the prompt."""
        hidden = self.hidden(self.tokens, 0, form)
        self.choose(hidden[-1:], [])
        # Rows 1.. of the prompt in its form, then the row of the first generated token.
        if mtp and self.num_prompt > 1 and not self.done:
            self.guess(hidden[:-1], 1, self.num_prompt, form)
        previous = hidden[-1:]
        while not self.done:
            start = len(self.tokens) - 1
            draft: list[int] = []
            if mtp:
                after = start + 1 - previous.shape[0]
                draft = [self.guess(previous, after, start + 1, "absorbed")]
                draft = draft[: self.state.allowed(draft)]
            hidden = self.hidden([self.tokens[start], *draft], start, "absorbed")
            previous = hidden[: self.choose(hidden, draft)]
        return self.tokens[self.num_prompt :]

    def batch(self, tokens: Sequence[int], start: int) -> Batch:
        item = SequenceSlice(self.page_table, start, start + len(tokens), start)
        return Batch.build([item], [tokens], self.page_size, self.model.device)

    def hidden(self, tokens: Sequence[int], start: int, form: Form) -> Tensor:
        hidden: Tensor = self.model.forward(self.batch(tokens, start), self.latents, form)
        return hidden

    def guess(self, previous: Tensor, start: int, end: int, form: Form) -> int:
        """Run MTP rows for the known tokens start..end-1; the draft that follows the last."""
        batch = self.batch(self.tokens[start:end], start)
        hidden = self.model.mtp_forward(batch, previous, self.latents, form)
        return int(self.model.mtp_logits(hidden[-1:]).argmax())

    def choose(self, hidden: Tensor, draft: Sequence[int]) -> int:
        """Choose after each row of `hidden` as long as the draft is right; how many were chosen."""
        logits = self.model.logits(hidden)
        choices = [self.state.choice(tuple(draft[:row])) for row in range(len(draft) + 1)]
        chosen, _ = sample(logits, choices)
        for row, token in enumerate(chosen):
            self.accept(token, logits[row : row + 1])
            if self.done or row == len(draft) or token != draft[row]:
                return row + 1
        raise AssertionError("the last row ends the loop")

    def accept(self, token: int, logits: Tensor) -> None:
        self.tokens.append(token)
        if self.on_logits is not None:
            self.on_logits(logits)
        self.done = len(self.tokens) >= self.limit or token in self.state.stop_tokens
        if not self.done:
            self.state.advance([token])
            self.done = self.state.ended

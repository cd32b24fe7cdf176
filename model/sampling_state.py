"""What the choice of a sequence's next tokens depends on besides the logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from pdmesh.model.choice import Choice
from pdmesh.model.forbidden import Forbidden
from pdmesh.model.grammar import Grammar
from pdmesh.model.penalties import Counts, TokenCounts
from pdmesh.wire.errors import InternalError
from pdmesh.wire.sampling import SamplingParams


class SamplingState:
    """The sampling side of one answer; the same tokens give the same state anywhere.

    Tokens that ``advance`` was given are the answer so far. A ``path`` is what may follow them, for
    example a draft: it is looked at and never kept.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        eos: Collection[int] = (),
        index: int = 0,
        grammar: Grammar | None = None,
        output: Sequence[int] = (),
    ) -> None:
        """
        Args:
            params: validated parameters.
            prompt: the user's prompt, without tokens of the answer.
            eos: the model's end-of-text tokens.
            index: which answer of the request this is.
            grammar: the compiled ``params.grammar``; it is copied, not kept.
            output: tokens of the answer that are there already.

        Raises:
            InternalError: ``params`` name a grammar and none is given, or ``output`` breaks it.
        """
        if params.grammar and grammar is None:
            raise InternalError("a sequence with a grammar was started without it")
        self.params = params
        self.index = index
        self.position = 0
        self.stop_tokens = _stop_tokens(params, eos, grammar is not None)
        ends = sorted({*eos, *params.stop_token_ids})
        self._forbidden = Forbidden(params.bad_words, ends, params.min_tokens)
        self._counts = _token_counts(params, prompt)
        self._bias = _bias(params)
        self._grammar = None if grammar is None else grammar.copy()
        self.advance(output)

    @property
    def ended(self) -> bool:
        """Whether the grammar lets nothing follow: the answer is complete and ends with "stop"."""
        return self._grammar is not None and self._grammar.ended

    def choice(self, path: Sequence[int] = ()) -> Choice:
        """How the token after the answer and ``path`` is chosen.

        A path that the answer can never take, as ``allowed`` tells, gives a choice that may be
        sampled like any other and means nothing.

        Raises:
            InvalidRequest: the grammar is too complex to go on here.
        """
        position = self.position + len(path)
        return Choice(
            params=self.params,
            position=position,
            index=self.index,
            counts=None if self._counts is None else self._counts.with_path(path),
            bias=self._bias,
            forbidden=self._forbidden.at(position, path),
            mask=None if self._grammar is None else self._grammar.mask(path),
        )

    def allowed(self, path: Sequence[int]) -> int:
        """How many leading tokens of a draft grammar, bad words and ``min_tokens`` let pass.

        Tokens after that many are never accepted. Where these rules leave nothing but what they
        forbid (see ``sample``) the number may be smaller than what could be chosen.
        """
        most = len(path) if self._grammar is None else self._grammar.allowed(path)
        for i in range(most):
            if path[i] in self._forbidden.at(self.position + i, path[:i]):
                return i
        return most

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes tokens into the answer; a stop token that ends it is not passed.

        Raises:
            InternalError: the grammar does not allow them.
        """
        if not tokens:
            return
        if self._grammar is not None:
            self._grammar.advance(tokens)
        if self._counts is not None:
            self._counts.add(tokens)
        self._forbidden.advance(tokens)
        self.position += len(tokens)


def _stop_tokens(params: SamplingParams, eos: Collection[int], constrained: bool) -> frozenset[int]:
    """End-of-text ends an answer with a grammar in any case: nothing may follow it there."""
    ends = frozenset(params.stop_token_ids)
    return ends if params.ignore_eos and not constrained else ends | frozenset(eos)


def _token_counts(params: SamplingParams, prompt: Sequence[int]) -> TokenCounts | None:
    if params.repetition_penalty != 1.0:
        return TokenCounts(prompt)
    if params.frequency_penalty or params.presence_penalty:
        return TokenCounts(())
    return None


def _bias(params: SamplingParams) -> Counts | None:
    """Values given twice for one token add up."""
    if not params.logit_bias:
        return None
    total: dict[int, float] = {}
    for token, value in params.logit_bias:
        total[token] = total.get(token, 0.0) + value
    return Counts(
        np.fromiter(total, np.int64, len(total)),
        np.fromiter(total.values(), np.float64, len(total)),
    )

"""The costs that a policy weighs, fitted to what the router measures of its workers. Pure.

    prefill   a prompt's computing time: tokens, pairs of tokens, a constant
    step      a decode step: a constant, sequences in the batch, tokens of their context
    push      what is left of a hand-off when the first token is known: a constant, tokens sent; for
              workers on one host, in one rack, elsewhere

One fit for all workers of a role. What cannot be measured (fetching a prefix, weights) keeps its
proportion to the time of a prompt. The configured costs are the prior of each, and stand until
there are enough samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pdmesh.router.policies.costs import NEARNESS, Costs, Link
from pdmesh.router.policies.fitting import LEAST, Fit
from pdmesh.wire.messages import WorkerRecord, WorkerStatus

ANSWER_TOKENS = 128.0
"""Length of an answer before any has ended."""
_ANSWERS = 1 / 32
"""Weight of the newest answer in the mean length."""
SETTLED = 10
"""Tokens of each sequence after which a worker's mean of step times is that of its batch."""
MOST_OFF = 8.0
"""What a sequence costs stays within this factor of what is configured, since a batch that never
changes says nothing about it. A pushed token does not become cheaper: who has pages stays better
than who has not."""


class FittedCosts:
    """``costs`` as they are now; ``refit`` brings them up to date.

    Args:
        prior: the configured costs.
    """

    def __init__(self, prior: Costs) -> None:
        self.prior = self.costs = prior
        self.prefill = Fit((prior.token_ms, prior.pair_ms, prior.step_ms))
        self.step = Fit(self._step_prior(1.0, ANSWER_TOKENS), free=0)
        self.pushes = tuple(Fit((link.hop_ms, link.token_ms)) for link in prior.push)
        self._alone = 0
        self._answer = ANSWER_TOKENS
        self._last: dict[str, WorkerStatus] = {}

    # ---- what is measured -----------------------------------------------------------------

    def note_prefill(
        self, tokens: int, cached: int, ms: float, now: float, *, alone: bool = True
    ) -> None:
        """A prompt of which ``cached`` tokens were there took so long to compute.

        Args:
            alone: whether its worker computed nothing else meanwhile; a time that was shared
                counts only where there are no others.
        """
        if alone or self._alone < LEAST:
            squares = float(tokens * tokens - cached * cached)
            taken = self.prefill.note((tokens - cached, squares, 1.0), ms, now)
            self._alone += alone and taken

    def note_push(
        self, prefill: WorkerRecord, decode: WorkerRecord, tokens: int, ms: float, now: float
    ) -> None:
        """The last of a prompt's pages, of which so many tokens were sent, came ``ms`` after the
        first token."""
        self.pushes[self.prior.nearness(prefill, decode)].note((1.0, tokens), ms, now)

    def note_answer(self, tokens: int) -> None:
        """An answer of so many tokens has ended."""
        self._answer += _ANSWERS * (max(1, tokens) - self._answer)

    def note_statuses(self, statuses: Iterable[WorkerStatus], now: float) -> None:
        """What all workers said last. A step time counts where the batch was the same for a while,
        since it is the worker's moving average."""
        before, self._last = self._last, {}
        for status in statuses:
            if status.role != "decode":
                continue
            known = before.get(status.instance)
            steady = known is not None and 0 < known.running == status.running
            if known is not None and steady:
                new = status.tokens_generated - known.tokens_generated
                if new < SETTLED * status.running:
                    self._last[status.instance] = known
                    continue
                context = status.pool.used * status.page_format.page_size
                self.step.note((1.0, status.running, context), status.step_ms, now)
            self._last[status.instance] = status

    # ---- what follows ---------------------------------------------------------------------

    @property
    def samples(self) -> dict[str, int]:
        """How many measurements each fit has seen."""
        fits = {"prefill": self.prefill, "step": self.step}
        fits |= {f"push_{n}": f for n, f in zip(NEARNESS, self.pushes, strict=True)}
        return {name: fit.seen for name, fit in fits.items()}

    def refit(self) -> bool:
        """Takes in what was measured since the last time. Whether ``costs`` are new."""
        changed = [fit.refit() for fit in (self.prefill, *self.pushes)]
        prior, scale = self.prior, self.prefill.scale
        self.step.prior = self._step_prior(scale, self._answer)
        changed.append(self.step.refit())
        if not any(changed):
            return False
        token, pair, start = self.prefill.coefficients
        base, sequence, context = self.step.coefficients
        if not self.step.ready:
            base, sequence, context = (
                prior.itl_base_ms,
                prior.itl_sequence_ms,
                prior.itl_context_ms,
            )
        self.costs = replace(
            prior,
            token_ms=token,
            pair_ms=pair,
            step_ms=start,
            same_host=_scaled(prior.same_host, scale),
            same_rack=_scaled(prior.same_rack, scale),
            elsewhere=_scaled(prior.elsewhere, scale),
            pushes=self._pushes(scale),
            sequence_ms=self._sequence(scale, sequence),
            context_ms=context * self._answer if self.step.ready else prior.context_ms * scale,
            itl_base_ms=base,
            itl_sequence_ms=sequence,
            itl_context_ms=context,
        )
        return True

    def _sequence(self, scale: float, measured: float) -> float:
        """What it costs an answer to share its steps with one sequence more."""
        configured = self.prior.sequence_ms * scale
        if not self.step.ready:
            return configured
        return min(max(measured * self._answer, configured / MOST_OFF), configured * MOST_OFF)

    def _step_prior(self, scale: float, answer: float) -> tuple[float, float, float]:
        """A step's time, of which the configured prices of sequences and context are a part."""
        prior = self.prior
        return (
            prior.itl_base_ms,
            prior.itl_sequence_ms or prior.sequence_ms * scale / answer,
            prior.itl_context_ms or prior.context_ms * scale / answer,
        )

    def _pushes(self, scale: float) -> tuple[Link, Link, Link]:
        """Measured where there are samples; never cheaper from farther away."""
        hop = token = 0.0
        links = []
        for fit, link in zip(self.pushes, self.prior.push, strict=True):
            own = configured = _scaled(link, scale)
            if fit.ready:
                own = Link(fit.coefficients[0], fit.coefficients[1])
                token = max(token, configured.token_ms / MOST_OFF)
            hop, token = max(hop, own.hop_ms), max(token, own.token_ms)
            links.append(Link(hop, token))
        return links[0], links[1], links[2]


def _scaled(link: Link, scale: float) -> Link:
    return Link(link.hop_ms * scale, link.token_ms * scale)

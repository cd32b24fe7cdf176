"""Chooses the workers of every attempt, learns what they cost, and remembers why."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from pdmesh.router.explained import Decisions
from pdmesh.router.policies import DEFAULT_POLICY, make_policy
from pdmesh.router.policies.base import Policy
from pdmesh.router.policies.costs import Costs
from pdmesh.router.policies.measured import FittedCosts
from pdmesh.router.policy import Route, Snapshot
from pdmesh.router.run import Run
from pdmesh.wire.admin import Explanation
from pdmesh.wire.messages import FirstToken, WorkerStatus


class Chooser:
    """A policy, the costs that it weighs, and its last decisions.

    Args:
        rng: breaks ties between equal workers.
        clock: seconds, monotone.
        policy: name of the policy.
        costs: what things cost before it is measured; None: see ``Costs``.

    Raises:
        ConfigError: there is no such policy.
    """

    def __init__(
        self,
        rng: random.Random,
        clock: Callable[[], float],
        policy: str = DEFAULT_POLICY,
        costs: Costs | None = None,
    ) -> None:
        self.fitted = FittedCosts(costs or Costs())
        self._policy: Policy = make_policy(policy, self.fitted.costs)
        self._rng = rng
        self._clock = clock
        self._decisions = Decisions(policy)

    def choose(self, run: Run, n: int, snapshot: Snapshot) -> Route:
        """The workers for the next attempt of ``n`` answers.

        Raises:
            InvalidRequest, Overloaded, Unavailable: see ``pdmesh.router.policy.usable``.
        """
        now = self._clock()
        self._policy.costs = self.fitted.costs
        route = self._policy.choose(run.facts(n), snapshot, self._rng, now)
        self._decisions.note(
            run.request.request_id,
            answer=run.index,
            attempt=run.gate.attempt,
            prompt_tokens=len(run.tokens),
            route=route,
            costs=self.fitted.costs,
            now=now,
        )
        return route

    def note_prefill(self, run: Run, first: FirstToken, *, alone: bool) -> None:
        """What the prompt of an attempt took; ``alone``: its worker had nothing else to do."""
        tokens = len(run.tokens)
        self.fitted.note_prefill(
            tokens, tokens - first.computed_tokens, first.compute_ms, self._clock(), alone=alone
        )

    def note_push(self, route: Route, tokens: int, ms: float) -> None:
        """So many tokens' pages were sent, and the last came ``ms`` after the first token."""
        self.fitted.note_push(route.prefill, route.decode, tokens, ms, self._clock())

    def refit(self, statuses: Iterable[WorkerStatus]) -> bool:
        """Brings the costs up to date, with what workers said last; whether they are new."""
        self.fitted.note_statuses(statuses, self._clock())
        return self.fitted.refit()

    def explain(self, beginning: str) -> Explanation:
        """The choices for the request whose id begins so.

        Raises:
            InvalidRequest: none is remembered, or several are.
        """
        return self._decisions.explain(beginning, self._clock())

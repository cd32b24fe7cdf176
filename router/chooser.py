"""Chooses the workers of every attempt, and remembers why."""

from __future__ import annotations

import random
from collections.abc import Callable

from pdmesh.router.explained import Decisions
from pdmesh.router.policies import DEFAULT_POLICY, make_policy
from pdmesh.router.policies.base import Policy
from pdmesh.router.policies.costs import Costs
from pdmesh.router.policy import Route, Snapshot
from pdmesh.router.run import Run
from pdmesh.wire.admin import Explanation


class Chooser:
    """A policy, and its last decisions.

    Args:
        rng: breaks ties between equal workers.
        clock: seconds, monotone.
        policy: name of the policy.
        costs: what things cost; None: see ``Costs``.

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
        self._policy: Policy = make_policy(policy, costs)
        self._rng = rng
        self._clock = clock
        self._decisions = Decisions(policy)

    def choose(self, run: Run, n: int, snapshot: Snapshot) -> Route:
        """The workers for the next attempt of ``n`` answers.

        Raises:
            InvalidRequest, Overloaded, Unavailable: see ``pdmesh.router.policy.usable``.
        """
        now = self._clock()
        route = self._policy.choose(run.facts(n), snapshot, self._rng, now)
        self._decisions.note(
            run.request.request_id,
            answer=run.index,
            attempt=run.gate.attempt,
            prompt_tokens=len(run.tokens),
            route=route,
            now=now,
        )
        return route

    def explain(self, beginning: str) -> Explanation:
        """The choices for the request whose id begins so.

        Raises:
            InvalidRequest: none is remembered, or several are.
        """
        return self._decisions.explain(beginning, self._clock())

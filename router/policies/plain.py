"""The policies that others use, to compare with: one idea each.

The decode worker is the cheapest by ``Costs.decode_ms`` and missing pages in all but ``tokens``.
Costs here are in milliseconds where they are times, in tokens or ranks where they are not.
"""

from __future__ import annotations

import random
from collections import deque
from hashlib import blake2b

from pdmesh.router.policies.base import CostOf, cheapest_of_each
from pdmesh.router.policies.costs import Costs, owned_tokens
from pdmesh.router.policy import Candidate, RequestFacts, Route, Snapshot, choose_route

WINDOW_S = 30.0
"""Load is the work sent within so many seconds."""
BOUND = 1.25
"""An owner is too busy at so many times the mean load."""
_TOKEN, _LOAD, _OVER = 1e5, 1e-2, 1e12
"""Weights of what comes first, second and before all: a missing token, a token of load, being too
busy."""


class RecentWork:
    """Tokens to compute that were sent to each instance lately."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._sent: deque[tuple[float, str, int]] = deque()
        self._load: dict[str, int] = {}

    def note(self, instance: str, tokens: int, now: float) -> None:
        """So many tokens were sent at ``now`` seconds."""
        self._sent.append((now, instance, tokens))
        self._load[instance] = self._load.get(instance, 0) + tokens

    def load(self, instance: str, now: float) -> int:
        """Tokens within the window."""
        while self._sent and self._sent[0][0] < now - self._window_s:
            _, old, tokens = self._sent.popleft()
            self._load[old] -= tokens
            if not self._load[old]:
                del self._load[old]
        return self._load.get(instance, 0)


class Tokens:
    """``choose_route``: tokens to compute and waiting, pages to send, sequences; costs are not
    asked."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def choose(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> Route:
        return choose_route(facts, snapshot, rng)


class _Plain:
    """By one number for each prefill worker."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._work = RecentWork()

    def choose(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> Route:
        prefill = self._cost(facts, snapshot, rng, now)
        route = cheapest_of_each(facts, snapshot, rng, prefill, self._decode(facts))
        self._work.note(route.prefill.instance, route.tokens_to_compute, now)
        return route

    def _cost(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> CostOf:
        raise NotImplementedError

    def _decode(self, facts: RequestFacts) -> CostOf:
        def cost(candidate: Candidate) -> float:
            missing = facts.num_prompt_tokens - owned_tokens(facts, candidate)
            moved = self.costs.push[2].token_ms * missing
            need = facts.decode_pages(candidate.record.page_format.page_size)
            return self.costs.decode_ms(facts, candidate, need) + moved

        return cost


class Random(_Plain):
    """Anywhere."""

    def _cost(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> CostOf:
        return lambda _: 0.0


class RoundRobin(_Plain):
    """Each in turn, by name."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self._last = ""

    def _cost(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> CostOf:
        names = sorted(c.record.worker_id for c in snapshot.prefill)
        order = [n for n in names if n > self._last] + [n for n in names if n <= self._last]
        turn = {name: float(i) for i, name in enumerate(order)}
        return lambda c: turn[c.record.worker_id]

    def choose(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> Route:
        route = super().choose(facts, snapshot, rng, now)
        self._last = route.prefill.worker_id
        return route


class LeastLoad(_Plain):
    """Where the least was sent lately, whoever owns what."""

    def _cost(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> CostOf:
        return lambda c: float(self._work.load(c.record.instance, now))


class LongestPrefix(_Plain):
    """Where most is cached, however busy; the least loaded of these."""

    def _cost(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> CostOf:
        def cost(candidate: Candidate) -> float:
            missing = facts.num_prompt_tokens - owned_tokens(facts, candidate)
            return _TOKEN * missing + _LOAD * self._work.load(candidate.record.instance, now)

        return cost


class BoundedLoad(LongestPrefix):
    """The longest prefix among workers with at most 1.25 times the mean load."""

    def _cost(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> CostOf:
        longest = super()._cost(facts, snapshot, rng, now)
        loads = [self._work.load(c.record.instance, now) for c in snapshot.prefill]
        bound = BOUND * (sum(loads) + facts.num_prompt_tokens) / max(1, len(loads))

        def cost(candidate: Candidate) -> float:
            over = self._work.load(candidate.record.instance, now) > bound
            return longest(candidate) + (_OVER if over else 0.0)

        return cost


class SessionAffinity(_Plain):
    """The same worker for the same beginning, by rendezvous hashing: no index is needed."""

    def _cost(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> CostOf:
        if not snapshot.anchor:
            return lambda c: float(self._work.load(c.record.instance, now))

        def cost(candidate: Candidate) -> float:
            name = candidate.record.worker_id.encode()
            digest = blake2b(name, key=snapshot.anchor[:64], digest_size=6).digest()
            return float(int.from_bytes(digest, "big"))

        return cost


class MinTtft(_Plain):
    """The earliest first token of this request; nobody else matters."""

    def _cost(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> CostOf:
        costs = self.costs

        def cost(candidate: Candidate) -> float:
            owned = owned_tokens(facts, candidate)
            return costs.queue_ms(candidate) + costs.prefill_ms(facts.num_prompt_tokens, owned)

        return cost

"""What all policies share: the call, and the way from costs of single workers to a route."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from pdmesh.router.policies.costs import SUSPECT_MS, Costs, owned_tokens
from pdmesh.router.policy import Candidate, RequestFacts, Route, Score, Snapshot, no_pair, usable
from pdmesh.wire.errors import Unavailable
from pdmesh.wire.hashes import PageFormat

TIE_MS = 1e-3
"""Costs that differ by less are equal."""


class Policy(Protocol):
    """A way to choose."""

    costs: Costs
    """What things cost; may be set anew between choices."""

    def choose(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> Route:
        """The workers for one request, which counts as sent to them.

        Args:
            facts: what is asked.
            snapshot: the workers that are ready.
            rng: breaks ties.
            now: seconds of a clock that never goes back.

        Raises:
            InvalidRequest, Overloaded, Unavailable: see ``pdmesh.router.policy.choose_route``.
        """
        ...


CostOf = Callable[[Candidate], float]


def both_roles(
    facts: RequestFacts, snapshot: Snapshot
) -> list[tuple[Sequence[Candidate], Sequence[Candidate]]]:
    """The usable prefill and decode workers, for each page format that both roles have.

    Raises:
        InvalidRequest, Overloaded, Unavailable: there are none.
    """
    prefill = usable("prefill", facts, snapshot.prefill)
    decode = usable("decode", facts, snapshot.decode)
    first = prefill[0].record.page_format
    if all(c.record.page_format == first for c in (*prefill, *decode)):
        return [(prefill, decode)]
    formats = dict.fromkeys(c.record.page_format for c in prefill)
    groups = [(_of(f, prefill), _of(f, decode)) for f in formats]
    found = [(ours, theirs) for ours, theirs in groups if theirs]
    if not found:
        raise no_pair(prefill[0].record, decode[0].record)
    return found


def cheapest_of_each(
    facts: RequestFacts,
    snapshot: Snapshot,
    rng: random.Random,
    prefill_cost: CostOf,
    decode_cost: CostOf,
) -> Route:
    """The cheapest prefill and the cheapest decode worker of one page format, ties at random."""
    best: tuple[float, Score, Score] | None = None
    scores: list[Score] = []
    for prefill, decode in both_roles(facts, snapshot):
        ours = [_score(facts, c, prefill_cost) for c in prefill]
        theirs = [_score(facts, c, decode_cost) for c in decode]
        scores += [*ours, *theirs]
        p, d = _cheapest(ours, rng), _cheapest(theirs, rng)
        if best is None or p.cost + d.cost < best[0]:
            best = p.cost + d.cost, p, d
    if best is None:
        raise Unavailable("no worker is ready")
    _, p, d = best
    return Route(
        prefill=p.candidate.record,
        decode=d.candidate.record,
        tokens_to_compute=facts.num_prompt_tokens - p.owned_tokens,
        scores=scores,
        chosen=(p, d),
        wait=d.candidate.record.instance in facts.avoid.full,
    )


def lowest(costs: Sequence[float], rng: random.Random) -> int:
    """Where the lowest cost is; one of those places, at random, where several are equal."""
    least = min(costs) + TIE_MS
    places = [i for i, cost in enumerate(costs) if cost <= least]
    return places[0] if len(places) == 1 else rng.choice(places)


def _score(facts: RequestFacts, candidate: Candidate, cost_of: CostOf) -> Score:
    cost = cost_of(candidate)
    if candidate.record.instance in facts.avoid.suspect:
        cost += SUSPECT_MS
    return Score(candidate, owned_tokens(facts, candidate), cost)


def _cheapest(scores: Sequence[Score], rng: random.Random) -> Score:
    return scores[lowest([score.cost for score in scores], rng)]


def _of(page_format: PageFormat, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    return [c for c in candidates if c.record.page_format == page_format]

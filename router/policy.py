"""Which prefill and which decode worker serve a request: a pure function of a snapshot.

Costs are counted in prompt tokens to compute. A prefill worker costs what it has to compute
for this request and before it; a decode worker costs the pages that must travel and the
sequences that share its steps. The longest owned prefix wins until its owner is busier, by
more than the prefix saves, than another worker.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdmesh.wire.errors import InvalidRequest, Overloaded, Unavailable
from pdmesh.wire.messages import Role, WorkerRecord

OTHERS_REQUEST = 256
"""Tokens assumed to wait for each request that another router has at a prefill worker."""
TRANSFERRED_TOKEN = 0.1
"""Cost of moving one token's latents, against computing one."""
RUNNING_SEQUENCE = 64
"""Cost of sharing a decode worker's steps with one more sequence."""
NO_ROOM = 100_000.0
"""Cost of a decode worker whose pool looks too full; it may have room when asked."""
SUSPECT = 1_000_000.0
"""Cost of a worker that failed this request before, where nothing better is left."""


@dataclass(frozen=True)
class Candidate:
    """A worker as one request sees it."""

    record: WorkerRecord
    owned_pages: int = 0
    """Leading pages of the prompt that it holds."""
    expected_pages: int = 0
    """Leading pages that it is about to hold, since they were sent there or are computed there."""
    own_requests: int = 0
    """Requests that this router has there now."""
    own_tokens: int = 0
    """Prompt tokens that this router has sent there and that are not computed yet."""
    other_requests: int = 0
    """Requests that others had there at the last poll."""
    free_pages: int | None = None
    """Pages that could be reserved at the last poll; None before the first."""
    empty_pages: int | None = None
    """Of these the ones that hold nothing: taking another evicts nothing; None before the poll."""

    @property
    def spared_pages(self) -> int:
        """Leading pages that need not be computed or sent for the prompt if it goes there."""
        return max(self.owned_pages, self.expected_pages)


@dataclass(frozen=True)
class Snapshot:
    """The mesh at one moment: workers that are alive and ready."""

    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]
    anchor: bytes = b""
    """What prompts with the same beginning have in common: the hash of their first page."""


@dataclass(frozen=True)
class Avoid:
    """Instances that failed this request before."""

    lost: frozenset[str] = frozenset()
    """Gone or broken: never again."""
    full: frozenset[str] = frozenset()
    """Had no room at once: only to wait there, where all are full."""
    closed: frozenset[str] = frozenset()
    """Had no room to wait either: not again in this attempt."""
    suspect: frozenset[str] = frozenset()
    """Took part in a failure that may have been another's: only if nothing else is left."""


@dataclass(frozen=True)
class RequestFacts:
    """What the choice depends on."""

    num_prompt_tokens: int
    max_tokens: int
    """Of each answer."""
    avoid: Avoid = field(default_factory=Avoid)
    n: int = 1
    """Answers, which share the prompt's full pages."""
    may_wait: bool = False
    """Whether there is time to wait for room at a decode worker."""

    def decode_pages(self, page_size: int) -> int:
        """Pages that the prompt and all answers fill."""
        shared, partial = divmod(self.num_prompt_tokens, page_size)
        return shared + self.n * -(-(partial + self.max_tokens) // page_size)


@dataclass(frozen=True)
class Score:
    """Why a worker was chosen or not: the lowest cost wins."""

    candidate: Candidate
    owned_tokens: int
    cost: float
    terms: Mapping[str, float] = field(default_factory=dict)
    """What the cost is made of, where it is a sum."""

    def __str__(self) -> str:
        load = self.candidate.own_requests + self.candidate.other_requests
        name = self.candidate.record.worker_id
        parts = "".join(f",{term}={value:.1f}" for term, value in self.terms.items() if value)
        return f"{name}:cost={self.cost:.1f},owned={self.owned_tokens},load={load}{parts}"


@dataclass(frozen=True)
class Route:
    """The choice, the tokens it leaves to compute, and the scores it was made from."""

    prefill: WorkerRecord
    decode: WorkerRecord
    tokens_to_compute: int
    scores: Sequence[Score]
    wait: bool = False
    """Every decode worker is full: the request has to wait at this one."""
    chosen: tuple[Score, ...] = ()
    """Of the scores those of the two."""

    def explain(self, *, all_scores: bool = True) -> str:
        """All scores in one line, or those of the two that were chosen."""
        return " ".join(str(score) for score in (self.scores if all_scores else self.chosen))


def choose_route(facts: RequestFacts, snapshot: Snapshot, rng: random.Random) -> Route:
    """The cheapest prefill worker and the cheapest decode worker of one page format.

    Ties are broken by ``rng``, so that routers which see the same do not herd.

    Raises:
        InvalidRequest: no decode worker's pool could ever hold the request.
        Overloaded: every prefill worker has refused this request for want of room, or every
            decode worker has and it may not wait.
        Unavailable: none is ready, or all that are have failed this request.
    """
    prefill = [_score("prefill", facts, c) for c in usable("prefill", facts, snapshot.prefill)]
    decode = [_score("decode", facts, c) for c in usable("decode", facts, snapshot.decode)]
    pairs = []
    for page_format in dict.fromkeys(score.candidate.record.page_format for score in prefill):
        same = [s for s in decode if s.candidate.record.page_format == page_format]
        if same:
            ours = [s for s in prefill if s.candidate.record.page_format == page_format]
            pairs.append((_cheapest(ours, rng), _cheapest(same, rng)))
    if not pairs:
        raise no_pair(prefill[0].candidate.record, decode[0].candidate.record)
    best_prefill, best_decode = min(pairs, key=lambda pair: pair[0].cost + pair[1].cost)
    return Route(
        prefill=best_prefill.candidate.record,
        decode=best_decode.candidate.record,
        tokens_to_compute=facts.num_prompt_tokens - best_prefill.owned_tokens,
        scores=(*prefill, *decode),
        chosen=(best_prefill, best_decode),
        wait=best_decode.candidate.record.instance in facts.avoid.full,
    )


def choose_target(
    facts: RequestFacts, source: WorkerRecord, candidates: Sequence[Candidate], rng: random.Random
) -> WorkerRecord:
    """The cheapest decode worker that a running answer can move to.

    Args:
        facts: prompt and output so far count as the prompt.
        source: where the answer is generated now.
        candidates: decode workers that are ready.
        rng: breaks ties.

    Raises:
        Unavailable: no other worker is ready, or none of the source's page format and size.
        Overloaded: none of them has room.
    """
    others = [
        c
        for c in candidates
        if c.record.instance != source.instance and c.record.instance not in facts.avoid.lost
    ]
    page_size = source.page_format.page_size
    pages = facts.decode_pages(page_size)
    large = [
        c
        for c in others
        if c.record.page_format == source.page_format
        and pages <= c.record.capacity_pages
        and facts.num_prompt_tokens + facts.max_tokens <= c.record.max_context
    ]
    if not large:
        why = f"of {len(others)}, none fits" if others else "none is left"
        raise Unavailable(f"no decode worker can take the answer over: {why}")
    roomy = [c for c in large if c.free_pages is None or c.free_pages >= pages]
    if not roomy:
        raise Overloaded(f"no other decode worker has {pages} pages free")
    return _cheapest([_score("decode", facts, c) for c in roomy], rng).candidate.record


def usable(role: Role, facts: RequestFacts, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The workers that a request may go to; what a policy says of the others does not matter.

    Raises:
        InvalidRequest, Overloaded, Unavailable: there is none; see ``choose_route``.
    """
    candidates = _large_enough(role, facts, candidates)
    avoid = facts.avoid
    if candidates and not avoid.lost and not avoid.full:
        return candidates
    alive = [c for c in candidates if c.record.instance not in avoid.lost]
    refused = [c for c in alive if c.record.instance in avoid.full]
    left = [c for c in alive if c.record.instance not in avoid.full]
    if not left and role == "decode" and facts.may_wait:
        left = [c for c in refused if c.record.instance not in avoid.closed]
    if left:
        return left
    if refused:
        noun = "worker is" if len(refused) == 1 else "workers are"
        raise Overloaded(f"all room is taken: {len(refused)} {role} {noun} full; retry later")
    if candidates:
        raise Unavailable(f"no {role} worker is left to try: {len(candidates)} failed this request")
    raise Unavailable(f"no {role} worker is ready")


def _large_enough(
    role: Role, facts: RequestFacts, candidates: Sequence[Candidate]
) -> list[Candidate]:
    sizes = {candidate.record.page_format.page_size for candidate in candidates}
    if role == "decode":
        needs = {size: facts.decode_pages(size) for size in sizes}
    else:
        needs = {size: -(-facts.num_prompt_tokens // size) for size in sizes}
    large = [
        candidate
        for candidate in candidates
        if needs[candidate.record.page_format.page_size] <= candidate.record.capacity_pages
    ]
    if candidates and not large:
        answers = f" for each of {facts.n} answers" if facts.n > 1 else ""
        raise InvalidRequest(
            f"{facts.num_prompt_tokens} prompt tokens and max_tokens {facts.max_tokens}{answers} "
            f"fit the memory of no {role} worker"
        )
    return large


def _score(role: Role, facts: RequestFacts, candidate: Candidate) -> Score:
    page_size = candidate.record.page_format.page_size
    # The last position is always computed: its logits give the first token.
    owned = min(candidate.spared_pages * page_size, facts.num_prompt_tokens - 1)
    missing = facts.num_prompt_tokens - owned
    if role == "prefill":
        cost = missing + candidate.own_tokens + OTHERS_REQUEST * float(candidate.other_requests)
    else:
        sequences = candidate.own_requests + candidate.other_requests
        cost = TRANSFERRED_TOKEN * missing + RUNNING_SEQUENCE * sequences
        pages = facts.decode_pages(page_size)
        if candidate.free_pages is not None and candidate.free_pages < pages:
            cost += NO_ROOM
    if candidate.record.instance in facts.avoid.suspect:
        cost += SUSPECT
    return Score(candidate, owned, cost)


def _cheapest(scores: Sequence[Score], rng: random.Random) -> Score:
    lowest = min(score.cost for score in scores)
    return rng.choice([score for score in scores if score.cost == lowest])


def no_pair(prefill: WorkerRecord, decode: WorkerRecord) -> Unavailable:
    """What is wrong where no two workers have one page format; two of them as an example."""
    reason = prefill.page_format.difference(decode.page_format)
    return Unavailable(
        "no prefill worker fits a decode worker: between "
        f"{prefill.worker_id} and {decode.worker_id}, {reason}"
    )

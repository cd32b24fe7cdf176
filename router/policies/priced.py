"""The policy of pdmesh: the pair of workers whose choice costs everybody least.

In milliseconds, for a prompt of L tokens, a prefill worker that has c of them, and a decode worker:

    queue    until the prefill worker begins
    compute  token_ms * (L - c) + pair_ms * (L^2 - c^2) + step_ms
    fetch    instead of computing it, moving a longer prefix from its owner, if that is quicker
    others   beta * price * compute, where price is the delay that a millisecond of work added now
             causes to all who come later (``Pressure.price``); in a burst over one prefix it is at
             least ``least_price``
    copy     kappa * the time to compute what another worker has, where the cache is full: what is
             evicted for one more copy has to be computed again
    decode   sequences, context and latency at the decode worker (``Costs.decode_ms``)
    transfer the latents that the decode worker lacks, over the link between the two

The sum of the first three and the last is the expected time to the first token. Both workers are
chosen together: the transfer depends on the pair, but on no more than how near the two are, so the
best partner is the best of three and the search needs no pairs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, overload

from pdmesh.router.policies.base import both_roles, lowest
from pdmesh.router.policies.costs import SUSPECT_MS, Costs, Link
from pdmesh.router.policies.hot import HotPrefixes
from pdmesh.router.policies.pressure import Pressure
from pdmesh.router.policy import Candidate, RequestFacts, Route, Score, Snapshot
from pdmesh.wire.messages import WorkerRecord

_BURST = 4
"""Requests with one prefix within ``horizon_s`` that are a burst."""
_PREFILL = ("queue", "compute", "fetch", "others", "copy", "suspect")
_DECODE = ("decode", "transfer", "suspect")


class _Row(NamedTuple):
    """What one worker costs; ``values`` are the terms by name, in ms."""

    candidate: Candidate
    owned: int
    names: tuple[str, ...]
    values: tuple[float, ...]

    def score(self) -> Score:
        terms = dict(zip(self.names, self.values, strict=True))
        return Score(self.candidate, self.owned, sum(self.values), terms)


class Scores(Sequence[Score]):
    """Why each worker was chosen or not; made when somebody looks."""

    def __init__(self, make: Callable[[], Sequence[_Row]]) -> None:
        self._make = make

    @cached_property
    def _rows(self) -> Sequence[_Row]:
        return self._make()

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Score: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Score]: ...

    def __getitem__(self, index: int | slice) -> Score | Sequence[Score]:
        if isinstance(index, slice):
            return [row.score() for row in self._rows[index]]
        return self._rows[index].score()

    def __iter__(self) -> Iterator[Score]:
        return (row.score() for row in self._rows)


class _Partners:
    """For a prefill worker at some place, the decode worker to go with."""

    def __init__(
        self, costs: Costs, facts: RequestFacts, decode: Sequence[Candidate], rng: random.Random
    ) -> None:
        same, near, elsewhere = costs.push
        self.anywhere = same == near == elsewhere
        """The transfer costs the same between any two."""
        self.rows: list[_Row] = []
        self._costs = costs
        self._links: list[tuple[float, int]] = []
        by_host: dict[str, list[int]] = {}
        by_rack: dict[str, list[int]] = {}
        suspect, tokens = facts.avoid.suspect, facts.num_prompt_tokens
        far: list[float] = []
        page_size = decode[0].record.page_format.page_size
        need = facts.decode_pages(page_size)
        for i, candidate in enumerate(decode):
            record = candidate.record
            owned = min(candidate.spared_pages * page_size, tokens - 1)
            base = costs.decode_ms(facts, candidate, need)
            doubt = SUSPECT_MS if record.instance in suspect else 0.0
            missing = tokens - owned
            moved = elsewhere.hop_ms + missing * elsewhere.token_ms
            self.rows.append(_Row(candidate, owned, _DECODE, (base, moved, doubt)))
            self._links.append((base + doubt, missing))
            far.append(base + doubt + moved)
            if self.anywhere:
                continue
            host, rack = costs.place(record)
            by_host.setdefault(host, []).append(i)
            if rack:
                by_rack.setdefault(rack, []).append(i)
        best = lowest(far, rng)
        self._far = far[best], best
        self._host = {h: self._best(same, i, rng) for h, i in by_host.items()}
        self._rack = {r: self._best(near, i, rng) for r, i in by_rack.items()}

    def best(self, record: WorkerRecord) -> tuple[float, int]:
        """Cost and number of the cheapest decode worker, transfer from ``record`` included."""
        found = self._far
        if self.anywhere:
            return found
        place = self._costs.place(record)
        for other in (self._rack.get(place[1]), self._host.get(place[0])):
            if other is not None and other[0] < found[0]:
                found = other
        return found

    def seen_from(self, record: WorkerRecord) -> list[_Row]:
        """What each costs with one prefill worker."""
        return [self.row(i, record) for i in range(len(self.rows))]

    def row(self, number: int, record: WorkerRecord) -> _Row:
        """What one costs with one prefill worker."""
        row = self.rows[number]
        if self.anywhere:
            return row
        link = self._costs.push[self._costs.nearness(record, row.candidate.record)]
        base, _, doubt = row.values
        moved = link.hop_ms + self._links[number][1] * link.token_ms
        return row._replace(values=(base, moved, doubt))

    def _best(self, link: Link, places: list[int], rng: random.Random) -> tuple[float, int]:
        costs = []
        for i in places:
            base, missing = self._links[i]
            costs.append(base + link.hop_ms + missing * link.token_ms)
        i = lowest(costs, rng)
        return costs[i], places[i]


class Priced:
    """See the module. Remembers how much work it sent, and how often each prefix is asked for."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.pressure = Pressure(costs.horizon_s)
        self.hot = HotPrefixes(costs.horizon_s)

    def choose(
        self, facts: RequestFacts, snapshot: Snapshot, rng: random.Random, now: float
    ) -> Route:
        best: tuple[float, _Row, _Row] | None = None
        groups: list[tuple[list[_Row], _Partners, WorkerRecord]] = []
        for prefill, decode in both_roles(facts, snapshot):
            partners = _Partners(self.costs, facts, decode, rng)
            ours = self._prefill(facts, prefill, decode, snapshot.anchor, now)
            pairs = [partners.best(c.record) for c in prefill]
            sums = [sum(r.values) + p[0] for r, p in zip(ours, pairs, strict=True)]
            i = lowest(sums, rng)
            record = ours[i].candidate.record
            groups.append((ours, partners, record))
            if best is None or sums[i] < best[0]:
                best = sums[i], ours[i], partners.row(pairs[i][1], record)
        assert best is not None
        _, p, d = best
        work = p.values[1]
        self.pressure.note(work, now)
        if snapshot.anchor:
            self.hot.seen(snapshot.anchor, work, now)
        return Route(
            prefill=p.candidate.record,
            decode=d.candidate.record,
            tokens_to_compute=facts.num_prompt_tokens - p.owned,
            scores=Scores(lambda: [r for g in groups for r in (*g[0], *g[1].seen_from(g[2]))]),
            chosen=(p.score(), d.score()),
            wait=d.candidate.record.instance in facts.avoid.full,
        )

    def _prefill(
        self,
        facts: RequestFacts,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        anchor: bytes,
        now: float,
    ) -> list[_Row]:
        costs, tokens, suspect = self.costs, facts.num_prompt_tokens, facts.avoid.suspect
        page_size = prefill[0].record.page_format.page_size
        price = self.pressure.price(len(prefill), now, costs.routers)
        asked = self.hot.rate(anchor, now) * costs.horizon_s / _BURST if anchor else 1.0
        others = costs.beta * max(price, costs.least_price * min(1.0, asked))
        most = min(max(map(_spared, prefill)) * page_size, tokens - 1)
        whole = costs.prefill_ms(tokens, most)
        pages = -(-tokens // page_size)
        kappa = costs.kappa
        if anchor and kappa and most > 0:
            owners = sum(c.spared_pages > 0 for c in prefill)
            if owners < self.hot.copies(anchor, now):
                kappa = 0.0
        source = prefill[0]
        if costs.fetching:  # from who has the pages now, not from who is about to
            source = max((*prefill, *decode), key=_owned)
        has = min(source.owned_pages * page_size, tokens - 1)
        fetched = costs.prefill_ms(tokens, has)
        place = costs.place(source.record)
        rows = []
        for candidate in prefill:
            record = candidate.record
            owned = min(candidate.spared_pages * page_size, tokens - 1)
            compute = costs.prefill_ms(tokens, owned)
            copied = compute - whole if most > owned else 0.0
            fetch = 0.0
            if has > owned and costs.fetching:
                link = costs.link(place, costs.place(record))
                moved = link.hop_ms + (has - owned) * link.token_ms
                if moved + fetched < compute:
                    owned, compute, fetch = has, fetched, moved
            empty = candidate.empty_pages
            full = empty is not None and empty < pages
            values = (
                costs.queue_ms(candidate),
                compute,
                fetch,
                others * compute,
                kappa * copied if full else 0.0,
                SUSPECT_MS if record.instance in suspect else 0.0,
            )
            rows.append(_Row(candidate, owned, _PREFILL, values))
        return rows


def _owned(candidate: Candidate) -> int:
    return candidate.owned_pages


def _spared(candidate: Candidate) -> int:
    return candidate.spared_pages

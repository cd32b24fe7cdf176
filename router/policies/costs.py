"""What things cost: milliseconds of prefill, transfer and decode, and the price of load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from pdmesh.router.policy import Candidate, RequestFacts
from pdmesh.wire.messages import WorkerRecord

ROOM_MS = 1e6
"""For a decode worker whose pool looks too full; it may have room when asked."""
SUSPECT_MS = 1e15
"""For a worker that failed this request before, where nothing better is left."""


NEARNESS = ("host", "rack", "elsewhere")
"""How near two workers are: the order of ``Costs.push``."""


@dataclass(frozen=True)
class Link:
    """Moving latents between two workers."""

    hop_ms: float
    """Before the first byte."""
    token_ms: float
    """For each token, at the share of the link that a transfer gets."""


@dataclass(frozen=True)
class Costs:
    """Coefficients, in milliseconds. The defaults weigh as ``choose_route`` does, a token = 1 ms.

    A prompt of L tokens of which c are cached takes
    ``token_ms * (L - c) + pair_ms * (L^2 - c^2) + step_ms`` to compute.
    """

    token_ms: float = 1.0
    pair_ms: float = 0.0
    step_ms: float = 0.0
    others_tokens: int = 256
    """Tokens assumed to wait for each request that another router has at a prefill worker."""

    same_host: Link = Link(0.0, 0.1)
    same_rack: Link = Link(0.0, 0.1)
    elsewhere: Link = Link(0.0, 0.1)
    """At least as dear as ``same_rack``, which is as dear as ``same_host``. These are for a prefix
    that is fetched."""
    pushes: tuple[Link, Link, Link] | None = None
    """The same three for the pages that a prompt brings to decode, most of which come while it is
    still computed: what is left when the first token is known. None: as for a fetch."""
    racks: Mapping[str, str] = field(default_factory=dict)
    """Rack of a host; hosts that are not named are in no rack."""
    fetching: bool = True
    """Whether a prefill worker can fetch a prefix from its owner instead of computing it."""

    sequence_ms: float = 64.0
    """Sharing a decode worker's steps with one sequence more."""
    context_ms: float = 0.0
    """Sharing them with one token of context more."""
    itl_base_ms: float = 0.0
    itl_sequence_ms: float = 0.0
    itl_context_ms: float = 0.0
    """Inter-token latency: ``base + sequence * batch + context * tokens in the pool``."""
    itl_slo_ms: float = 0.0
    """What it should stay below; 0: anything will do."""
    itl_over_ms: float = 1000.0
    """Cost of a latency of twice ``itl_slo_ms``; in between in proportion."""

    beta: float = 0.8
    """Weight of the delay that a request's work causes to others."""
    least_price: float = 0.25
    """Least price of a millisecond of work where several ask for the same prefix: a burst does not
    compute it everywhere, however idle the workers are."""
    kappa: float = 0.3
    """Weight of making one more copy of a prefix where that evicts something."""
    horizon_s: float = 60.0
    """Over which the load is averaged."""
    routers: int = 1
    """Routers that share the workers; each sees its own requests only."""

    @property
    def push(self) -> tuple[Link, Link, Link]:
        """Handing a prompt's pages over: on one host, in one rack, elsewhere."""
        return self.pushes or (self.same_host, self.same_rack, self.elsewhere)

    def nearness(self, one: WorkerRecord, other: WorkerRecord) -> int:
        """Which of ``push`` is between two workers."""
        here, there = self.place(one), self.place(other)
        if here[0] == there[0]:
            return 0
        return 1 if here[1] and here[1] == there[1] else 2

    def named(self) -> dict[str, float]:
        """What is fitted to the workers, in milliseconds by name."""
        found = {
            "prefill_token": self.token_ms,
            "prefill_pair": self.pair_ms,
            "prefill_start": self.step_ms,
            "step": self.itl_base_ms,
            "step_sequence": self.itl_sequence_ms,
            "step_context": self.itl_context_ms,
            "sequence": self.sequence_ms,
        }
        for place, link in zip(NEARNESS, self.push, strict=True):
            found |= {f"push_{place}": link.hop_ms, f"push_{place}_token": link.token_ms}
        return found

    def prefill_ms(self, tokens: int, cached: int) -> float:
        """Time to compute a prompt behind ``cached`` tokens of it."""
        return (
            self.token_ms * (tokens - cached)
            + self.pair_ms * (tokens * tokens - cached * cached)
            + self.step_ms
        )

    def queue_ms(self, candidate: Candidate) -> float:
        """Time until a prefill worker would begin: as if the prompts there were equally long, and
        those of other routers of ``others_tokens``."""
        tokens, requests = candidate.own_tokens, candidate.own_requests
        own = self.token_ms * tokens + self.step_ms * requests
        if self.pair_ms:
            own += self.pair_ms * tokens * tokens / max(1, requests)
        if candidate.other_requests:
            own += candidate.other_requests * self.prefill_ms(self.others_tokens, 0)
        return own

    def decode_ms(self, facts: RequestFacts, candidate: Candidate, need: int) -> float:
        """Price of decoding at a worker, without the transfer to it; ``need`` is in pages."""
        sequences = candidate.own_requests + candidate.other_requests
        cost = self.sequence_ms * sequences
        free = candidate.free_pages
        if free is not None and free < need:
            cost += ROOM_MS
        if self.itl_slo_ms or (
            self.context_ms and sequences
        ):  # with nobody there it is an old poll
            record = candidate.record
            used = 0 if free is None else record.capacity_pages - free
            context = used * record.page_format.page_size
            cost += self.context_ms * context + self._over(facts, sequences, context)
        return cost

    def _over(self, facts: RequestFacts, sequences: int, context: int) -> float:
        """Cost of an inter-token latency above the limit, once the request is there."""
        if not self.itl_slo_ms:
            return 0.0
        after = context + facts.num_prompt_tokens + facts.n * facts.max_tokens
        batch = sequences + facts.n
        itl = self.itl_base_ms + self.itl_sequence_ms * batch + self.itl_context_ms * after
        return self.itl_over_ms * max(0.0, itl / self.itl_slo_ms - 1)

    def place(self, record: WorkerRecord) -> tuple[str, str]:
        """Host and rack of a worker; the rack is empty if it is not known."""
        host = _host(record.address)
        return host, self.racks.get(host, "")

    def link(self, one: tuple[str, str], other: tuple[str, str]) -> Link:
        """Between two places."""
        if one[0] == other[0]:
            return self.same_host
        if one[1] and one[1] == other[1]:
            return self.same_rack
        return self.elsewhere


@lru_cache(maxsize=4096)
def _host(address: str) -> str:
    return address.rpartition(":")[0]


def owned_tokens(facts: RequestFacts, candidate: Candidate) -> int:
    """Leading tokens of the prompt that a worker need not compute.

    The last position is always computed: its logits give the first token.
    """
    owned = candidate.spared_pages * candidate.record.page_format.page_size
    return min(owned, facts.num_prompt_tokens - 1)

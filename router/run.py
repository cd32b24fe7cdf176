"""The state of one answer on its way through the mesh, and the messages made from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from pdmesh.router.failure import AttemptFailed
from pdmesh.router.leases import HeldLease
from pdmesh.router.policy import Avoid, RequestFacts, Route
from pdmesh.router.prompt import PromptHashes
from pdmesh.router.request import GenerateRequest
from pdmesh.router.stream import Delta, GatewayStream, StreamBroken
from pdmesh.wire.errors import Unavailable
from pdmesh.wire.messages import (
    FirstToken,
    Lease,
    PageSource,
    PrefillRequest,
    ReserveRequest,
    StreamRequest,
    TokenChunk,
    WorkerRecord,
)
from pdmesh.wire.sampling import SamplingParams

WAIT_GRACE = 1.0
"""Seconds before the deadline that are not waited for room: nothing could be served in them."""
CALL_GRACE = 1.0
"""Seconds by which calls to workers outlive the request's deadline, which is watched elsewhere."""

Sources = tuple[PageSource, ...]


@dataclass
class Run:
    """One answer of a request: its tokens so far, the attempts so far, and the time spent.

    The first answer leads the attempts in which all of them begin; later ones are an answer's own.

    Args:
        request: as checked.
        index: which answer.
        gate: accepts the answer's tokens.
        key: of the page hashes.
        eos_ids: end-of-text tokens, empty where the client ignores them.
        clock: seconds, monotone.
    """

    request: GenerateRequest
    index: int
    gate: GatewayStream
    key: bytes
    eos_ids: tuple[int, ...]
    clock: Callable[[], float]
    route: Route | None = None
    failures: list[AttemptFailed] = field(default_factory=list)
    avoid: Avoid = field(default_factory=Avoid)
    attempts: int = 0
    """Begun by this answer; one that it joined is counted at the answer that led."""
    migrations: int = 0
    """Times that another decode worker took the answer over."""
    handoffs: int = 0
    """Number of the last handoff that was offered."""
    cached_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    router_s: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    """The longest of all attempts."""
    arrival_ms: float = 0.0
    """From this attempt's first token to the arrival of its pages at decode, once tokens come."""
    _request_id: str = ""
    _drafts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _prompt: tuple[tuple[int, ...], PromptHashes] | None = None

    # ---- one attempt ----------------------------------------------------------------------

    def begin_attempt(self) -> None:
        """Fixes the prompt of the next attempt: the client's, and the answer so far."""
        self.gate.begin_attempt()
        self.attempts += 1
        own = f"#{self.index}" if self.index else ""
        self._request_id = self.request.request_id + own
        tokens = self.all_tokens
        self._prompt = tokens, PromptHashes(self.key, self.request.tenant, tokens)

    def join(self, lead: Run) -> None:
        """Takes part in an attempt that another answer has begun."""
        self.gate.join_attempt(lead.gate.attempt)
        self._request_id, self._prompt, self.route = lead._request_id, lead._prompt, lead.route
        self.failures, self.avoid = list(lead.failures), lead.avoid

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt of this attempt."""
        assert self._prompt is not None
        return self._prompt[0]

    @property
    def hashes(self) -> PromptHashes:
        assert self._prompt is not None
        return self._prompt[1]

    @property
    def offset(self) -> int:
        """Answer tokens that are part of this attempt's prompt."""
        return len(self.tokens) - len(self.request.token_ids)

    @property
    def sampling(self) -> SamplingParams:
        """For a worker: what is left to generate; stop strings are found here."""
        left = self.request.sampling.max_tokens - self.offset
        return msgspec.structs.replace(self.request.sampling, max_tokens=left, stop=())

    def facts(self, n: int) -> RequestFacts:
        """For the choice of workers for ``n`` answers."""
        return RequestFacts(
            num_prompt_tokens=len(self.tokens),
            max_tokens=self.sampling.max_tokens,
            avoid=self.avoid,
            n=n,
            may_wait=self._wait_ms() > 0,
        )

    def remaining(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self.request.deadline - self.clock())

    def call_timeout(self) -> float:
        """Seconds that a call to a worker may last."""
        return self.remaining() + CALL_GRACE

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """The client's prompt and the answer so far."""
        return (*self.request.token_ids, *self.gate.tokens)

    def move_facts(self, avoid: frozenset[str]) -> RequestFacts:
        """For the choice of a worker to go on at, none of ``avoid``."""
        return RequestFacts(
            num_prompt_tokens=len(self.request.token_ids) + len(self.gate.tokens),
            max_tokens=self.request.sampling.max_tokens - len(self.gate.tokens),
            avoid=Avoid(lost=self.avoid.lost | avoid, suspect=self.avoid.suspect),
        )

    def all_hashes(self) -> PromptHashes:
        """Of the client's prompt and the answer so far."""
        return PromptHashes(self.key, self.request.tenant, self.all_tokens)

    @property
    def worker_request_id(self) -> str:
        """The id that workers know this answer's attempt by."""
        return self._request_id

    def _deadline_ms(self) -> int:
        return max(1, int(self.remaining() * 1e3))

    def _wait_ms(self) -> int:
        return max(0, int((self.remaining() - WAIT_GRACE) * 1e3))

    def _waited_ms(self) -> int:
        return max(0, int((self.clock() - self.request.received) * 1e3))

    def reserve_request(self, route: Route, n: int, sources: Sources = ()) -> ReserveRequest:
        return ReserveRequest(
            request_id=self._request_id,
            attempt=self.gate.attempt,
            num_prompt_tokens=len(self.tokens),
            hashes=self.hashes.for_format(route.decode.page_format),
            tenant=self.request.tenant,
            max_tokens=self.sampling.max_tokens,
            n=n,
            priority=self.request.priority,
            waited_ms=self._waited_ms(),
            wait_ms=self._wait_ms() if route.wait else 0,
            sources=sources,
            deadline_ms=self._deadline_ms(),
        )

    def prefill_request(self, lease: Lease, n: int, sources: Sources = ()) -> PrefillRequest:
        return PrefillRequest(
            request_id=self._request_id,
            attempt=self.gate.attempt,
            token_ids=self.tokens,
            tenant=self.request.tenant,
            sampling=self.sampling,
            output_offset=self.offset,
            n=n,
            sample_index=self.index,
            priority=self.request.priority,
            waited_ms=self._waited_ms(),
            eos_token_ids=self.eos_ids,
            sources=sources,
            lease=lease,
            deadline_ms=self._deadline_ms(),
        )

    def stream_request(self, lease: HeldLease, first_token: int) -> StreamRequest:
        return StreamRequest(
            lease_id=lease.lease_id,
            generation=lease.generation,
            request_id=self._request_id,
            attempt=self.gate.attempt,
            token_ids=self.tokens,
            first_token=first_token,
            sampling=self.sampling,
            output_offset=self.offset,
            sample_index=self.index,
            eos_token_ids=self.eos_ids,
            tenant=self.request.tenant,
        )

    # ---- what comes back ------------------------------------------------------------------

    def note_prefill(self, first: FirstToken, n: int) -> None:
        """What the prompt of an attempt cost.

        Raises:
            StreamBroken: there is not a first token for each of the ``n`` answers.
        """
        self.cached_tokens = max(
            self.cached_tokens, min(first.cached_tokens, len(self.request.token_ids))
        )
        self.queue_ms += first.queue_ms
        self.prefill_ms += first.compute_ms
        entries = 0 if self.request.sampling.logprobs is None else n
        if (len(first.token_ids), len(first.logprobs)) != (n, entries):
            raise StreamBroken(
                f"prefill sent {len(first.token_ids)} first tokens and {len(first.logprobs)} "
                f"logprobs, not {n} and {entries}"
            )

    def take_first(self, first: FirstToken, place: int) -> Delta:
        """The first token of this answer, which is the ``place``-th of an attempt."""
        return self.take(
            TokenChunk(
                attempt=self.gate.attempt,
                position=self.offset,
                token_ids=first.token_ids[place : place + 1],
                logprobs=first.logprobs[place : place + 1],
            )
        )

    def take(self, chunk: TokenChunk) -> Delta:
        """One chunk of tokens, from decode."""
        started = self.clock()
        if chunk.drafted:
            self._drafts[self.gate.attempt] = chunk.drafted, chunk.accepted
        self.arrival_ms = chunk.transfer_ms
        self.transfer_ms = max(self.transfer_ms, chunk.transfer_ms)
        delta = self.gate.take(chunk)
        self.router_s += self.clock() - started
        return delta

    def moved(self, target: WorkerRecord, attempt: int) -> None:
        """Another decode worker goes on, as ``attempt``; it goes on counting drafts as well."""
        if self.gate.attempt in self._drafts:
            self._drafts[attempt] = self._drafts.pop(self.gate.attempt)
        self.gate.join_attempt(attempt)
        self.migrations += 1
        if self.route is not None:
            self.route = replace(self.route, decode=target)

    def note_failure(self, failure: AttemptFailed) -> None:
        """Remembers which worker failed, so that the next attempt avoids it."""
        self.failures.append(failure)
        one = frozenset({failure.worker.instance})
        if failure.full:
            waited = self.route is not None and self.route.wait
            refused = one if waited else frozenset()
            self.avoid = replace(
                self.avoid, full=self.avoid.full | one, closed=self.avoid.closed | refused
            )
            return
        # Time has passed: there may be room again.
        self.avoid = replace(self.avoid, full=frozenset(), closed=frozenset())
        if failure.preempted or (failure.moving and not failure.unreachable):
            return
        if failure.suspect and self.route is not None:
            both = frozenset({self.route.prefill.instance, self.route.decode.instance})
            self.avoid = replace(self.avoid, suspect=self.avoid.suspect | both)
        else:
            self.avoid = replace(self.avoid, lost=self.avoid.lost | one)

    def give_up(self, reason: str) -> Unavailable:
        """The error to end with; says what the last worker said."""
        if not self.failures:
            return Unavailable(reason)
        last = self.failures[-1]
        return Unavailable(f"{reason}; last failure, at {last.worker.worker_id}: {last}")

    @property
    def broken_attempts(self) -> int:
        """Attempts in which something went wrong."""
        return sum(failure.broken for failure in self.failures)

    @property
    def drafts(self) -> tuple[int, int]:
        """Drafts verified and accepted, over all attempts."""
        counts = self._drafts.values()
        return sum(drafted for drafted, _ in counts), sum(accepted for _, accepted in counts)

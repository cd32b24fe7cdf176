"""The state of one request on its way through the mesh, and the messages made from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from pdmesh.router.clients import AttemptFailed
from pdmesh.router.policy import Avoid, RequestFacts, Route
from pdmesh.router.prompt import PromptHashes
from pdmesh.router.request import GenerateRequest
from pdmesh.router.stream import Delta, GatewayStream
from pdmesh.router.usage import Timing, Usage
from pdmesh.wire.errors import Unavailable
from pdmesh.wire.messages import (
    FirstToken,
    Lease,
    PrefillRequest,
    ReserveRequest,
    StreamRequest,
    TokenChunk,
)
from pdmesh.wire.sampling import SamplingParams


@dataclass
class Run:
    """One request: the answer so far, the attempts so far, and the time spent.

    Args:
        request: as checked.
        gate: accepts the answer's tokens.
        key: of the page hashes.
        eos_ids: end-of-text tokens, empty where the client ignores them.
        clock: seconds, monotone.
    """

    request: GenerateRequest
    gate: GatewayStream
    key: bytes
    eos_ids: tuple[int, ...]
    clock: Callable[[], float]
    route: Route | None = None
    failures: list[AttemptFailed] = field(default_factory=list)
    avoid: Avoid = field(default_factory=Avoid)
    cached_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    router_s: float = 0.0
    _queue_ms: float = 0.0
    _prefill_ms: float = 0.0
    _transfer_ms: float = 0.0
    _drafts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _prompt: tuple[tuple[int, ...], PromptHashes] | None = None

    # ---- one attempt ----------------------------------------------------------------------

    def begin_attempt(self) -> None:
        """Fixes the prompt of the next attempt: the client's, and the answer so far."""
        self.gate.begin_attempt()
        tokens = (*self.request.token_ids, *self.gate.tokens)
        self._prompt = tokens, PromptHashes(self.key, self.request.tenant, tokens)

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

    @property
    def facts(self) -> RequestFacts:
        return RequestFacts(len(self.tokens), self.sampling.max_tokens, self.avoid)

    def remaining(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self.request.deadline - self.clock())

    def _deadline_ms(self) -> int:
        return max(1, int(self.remaining() * 1e3))

    def reserve_request(self, route: Route) -> ReserveRequest:
        return ReserveRequest(
            request_id=self.request.request_id,
            attempt=self.gate.attempt,
            num_prompt_tokens=len(self.tokens),
            hashes=self.hashes.for_format(route.decode.page_format),
            tenant=self.request.tenant,
            max_tokens=self.sampling.max_tokens,
            deadline_ms=self._deadline_ms(),
        )

    def prefill_request(self, lease: Lease) -> PrefillRequest:
        return PrefillRequest(
            request_id=self.request.request_id,
            attempt=self.gate.attempt,
            token_ids=self.tokens,
            tenant=self.request.tenant,
            sampling=self.sampling,
            output_offset=self.offset,
            lease=lease,
            deadline_ms=self._deadline_ms(),
        )

    def stream_request(self, lease: Lease, first: FirstToken) -> StreamRequest:
        return StreamRequest(
            lease_id=lease.lease_id,
            generation=lease.generation,
            request_id=self.request.request_id,
            attempt=self.gate.attempt,
            token_ids=self.tokens,
            first_token=first.token_ids[0],
            sampling=self.sampling,
            output_offset=self.offset,
            eos_token_ids=self.eos_ids,
            tenant=self.request.tenant,
        )

    # ---- what comes back ------------------------------------------------------------------

    def take_first(self, first: FirstToken) -> Delta:
        """The first token of an attempt, from prefill."""
        self.cached_tokens = max(
            self.cached_tokens, min(first.cached_tokens, len(self.request.token_ids))
        )
        self._queue_ms += first.queue_ms
        self._prefill_ms += first.compute_ms
        return self.take(
            TokenChunk(
                attempt=self.gate.attempt,
                position=self.offset,
                token_ids=first.token_ids,
                logprobs=first.logprobs,
            )
        )

    def take(self, chunk: TokenChunk) -> Delta:
        """One chunk of tokens, from decode."""
        started = self.clock()
        if chunk.drafted:
            self._drafts[self.gate.attempt] = chunk.drafted, chunk.accepted
        self._transfer_ms = max(self._transfer_ms, chunk.transfer_ms)
        delta = self.gate.take(chunk)
        self.router_s += self.clock() - started
        return delta

    def note_failure(self, failure: AttemptFailed) -> None:
        """Remembers which worker failed, so that the next attempt avoids it."""
        self.failures.append(failure)
        one = frozenset({failure.worker.instance})
        if failure.full:
            self.avoid = replace(self.avoid, full=self.avoid.full | one)
        elif failure.suspect and self.route is not None:
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
        """Attempts that failed for another reason than want of room."""
        return sum(not failure.full for failure in self.failures)

    # ---- the end --------------------------------------------------------------------------

    def usage(self) -> Usage:
        drafted = sum(d for d, _ in self._drafts.values())
        accepted = sum(a for _, a in self._drafts.values())
        return Usage(
            prompt_tokens=len(self.request.token_ids),
            cached_tokens=self.cached_tokens,
            completion_tokens=len(self.gate.tokens),
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            seed=self.request.sampling.seed,
        )

    def timing(self) -> Timing:
        now = self.clock()
        first = self.first_token_at if self.first_token_at is not None else now
        route = self.route
        return Timing(
            queue_ms=self._queue_ms,
            prefill_ms=self._prefill_ms,
            transfer_ms=self._transfer_ms,
            decode_ms=(now - first) * 1e3,
            router_ms=self.router_s * 1e3,
            ttft_ms=(first - self.request.received) * 1e3,
            prefill_worker=route.prefill.worker_id if route else "",
            decode_worker=route.decode.worker_id if route else "",
            attempts=self.gate.attempt,
        )

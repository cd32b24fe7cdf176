"""The answers of one request together: what they cost, and which message is the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdmesh.router.request import GenerateRequest
from pdmesh.router.run import Run
from pdmesh.router.stream import Delta
from pdmesh.router.usage import Timing, Usage
from pdmesh.wire.messages import FinishReason


@dataclass(frozen=True)
class Finished:
    """The last event of an answer; the last one of the request says what it cost."""

    index: int
    text: str
    reason: FinishReason
    usage: Usage | None = None
    timing: Timing | None = None


Event = Delta | Finished


@dataclass
class Answers:
    """The answers of one request, in order of their index."""

    request: GenerateRequest
    runs: tuple[Run, ...]
    clock: Callable[[], float]
    _unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self._unfinished = len(self.runs)

    def complete(self, event: Event) -> Event:
        """An event for the client: the last of all carries usage and timing."""
        if isinstance(event, Delta):
            return event
        self._unfinished -= 1
        if self._unfinished:
            return event
        return replace(event, usage=self.usage(), timing=self.timing())

    @property
    def outcome(self) -> FinishReason | None:
        """How all of them ended: "length" if one did; None while one has not ended."""
        reasons = [run.gate.finish for run in self.runs]
        if None in reasons:
            return None
        return "length" if "length" in reasons else "stop"

    @property
    def attempts(self) -> int:
        """Tries of the request and of single answers."""
        return sum(run.attempts for run in self.runs)

    @property
    def first_token_at(self) -> float | None:
        return min((t for run in self.runs if (t := run.first_token_at) is not None), default=None)

    def usage(self) -> Usage:
        """The prompt once, and all completions."""
        drafts = [run.drafts for run in self.runs]
        return Usage(
            prompt_tokens=len(self.request.token_ids),
            cached_tokens=max(run.cached_tokens for run in self.runs),
            completion_tokens=sum(len(run.gate.tokens) for run in self.runs),
            drafted_tokens=sum(drafted for drafted, _ in drafts),
            accepted_tokens=sum(accepted for _, accepted in drafts),
            seed=self.request.sampling.seed,
        )

    def timing(self) -> Timing:
        """Summed over all attempts; the workers are those of answer 0."""
        now = self.clock()
        first = self.first_token_at
        first = now if first is None else first
        route = self.runs[0].route
        return Timing(
            queue_ms=sum(run.queue_ms for run in self.runs),
            prefill_ms=sum(run.prefill_ms for run in self.runs),
            transfer_ms=max(run.transfer_ms for run in self.runs),
            decode_ms=(now - first) * 1e3,
            router_ms=sum(run.router_s for run in self.runs) * 1e3,
            ttft_ms=(first - self.request.received) * 1e3,
            prefill_worker=route.prefill.worker_id if route else "",
            decode_worker=route.decode.worker_id if route else "",
            attempts=self.attempts,
            migrations=sum(run.migrations for run in self.runs),
        )

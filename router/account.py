"""What is counted and logged of every request, from its beginning to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdmesh.router.answers import Answers
from pdmesh.router.failure import AttemptFailed
from pdmesh.router.metrics import Metrics
from pdmesh.router.policy import Route
from pdmesh.router.run import Run
from pdmesh.router.stream import Delta
from pdmesh.wire.errors import InvalidRequest, Overloaded, PdmeshError, Unavailable
from pdmesh.wire.logs import event
from pdmesh.wire.messages import WorkerRecord

log = logging.getLogger(__name__)


class Account:
    """Metrics and log lines of requests; ``clock`` gives seconds, monotone."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._running: set[str] = set()

    @contextmanager
    def serving(self, answers: Answers) -> Iterator[None]:
        """A request from its beginning to its end, however it ends.

        Raises:
            InvalidRequest: one with its id is running.
        """
        request = answers.request
        if request.request_id in self._running:
            raise InvalidRequest(f"a request with the id {request.request_id} is running already")
        self._running.add(request.request_id)
        self._metrics.running.inc()
        self._metrics.answers.observe(request.n)
        event(
            log,
            "received",
            request=request.request_id,
            prompt_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
            n=request.n,
            priority=request.priority,
        )
        try:
            yield
        except PdmeshError as error:
            self._ended(answers, _outcome(error), error.message)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if answers.outcome is not None:  # the client left with the last message in hand
                self._ended(answers, answers.outcome)
            elif self._clock() >= request.deadline:
                self._ended(answers, "deadline")
            else:
                self._ended(answers, "cancelled")
            raise
        except BaseException as error:
            self._ended(answers, "error", repr(error))
            raise
        else:
            assert answers.outcome is not None
            self._ended(answers, answers.outcome)
        finally:
            self._running.discard(request.request_id)
            self._metrics.running.dec()

    def routed(self, run: Run, route: Route) -> None:
        """An attempt has its workers. ``explain`` of the chooser knows why; DEBUG logs it."""
        all_scores = log.isEnabledFor(logging.DEBUG)
        event(
            log,
            "routed",
            request=run.request.request_id,
            answer=run.index,
            attempt=run.gate.attempt,
            prefill=route.prefill.worker_id,
            decode=route.decode.worker_id,
            wait=route.wait,
            scores=route.explain(all_scores=all_scores),
        )

    @contextmanager
    def waiting(self, run: Run, route: Route) -> Iterator[Callable[[], None]]:
        """The wait of an attempt for room, if it has to; what is given is called at its end."""
        started, over = self._clock(), not route.wait

        def granted() -> None:
            nonlocal over
            if not over:
                over = True
                self._metrics.waiting.dec()
                run.queue_ms += (self._clock() - started) * 1e3

        if not over:
            self._metrics.waiting.inc()
        try:
            yield granted
        finally:
            granted()

    def delta(self, run: Run, delta: Delta) -> None:
        """A part of an answer."""
        now = self._clock()
        count = len(delta.token_ids)
        if run.first_token_at is None:
            run.first_token_at = now
            if run.index == 0:
                self._first_token(run, now)
        elif count:
            self._metrics.inter_token_latency.observe((now - run.last_token_at) / count, count)
        run.last_token_at = now

    def failed(self, run: Run, failure: AttemptFailed) -> None:
        """An attempt that came to nothing."""
        if failure.preempted:
            self._metrics.preemptions.inc()
        elif failure.broken:
            self._metrics.failed_attempts.labels(failure.worker.role).inc()
        event(
            log,
            _name(failure),
            logging.WARNING if failure.broken else logging.INFO,
            request=run.request.request_id,
            answer=run.index,
            attempt=run.gate.attempt,
            worker=failure.worker.worker_id,
            error=failure,
        )

    def migrating(self, run: Run, source: WorkerRecord, target: WorkerRecord) -> None:
        """An answer is asked to move."""
        self._move_event("migrating", run, source, target, tokens=len(run.gate.tokens))

    def migrated(
        self, run: Run, source: WorkerRecord, target: WorkerRecord, pause_s: float
    ) -> None:
        """The first token of a moved answer has come from its target."""
        self._metrics.migrations.labels("moved").inc()
        self._metrics.migration_pause.observe(pause_s)
        pause = f"{pause_s * 1e3:.1f}"
        self._move_event("migrated", run, source, target, pause_ms=pause)

    def migration_failed(
        self, run: Run, source: WorkerRecord, target: WorkerRecord | None, reason: str
    ) -> None:
        """An answer did not move; it goes on where it is, or fails over. Without a target: none
        could be found."""
        if target is not None:
            self._metrics.migrations.labels("failed").inc()
        self._move_event("migration_failed", run, source, target, reason=reason)

    def migration_ended(self) -> None:
        """An answer ended while it was moving."""
        self._metrics.migrations.labels("ended").inc()

    def _move_event(
        self,
        name: str,
        run: Run,
        source: WorkerRecord,
        target: WorkerRecord | None,
        **fields: object,
    ) -> None:
        event(
            log,
            name,
            logging.INFO,
            request=run.request.request_id,
            answer=run.index,
            attempt=run.gate.attempt,
            source=source.worker_id,
            target="" if target is None else target.worker_id,
            **fields,
        )

    def _first_token(self, run: Run, now: float) -> None:
        ttft = now - run.request.received
        self._metrics.time_to_first_token.observe(ttft)
        event(
            log,
            "first_token",
            request=run.request.request_id,
            ttft_ms=f"{ttft * 1e3:.1f}",
            cached_tokens=run.cached_tokens,
        )

    def _ended(self, answers: Answers, outcome: str, error: str | None = None) -> None:
        usage = answers.usage()
        seconds = self._clock() - answers.request.received
        self._metrics.count(outcome, usage)
        if answers.first_token_at is not None:
            self._metrics.queue_time.observe(answers.timing().queue_ms / 1e3)
        name = "failed" if error is not None else outcome
        if name not in ("failed", "cancelled", "deadline"):
            name = "finished"
            self._metrics.e2e_latency.observe(seconds)
        event(
            log,
            name,
            logging.WARNING if error is not None else logging.INFO,
            request=answers.request.request_id,
            outcome=outcome,
            attempts=answers.attempts,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ms=f"{seconds * 1e3:.1f}",
            error=error or "",
        )


def _name(failure: AttemptFailed) -> str:
    if failure.broken:
        return "attempt_failed"
    if failure.moving:
        return "not_taken_over"
    if failure.draining:
        return "draining"
    return "preempted" if failure.preempted else "no_room"


def _outcome(error: PdmeshError) -> str:
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, Unavailable):
        return "unavailable"
    return "invalid" if isinstance(error, InvalidRequest) else "error"

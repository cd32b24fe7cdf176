"""The whole story of a request."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from pdmesh.router.clients import AttemptFailed, WorkerClients, blame
from pdmesh.router.metrics import Metrics
from pdmesh.router.policy import Route, choose_route
from pdmesh.router.request import GenerateRequest
from pdmesh.router.run import Run
from pdmesh.router.stream import Delta, GatewayStream, Limits, StreamBroken
from pdmesh.router.usage import Timing, Usage
from pdmesh.router.view import MeshView
from pdmesh.text.output import OutputText
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.wire.errors import InvalidRequest, Overloaded, PdmeshError, Unavailable
from pdmesh.wire.logs import event
from pdmesh.wire.messages import FinishReason

log = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds by which calls to workers outlive the request's deadline, which is watched here."""


@dataclass(frozen=True)
class Finished:
    """The last event of an answer."""

    text: str
    reason: FinishReason
    usage: Usage
    timing: Timing


@dataclass(frozen=True)
class ServiceConfig:
    """What the service needs to know besides its parts."""

    key: bytes
    """Of the page hashes."""
    max_attempts: int = 3


class Service:
    """Serves requests over the workers of a mesh.

    Args:
        tokenizer: turns tokens into text.
        view: the mesh as it is known.
        clients: channels to the workers.
        metrics: what is counted.
        config: see ServiceConfig.
        rng: breaks ties between equal workers.
        clock: seconds, monotone; of the requests' deadlines too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        view: MeshView,
        clients: WorkerClients,
        metrics: Metrics,
        config: ServiceConfig,
        *,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._view = view
        self._clients = clients
        self._metrics = metrics
        self._config = config
        self._rng = rng
        self._clock = clock
        self._running: set[str] = set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta | Finished, None]:
        """The answer as it comes, then one ``Finished``. Closing the iterator cancels the request.

        Raises:
            InvalidRequest: the id is in use, or no worker could ever hold the request.
            Overloaded: no decode worker has room now.
            Unavailable: no worker is ready, or too many failed.
        """
        run = self._new_run(request)
        with self._accounted(run):
            while run.gate.finish is None:
                try:
                    async with aclosing(self._attempt(run)) as deltas:
                        async for delta in deltas:
                            self._note_delta(run, delta)
                            if delta.token_ids or delta.text:
                                yield delta
                except AttemptFailed as failure:
                    self._note_failure(run, failure)
            yield Finished(run.gate.tail(), run.gate.finish, run.usage(), run.timing())

    async def _attempt(self, run: Run) -> AsyncGenerator[Delta, None]:
        """One try: reserve on decode, prefill, stream; the lease is released on the way out."""
        run.begin_attempt()
        route = self._choose(run)
        decode = self._clients.decode(route.decode)
        prefill = self._clients.prefill(route.prefill)
        with self._view.book(route) as booking:
            async with decode.reserve(run.reserve_request(route)) as lease:
                first = await prefill.run(run.prefill_request(lease), run.remaining() + GRACE)
                booking.prefilled()
                with blame(route.prefill):
                    delta = run.take_first(first)
                yield delta
                if run.gate.finish is not None:
                    return
                stream = decode.stream(run.stream_request(lease, first), run.remaining() + GRACE)
                async with aclosing(stream) as chunks:
                    async for chunk in chunks:
                        with blame(route.decode):
                            delta = run.take(chunk)
                        yield delta
                        if run.gate.finish is not None:
                            return
                raise AttemptFailed(route.decode, StreamBroken("the answer has no end"))

    def _new_run(self, request: GenerateRequest) -> Run:
        eos = () if request.sampling.ignore_eos else self._tokenizer.ids.eos
        limits = Limits(
            max_tokens=request.sampling.max_tokens,
            stop_ids=frozenset((*eos, *request.sampling.stop_token_ids)),
            vocab_size=self._tokenizer.vocab_size,
        )
        gate = GatewayStream(OutputText(self._tokenizer, request.sampling.stop), limits)
        return Run(request, gate, self._config.key, eos, self._clock)

    def _choose(self, run: Run) -> Route:
        started = self._clock()
        try:
            route = choose_route(run.facts, self._view.snapshot(run.hashes), self._rng)
        except Unavailable as error:
            raise run.give_up(error.message) from error
        run.route = route
        run.router_s += self._clock() - started
        event(
            log,
            "routed",
            request=run.request.request_id,
            attempt=run.gate.attempt,
            prefill=route.prefill.worker_id,
            decode=route.decode.worker_id,
            scores=route.explain(),
        )
        return route

    def _note_delta(self, run: Run, delta: Delta) -> None:
        now = self._clock()
        count = len(delta.token_ids)
        if run.first_token_at is None:
            run.first_token_at = now
            ttft = now - run.request.received
            self._metrics.time_to_first_token.observe(ttft)
            event(
                log,
                "first_token",
                request=run.request.request_id,
                ttft_ms=f"{ttft * 1e3:.1f}",
                cached_tokens=run.cached_tokens,
            )
        else:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((now - run.last_token_at) / count)
        run.last_token_at = now

    def _note_failure(self, run: Run, failure: AttemptFailed) -> None:
        """Prepares the next attempt, or raises what the client is told."""
        run.note_failure(failure)
        if failure.unreachable:
            self._view.mark_lost(failure.worker.instance)
        self._metrics.failed_attempts.labels(failure.worker.role).inc()
        event(
            log,
            "attempt_failed",
            logging.WARNING,
            request=run.request.request_id,
            attempt=run.gate.attempt,
            worker=failure.worker.worker_id,
            error=failure,
        )
        if run.broken_attempts >= self._config.max_attempts:
            raise run.give_up(f"gave up after {run.gate.attempt} attempts") from failure

    @contextmanager
    def _accounted(self, run: Run) -> Iterator[None]:
        """Counts and logs a request from its beginning to its end, however it ends."""
        request = run.request
        if request.request_id in self._running:
            raise InvalidRequest(f"a request with the id {request.request_id} is running already")
        self._running.add(request.request_id)
        self._metrics.running.inc()
        event(
            log,
            "received",
            request=request.request_id,
            prompt_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
        )
        try:
            yield
        except PdmeshError as error:
            self._ended(run, _outcome(error), error.message)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if run.gate.finish is not None:  # the client left with the last message in hand
                self._ended(run, run.gate.finish)
            elif self._clock() >= request.deadline:
                self._ended(run, "deadline")
            else:
                self._ended(run, "cancelled")
            raise
        except BaseException as error:
            self._ended(run, "error", repr(error))
            raise
        else:
            assert run.gate.finish is not None
            self._ended(run, run.gate.finish)
        finally:
            self._running.discard(request.request_id)
            self._metrics.running.dec()

    def _ended(self, run: Run, outcome: str, error: str | None = None) -> None:
        usage = run.usage()
        self._metrics.count(outcome, usage)
        name = "failed" if error is not None else outcome
        if name not in ("failed", "cancelled", "deadline"):
            name = "finished"
        event(
            log,
            name,
            logging.WARNING if error is not None else logging.INFO,
            request=run.request.request_id,
            outcome=outcome,
            attempts=run.gate.attempt,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ms=f"{(self._clock() - run.request.received) * 1e3:.1f}",
            error=error or "",
        )


def _outcome(error: PdmeshError) -> str:
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, Unavailable):
        return "unavailable"
    return "invalid" if isinstance(error, InvalidRequest) else "error"

"""The whole story of a request."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

from pdmesh.router.account import Account
from pdmesh.router.admission import Admission
from pdmesh.router.answers import Answers, Event, Finished
from pdmesh.router.booking import Booking
from pdmesh.router.chooser import Chooser
from pdmesh.router.clients import WorkerClients
from pdmesh.router.failure import AttemptFailed, blame
from pdmesh.router.fanout import merged
from pdmesh.router.leases import HeldLease
from pdmesh.router.moves import Moves
from pdmesh.router.policy import Route
from pdmesh.router.request import GenerateRequest
from pdmesh.router.run import Run
from pdmesh.router.stream import Delta, GatewayStream, Limits
from pdmesh.router.view import MeshView
from pdmesh.text.output import OutputText
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.wire.errors import Overloaded, Unavailable


@dataclass(frozen=True)
class ServiceConfig:
    """What the service needs to know besides its parts."""

    key: bytes
    """Of the page hashes."""
    max_attempts: int = 3


@dataclass(frozen=True)
class Begun:
    """An answer whose first token is there, and what it needs to go on."""

    run: Run
    route: Route
    lease: HeldLease
    booking: Booking
    first_token: int
    delta: Delta
    pushed_pages: int


class Service:
    """Serves requests over the workers of a mesh.

    Args:
        tokenizer: turns tokens into text.
        view: the mesh as it is known.
        clients: channels to the workers.
        account: counts and logs.
        moves: keeps the running answers.
        chooser: chooses the workers.
        config: see ServiceConfig.
        clock: seconds, monotone; of the requests' deadlines too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        view: MeshView,
        clients: WorkerClients,
        account: Account,
        moves: Moves,
        chooser: Chooser,
        config: ServiceConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._view = view
        self._clients = clients
        self._account = account
        self._moves = moves
        self._chooser = chooser
        self._config = config
        self._clock = clock
        self._admission = Admission()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The answers as they come, each ended by a ``Finished``. Closing it cancels the request.

        Raises:
            InvalidRequest: the id is in use, or no worker could ever hold the request.
            Overloaded: no decode worker has room, or lets the request wait for it; or its first
                token could not come before its deadline.
            Unavailable: no worker is ready, or too many failed.
        """
        answers = self._answers(request)
        with self._account.serving(answers):
            async with (
                self._begun(answers.runs) as begun,
                aclosing(merged([self._answer(one) for one in begun])) as events,
            ):
                async for event in events:
                    yield answers.complete(event)

    @asynccontextmanager
    async def _begun(self, runs: Sequence[Run]) -> AsyncGenerator[list[Begun], None]:
        """All answers with their first tokens, through as many attempts as it takes."""
        while True:
            async with AsyncExitStack() as stack:
                try:
                    begun = await stack.enter_async_context(self._attempt(runs))
                except AttemptFailed as failure:
                    self._note_failure(runs[0], failure)
                    continue
                yield begun
                return

    async def _answer(self, begun: Begun) -> AsyncGenerator[Event, None]:
        """One answer to its end; after a failure it goes on alone, from the tokens it has."""
        run, deltas = begun.run, self._stream(begun)
        while True:
            try:
                async with aclosing(deltas) as stream:
                    async for delta in stream:
                        self._account.delta(run, delta)
                        if delta.token_ids or delta.text:
                            yield delta
                break
            except AttemptFailed as failure:
                self._note_failure(run, failure)
                deltas = self._alone(run)
        assert run.gate.finish is not None
        self._chooser.fitted.note_answer(len(run.gate.tokens))
        yield Finished(run.index, run.gate.tail(), run.gate.finish)

    async def _alone(self, run: Run) -> AsyncGenerator[Delta, None]:
        async with self._attempt([run]) as (begun,), aclosing(self._stream(begun)) as deltas:
            async for delta in deltas:
                yield delta

    @asynccontextmanager
    async def _attempt(self, runs: Sequence[Run]) -> AsyncGenerator[list[Begun], None]:
        """Reserve on decode, prefill: the first token of each answer. Frees what is not used."""
        lead, n = runs[0], len(runs)
        lead.begin_attempt()
        await self._view.look_up(lead.hashes)
        route = self._choose(lead, n)
        decode = self._clients.decode(route.decode)
        prefill = self._clients.prefill(route.prefill)
        with (
            self._view.book(route, lead.hashes, n) as booking,
            self._account.waiting(lead, route) as granted,
        ):
            sources = self._view.sources(lead.hashes, route.decode, [route.prefill])
            async with decode.reserve(lead.reserve_request(route, n, sources)) as reserved:
                granted()
                sources = self._view.sources(lead.hashes, route.prefill)
                request = lead.prefill_request(reserved.lease, n, sources)
                first = await prefill.run(request, lead.call_timeout())
                booking.prefilled()
                with blame(route.prefill):
                    lead.note_prefill(first, n)
                    self._chooser.note_prefill(lead, first, alone=booking.alone)
                    self._admission.note(first.computed_tokens, first.compute_ms / 1e3)
                    begun = []
                    for i, run in enumerate(runs):
                        if i:
                            run.join(lead)
                        token, delta = first.token_ids[i], run.take_first(first, i)
                        held = reserved.held[i]
                        begun.append(
                            Begun(run, route, held, booking, token, delta, first.pushed_pages)
                        )
                yield begun

    async def _stream(self, begun: Begun) -> AsyncGenerator[Delta, None]:
        """The rest of an answer from its decode workers; leases are released on the way out."""
        run, decode, lease = begun.run, begun.route.decode, begun.lease
        with begun.booking.answer() as seat:
            async with self._moves.live(run, decode, lease, seat) as live:
                if run.gate.finish is None:
                    live.begin(run.stream_request(lease, begun.first_token))
                yield begun.delta
                if run.gate.finish is not None:
                    return
                arrived = False
                async with aclosing(live.deltas()) as deltas:
                    async for delta in deltas:
                        if not arrived:
                            arrived = True
                            self._note_push(begun)
                        yield delta

    def _note_push(self, begun: Begun) -> None:
        """The pages are there: how long it took after the first token."""
        size = begun.route.decode.page_format.page_size
        self._chooser.note_push(begun.route, begun.pushed_pages * size, begun.run.arrival_ms)

    def _answers(self, request: GenerateRequest) -> Answers:
        sampling = request.sampling
        free = sampling.ignore_eos and not sampling.grammar  # after its grammar nothing follows
        eos = () if free else self._tokenizer.ids.eos
        limits = Limits(
            max_tokens=sampling.max_tokens,
            stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
            vocab_size=self._tokenizer.vocab_size,
        )
        runs = []
        for index in range(request.n):
            output = OutputText(self._tokenizer, sampling.stop, sampling.min_tokens)
            gate = GatewayStream(output, limits, index)
            runs.append(Run(request, index, gate, self._config.key, eos, self._clock))
        return Answers(request, tuple(runs), self._clock)

    def _choose(self, run: Run, n: int) -> Route:
        started = self._clock()
        snapshot = self._view.snapshot(run.hashes)
        try:
            route = self._chooser.choose(run, n, snapshot)
        except Unavailable as error:
            raise run.give_up(error.message) from error
        except Overloaded as error:
            raise Overloaded(error.message, self._admission.retry_after_s(snapshot)) from error
        if not run.gate.tokens and not run.failures:
            self._admission.check(route, snapshot, run.remaining())
        run.route = route
        run.router_s += self._clock() - started
        self._account.routed(run, route)
        return route

    def _note_failure(self, run: Run, failure: AttemptFailed) -> None:
        """Prepares the next attempt, or raises what the client is told."""
        run.note_failure(failure)
        if failure.unreachable:
            self._view.mark_lost(failure.worker.instance)
        self._account.failed(run, failure)
        if run.broken_attempts >= self._config.max_attempts:
            raise run.give_up(f"gave up after {run.gate.attempt} attempts") from failure

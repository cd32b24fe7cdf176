"""A router as a simulated process: the real service, view and moves; and its clients."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import cast

import tokenizers

from pdmesh.registry.client import RegistryView
from pdmesh.router.account import Account
from pdmesh.router.answers import Finished
from pdmesh.router.chooser import Chooser
from pdmesh.router.clients import WorkerClients
from pdmesh.router.handoff import Surroundings as MoveSurroundings
from pdmesh.router.metrics import Metrics
from pdmesh.router.moves import Moves
from pdmesh.router.policy import Candidate
from pdmesh.router.prompt import PromptHashes
from pdmesh.router.request import GenerateRequest
from pdmesh.router.service import Service, ServiceConfig
from pdmesh.router.view import MeshView
from pdmesh.simulation.loop import Process
from pdmesh.simulation.model import EOS, VOCAB, Expected, Oracle
from pdmesh.simulation.network import SimClient
from pdmesh.simulation.scenario import ClientSpec
from pdmesh.simulation.store import StoreClient
from pdmesh.simulation.workers import SECRET, Surroundings
from pdmesh.text.tokenizer import SpecialIds, Tokenizer
from pdmesh.wire.errors import DeadlineExceeded, PdmeshError
from pdmesh.wire.messages import PageSource, WorkerRecord

_SILENCE_S = 10.0
_SLACK_S = 3.0
"""Seconds after its deadline by which a request must have ended."""


def sim_tokenizer() -> Tokenizer:
    """One that knows ids only."""
    pieces = {token: f"<{token}>".encode() for token in range(VOCAB)}
    return Tokenizer(
        plain=cast("tokenizers.Tokenizer", None),
        special={},
        silent=frozenset(),
        ids=SpecialIds(None, (EOS,)),
        vocab_size=VOCAB,
        _pieces=pieces,
    )


@dataclass
class Record:
    """What a client has seen of its request.

    ``ended`` says how it is over: "finished", "cancelled", or the name of an error.
    """

    spec: ClientSpec
    expected: tuple[Expected, ...]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    started: float = 0.0
    ended: str = ""
    message: str = ""
    over_at: float = 0.0
    unexpected: bool = False
    too_big: bool = False
    """A worker may say that the request can never fit."""

    def problems(self) -> list[str]:
        """What is wrong with what came, one sentence each."""
        found: list[str] = []
        for index, expected in enumerate(self.expected):
            got = tuple(self.tokens.get(index, ()))
            who = f"answer {index} of {self.spec.name}"
            if got != expected.tokens[: len(got)]:
                at = next(
                    (
                        i
                        for i, (a, b) in enumerate(zip(got, expected.tokens, strict=False))
                        if a != b
                    ),
                    len(expected.tokens),
                )
                found.append(f"{who}: token {at} of {len(got)} is wrong")
            finish = self.finishes.get(index)
            if finish is not None and (got, finish) != (expected.tokens, expected.finish):
                found.append(
                    f"{who} ended with {finish!r} after {len(got)} tokens, not with"
                    f" {expected.finish!r} after {len(expected.tokens)}"
                )
            if self.ended == "finished" and finish is None:
                found.append(f"{who} has no end")
        if self.unexpected:
            found.append(f"{self.spec.name} ended with {self.ended}: {self.message}")
        late = self.over_at - self.started - self.spec.timeout
        if self.ended and late > _SLACK_S and self.ended != "router lost":
            found.append(f"{self.spec.name} ended {late:.1f} s after its deadline")
        return found


class _Anywhere(MeshView):
    """Sends requests where there is least to do, whoever has their pages; names all who have."""

    def _seen_by(self, records: Sequence[WorkerRecord], hashes: PromptHashes) -> list[Candidate]:
        seen = super()._seen_by(records, hashes)
        return [replace(c, owned_pages=0, expected_pages=0) for c in seen]

    def sources(
        self, hashes: PromptHashes, chosen: WorkerRecord, besides: Sequence[WorkerRecord] = ()
    ) -> tuple[PageSource, ...]:
        return super().sources(hashes, chosen)


class SimRouter:
    """One router process, and the requests in it."""

    def __init__(self, around: Surroundings, process: Process, seed: int) -> None:
        self.process = process
        self._around = around
        self._loop = around.network.loop
        self.records: list[Record] = []
        rng = random.Random(f"router {seed} {process.name}")
        clock = around.clock
        metrics = Metrics()
        self.registry = RegistryView(
            "redis://simulated", "sim", clock=clock, store=StoreClient(around.store)
        )
        self.clients = WorkerClients(lambda where, role: SimClient(around.network, where, role))
        view = _Anywhere if around.mesh.pulling else MeshView
        self.view = view(self.registry, self.clients, "sim", metrics, clock=clock)
        account = Account(metrics, clock)
        moving = MoveSurroundings(self.view, self.clients, account, clock, _SILENCE_S)
        self.moves = Moves(moving, rng)
        self.chooser = Chooser(rng, clock)
        self.service = Service(
            sim_tokenizer(),
            self.view,
            self.clients,
            account,
            self.moves,
            self.chooser,
            ServiceConfig(SECRET),
            clock=clock,
        )
        process.ended.append(self._lost)
        self._loop.spawn(process, self._start())

    async def _start(self) -> None:
        await self.registry.start()
        await self.view.start(self._around.mesh.poll_s, self._polled)

    async def _polled(self) -> None:
        self.moves.tick()
        self.chooser.refit(self.view.statuses())

    def begin(self, record: Record) -> asyncio.Task[None]:
        """Serves a request, as the gRPC handler does."""
        self.records.append(record)
        record.started = self._loop.time()
        task = self._loop.spawn(self.process, self._serve(record))
        if record.spec.cancel_after is not None:
            timer = self._loop.call_later(record.spec.cancel_after, task.cancel)
            task.add_done_callback(lambda _: timer.cancel())
        return task

    async def _serve(self, record: Record) -> None:
        spec = record.spec
        deadline = record.started + spec.timeout
        request = GenerateRequest(
            request_id=spec.name,
            token_ids=spec.prompt,
            sampling=spec.sampling,
            tenant=spec.tenant,
            received=record.started,
            deadline=deadline,
            n=spec.n,
            priority=spec.priority,
        )
        ended, message, unexpected = "finished", "", False
        try:
            async with (
                asyncio.timeout_at(deadline),
                aclosing(self.service.generate(request)) as events,
            ):
                async for item in events:
                    if isinstance(item, Finished):
                        record.finishes[item.index] = item.reason
                    else:
                        record.tokens.setdefault(item.index, []).extend(item.token_ids)
                    if spec.slow_s:
                        await asyncio.sleep(spec.slow_s)
        except TimeoutError:
            ended = DeadlineExceeded.__name__
        except asyncio.CancelledError:
            ended = "cancelled"
        except PdmeshError as error:
            ended, message = type(error).__name__, error.message
            unexpected = ended in ("InternalError", "InvalidRequest", "Incompatible")
        except Exception as error:  # noqa: BLE001 - noted as a problem
            ended, message, unexpected = type(error).__name__, str(error), True
        unexpected = unexpected and not (ended == "InvalidRequest" and record.too_big)
        record.ended, record.message, record.unexpected = ended, message, unexpected
        record.over_at = self._loop.time()

    def _lost(self) -> None:
        for record in self.records:
            if not record.ended:
                record.ended, record.over_at = "router lost", self._loop.time()

    def left(self) -> list[str]:
        """What it still holds, in words."""
        found = [f"router: {r.spec.name} is not over" for r in self.records if not r.ended]
        busy = sorted(self.view._requests.items())
        found += [f"router: {n} requests booked at {instance}" for instance, n in busy]
        if self.clients.background._tasks:
            found.append(f"router: {len(self.clients.background._tasks)} releases under way")
        if self.moves.answers():
            found.append(f"router: {len(self.moves.answers())} live answers")
        return found


def expected_answers(spec: ClientSpec) -> tuple[Expected, ...]:
    """What the answers of a request have to be."""
    oracle = Oracle()
    return tuple(oracle.answer(spec.prompt, spec.sampling, i) for i in range(spec.n))

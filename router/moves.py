"""The running answers of a router: which of them move to another decode worker, and where to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdmesh.router.booking import Seat
from pdmesh.router.handoff import LiveAnswer, Surroundings
from pdmesh.router.leases import HeldLease
from pdmesh.router.move import Move
from pdmesh.router.policy import choose_target
from pdmesh.router.run import Run
from pdmesh.wire.errors import InvalidRequest, Overloaded, Unavailable
from pdmesh.wire.messages import WorkerRecord

MOST_MOVES = 2
"""Answers that one worker hands over at a time."""
RETRY_S = 0.25
MOST_RETRY_S = 2.0


def retry_after(tries: int) -> float:
    """Seconds until an answer that could not be moved ``tries`` times is tried again."""
    return min(RETRY_S * (tries - 1), MOST_RETRY_S)


@dataclass
class _Tries:
    """What moving an answer away has come to so far."""

    number: int = 0
    not_before: float = 0.0
    refused: set[str] = field(default_factory=set)
    """Instances of targets that did not do."""
    reason: str = ""


class Moves:
    """Answers that decode workers generate; those on workers that drain are moved away.

    Args:
        around: what an answer needs.
        rng: breaks ties between targets.
    """

    def __init__(self, around: Surroundings, rng: random.Random) -> None:
        self._around = around
        self._rng = rng
        self._live: dict[LiveAnswer, _Tries] = {}

    @asynccontextmanager
    async def live(
        self, run: Run, worker: WorkerRecord, lease: HeldLease, seat: Seat
    ) -> AsyncGenerator[LiveAnswer, None]:
        """An answer while it is generated; see LiveAnswer."""
        answer = LiveAnswer(run, worker, lease, seat, self._around, self._moved)
        self._live[answer] = _Tries()
        try:
            async with answer:
                yield answer
        finally:
            del self._live[answer]

    def answers(self) -> list[LiveAnswer]:
        """All of them, oldest first."""
        return list(self._live)

    def find(self, request_id: str, index: int | None) -> list[LiveAnswer]:
        """The running answers of a request, or one of them.

        Raises:
            InvalidRequest: there is none.
        """
        of_request = [a for a in self._live if a.run.request.request_id == request_id]
        found = [a for a in of_request if index in (None, a.run.index)]
        if not found:
            which = f"answer {index} of request" if of_request else "request"
            raise InvalidRequest(f"{which} {request_id!r} is not being generated here")
        return sorted(found, key=lambda a: a.run.index)

    def start(self, answer: LiveAnswer, target_id: str = "") -> Move:
        """Begins to move an answer, to a worker by name or to the best one.

        Raises:
            InvalidRequest: no such worker is ready, or it cannot take the answer.
            Overloaded: the answer's worker hands others over, or no target has room.
            Unavailable: the answer has not begun, is moving, or no target fits.
        """
        if answer.phase != "running":
            raise Unavailable(f"the answer is {answer.phase}; it can be moved when it is running")
        busy = sum(m.source.instance == answer.worker.instance for m in self._moves())
        if busy >= MOST_MOVES:
            raise Overloaded(
                f"{answer.worker.worker_id} hands {busy} answers over already; retry later"
            )
        target = self._named(answer, target_id) if target_id else self._best(answer)
        move = answer.offer(target)
        if move is None:
            raise Unavailable("the answer is over")
        return move

    def tick(self) -> None:
        """Moves answers away from workers that drain; gives up on targets that are gone."""
        view = self._around.view
        for answer in self.answers():
            move = answer.move
            if move is not None and not view.known(move.target.instance):
                answer.give_up(move, f"{move.target.worker_id} is gone")
        draining = {record.instance for record in view.draining("decode")}
        for answer in self.answers():
            over = answer.run.gate.finish is not None
            if answer.worker.instance in draining and answer.phase == "running" and not over:
                self._try(answer)

    def _try(self, answer: LiveAnswer) -> None:
        tries = self._live[answer]
        source = answer.worker
        busy = sum(m.source.instance == source.instance for m in self._moves())
        if busy >= MOST_MOVES or self._around.clock() < tries.not_before:
            return
        try:
            self.start(answer)
        except (Overloaded, Unavailable) as error:
            if error.message != tries.reason:  # said once
                tries.reason = error.message
                self._around.account.migration_failed(answer.run, source, None, error.message)
            self._postpone(tries)

    def _postpone(self, tries: _Tries) -> None:
        tries.number += 1
        tries.not_before = self._around.clock() + retry_after(tries.number)

    def _moved(self, answer: LiveAnswer, move: Move) -> None:
        tries = self._live.get(answer)
        if tries is not None and move.state == "failed":
            tries.refused.add(move.target.instance)
            self._postpone(tries)
        elif tries is not None:
            self._live[answer] = _Tries()
        if move.state != "failed":  # a place is free at the source; a failure waits for a poll
            asyncio.get_running_loop().call_soon(self.tick)

    def _moves(self) -> list[Move]:
        return [answer.move for answer in self._live if answer.move is not None]

    def _best(self, answer: LiveAnswer) -> WorkerRecord:
        run = answer.run
        candidates = self._around.view.candidates("decode", run.all_hashes())
        refused = self._live[answer].refused
        try:
            facts = run.move_facts(frozenset(refused))
            return choose_target(facts, answer.worker, candidates, self._rng)
        except (Overloaded, Unavailable):
            if not refused:
                raise
        refused.clear()  # all have been tried: the first may do now
        return choose_target(run.move_facts(frozenset()), answer.worker, candidates, self._rng)

    def _named(self, answer: LiveAnswer, target_id: str) -> WorkerRecord:
        ready = {record.worker_id: record for record in self._around.view.ready("decode")}
        target, source = ready.get(target_id), answer.worker
        if target is None:
            names = ", ".join(sorted(ready)) or "none"
            raise InvalidRequest(f"no decode worker {target_id!r} is ready; ready: {names}")
        if target.instance == source.instance:
            raise InvalidRequest(f"the answer is at {target_id} already")
        if target.page_format != source.page_format:
            reason = source.page_format.difference(target.page_format)
            raise InvalidRequest(f"{target_id} cannot take it from {source.worker_id}: {reason}")
        return target

"""The router's internal service: what runs, moving it by hand, and why it is where it is."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from pathlib import Path

from pdmesh.router.chooser import Chooser
from pdmesh.router.handoff import LiveAnswer
from pdmesh.router.move import Move
from pdmesh.router.moves import Moves
from pdmesh.wire.admin import (
    AnswerList,
    ExplainRequest,
    Explanation,
    MoveOrder,
    MoveReport,
    RunningAnswer,
)
from pdmesh.wire.errors import ConfigError, InvalidRequest, Overloaded, Unavailable
from pdmesh.wire.messages import Empty
from pdmesh.wire.rpc import Method

SERVICE = "router"


class AdminService:
    """Handlers of the internal service ``router``."""

    def __init__(self, moves: Moves, chooser: Chooser) -> None:
        self._moves = moves
        self._chooser = chooser

    def methods(self) -> list[Method]:
        return [
            Method("Answers", Empty, unary=self.answers),
            Method("MigrateAnswer", MoveOrder, stream=self.migrate),
            Method("Explain", ExplainRequest, unary=self.explain),
        ]

    async def answers(self, _: Empty) -> AnswerList:
        """The running answers, oldest first."""
        return AnswerList(answers=tuple(_described(a) for a in self._moves.answers()))

    async def explain(self, request: ExplainRequest) -> Explanation:
        """Every choice that was made for a request, and what each worker would have cost.

        Raises:
            InvalidRequest: no such request is remembered, or several are meant.
        """
        return self._chooser.explain(request.request_id)

    async def migrate(self, order: MoveOrder) -> AsyncGenerator[MoveReport, None]:
        """Moves the answers that are meant, one after the other. A caller that leaves changes
        nothing about the move under way.

        Raises:
            InvalidRequest: no such answer runs here, or no such target is ready.
        """
        for answer in self._moves.find(order.request_id, order.index):
            index, source = answer.run.index, answer.worker.worker_id
            if answer not in self._moves.answers():
                yield MoveReport(index=index, state="ended", source=source)
                continue
            try:
                move = self._moves.start(answer, order.target)
            except InvalidRequest:
                raise
            except (Overloaded, Unavailable) as error:
                yield MoveReport(index=index, state="failed", source=source, reason=error.message)
                continue
            yield _report(index, move)
            await move.done.wait()
            yield _report(index, move)


def _described(answer: LiveAnswer) -> RunningAnswer:
    run = answer.run
    return RunningAnswer(
        request_id=run.request.request_id,
        index=run.index,
        worker_id=answer.worker.worker_id,
        phase=answer.phase,
        prompt_tokens=len(run.request.token_ids),
        tokens=len(run.gate.tokens),
        migrations=run.migrations,
    )


def _report(index: int, move: Move) -> MoveReport:
    return MoveReport(
        index=index,
        state=move.state,
        source=move.source.worker_id,
        target=move.target.worker_id,
        reason=move.reason,
        pause_ms=move.pause_s * 1e3,
    )


def write_address(path: Path, address: str) -> None:
    """Leaves the service's address in a file, which is whole whenever it is there.

    Raises:
        ConfigError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        part.write_text(f"{address}\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the admin file {path}: {error.strerror}") from error

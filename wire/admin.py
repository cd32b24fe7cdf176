"""Messages of a router's internal service (``router``): running answers, and moving them.

Methods: ``Answers`` (Empty -> AnswerList), ``MigrateAnswer`` (MoveOrder -> stream of MoveReport).
"""

from __future__ import annotations

from typing import Literal

import msgspec

AnswerPhase = Literal["starting", "running", "moving", "activating"]
"""Without a token from its decode worker yet; generating; a handoff is open; handed over, and the
target has not said yet that it generates."""
MoveState = Literal["moving", "moved", "failed", "ended"]
"""``ended``: the answer was over first."""


class RunningAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer that a decode worker generates."""

    request_id: str
    index: int
    worker_id: str
    """Of the decode worker."""
    phase: AnswerPhase
    prompt_tokens: int
    tokens: int
    """Of the answer, so far."""
    migrations: int = 0


class AnswerList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The running answers of a router, oldest first."""

    answers: tuple[RunningAnswer, ...]


class MoveOrder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Move answers of a request to another decode worker, one after the other."""

    request_id: str
    index: int | None = None
    """None: all that are running."""
    target: str = ""
    """Worker id; empty: the router chooses."""


class MoveReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the move of one answer is; the last one of an answer is not ``moving``."""

    index: int
    state: MoveState
    source: str
    target: str = ""
    """Worker ids."""
    reason: str = ""
    """Why it failed."""
    pause_ms: float = 0.0
    """From the source's last token to the target's first, as the router saw them."""

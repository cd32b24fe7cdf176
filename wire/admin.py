"""Messages of a router's internal service (``router``): running answers, and moving them.

Methods: ``Answers`` (Empty -> AnswerList), ``MigrateAnswer`` (MoveOrder -> stream of MoveReport),
``Explain`` (ExplainRequest -> Explanation).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdmesh.wire.messages import Role

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


class ExplainRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why did a request go where it went?"""

    request_id: str
    """Or its beginning, if no other begins so."""


class CandidateScore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker as it stood when a choice was made."""

    worker_id: str
    role: Role
    chosen: bool
    owned_tokens: int
    """Leading tokens of the prompt that it had."""
    requests: int
    """That were there, of this router and of others."""
    cost: float
    """The cheapest is chosen. Its unit is the policy's: milliseconds, or tokens."""
    free_pages: int | None = None
    """That could be reserved; None: it had not said."""
    terms: dict[str, float] = {}
    """What the cost is the sum of, where the policy says."""
    expected: bool = False
    """Some of ``owned_tokens`` it was only about to have."""


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of a prefill and a decode worker."""

    answer: int
    attempt: int
    seconds_ago: float
    prompt_tokens: int
    """The client's prompt, and what had been generated before the attempt."""
    tokens_to_compute: int
    candidates: tuple[CandidateScore, ...]
    waits: bool = False
    """Every decode worker was full: the request waited at the one chosen."""
    costs: dict[str, float] = {}
    """Milliseconds by name from which the terms were worked out, as fitted by then."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All choices that were made for one request, in order."""

    request_id: str
    policy: str
    choices: tuple[Choice, ...]

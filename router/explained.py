"""Why the last requests went where they went."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pdmesh.router.policies.costs import Costs
from pdmesh.router.policy import Route, Score
from pdmesh.wire.admin import CandidateScore, Choice, Explanation
from pdmesh.wire.errors import InvalidRequest

MOST_REQUESTS = 512
MOST_CHOICES = 16
"""Of one request; the first ones are kept."""


@dataclass(frozen=True)
class _Chosen:
    at: float
    answer: int
    attempt: int
    prompt_tokens: int
    route: Route
    costs: Costs


class Decisions:
    """Remembers the choices for the last requests; what they say is made when somebody asks.

    Args:
        policy: its name.
        most: requests that are remembered.
    """

    def __init__(self, policy: str, most: int = MOST_REQUESTS) -> None:
        self._policy = policy
        self._most = most
        self._chosen: OrderedDict[str, list[_Chosen]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chosen)

    def note(
        self,
        request_id: str,
        *,
        answer: int,
        attempt: int,
        prompt_tokens: int,
        route: Route,
        costs: Costs,
        now: float,
    ) -> None:
        """A choice was made, with these costs; ``now`` in seconds."""
        choices = self._chosen.setdefault(request_id, [])
        if len(choices) < MOST_CHOICES:
            choices.append(_Chosen(now, answer, attempt, prompt_tokens, route, costs))
        self._chosen.move_to_end(request_id)
        while len(self._chosen) > self._most:
            self._chosen.popitem(last=False)

    def explain(self, beginning: str, now: float) -> Explanation:
        """The choices of the one request whose id begins so.

        Raises:
            InvalidRequest: none is remembered, or several are.
        """
        request_id = self._find(beginning)
        choices = tuple(self._choice(chosen, now) for chosen in self._chosen[request_id])
        return Explanation(request_id=request_id, policy=self._policy, choices=choices)

    def _find(self, beginning: str) -> str:
        if beginning in self._chosen:
            return beginning
        found = [name for name in self._chosen if beginning and name.startswith(beginning)]
        if len(found) == 1:
            return found[0]
        if found:
            some = ", ".join(found[:5])
            raise InvalidRequest(
                f"{len(found)} requests begin with {beginning!r}: {some}; say more"
            )
        last = ", ".join(list(self._chosen)[-3:]) or "none"
        raise InvalidRequest(
            f"no request {beginning!r} among the last {self._most} of this router; newest: {last}"
        )

    def _choice(self, chosen: _Chosen, now: float) -> Choice:
        route = chosen.route
        ours = (route.prefill.instance, route.decode.instance)
        priced = any(score.terms for score in route.chosen)
        return Choice(
            answer=chosen.answer,
            attempt=chosen.attempt,
            seconds_ago=max(0.0, now - chosen.at),
            prompt_tokens=chosen.prompt_tokens,
            tokens_to_compute=route.tokens_to_compute,
            waits=route.wait,
            candidates=tuple(_scored(score, ours) for score in route.scores),
            costs=chosen.costs.named() if priced else {},
        )


def _scored(score: Score, chosen: tuple[str, str]) -> CandidateScore:
    candidate = score.candidate
    record = candidate.record
    return CandidateScore(
        worker_id=record.worker_id,
        role=record.role,
        chosen=record.instance in chosen,
        owned_tokens=score.owned_tokens,
        expected=candidate.expected_pages > candidate.owned_pages,
        requests=candidate.own_requests + candidate.other_requests,
        free_pages=candidate.free_pages,
        cost=score.cost,
        terms=dict(score.terms),
    )

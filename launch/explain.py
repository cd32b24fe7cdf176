"""``pdmesh explain``: why a request went to the workers it went to."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

import msgspec

from pdmesh.launch.answers import admin_addresses
from pdmesh.wire.admin import CandidateScore, Choice, ExplainRequest, Explanation
from pdmesh.wire.errors import ConfigError, InvalidRequest, WorkerLost
from pdmesh.wire.rpc import Client

_CALL_S = 10.0
_SHOWN = 8
"""Workers of a role that are shown without --all: the cheapest."""


def explain(arguments: argparse.Namespace) -> int:
    """Prints every choice made for a request. Returns the exit code."""
    found = asyncio.run(_explanation(admin_addresses(arguments), arguments.request))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(as_text(found, None if arguments.all else _SHOWN))
    return 0


def as_text(found: Explanation, most: int | None = None) -> str:
    """An explanation for people, with at most ``most`` workers of each role a choice."""
    lines = [f"request {found.request_id}, policy {found.policy}"]
    for choice in found.choices:
        lines += ["", _title(choice)]
        if choice.costs:
            known = (f"{name} {_ms(value)}" for name, value in choice.costs.items() if value)
            lines.append(f"  costs in ms: {', '.join(known)}")
        for role in ("prefill", "decode"):
            scores = sorted(
                (c for c in choice.candidates if c.role == role),
                key=lambda c: (not c.chosen, c.cost, c.worker_id),
            )
            lines += _table(role, scores[:most])
            if len(scores) > len(scores[:most]):
                lines.append(f"  and {len(scores) - len(scores[:most])} more; --all shows them")
    if any(c.expected for choice in found.choices for c in choice.candidates):
        lines += ["", "* about to have: sent there, and not told by the worker yet"]
    return "\n".join(lines)


def _ms(value: float) -> str:
    """Three digits, and no exponent where a number is large."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _title(choice: Choice) -> str:
    who = f"answer {choice.answer}, attempt {choice.attempt}, {choice.seconds_ago:.1f} s ago"
    work = f"{choice.prompt_tokens} prompt tokens, {choice.tokens_to_compute} of them to compute"
    return f"{who}: {work}{'; waits for room' if choice.waits else ''}"


def _table(role: str, scores: Sequence[CandidateScore]) -> list[str]:
    if not scores:
        return []
    terms = list(dict.fromkeys(name for score in scores for name in score.terms))
    head = ("", role, "owned", "requests", "free pages", "cost", *terms)
    rows = [head, *(_row(score, terms) for score in scores)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join((*left, *right)).rstrip())
    return lines


def _row(score: CandidateScore, terms: Sequence[str]) -> tuple[str, ...]:
    free = "?" if score.free_pages is None else str(score.free_pages)
    owned = f"{score.owned_tokens}{'*' if score.expected else ''}"
    start = ("->" if score.chosen else "", score.worker_id, owned)
    values = (f"{score.terms.get(name, 0.0):.1f}" for name in terms)
    return (*start, str(score.requests), free, f"{score.cost:.1f}", *values)


async def _explanation(addresses: Sequence[str], request: str) -> Explanation:
    """Asks the routers one after the other: the one that served the request knows.

    Raises:
        ConfigError: none remembers it, or several requests are meant.
        WorkerLost: no router can be reached.
    """
    unknown: InvalidRequest | None = None
    lost: WorkerLost | None = None
    for address in addresses:
        client = Client(address, "router")
        try:
            question = ExplainRequest(request_id=request)
            return await client.unary("Explain", question, Explanation, timeout=_CALL_S)
        except InvalidRequest as error:
            unknown = error
        except WorkerLost as error:
            lost = error
        finally:
            await client.close()
    if unknown is not None:
        raise ConfigError(unknown.message)
    assert lost is not None
    raise lost

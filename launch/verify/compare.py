"""Two runs of one case beside each other. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Answer:
    """One answer as the client got it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    """Of each token where asked for: its own, and the likeliest ids with theirs."""
    text: str = ""
    finish: str = ""


def difference(alone: list[Answer], moved: list[Answer]) -> str | None:
    """How the answers of a moved run differ from those left alone, in a sentence; None if not."""
    if len(alone) != len(moved):
        return f"{len(moved)} answers came, {len(alone)} were due"
    for index, (one, other) in enumerate(zip(alone, moved, strict=True)):
        which = f"answer {index}: " if len(alone) > 1 else ""
        found = _difference(one, other)
        if found is not None:
            return which + found
    return None


def _difference(alone: Answer, moved: Answer) -> str | None:
    pairs = zip(alone.token_ids, moved.token_ids, strict=False)
    for position, (left, right) in enumerate(pairs):
        if left != right:
            return f"token {position} is {right}, left alone it is {left}"
    if len(alone.token_ids) != len(moved.token_ids):
        return f"{len(moved.token_ids)} tokens, left alone {len(alone.token_ids)}"
    if alone.logprobs != moved.logprobs:
        position = next(
            i
            for i in range(max(len(alone.logprobs), len(moved.logprobs)))
            if alone.logprobs[i : i + 1] != moved.logprobs[i : i + 1]
        )
        return f"the log-probability of token {position} differs"
    if alone.text != moved.text:
        return f"the text is {moved.text!r}, left alone {alone.text!r}"
    if alone.finish != moved.finish:
        return f"it ended with {moved.finish!r}, left alone with {alone.finish!r}"
    return None


def beyond_rounding(
    alone: list[Answer], moved: list[Answer], tolerance: float, *, greedy: bool
) -> str | None:
    """As ``difference``, of answers that another arithmetic computed on with; None within rounding.

    Log-probabilities may differ by ``tolerance``. So a token may be another one where two were
    nearly as likely (``greedy``), or a random number fell nearly between two; what follows such a
    token is not compared.
    """
    if len(alone) != len(moved):
        return difference(alone, moved)
    for one, other in zip(alone, moved, strict=True):
        found = _beyond_rounding(one, other, tolerance, greedy)
        if found is not None:
            return found
    return None


def _beyond_rounding(alone: Answer, moved: Answer, tolerance: float, greedy: bool) -> str | None:
    pairs = zip(alone.token_ids, moved.token_ids, strict=False)
    fork = next((i for i, (left, right) in enumerate(pairs) if left != right), None)
    end = None if fork is None else fork + 1
    entries = zip(alone.logprobs[:end], moved.logprobs[:end], strict=False)
    for position, (left, right) in enumerate(entries):
        here, there = _by_token(left), _by_token(right)
        off = max((abs(here[t] - there[t]) for t in here.keys() & there.keys()), default=0.0)
        if off > tolerance:
            return f"the log-probabilities of token {position} are {off:.2g} apart"
    if fork is None:
        same = Answer(alone.token_ids, [], alone.text, alone.finish)
        return _difference(same, Answer(moved.token_ids, [], moved.text, moved.finish))
    if greedy and fork < len(alone.logprobs):
        found = _by_token(alone.logprobs[fork])
        gap = max(found.values()) - found.get(moved.token_ids[fork], float("-inf"))
        if gap > 2 * tolerance:
            return f"token {fork} is {moved.token_ids[fork]}, {gap:.2g} less likely than the best"
    return None


def _by_token(entry: tuple[float, tuple[int, ...], tuple[float, ...]]) -> dict[int, float]:
    return dict(zip(entry[1], entry[2], strict=True))


def checksum_difference(
    source: tuple[str, tuple[int, ...]], target: tuple[str, tuple[int, ...]]
) -> str | None:
    """Which page of a common prefix differs between two workers (name, checksums by page)."""
    for page, (one, other) in enumerate(zip(source[1], target[1], strict=False)):
        if one != other:
            return f"page {page} at {target[0]} is not page {page} at {source[0]}"
    return None

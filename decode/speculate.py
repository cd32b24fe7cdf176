"""What a verified step yields: accepted tokens, and whether the sequence ends. Pure.

A draft is accepted iff it equals the token that the target model chooses at its position, greedy
or sampled; so speculation never changes an output (chain case of speculative decoding, Leviathan
et al. 2023, with the deterministic coupling that counter-based sampling gives).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.wire.messages import FinishReason


@dataclass(frozen=True)
class Accepted:
    """Result of one step of one sequence.

    ``tokens`` are new output tokens in order; ``stop_token`` ended the sequence and is not among
    them; ``rows`` of the step's rows hold valid latents.
    """

    tokens: tuple[int, ...]
    rows: int
    drafts_accepted: int
    finish: FinishReason | None
    stop_token: int | None


def accept(
    chosen: Sequence[int], drafts: Sequence[int], room: int, stop_tokens: frozenset[int]
) -> Accepted:
    """Walks the chosen tokens until a draft was wrong, a stop token came or the room is used.

    Args:
        chosen: the target's token after each row; row 0 is the known last token, row i > 0 is
            ``drafts[i - 1]``.
        drafts: the drafted tokens, one fewer than ``chosen``.
        room: how many more tokens the request may get, at least 1.
        stop_tokens: tokens that end the sequence.
    """
    tokens: list[int] = []
    for row, token in enumerate(chosen):
        if row and drafts[row - 1] != tokens[-1]:
            return Accepted(tuple(tokens), row, row - 1, None, None)
        if token in stop_tokens:
            return Accepted(tuple(tokens), row + 1, row, "stop", token)
        tokens.append(token)
        if len(tokens) == room:
            return Accepted(tuple(tokens), row + 1, row, "length", None)
    return Accepted(tuple(tokens), len(chosen), len(chosen) - 1, None, None)

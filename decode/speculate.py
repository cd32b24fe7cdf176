"""What a verified step yields: accepted tokens, and whether the sequence ends. Pure.

A draft is accepted iff it equals the token that the target model chooses at its position, greedy
or sampled; so speculation never changes an output (speculative decoding, Leviathan et al. 2023,
with the deterministic coupling that counter-based sampling gives; trees of drafts as in
SpecInfer, Miao et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.model.tree import TokenTree
from pdmesh.wire.messages import FinishReason


@dataclass(frozen=True)
class Accepted:
    """Result of one step of one sequence.

    ``tokens`` are new output tokens in order; ``stop_token`` ended the sequence and is not among
    them. ``path`` are the accepted nodes of the tree, root first: their rows hold what the
    sequence keeps.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...]
    drafts_accepted: int
    finish: FinishReason | None = None
    stop_token: int | None = None

    def cut(self, count: int) -> Accepted:
        """The same with the first ``count`` tokens only, as the end of the sequence."""
        kept = self.path[:count]
        return Accepted(self.tokens[:count], kept, len(kept) - 1, "stop", None)


def accept(
    tree: TokenTree, chosen: Sequence[int], room: int, stop_tokens: frozenset[int]
) -> Accepted:
    """Walks down the tree until no draft is right, a stop token came or the room is used.

    Args:
        tree: the drafts under the last known token.
        chosen: the target's token after each node of the tree.
        room: how many more tokens the request may get, at least 1.
        stop_tokens: tokens that end the sequence.
    """
    tokens: list[int] = []
    path: list[int] = []
    node: int | None = 0
    while node is not None:
        path.append(node)
        token = chosen[node]
        if token in stop_tokens:
            return Accepted(tuple(tokens), tuple(path), len(path) - 1, "stop", token)
        tokens.append(token)
        if len(tokens) == room:
            return Accepted(tuple(tokens), tuple(path), len(path) - 1, "length")
        node = _child(tree, node, token)
    return Accepted(tuple(tokens), tuple(path), len(path) - 1)


def _child(tree: TokenTree, node: int, token: int) -> int | None:
    """The node under ``node`` that drafts ``token``."""
    for child in range(node + 1, len(tree.tokens)):
        if tree.parents[child] == node and tree.tokens[child] == token:
            return child
    return None


def judged(tree: TokenTree, accepted: Accepted) -> tuple[int, int]:
    """How many depths of drafts were put to the test, and how many of them were right.

    Nothing below a wrong draft was tested, nor what the end of the sequence hides.
    """
    right = accepted.drafts_accepted
    missed = accepted.finish is None and accepted.path[-1] in tree.parents
    return right + missed, right

"""Trees of draft tokens: several guesses of what follows the last known token, verified at once.

Miao et al., "SpecInfer" (arXiv:2305.09781). A tree is written as parents: `parents[i]` is the node
before node i, or -1 where that is the last token with a latent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens under the last known token.

    Attributes:
        tokens: tokens[0] is the last known token, the root.
        parents: parents[0] is -1, and 0 <= parents[i] < i for the others.

    Raises:
        ValueError: there is no root, or a parent is out of range.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens and {len(self.parents)} parents")
        check_parents(self.parents)
        if any(parent < 0 for parent in self.parents[1:]):
            raise ValueError("only the first node of a tree has no parent")

    @staticmethod
    def chain(tokens: Sequence[int]) -> "TokenTree":
        """Each token follows the one before it."""
        return TokenTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return len(self.parents) == 1 or self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Steps from the root to each node; 0 for the root."""
        return node_depths(self.parents)

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root to `node`, both included."""
        return node_path(self.parents, node)


def check_parents(parents: Sequence[int]) -> None:
    """Raises ValueError if a node's parent is neither -1 nor a node before it."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"the parent of node {node} is {parent}; it must come before its node")


def node_depths(parents: Sequence[int]) -> tuple[int, ...]:
    """How many nodes stand above each node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return tuple(depths)


def node_path(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The nodes from the topmost one to `node`, both included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))


def node_chains(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Every node once, as chains of a node, its first child, that one's first child, and so on."""
    chains: list[list[int]] = []
    chain_of: list[int] = []
    for node, parent in enumerate(parents):
        if parent >= 0 and chains[chain_of[parent]][-1] == parent:
            chain_of.append(chain_of[parent])
            chains[chain_of[node]].append(node)
        else:
            chain_of.append(len(chains))
            chains.append([node])
    return [tuple(chain) for chain in chains]

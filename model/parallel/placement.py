"""Which routed experts stand on which rank, redundant copies included.

A *logical* expert is one of the model's; a *physical* expert is a copy of one in a slot of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pdmesh.wire.errors import ConfigError

Slots = tuple[tuple[int, ...], ...]
"""For each rank the logical experts in its slots, in order."""


@dataclass(frozen=True)
class Move:
    """`rank` has to get logical expert `expert` of MoE layer `layer`, which it did not hold."""

    layer: int
    rank: int
    expert: int


@dataclass(frozen=True)
class Placement:
    """The slots of every rank in every MoE layer (the MTP layer's is the last).

    A rank may have another number of slots than another, or none; an expert may stand twice on one.

    Attributes:
        num_experts: logical experts a layer.
        layers: the slots, one entry a MoE layer.

    Raises:
        ConfigError: a layer lacks an expert, names one that does not exist, or has another number
            of ranks than the first.
    """

    num_experts: int
    layers: tuple[Slots, ...]

    def __post_init__(self) -> None:
        for number, slots in enumerate(self.layers):
            if len(slots) != len(self.layers[0]):
                raise ConfigError(
                    f"MoE layer {number} is placed on {len(slots)} ranks, the first on "
                    f"{len(self.layers[0])}"
                )
            held = {expert for rank in slots for expert in rank}
            if held != set(range(self.num_experts)):
                wrong = sorted(held ^ set(range(self.num_experts)))
                raise ConfigError(
                    f"MoE layer {number} must hold each of the experts 0 to "
                    f"{self.num_experts - 1}; wrong: {', '.join(map(str, wrong[:8]))}"
                )

    @staticmethod
    def even(num_layers: int, num_experts: int, num_ranks: int) -> Placement:
        """Every expert once, in order, as many on each rank.

        Raises:
            ConfigError: the ranks do not divide the experts.
        """
        return Placement.cut([range(num_experts)] * num_layers, num_experts, num_ranks)

    @staticmethod
    def cut(physical: Sequence[Sequence[int]], num_experts: int, num_ranks: int) -> Placement:
        """From the logical expert of each physical one, [layers][physical], cut into equal ranks.

        Raises:
            ConfigError: the ranks do not divide the physical experts, or there are too few.
        """
        layers = []
        for row in physical:
            if len(row) % num_ranks:
                raise ConfigError(
                    f"{len(row)} physical experts cannot be shared evenly by {num_ranks} ranks"
                )
            if len(row) < num_experts:
                raise ConfigError(
                    f"{len(row)} physical experts cannot hold {num_experts} logical ones"
                )
            size = len(row) // num_ranks
            layers.append(
                tuple(
                    tuple(int(e) for e in row[r * size : (r + 1) * size]) for r in range(num_ranks)
                )
            )
        return Placement(num_experts, tuple(layers))

    @property
    def num_ranks(self) -> int:
        """Ranks, those without a slot included."""
        return len(self.layers[0]) if self.layers else 0

    def copies(self, layer: int) -> list[list[tuple[int, int]]]:
        """The (rank, slot) of every copy of each logical expert of a layer, lowest rank first."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.layers[layer]):
            for slot, expert in enumerate(experts):
                found[expert].append((rank, slot))
        return found

    def moves_from(self, old: Placement) -> list[Move]:
        """What ranks have to load to get from `old` to this one; a copy within a rank is free."""
        return [
            Move(layer, rank, expert)
            for layer, (before, after) in enumerate(zip(old.layers, self.layers, strict=True))
            for rank, experts in enumerate(after)
            for expert in sorted(set(experts) - set(before[rank]))
        ]

    def without(self, dead: Collection[int]) -> Placement:
        """The slots of `dead` ranks given up, each expert they alone held put elsewhere.

        Such an expert takes the slot of a copy that is not the only one, of the expert with most
        copies, on a rank that took fewest so far; if no such slot is left, it gets a new slot on
        the rank with fewest. Other slots stay as they are, so little has to be loaded.

        Raises:
            ConfigError: no rank is left.
        """
        alive = [rank for rank in range(self.num_ranks) if rank not in dead]
        if not alive:
            raise ConfigError("no rank is left to hold experts")
        return Placement(
            self.num_experts,
            tuple(_without(slots, alive, self.num_experts) for slots in self.layers),
        )


def _without(slots: Slots, alive: Sequence[int], num_experts: int) -> Slots:
    kept = {rank: list(slots[rank]) for rank in alive}
    counts = Counter(expert for experts in kept.values() for expert in experts)
    taken = dict.fromkeys(alive, 0)
    for expert in range(num_experts):
        if counts[expert]:
            continue
        spare = [
            (-counts[old], taken[rank], rank, slot)
            for rank, experts in kept.items()
            for slot, old in enumerate(experts)
            if counts[old] > 1
        ]
        if spare:
            _, _, rank, slot = min(spare)
            counts[kept[rank][slot]] -= 1
            kept[rank][slot] = expert
        else:
            rank = min(alive, key=lambda r: (len(kept[r]), r))
            kept[rank].append(expert)
        counts[expert] += 1
        taken[rank] += 1
    return tuple(tuple(kept.get(rank, ())) for rank in range(len(slots)))

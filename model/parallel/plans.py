"""Placements of experts that ranks of separate processes change while they serve.

The lowest of the members leads: it adds up the rows that all of them sent to each expert, and where
the placement has become stale it tells all a new one, under a number that nobody else gives. A step
uses the newest that all its members know (see ``assembly``), so nobody waits for a plan, and none
is used by a part of the ranks only. What a placement is changes no bit of any result.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pdmesh.model.parallel.balancer import Balancer, BalanceRule
from pdmesh.model.parallel.placement import Placement
from pdmesh.wire.errors import ConfigError

KEPT = 4
"""Plans that are remembered besides the first: a rank may be a few behind."""


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """A placement under its number."""

    number: int
    num_experts: int
    layers: tuple[tuple[tuple[int, ...], ...], ...]


class Plans:
    """What one rank knows. Not thread-safe.

    Args:
        rank, size: its number, and how many there are.
        first: plan 0, which every rank has from the start.
        rule: when to make another; None makes none.

    Attributes:
        deferred: a plan counts as known only once it is `prepared`: then this rank holds the
            weights that it takes, and nobody waits while they are read.
    """

    def __init__(self, rank: int, size: int, first: Placement, rule: BalanceRule | None) -> None:
        self.deferred = False
        self._rank = rank
        self._size = size
        self._known = {0: first}
        self._waiting: set[int] = set()
        self._rule = rule
        self._balancer: tuple[int, Balancer] | None = None
        self._rows = self._none()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the plans that are known, and prepared."""
        return tuple(number for number in self._known if number not in self._waiting)

    @property
    def waiting(self) -> int | None:
        """The newest plan, if it is still to be prepared; those before it need not be any more."""
        newest = max(self._known)
        return newest if newest in self._waiting else None

    def prepared(self, number: int) -> None:
        """This plan can be used."""
        self._waiting.discard(number)

    @property
    def told(self) -> tuple[Plan, ...]:
        """For a rank that has come: all that are known but the first."""
        return tuple(
            Plan(number, placement.num_experts, placement.layers)
            for number, placement in self._known.items()
            if number
        )

    def placement(self, number: int) -> Placement:
        """The placement that is plan ``number``."""
        return self._known[number]

    def learn(self, plan: Plan) -> None:
        """Another rank's plan.

        Raises:
            ConfigError: it does not fit this group.
        """
        placement = Placement(plan.num_experts, plan.layers)
        first = self._known[0]
        shape = (len(placement.layers), placement.num_experts, placement.num_ranks)
        if plan.number < 1 or shape != (len(first.layers), first.num_experts, first.num_ranks):
            raise ConfigError(f"plan {plan.number} is for another group of ranks")
        self._keep(plan.number, placement)

    def count(self, rows: Tensor) -> None:
        """Rows [MoE layers, experts] that a rank sent, itself or another."""
        if tuple(rows.shape) == self._rows.shape:
            self._rows += rows.numpy()

    def lead(self, current: int, tell: Callable[[Plan], None]) -> None:
        """The interval is over: makes another plan if ``current`` has become stale."""
        rule = self._rule
        if rule is None:
            return
        if self._balancer is None or self._balancer[0] != current:
            window = None if self._balancer is None else self._balancer[1]
            balancer = window or Balancer(self._known[current], rule)
            balancer.use(self._known[current])
            self._balancer = current, balancer
        balancer = self._balancer[1]
        balancer.observe(self._rows)
        self._rows = self._none()
        if max(self._known) > current:
            return  # one is on its way
        proposal = balancer.proposal()
        if proposal is None:
            return
        number = (max(self._known) // self._size + 1) * self._size + self._rank
        self._keep(number, proposal)
        tell(Plan(number, proposal.num_experts, proposal.layers))

    def _keep(self, number: int, placement: Placement) -> None:
        if self.deferred and number not in self._known:
            self._waiting.add(number)
        self._known[number] = placement
        for old in sorted(self._known)[1:-KEPT]:
            del self._known[old]
            self._waiting.discard(old)

    def _none(self) -> NDArray[np.int64]:
        first = self._known[0]
        return np.zeros((len(first.layers), first.num_experts), dtype=np.int64)


def first_placement(num_layers: int, num_experts: int, num_ranks: int, redundant: int) -> Placement:
    """Every expert once, in order, and ``redundant`` further copies of a layer's experts, in turn.

    Raises:
        ConfigError: the ranks do not divide the copies.
    """
    count = num_experts + redundant
    if count % num_ranks:
        raise ConfigError(
            f"{num_experts} experts and {redundant} redundant copies cannot be shared evenly by "
            f"{num_ranks} ranks"
        )
    if not redundant:
        return Placement.even(num_layers, num_experts, num_ranks)
    share = count // num_ranks
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in range(num_experts):
        held[expert * num_ranks // num_experts].append(expert)
    turns = sorted((experts.index(e), r, e) for r, experts in enumerate(held) for e in experts)
    for copy in range(redundant):
        expert = turns[copy % num_experts][2]
        free = [rank for rank in range(num_ranks) if len(held[rank]) < share]
        held[min(free, key=lambda r: (expert in held[r], len(held[r]), r))].append(expert)
    slots = tuple(tuple(experts) for experts in held)
    return Placement(num_experts, (slots,) * num_layers)

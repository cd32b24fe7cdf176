"""Decides while serving when a placement of experts no longer fits, and what to use instead."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdmesh.model.parallel.eplb import balance_experts
from pdmesh.model.parallel.placement import Placement, Slots
from pdmesh.wire.errors import ConfigError

Loads = NDArray[np.float64]


@dataclass(frozen=True)
class BalanceRule:
    """When and how to place experts anew.

    Attributes:
        num_physical: copies of all experts of a layer.
        num_groups: groups of experts, for the hierarchical policy.
        num_hosts: hosts of the ranks.
        window: intervals of load that count.
        min_rows: rows a layer needs before anything is decided.
        tolerance: a layer's plan is stale once its busiest rank has so many times the load that it
            would have under a new one.
        drift: share of a layer's rows (mean over layers) that an interval sends to other experts
            than those before it, beyond what chance makes of so few rows; from there on these are
            of another workload, and forgotten.
    """

    num_physical: int
    num_groups: int = 1
    num_hosts: int = 1
    window: int = 8
    min_rows: int = 2048
    tolerance: float = 1.1
    drift: float = 0.05


class Balancer:
    """Watches the load of a placement's experts. Nothing here knows a clock.

    Args:
        placement: what is in use.
        rule: see there.

    Raises:
        ConfigError: the rule's hosts do not divide the ranks.
    """

    def __init__(self, placement: Placement, rule: BalanceRule) -> None:
        if placement.num_ranks % rule.num_hosts:
            raise ConfigError(
                f"{rule.num_hosts} hosts do not divide {placement.num_ranks} ranks of experts"
            )
        self.placement = placement
        self._rule = rule
        self._window: deque[Loads] = deque(maxlen=rule.window)

    def observe(self, load: ArrayLike) -> bool:
        """Take in the rows of one interval, [layers, experts].

        Returns:
            Whether the intervals before it were forgotten because it is of another workload.
        """
        rows = np.asarray(load, dtype=np.float64)
        changed = self._differs(rows)
        if changed:
            self._window.clear()
        self._window.append(rows)
        return changed

    def load(self) -> Loads:
        """Rows [layers, experts] of the intervals that count."""
        layers, experts = len(self.placement.layers), self.placement.num_experts
        return sum(self._window, np.zeros((layers, experts)))

    def imbalance(self) -> Loads:
        """Of each layer the busiest rank's rows over the mean of all ranks, in the window."""
        return imbalance(self.placement, self.load())

    def proposal(self) -> Placement | None:
        """A placement that is new for the layers whose plan is stale, or None if none is.

        It is not in use before `use` says so. In a new layer ranks are numbered so that many
        experts stay where they are. Ranks without any slot stay without.
        """
        load = self.load()
        enough = load.sum(axis=1) >= self._rule.min_rows
        if not enough.any():
            return None
        fresh = place(load, self.placement.num_ranks, self._rule, self.placement)
        now, then = imbalance(self.placement, load), imbalance(fresh, load)
        stale = enough & (now > self._rule.tolerance * then)
        if not stale.any():
            return None
        pairs = zip(stale, fresh.layers, self.placement.layers, strict=True)
        return Placement(
            self.placement.num_experts, tuple(new if use else old for use, new, old in pairs)
        )

    def use(self, placement: Placement) -> None:
        """This placement is in use now."""
        self.placement = placement

    def _differs(self, rows: Loads) -> bool:
        if not self._window:
            return False
        before, after = self.load(), rows
        enough = (before.sum(axis=1) >= self._rule.min_rows) & (
            after.sum(axis=1) >= self._rule.min_rows
        )
        if not enough.any():
            return False
        totals = [x[enough].sum(axis=1) for x in (before, after)]
        shares = [x[enough] / t[:, None] for x, t in zip((before, after), totals, strict=True)]
        distance = np.abs(shares[0] - shares[1]).sum(axis=1) / 2
        # What two draws from equal shares come to in the mean: E |normal| for each expert.
        chance = np.sqrt(rows.shape[1] / (2 * np.pi) * (1 / totals[0] + 1 / totals[1]))
        return float((distance - chance).mean()) > self._rule.drift


def place(
    load: ArrayLike, num_ranks: int, rule: BalanceRule, near: Placement | None = None
) -> Placement:
    """EPLB's placement for `load` [layers, experts], numbered like `near` as far as it can be.

    Ranks that hold nothing in `near` get nothing. The others then make one host, with as many
    further copies as it takes to give each the same number.

    Raises:
        ConfigError: copies, ranks, hosts and groups do not divide one another.
    """
    loads = np.asarray(load)
    alive = list(range(num_ranks)) if near is None else _holders(near)
    if len(alive) < num_ranks:
        physical = -(-rule.num_physical // len(alive)) * len(alive)
        rule = replace(rule, num_physical=physical, num_groups=1, num_hosts=1)
    args = (rule.num_physical, rule.num_groups, rule.num_hosts, len(alive))
    fresh = Placement.cut(
        balance_experts(loads, *args).logical.tolist(), loads.shape[1], len(alive)
    )
    if near is None:
        return fresh
    if len(alive) < num_ranks:
        layers = []
        for slots in fresh.layers:
            held = dict(zip(alive, slots, strict=True))
            layers.append(tuple(held.get(rank, ()) for rank in range(num_ranks)))
        fresh = Placement(fresh.num_experts, tuple(layers))
    whole = rule.num_groups % rule.num_hosts != 0
    together = num_ranks if whole else num_ranks // rule.num_hosts
    pairs = zip(fresh.layers, near.layers, strict=True)
    return Placement(fresh.num_experts, tuple(_renumbered(*pair, together) for pair in pairs))


def imbalance(placement: Placement, load: ArrayLike) -> Loads:
    """Of each layer the busiest rank's rows over the mean of the ranks that hold experts.

    load [layers, experts]; copies of an expert share its rows evenly. 1 where there is no load.
    """
    found = []
    for slots, row in zip(placement.layers, np.asarray(load, dtype=np.float64), strict=True):
        flat = np.concatenate([np.asarray(experts, dtype=np.int64) for experts in slots])
        each = row / np.bincount(flat, minlength=len(row))
        ranks = np.array([each[list(experts)].sum() for experts in slots if experts])
        found.append(ranks.max() / ranks.mean() if ranks.sum() > 0 else 1.0)
    return np.array(found)


def _common(new: tuple[int, ...], old: tuple[int, ...], same: bool) -> int:
    """Experts that need not be loaded; ranks without slots go with themselves before all others."""
    if not new:
        return 1 << 30 if same else -1
    return len(set(new) & set(old))


def _holders(placement: Placement) -> list[int]:
    """The ranks with a slot in some layer."""
    ranks = range(placement.num_ranks)
    return [rank for rank in ranks if any(slots[rank] for slots in placement.layers)]


def _renumbered(new: Slots, old: Slots, together: int) -> Slots:
    """`new` with ranks exchanged, within each `together` of them, so that much of `old` stays.

    A rank without slots stays one.
    """
    result: list[tuple[int, ...]] = [()] * len(new)
    for first in range(0, len(new), together):
        block = range(first, first + together)
        common = np.array([[_common(new[a], old[b], a == b) for b in block] for a in block])
        order = np.argsort(-common, axis=None, kind="stable")
        taken_new: set[int] = set()
        taken_old: set[int] = set()
        for a, b in zip(*np.unravel_index(order, common.shape), strict=True):
            if a in taken_new or b in taken_old:
                continue
            taken_new.add(int(a))
            taken_old.add(int(b))
            result[first + int(b)] = new[first + int(a)]
    return tuple(result)

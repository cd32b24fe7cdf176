"""Balanced placement of experts with redundant copies, from measured loads.

The two policies of DeepSeek's EPLB (deepseek-ai/EPLB, "Expert Parallelism Load Balancer"), stated
from its description:

* hierarchical: groups of experts are packed onto hosts, so that a token's groups are few hosts;
  on each host the experts with most load a copy get another copy, and copies are packed onto ranks;
* global: the same as with one group on one host, where the hosts do not divide the groups.

Packing is greedy: heaviest first, each to the lightest bin that has room. Everything is
deterministic; of equal loads the lower index comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdmesh.wire.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Balanced:
    """A plan; equal numbers of consecutive physical experts make a rank.

    Attributes:
        logical: [layers, physical] the logical expert of each physical one.
        copy: [layers, physical] which of its expert's copies it is, from 0.
        counts: [layers, experts] copies of each logical expert.
    """

    logical: Ints
    copy: Ints
    counts: Ints


def balance_experts(
    load: ArrayLike, num_physical: int, num_groups: int, num_hosts: int, num_ranks: int
) -> Balanced:
    """Place `num_physical` copies of the experts on ranks so that their loads are nearly equal.

    Args:
        load: [layers, experts], rows that each expert got; any unit.
        num_physical: copies in all, at least one an expert.
        num_groups: groups of consecutive experts; the hierarchical policy if hosts divide them.
        num_hosts, num_ranks: hosts, and ranks on all of them.

    Raises:
        ConfigError: the numbers do not divide one another, or there are too few copies.
    """
    loads = np.asarray(load, dtype=np.float32)
    experts = loads.shape[1]
    if num_groups % num_hosts:
        num_groups = num_hosts = 1
    _check(experts, num_physical, num_groups, num_hosts, num_ranks)
    plans = [_one_layer(row, num_physical, num_groups, num_hosts, num_ranks) for row in loads]
    logical = np.stack([plan[0] for plan in plans])
    counts = np.stack([np.bincount(row, minlength=experts) for row in logical])
    return Balanced(logical, np.stack([plan[1] for plan in plans]), counts)


def rank_loads(load: ArrayLike, logical: ArrayLike, num_ranks: int) -> NDArray[np.float64]:
    """Load of each rank [layers, ranks] under a plan, copies of an expert sharing it evenly.

    load [layers, experts], logical [layers, physical] as in `Balanced`.
    """
    loads, placed = np.asarray(load, dtype=np.float64), np.asarray(logical)
    rows = []
    for row, experts in zip(loads, placed, strict=True):
        each = row / np.maximum(np.bincount(experts, minlength=len(row)), 1)
        rows.append(each[experts].reshape(num_ranks, -1).sum(axis=1))
    return np.stack(rows)


def _check(experts: int, physical: int, groups: int, hosts: int, ranks: int) -> None:
    for name, whole, part, parts in (
        ("groups", experts, groups, "experts"),
        ("hosts", ranks, hosts, "ranks"),
        ("ranks", physical, ranks, "physical experts"),
    ):
        if whole % part:
            raise ConfigError(f"{part} {name} do not divide {whole} {parts}")
    if physical < experts:
        raise ConfigError(f"{physical} physical experts cannot hold {experts} logical ones")


def _one_layer(
    row: Floats, physical: int, groups: int, hosts: int, ranks: int
) -> tuple[Ints, Ints]:
    """The logical expert and copy number of each physical expert of one layer."""
    size = len(row) // groups
    on_host = _pack(np.asarray(row.reshape(groups, size).sum(axis=1), np.float32), hosts)
    logical, copies = [], []
    for host in on_host:
        experts = (np.asarray(host)[:, None] * size + np.arange(size)).ravel()
        chosen, number, counts = _copied(row[experts], physical // hosts)
        each = np.divide(row[experts], counts, dtype=np.float32)[chosen]
        order = np.concatenate([np.asarray(b, dtype=np.int64) for b in _pack(each, ranks // hosts)])
        logical.append(experts[chosen[order]])
        copies.append(number[order])
    return np.concatenate(logical), np.concatenate(copies)


def _pack(weights: Floats, bins: int) -> list[list[int]]:
    """Items in `bins` of equal number: heaviest first, to the lightest bin with room."""
    room = len(weights) // bins
    if room == 1:
        return [[item] for item in range(len(weights))]
    packed: list[list[int]] = [[] for _ in range(bins)]
    totals = [np.float32(0.0)] * bins
    for item in np.argsort(-weights, kind="stable").tolist():
        lightest = min((b for b in range(bins) if len(packed[b]) < room), key=totals.__getitem__)
        packed[lightest].append(item)
        totals[lightest] += weights[item]
    return packed


def _copied(weights: Floats, physical: int) -> tuple[Ints, Ints, Ints]:
    """Further copies for the experts with most load a copy: (expert, copy number, counts)."""
    counts = np.ones(len(weights), dtype=np.int64)
    chosen = list(range(len(weights)))
    number = [0] * len(weights)
    for _ in range(physical - len(weights)):
        most = int(np.argmax(weights / counts.astype(np.float32)))
        chosen.append(most)
        number.append(int(counts[most]))
        counts[most] += 1
    return np.asarray(chosen, dtype=np.int64), np.asarray(number, dtype=np.int64), counts

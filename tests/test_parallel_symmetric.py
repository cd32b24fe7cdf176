"""Dispatch and combine over symmetric memory equal their definition, ranks in one process."""

import pytest
import torch
from symmetric_rig import Group, channel, inputs, routing, scattered

from pdmesh.kernels.expert_exchange import ExchangeSize
from pdmesh.model.parallel.exchange import RankLost
from pdmesh.model.parallel.nvshmem import ExpertsFull
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable

EXPERTS, TOP = 6, 3


def sized(ranks, slots, tokens=5, hidden=256, max_rows=24):
    return ExchangeSize(ranks, slots, tokens, hidden, TOP, max_rows)


def most_slots(placement):
    return max(len(experts) for experts in placement.layers[0])


@pytest.mark.parametrize("kind", ["balanced", "skewed", "one", "padded"])
@pytest.mark.parametrize(("ranks", "counts"), [(2, (4, 5)), (3, (0, 5, 1)), (4, (0, 0, 3, 0))])
def test_what_arrives_and_what_comes_back_are_bit_for_bit_the_definition(kind, ranks, counts):
    placement = scattered(ranks, EXPERTS, seed=ranks)
    size = sized(ranks, most_slots(placement))
    Group(placement, size).check(*inputs(size, counts, kind, EXPERTS, seed=ranks))

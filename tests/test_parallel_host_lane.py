"""The exchange in memory of the host: bit for bit the definition, as the kernels are."""

import random

import pytest
from symmetric_rig import Group, channel, inputs, scattered

from pdmesh.kernels.expert_exchange import ExchangeSize
from pdmesh.model.parallel.exchange import RankLost
from pdmesh.model.parallel.nvshmem import ExpertsFull
from pdmesh.model.parallel.placement import Placement

EXPERTS, TOP = 6, 3


def sized(placement, tokens=5, hidden=256, max_rows=24):
    slots = max(len(experts) for experts in placement.layers[0])
    return ExchangeSize(placement.num_ranks, slots, tokens, hidden, TOP, max_rows)


def in_one_row(placement, tokens=5, hidden=256, capacity=None):
    slots = max(len(experts) for experts in placement.layers[0])
    return ExchangeSize.contiguous(placement.num_ranks, slots, tokens, hidden, TOP, capacity)


LAYOUTS = pytest.mark.parametrize("sized", [sized, in_one_row], ids=["masked", "contiguous"])


@LAYOUTS
@pytest.mark.parametrize("seed", range(20))
def test_what_arrives_and_what_comes_back_are_bit_for_bit_the_definition(seed, sized):
    rng = random.Random(seed)
    ranks = rng.choice([1, 2, 3, 4])
    placement = scattered(ranks, EXPERTS, seed)
    group = Group(placement, sized(placement), host=True)
    for step in range(3):
        counts = [rng.choice([0, 1, 5]) for _ in range(ranks)]
        kind = rng.choice(["balanced", "skewed", "one", "padded"])
        group.check(*inputs(group.size, counts, kind, EXPERTS, seed + 1000 * step))


def test_an_expert_with_more_rows_than_a_block_moves_the_next_one_by_two():
    placement = Placement(EXPERTS, ((tuple(range(EXPERTS)), ()),))
    group = Group(placement, in_one_row(placement, tokens=70), host=True)
    for step in range(2):
        rows, ids, weights = inputs(group.size, (70, 70), "one", EXPERTS, step)
        for own in ids:
            own[:, 1:] = -1
        ids[1][-1, 1] = 1
        group.check(rows, ids, weights)
        full, empty = (end.lanes[0].arrived for end in group.ends)
        assert full.row_expert[:257].tolist() == [0] * 140 + [-1] * 116 + [1]
        assert (full.used.tolist(), empty.used.tolist()) == ([3 * 128], [0])


@LAYOUTS
def test_bytes_are_counted_as_the_kernels_count_them(sized):
    placement = scattered(3, EXPERTS, 1)
    data = inputs(sized(placement), (5, 0, 3), "balanced", EXPERTS, 4)
    sent = []
    for host in (True, False):
        group = Group(placement, sized(placement), host=host)
        group.check(*data)
        sent.append([[end.sent.by_peer(k) for k in ("dispatch", "combine")] for end in group.ends])
    assert sent[0] == sent[1]


def test_a_rank_that_sends_nothing_is_named_and_the_others_go_on_without_it():
    group = Group(Placement.even(1, EXPERTS, 3), sized(Placement.even(1, EXPERTS, 3)), host=True)
    rows, ids, weights = inputs(group.size, (5, 5, 5), "balanced", EXPERTS, 1)
    for end in group.ends:
        end.lanes[0].gone = lambda rank: rank == 1
    for rank in (0, 2):
        handle = group.ends[rank].dispatch_send(channel(1), 0, rows[rank], ids[rank])
        group.ends[rank].dispatch_recv(handle)
        with pytest.raises(RankLost, match="rank 1 is lost"):
            group.ends[rank].check()


def test_a_rank_that_is_late_beside_one_that_is_lost_is_not_named():
    group = Group(Placement.even(1, EXPERTS, 3), sized(Placement.even(1, EXPERTS, 3)), host=True)
    rows, ids, _ = inputs(group.size, (5, 5, 5), "balanced", EXPERTS, 1)
    handle = group.ends[0].dispatch_send(channel(1), 0, rows[0], ids[0])
    group.ends[0].lanes[0].gone = lambda rank: rank == 2
    group.ends[0].dispatch_recv(handle)
    with pytest.raises(RankLost, match="rank 2 is lost"):
        group.ends[0].check()


def test_a_wait_ends_at_once_when_the_host_knows_of_a_loss_and_names_nobody_else():
    group = Group(Placement.even(1, EXPERTS, 3), sized(Placement.even(1, EXPERTS, 3)), host=True)
    rows, ids, _ = inputs(group.size, (5, 5, 5), "balanced", EXPERTS, 1)
    handle = group.ends[0].dispatch_send(channel(1), 0, rows[0], ids[0])
    group.ends[0].lose(2)
    group.ends[0].dispatch_recv(handle)
    with pytest.raises(RankLost, match="rank 2 is lost"):
        group.ends[0].check()


def test_more_rows_than_an_expert_has_room_for_are_an_error_and_not_a_loss():
    placement = Placement.even(1, EXPERTS, 2)
    group = Group(placement, sized(placement, max_rows=9), host=True)
    rows, ids, _ = inputs(group.size, (5, 5), "one", EXPERTS, 1)
    sent = [group.ends[r].dispatch_send(channel(1), 0, rows[r], ids[r]) for r in (0, 1)]
    group.ends[0].dispatch_recv(sent[0])
    with pytest.raises(ExpertsFull, match="an expert got 10 rows; there is room for 9"):
        group.ends[0].check()


def test_more_rows_than_all_experts_have_room_for_are_an_error_and_touch_no_other_memory():
    placement = Placement.even(1, EXPERTS, 2)
    group = Group(placement, in_one_row(placement, capacity=256), host=True)
    rows, ids, weights = inputs(group.size, (5, 5), "one", EXPERTS, 1)
    sent = [group.ends[r].dispatch_send(channel(1), 0, rows[r], ids[r]) for r in (0, 1)]
    group.ends[0].dispatch_recv(sent[0])
    said = "all experts of the rank got 384 rows with padding; there is room for 256"
    with pytest.raises(ExpertsFull, match=said):
        group.ends[0].check()
    arrived = group.ends[0].lanes[0].arrived
    assert (arrived.counts.tolist(), arrived.used.tolist()) == ([10, 10, 0], [256])
    for end in group.ends:
        end.reset([0, 1])
    for own in ids:
        own[:, 1:] = -1
    group.check(rows, ids, weights)

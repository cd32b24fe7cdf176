"""Ranks that are lost and experts that move, while the same rows are computed."""

import numpy as np
import pytest
import torch
from parallel_rig import (
    MOE_LAYERS,
    a_step,
    check,
    redundant,
    same,
    skewed_model,
    stale,
    wide_model,
)

from pdmesh.model.parallel.balancer import Balancer, BalanceRule
from pdmesh.model.parallel.exchange import RankLost
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.schedule import plan_schedule
from pdmesh.model.parallel.step import RankBatch
from pdmesh.model.parallel.virtual import Settings, VirtualRanks
from pdmesh.wire.errors import ConfigError

UNEVEN = (3, 0, 1, 6, 2)
ITEMS = len(plan_schedule([(0, False), (1, True)], "microbatch"))


def elsewhere(inputs, dp):
    """The inputs without those of one DP group, pages as they were before the step."""
    return [
        None if i is None or n == dp else RankBatch(i.batch, i.latents)
        for n, i in enumerate(inputs)
    ]


@pytest.mark.parametrize("before", range(ITEMS))
def test_a_rank_lost_at_any_stage_is_an_error_that_names_it_and_a_new_plan_serves_on(before):
    model = wide_model()
    ranks = VirtualRanks(model, Groups(6, ranks_per_host=6), redundant(288, 6), MICROBATCH)
    step = a_step(model, 6, 1, UNEVEN)
    ranks.fail(3, before)
    with pytest.raises(RankLost, match="rank 3 is lost: .* did not come from it") as caught:
        ranks.forward(step.inputs)
    assert caught.value.rank == 3
    assert ranks.lost == (3,)
    with pytest.raises(RankLost, match="rank 3"):
        ranks.forward(step.inputs)
    moves = ranks.exclude(3, ranks.placement.without({3}))
    assert {move.rank for move in moves} <= {0, 1, 2, 4, 5}
    assert ranks.lost == ()
    with pytest.raises(ValueError, match="DP group 3 has lost rank 3: its sequences have to go"):
        ranks.forward(step.inputs)
    expected = [None if n == 3 else hidden for n, hidden in enumerate(step.hidden)]
    same(ranks.forward(elsewhere(step.inputs, 3)), expected)
    moved = [step.inputs[3] if n == 1 else None for n in range(6)]
    same(ranks.forward(moved), [step.hidden[3] if n == 1 else None for n in range(6)])


MICROBATCH = Settings(mode="microbatch")


def test_the_other_ranks_of_a_tp_group_notice_and_go_on_serving_their_experts():
    model = wide_model()
    ranks = VirtualRanks(model, Groups(8, 4))
    step = a_step(model, 2, 4, (5, 7))
    ranks.fail(6, 0)
    with pytest.raises(RankLost, match="rank 6 is lost: heads of layer 0"):
        ranks.forward(step.inputs)
    placement = ranks.placement.without({6})
    assert all(slots[5] for slots in placement.layers)
    ranks.exclude(6, placement)
    same(ranks.forward(elsewhere(step.inputs, 1)), [step.hidden[0], None])


def test_a_message_of_a_step_that_broke_off_is_not_taken_for_one_of_the_next():
    model = wide_model()
    ranks = VirtualRanks(model, Groups(4))
    first, second = (a_step(model, 4, 1, lengths) for lengths in ((4, 9), (7, 2)))
    ranks.fail(2, 3)
    with pytest.raises(RankLost):
        ranks.forward(first.inputs)
    ranks.exclude(2, ranks.placement.without({2}))
    expected = [None if n == 2 else hidden for n, hidden in enumerate(second.hidden)]
    same(ranks.forward(elsewhere(second.inputs, 2)), expected)


def test_a_placement_may_not_use_a_lost_rank():
    model = wide_model()
    ranks = VirtualRanks(model, Groups(4))
    ranks.exclude(2, ranks.placement.without({2}))
    with pytest.raises(ConfigError, match="the placement uses rank 2, which is lost"):
        ranks.rebalance(Placement.even(MOE_LAYERS, 256, 4))


def test_another_placement_before_every_step_changes_no_bit():
    model = skewed_model()
    ranks = VirtualRanks(model, Groups(8, 2), redundant(288, 8))
    for seed, physical in enumerate((288, 288, 320, 288, 288), 1):
        moves = ranks.rebalance(redundant(physical, 8, seed))
        assert moves
        check(ranks, a_step(model, 4, 2, UNEVEN))


def test_a_rank_has_the_weights_of_its_placement_and_no_others():
    """A slot whose weights are wrong gives another result: nothing reads the whole model."""
    model = wide_model()
    ranks = VirtualRanks(model, Groups(4))
    step = a_step(model, 4, 1, (20,))
    for weights in ranks._ranks[1].experts:
        weights[1].zero_()
    found = ranks.forward(step.inputs)
    assert all(not torch.equal(a, b) for a, b in zip(found, step.hidden, strict=True))
    check(VirtualRanks(model, Groups(4)), a_step(model, 4, 1, (20,)))


def test_the_balancer_learns_from_served_rows_and_its_plans_change_no_bit():
    model = skewed_model()
    ranks = VirtualRanks(model, Groups(16, 2))
    balancer = Balancer(ranks.placement, BalanceRule(288, min_rows=500))
    used, before = 0, None
    for _ in range(4):
        check(ranks, a_step(model, 8, 2, (30, 2, 11)))
        balancer.observe(ranks.take_load().numpy())
        before = balancer.imbalance().mean() if before is None else before
        plan = balancer.proposal()
        if plan is not None:
            used += 1
            ranks.rebalance(plan)
            balancer.use(plan)
    assert used == 1
    assert balancer.imbalance().mean() < 0.5 * before


def loads(seed, rows=100_000, experts=64, layers=3):
    shares = np.random.default_rng(seed).dirichlet(np.full(experts, 0.7), layers)
    return np.round(shares * rows)


RULE = BalanceRule(72, window=4, min_rows=1000)
EVEN = Placement.even(3, 64, 8)


def test_a_plan_that_fits_is_kept():
    balancer = Balancer(EVEN, RULE)
    balancer.observe(np.full((3, 64), 100))
    assert balancer.proposal() is None


def test_a_skewed_load_gets_a_plan_that_is_then_kept():
    balancer = Balancer(EVEN, RULE)
    balancer.observe(loads(1))
    before = balancer.imbalance()
    plan = balancer.proposal()
    balancer.use(plan)
    assert (balancer.imbalance() < before).all()
    assert (balancer.imbalance() < 1.05).all()
    balancer.observe(loads(1))
    assert balancer.proposal() is None


def test_few_rows_decide_nothing():
    balancer = Balancer(EVEN, RULE)
    balancer.observe(loads(1, rows=900))
    assert balancer.proposal() is None
    balancer.observe(loads(1, rows=900))
    assert balancer.proposal() is not None


def test_only_the_layers_whose_plan_is_stale_are_placed_anew():
    balancer = Balancer(EVEN, RULE)
    load = np.full((3, 64), 100.0)
    load[1] = loads(1)[1]
    balancer.observe(load)
    plan = balancer.proposal()
    assert plan.layers[0] == EVEN.layers[0]
    assert plan.layers[1] != EVEN.layers[1]
    assert plan.layers[2] == EVEN.layers[2]


def test_another_workload_makes_the_old_one_forgotten_and_the_plan_stale():
    balancer = Balancer(EVEN, RULE)
    assert not balancer.observe(loads(1))
    balancer.use(balancer.proposal())
    assert not balancer.observe(loads(1))
    assert balancer.observe(loads(2))
    assert balancer.load().sum() == loads(2).sum()
    assert (balancer.imbalance() > 1.1).any()
    balancer.use(balancer.proposal())
    assert (balancer.imbalance() < 1.1).all()


def test_loads_before_the_window_do_not_count():
    balancer = Balancer(EVEN, RULE)
    for _ in range(9):
        balancer.observe(loads(1))
    assert balancer.load().sum() == 4 * loads(1).sum()


def test_a_plan_for_nearly_the_same_load_moves_few_experts():
    balancer = Balancer(EVEN, BalanceRule(72, tolerance=1.0, min_rows=1))
    balancer.observe(loads(1))
    balancer.use(balancer.proposal())
    old = balancer.placement
    balancer.observe(loads(1) * (1 + 0.02 * np.sin(np.arange(64))))
    new = balancer.proposal()
    assert len(new.moves_from(old)) < 3 * 72 * 0.8


def test_ranks_that_were_left_behind_stay_without_experts_in_later_plans():
    lost = EVEN.without({5})
    balancer = Balancer(lost, RULE)
    balancer.observe(loads(3))
    plan = balancer.proposal()
    assert all(slots[5] == () for slots in plan.layers)
    assert {len(held) for slots in plan.layers for held in slots} == {0, 11}


def test_pages_of_a_rank_that_was_lost_are_not_needed_by_anybody_else():
    model = wide_model()
    ranks = VirtualRanks(model, Groups(2))
    step = a_step(model, 2, 1, (8,))
    ranks.fail(0)
    with pytest.raises(RankLost, match="rank 0"):
        ranks.forward(step.inputs)
    ranks.exclude(0, ranks.placement.without({0}))
    again = RankBatch(step.inputs[0].batch, (stale(model),))
    same(ranks.forward([None, again]), [None, step.hidden[0]])

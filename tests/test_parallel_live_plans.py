"""Plans for experts that ranks tell each other: numbers, what fits, what is remembered."""

import pytest
import torch

from pdmesh.model.parallel.balancer import BalanceRule
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.plans import KEPT, Plan, Plans, first_placement
from pdmesh.wire.errors import ConfigError

FIRST = Placement.even(1, 8, 2)
RULE = BalanceRule(8, min_rows=10, window=1)
SWAPPED = (((0, 2, 4, 6), (1, 3, 5, 7)),)


def skewed():
    return torch.tensor([[100, 100, 100, 100, 0, 0, 0, 0]])


def test_the_leader_tells_a_plan_once_it_pays_and_waits_until_it_is_used():
    told = []
    leader = Plans(0, 2, FIRST, RULE)
    leader.lead(0, told.append)
    assert told == []
    leader.count(skewed())
    leader.lead(0, told.append)
    assert len(told) == 1
    leader.count(skewed())
    leader.lead(0, told.append)
    assert len(told) == 1
    assert leader.numbers == (0, told[0].number)
    other = Plans(1, 2, FIRST, RULE)
    other.learn(told[0])
    assert other.placement(told[0].number) == leader.placement(told[0].number)
    leader.count(skewed())
    leader.lead(told[0].number, told.append)
    assert len(told) == 1  # it fits


def test_two_leaders_never_give_two_plans_one_number():
    numbers = []
    for rank in range(2):
        plans = Plans(rank, 2, FIRST, RULE)
        plans.learn(Plan(2, 8, SWAPPED))
        plans.count(torch.tensor([[50, 0, 50, 0, 50, 0, 50, 0]]))
        plans.lead(2, lambda plan: numbers.append(plan.number))
    assert len(numbers) == len(set(numbers)) == 2
    assert min(numbers) > 2


def test_no_rule_no_plan():
    plans = Plans(0, 2, FIRST, None)
    plans.count(skewed())
    plans.lead(0, pytest.fail)


def test_the_first_plan_and_the_newest_are_remembered():
    plans = Plans(0, 2, FIRST, None)
    for number in range(1, 10):
        plans.learn(Plan(number, 8, SWAPPED))
    assert plans.numbers[0] == 0
    assert plans.numbers[-KEPT:] == tuple(range(10 - KEPT, 10))
    assert len(plans.numbers) == KEPT + 1
    assert [plan.number for plan in plans.told] == list(plans.numbers[1:])


@pytest.mark.parametrize(
    "plan",
    [
        Plan(0, 8, SWAPPED),
        Plan(3, 8, SWAPPED * 2),
        Plan(3, 8, (((0, 1, 2, 3, 4, 5, 6, 7),),)),
        Plan(3, 8, (((0,), (1,)),)),
        Plan(3, 4, (((0, 1), (2, 3)),)),
    ],
)
def test_a_plan_for_others_is_refused(plan):
    plans = Plans(0, 2, FIRST, None)
    with pytest.raises(ConfigError):
        plans.learn(plan)
    assert plans.numbers == (0,)


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant"), [(8, 2, 0), (8, 2, 4), (32, 8, 8), (6, 4, 2)]
)
def test_further_copies_stand_on_other_ranks(experts, ranks, redundant):
    placement = first_placement(3, experts, ranks, redundant)
    assert [len(held) for held in placement.layers[0]] == [(experts + redundant) // ranks] * ranks
    for held in placement.layers[0]:
        assert len(set(held)) == len(held)


def test_copies_that_cannot_be_shared_evenly_are_refused():
    with pytest.raises(ConfigError, match="8 experts and 1 redundant copies cannot be shared"):
        first_placement(1, 8, 2, 1)


def test_a_plan_is_known_once_it_is_prepared_and_the_newest_alone_has_to_be():
    plans = Plans(0, 2, FIRST, None)
    plans.deferred = True
    for number in (3, 5):
        plans.learn(Plan(number, 8, SWAPPED))
    assert (plans.numbers, plans.waiting) == ((0,), 5)
    plans.prepared(5)
    assert (plans.numbers, plans.waiting) == ((0, 5), None)
    plans.learn(Plan(7, 8, SWAPPED))
    assert (plans.numbers, plans.waiting) == ((0, 5), 7)
    assert [plan.number for plan in plans.told] == [3, 5, 7]  # who has prepared them may use them

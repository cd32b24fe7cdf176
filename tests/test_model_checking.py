"""Every interleaving of the transfer and migration protocols, within stated bounds."""

from __future__ import annotations

import pytest
from model_checking import migrate, pulls, push, reserve
from model_checking.explorer import Model, Result, TooManyWorlds, explore
from model_checking.mistakes import MISTAKES

SAMPLE: dict[str, Model] = {
    "push, one request, one loss": push.PushModel(push.Bounds(losses=1)),
    "push, one request, one crash": push.PushModel(push.Bounds(crashes=1)),
    "push, two requests": push.PushModel(push.Bounds(requests=2, attempts=1, pool=3)),
    "push, no pages": push.PushModel(push.Bounds(pages=0, attempts=1, losses=1)),
    "push, each write checked, one crash": push.PushModel(
        push.Bounds(attempts=1, crashes=1, losses=1, one_sided=False)
    ),
    "pull, two requests": pulls.PullModel(pulls.Bounds(requests=2, attempts=1)),
    "pull, one request, one loss, one crash": pulls.PullModel(pulls.Bounds(losses=1, crashes=1)),
    "reservations": reserve.ReserveModel(requests=3),
    "migration": migrate.MigrateModel(migrate.Bounds()),
    "migration, one loss": migrate.MigrateModel(migrate.Bounds(tokens=2, losses=1)),
    "migration, one crash": migrate.MigrateModel(migrate.Bounds(tokens=2, crashes=1)),
    "migration, one cut stream": migrate.MigrateModel(migrate.Bounds(tokens=2, cuts=1)),
}


EVERYTHING = {"losses": 1, "duplicates": 1, "crashes": 1}
FULL: dict[str, Model] = {
    "push, two requests, one of each fault": push.PushModel(push.Bounds(requests=2, **EVERYTHING)),
    "push, two requests, one pause": push.PushModel(push.Bounds(requests=2, pauses=1)),
    "push, room for both requests": push.PushModel(push.Bounds(requests=2, attempts=1, pool=4)),
    "push, each write checked, one loss, one repeat": push.PushModel(
        push.Bounds(one_sided=False, losses=1, duplicates=1)
    ),
    "push, each write checked, one crash": push.PushModel(push.Bounds(one_sided=False, crashes=1)),
    "pull, two requests": pulls.PullModel(pulls.Bounds(requests=2)),
    "pull, one request, one of each fault": pulls.PullModel(pulls.Bounds(**EVERYTHING)),
    "migration, one of each fault": migrate.MigrateModel(migrate.Bounds(tokens=2, **EVERYTHING)),
    "migration, two handoffs, one crash": migrate.MigrateModel(
        migrate.Bounds(tokens=2, handoffs=2, crashes=1)
    ),
}


def searched(name: str, model: Model) -> Result:
    """Searches and prints the number of states, or the events of a counterexample (-s)."""
    result = explore(model, most=12_000_000)
    print(f"{name}: {result}")  # noqa: T201
    return result


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", FULL)
def test_no_interleaving_within_the_full_bounds_breaks_an_invariant_or_is_stuck(name):
    result = searched(name, FULL[name])
    assert not result.problem, str(result)


@pytest.mark.parametrize("name", SAMPLE)
def test_no_interleaving_breaks_an_invariant_or_is_stuck(name):
    result = searched(name, SAMPLE[name])
    assert not result.problem, str(result)
    assert result.num_worlds > 20


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_with_the_events_that_lead_to_it(name):
    result = searched(name, MISTAKES[name])
    assert result.problem
    assert result.events


def test_taking_requests_by_either_name_for_the_same_changes_no_verdict():
    bounds = {"requests": 2, "attempts": 1, "losses": 1}
    both = explore(push.PushModel(push.Bounds(**bounds, symmetry=False)))
    one = explore(push.PushModel(push.Bounds(**bounds)))
    assert not both.problem
    assert not one.problem
    assert one.num_worlds < both.num_worlds


def test_a_search_that_is_too_large_says_so():
    with pytest.raises(TooManyWorlds, match="more than 100 states"):
        explore(push.PushModel(push.Bounds()), most=100)


def test_a_counterexample_is_one_of_the_shortest():
    """Grant, write, cancel, landing: no shorter run has a write and a freed page."""
    result = explore(MISTAKES["release at a deadline"])
    assert len(result.events) == 7
    assert str(result).count("\n") == 8

"""What is read off measured curves."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def reading():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("reading")
    finally:
        sys.path.remove(str(ROOT / "bench"))


def rows(*times):
    """By batch: dispatch_overlap, microbatch."""
    return {b: {"dispatch_overlap": d, "microbatch": m} for b, d, m in times}


def test_published_times_are_met_and_joined_by_lines(reading):
    dispatch = reading.PUBLISHED_EP128["dispatch"]
    assert [reading.interpolate(dispatch, t) for t in (1, 128, 256)] == [126, 308, 593]
    assert reading.interpolate(dispatch, 192) == pytest.approx((308 + 593) / 2)


def test_a_line_goes_on_beyond_the_last_point(reading):
    assert reading.interpolate([(0, 0), (1, 1), (2, 3)], 3) == 5
    assert reading.interpolate([(1, 1), (2, 3)], 0) == -1


def test_the_crossover_is_where_a_gain_begins_and_stays(reading):
    measured = rows((4, 10, 15), (8, 10, 9), (16, 10, 11), (32, 20, 18), (64, 40, 30))
    gains = reading.gain(measured, "microbatch", "dispatch_overlap")
    assert gains[4] == pytest.approx(-1 / 3)
    assert reading.crossover(gains) == 32


@pytest.mark.parametrize(("gains", "found"), [({4: -0.1, 8: -0.2}, None), ({4: 0.1, 8: 0.2}, 4)])
def test_there_may_be_no_crossover_or_none_needed(reading, gains, found):
    assert reading.crossover(gains) == found


def test_a_rule_loses_where_it_takes_the_slower_mode(reading):
    measured = rows((8, 10, 9), (16, 10, 11), (32, 20, 18))
    assert reading.auto_loss(measured, 32) == pytest.approx(10 / 9 - 1)
    assert reading.auto_loss(measured, 8) == pytest.approx(0.1)
    assert reading.auto_loss(measured, None) == pytest.approx(20 / 18 - 1)


def test_the_knee_is_the_last_point_that_costs_no_more_than_the_first(reading):
    assert reading.knee([(1, 50), (2, 51), (4, 54), (8, 56), (16, 52)]) == 4


def test_both_products_of_the_experts_are_added_up(reading):
    both = [
        {"family": "grouped", "ep": "128", "batch": b, "us": us}
        for b, us in [("2", "30"), ("2", "20"), ("1", "30"), ("1", "15")]
    ]
    assert reading.expert_times([*both, {"family": "dense"}]) == {128: [(1, 45), (2, 50)]}


def test_attention_is_told_by_the_row(reading):
    rows = [
        {"family": "mla", "heads": "16", "query": q, "us": us} for q, us in [("1", 9), ("2", 10)]
    ]
    assert reading.time_a_token(rows) == {16: {1: 9, 2: 5}}

"""Which workers start and stop: the plans of a scale and of a rolling restart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.launch.operate import parse_targets
from pdmesh.launch.scaling import Change, next_name, ordered, plan_restart, plan_scale
from pdmesh.wire.control import ScaleRequest
from pdmesh.wire.errors import ConfigError

FOUR = ["prefill-0", "decode-0", "decode-1", "decode-2"]


@pytest.mark.parametrize(
    ("running", "targets", "start", "stop"),
    [
        (FOUR, {"decode": 3}, (), ()),
        (FOUR, {"decode": 5}, ("decode-3", "decode-4"), ()),
        (FOUR, {"decode": 1}, (), ("decode-2", "decode-1")),
        (FOUR, {"prefill": 2, "decode": 2}, ("prefill-1",), ("decode-2",)),
        (["prefill-0", "decode-0", "decode-2"], {"decode": 4}, ("decode-1", "decode-3"), ()),
        (["prefill-0", "decode-2", "decode-10"], {"decode": 1}, (), ("decode-10",)),
        (FOUR, {}, (), ()),
    ],
)
def test_what_is_missing_starts_and_the_highest_numbers_stop(running, targets, start, stop):
    assert plan_scale(running, targets) == Change(start, stop)


@pytest.mark.parametrize(
    ("running", "target", "start", "stop"),
    [
        ([0, 1], 4, [2, 3], []),
        ([0, 1, 2, 3, 4, 5], 2, [], [5, 4, 3, 2]),
        ([2, 3], 6, [0, 1, 4, 5], []),
        ([0, 1, 3], 4, [], []),  # a group that lacks a worker is one
        ([0, 1, 3], 2, [], [3]),
        ([0, 1, 8, 9, 10, 11], 4, [], [11, 10]),  # by their numbers, not by their names
    ],
)
def test_workers_that_share_their_experts_come_and_go_by_whole_groups(running, target, start, stop):
    names = ["prefill-0", *(f"decode-{n}" for n in running)]
    wanted = (tuple(f"decode-{n}" for n in numbers) for numbers in (start, stop))
    assert plan_scale(names, {"decode": target}, {"decode": 2}) == Change(*wanted)


def test_a_part_of_a_group_is_refused_with_what_can_be():
    with pytest.raises(ConfigError, match=r"decode=3: 3 workers make no groups of 2 .* multiple"):
        plan_scale(FOUR, {"decode": 3}, {"decode": 2})
    assert plan_scale(FOUR, {"prefill": 2}, {"decode": 2}) == Change(("prefill-1",))


ROLES = ("prefill", "decode")
TARGETS = st.dictionaries(st.sampled_from(ROLES), st.integers(1, 12))
RUNNING = st.sets(st.builds("{}-{}".format, st.sampled_from(ROLES), st.integers(0, 15)))


@given(RUNNING, TARGETS)
def test_after_a_plan_as_many_run_as_were_asked_for_and_no_name_is_taken_twice(running, targets):
    plan = plan_scale(running, targets)
    assert not set(plan.start) & running
    assert set(plan.stop) <= running
    assert not (
        {n.split("-")[0] for n in plan.start} & {n.split("-")[0] for n in plan.stop}
    )  # a role grows or shrinks
    after = (running | set(plan.start)) - set(plan.stop)
    for role, target in targets.items():
        assert sum(name.startswith(role) for name in after) == target
    assert plan_scale(after, targets) == Change()  # and then there is nothing to do


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (0, "decode=0: a mesh needs at least 1 decode worker; ask for 1"),
        (-3, "decode=-3: a mesh needs at least 1"),
        (65, "decode=65: there can be at most 64 decode workers"),
    ],
)
def test_a_target_out_of_range_is_one_sentence(target, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan_scale(FOUR, {"decode": target})


def test_a_restart_replaces_those_asked_for_in_order_or_all():
    assert plan_restart(FOUR, []) == FOUR
    assert plan_restart(FOUR, ["decode-1", "prefill-0", "decode-1"]) == ["prefill-0", "decode-1"]


def test_a_worker_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ConfigError, match="no worker 'decode-9' in this mesh; there are: prefill-"):
        plan_restart(FOUR, ["decode-9"])


def test_names_are_in_the_order_of_their_numbers():
    assert next_name({"decode-0", "decode-2", "prefill-1"}, "decode") == "decode-1"
    mixed = ["decode-10", "decode-9", "prefill-1", "decode-kitchen-4f2a"]
    assert ordered(mixed)[0] == "prefill-1"
    assert ordered(mixed).index("decode-9") < ordered(mixed).index("decode-10")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["decode"], "'decode' is no target; give prefill=N or decode=N, e.g. decode=3"),
        (["decode=x"], "'decode=x' is no target"),
        (["decode="], "'decode=' is no target"),
        (["router=2"], "'router=2' is no target"),
        (["decode=2", "decode=3"], "'decode=3': decode is given twice; give it once"),
        (["prefill=0"], "prefill=0: a mesh needs at least 1 prefill worker; ask for 1"),
    ],
)
def test_targets_that_are_none_are_one_sentence(words, sentence):
    with pytest.raises(ConfigError) as wrong:
        parse_targets(words)
    assert sentence in wrong.value.message


def test_targets_say_a_role_or_both():
    assert parse_targets(["decode=3"]) == ScaleRequest(decode=3)
    assert parse_targets(["decode=3", "prefill=2"]) == ScaleRequest(prefill=2, decode=3)

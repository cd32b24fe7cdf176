"""Groups, placements, schedules and cuts of a batch: plain values, no model."""

import json

import pytest
import torch
from model_cases import one_slice, tokens_of

from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.parallel.groups import Groups, share
from pdmesh.model.parallel.microbatch import split_batch, split_rows
from pdmesh.model.parallel.placement import Move, Placement
from pdmesh.model.parallel.replicas import ReplicaTable, first_copy
from pdmesh.model.parallel.schedule import (
    FIVE,
    WHOLE,
    Item,
    Stage,
    choose_mode,
    plan_schedule,
)
from pdmesh.model.parallel.timeline import StageCosts, Timeline, chrome_trace, predict
from pdmesh.wire.errors import ConfigError

LAYERS = [(0, False), (1, True), (2, True)]


def test_ep128_of_dp32_and_tp4_on_sixteen_hosts():
    groups = Groups(128, 4)
    assert (groups.dp, groups.hosts) == (32, 16)
    at = groups.coordinates(71)
    assert (at.dp, at.tp, at.host) == (17, 3, 8)
    assert list(groups.tp_group(17)) == [68, 69, 70, 71]
    assert [list(groups.heads(tp, 8)) for tp in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((8, 3), "TP 3 does not divide EP 8"),
        ((0, 1), "must all be at least 1"),
        ((16, 16), "ranks 0 to 15 would be one TP group on two hosts of 8 ranks"),
        ((12, 4, 6), "ranks 4 to 7 would be one TP group on two hosts of 6 ranks"),
    ],
)
def test_groups_that_cannot_be_are_refused(shape, words):
    with pytest.raises(ConfigError, match=words):
        Groups(*shape)


def test_heads_that_tp_does_not_divide_and_ranks_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="TP 8 does not divide 12 attention heads"):
        Groups(8, 8).heads(0, 12)
    with pytest.raises(ValueError, match="no rank 8 among 8"):
        Groups(8).coordinates(8)


def test_shares_of_rows_differ_by_one_at_most_and_leave_nothing_out():
    for count in range(20):
        parts = [share(count, 8, i) for i in range(8)]
        assert [row for part in parts for row in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_placement_has_to_hold_every_expert():
    with pytest.raises(ConfigError, match=r"MoE layer 1 must hold .* wrong: 1, 7"):
        Placement(3, (((0, 1), (2,)), ((0, 7), (2,))))
    with pytest.raises(ConfigError, match="MoE layer 1 is placed on 1 ranks, the first on 2"):
        Placement(2, (((0,), (1,)), ((0, 1),)))
    with pytest.raises(ConfigError, match="7 physical experts cannot be shared evenly by 2 ranks"):
        Placement.cut([range(7)], 7, 2)


def test_only_what_a_rank_lacks_is_loaded():
    old = Placement(4, (((0, 1), (2, 3)),))
    new = Placement(4, (((1, 2, 2), (3, 0)),))
    assert new.moves_from(old) == [Move(0, 0, 2), Move(0, 1, 0)]
    assert old.moves_from(old) == []


def test_what_a_lost_rank_held_alone_takes_the_place_of_spare_copies():
    old = Placement(6, (((0, 1), (2, 3), (4, 5), (2, 3)),))
    new = old.without({0})
    assert new.layers == (((), (0, 3), (4, 5), (2, 1)),)
    assert len(new.moves_from(old)) == 2


def test_without_spare_copies_the_ranks_that_are_left_get_more_slots():
    new = Placement.even(2, 8, 4).without({1, 2})
    assert new.layers[0] == ((0, 1, 2, 4), (), (), (6, 7, 3, 5))
    with pytest.raises(ConfigError, match="no rank is left"):
        new.without(range(4))


def test_copies_are_chosen_in_turn_wherever_a_home_begins():
    table = ReplicaTable.build(Placement(2, (((0,), (0, 1), (0,)),)), 0)
    ids = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1], [0, 1]])
    begins = set()
    for home in range(20):
        ranks, slots = table.choose(ids, home)
        begin = first_copy(home, 0, 3)
        begins.add(begin)
        assert ranks[:, 0].tolist() == [(begin + turn) % 3 for turn in range(5)]
        assert ranks[:, 1].tolist() == [1] * 5
        assert slots.tolist() == [[0, 1]] * 5
        again = table.choose(ids, home)
        assert torch.equal(again[0], ranks)
    assert begins == {0, 1, 2}


@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("stride", [1, 2, 3, 4, 6, 8])
def test_copies_come_up_about_as_often_though_only_every_nth_home_has_rows(count, stride):
    homes = range(stride - 1, 1024 * stride, stride)
    for expert in (0, 7, 255):
        first = [first_copy(home, expert, count) for home in homes]
        often = [first.count(copy) for copy in range(count)]
        assert max(often) < 1.25 * 1024 / count
        assert min(often) > 0.75 * 1024 / count


def test_a_hundred_thousand_choices_are_shared_evenly_by_copies_over_many_homes():
    physical = [e % 64 for e in range(96)]
    placement = Placement.cut([physical], 64, 8)
    table = ReplicaTable.build(placement, 0)
    counts = torch.zeros(8, 12, dtype=torch.int64)
    for home in range(64):
        generator = torch.Generator().manual_seed(home)
        ids = torch.rand(200, 64, generator=generator).topk(8, dim=1).indices
        ranks, slots = table.choose(ids, home)
        counts.view(-1).index_add_(0, (ranks * 12 + slots).flatten(), torch.ones(1600).long())
    per_copy = counts.flatten()
    for expert in range(32):
        one, other = per_copy[expert], per_copy[64 + expert]
        assert abs(int(one - other)) <= 64, "each home may be one ahead"


@pytest.mark.parametrize("mode", ["no_overlap", "dispatch_overlap", "microbatch"])
def test_a_schedule_has_every_stage_once_and_in_order(mode):
    schedule = plan_schedule(LAYERS, mode)
    assert schedule[0] == Item(WHOLE, 0, Stage.DENSE)
    batches = (0, 1) if mode == "microbatch" else (WHOLE,)
    for number in batches:
        found = [(i.layer, i.stage) for i in schedule[1:] if i.microbatch == number]
        third = Stage.SHARED_FIRST if mode == "no_overlap" else Stage.SEND
        stages = [third if stage == Stage.SEND else stage for stage in FIVE]
        assert found == [(layer, stage) for layer in (1, 2) for stage in stages]
    assert len(schedule) == 1 + 10 * len(batches)


def test_microbatches_are_three_stages_apart_and_each_exchange_has_other_work_beside_it():
    schedule = plan_schedule(LAYERS, "microbatch")[1:]
    at = {(i.microbatch, i.layer, i.stage): n for n, i in enumerate(schedule)}
    done = [[i for i in schedule if i.microbatch == half] for half in (0, 1)]
    for place, item in enumerate(done[1][:-3]):
        after = at[0, done[0][place + 3].layer, done[0][place + 3].stage]
        assert at[1, item.layer, item.stage] == after - 1
    computing = {Stage.PROJECT, Stage.ATTEND}
    for number, item in enumerate(schedule[:-6]):
        if item.stage in (Stage.SEND, Stage.EXPERTS) and number > 6:
            between = schedule[number + 1]
            assert between.microbatch != item.microbatch
            assert between.stage in computing


def test_auto_is_decided_by_the_number_of_tokens():
    assert choose_mode("auto", 31, 32) == "dispatch_overlap"
    assert choose_mode("auto", 32, 32) == "microbatch"
    assert choose_mode("no_overlap", 10_000, 32) == "no_overlap"


def rows(*items: SequenceSlice) -> Batch:
    return Batch.build(items, [tokens_of(i.end - i.start, n) for n, i in enumerate(items)], 16)


def test_a_batch_is_cut_between_sequences_where_that_is_even_enough():
    batch = rows(*(one_slice((n,), 0, 2) for n in range(5)))
    first, second = split_batch(batch)
    assert [len(first.slices), len(second.slices)] == [2, 3]
    assert torch.equal(torch.cat([first.tokens, second.tokens]), batch.tokens)


def test_a_long_prompt_is_cut_inside():
    batch = rows(one_slice((0, 1, 2), 8, 48, write_from=20), one_slice((3,), 0, 2))
    first, second = split_batch(batch)
    assert [first.num_rows, second.num_rows] == [21, 21]
    assert (first.slices[0].end, second.slices[0].start, second.slices[0].write_from) == (
        29,
        29,
        20,
    )
    assert torch.equal(torch.cat([first.tokens, second.tokens]), batch.tokens)


def test_a_batch_is_cut_without_its_device():
    """What is asked of a device waits for all that it computes; here there is nothing to read."""
    items = [one_slice((n,), 0, 2) for n in range(4)]
    batch = Batch.build(items, [[n, n + 1] for n in range(4)], 16, "meta")
    for parts in (split_batch(batch), split_rows(batch, 4)):
        assert [part.host_tokens.tolist() for part in parts] == [[0, 1, 1, 2], [2, 3, 3, 4]]


def test_a_tree_is_never_cut():
    tree = SequenceSlice((0,), 3, 7, 3, parents=(-1, 0, 0, 1))
    assert split_batch(rows(tree)) is None
    first, second = split_batch(rows(tree, one_slice((1,), 0, 1)))
    assert [first.num_rows, second.num_rows] == [4, 1]


def test_one_row_makes_one_microbatch():
    assert split_batch(rows(one_slice((0,), 4, 5))) is None


def test_rows_that_read_what_later_rows_of_the_batch_write_are_not_parted_from_them():
    reader, writer = one_slice((0, 1), 16, 20), one_slice((0,), 12, 16)
    assert split_batch(rows(reader, writer)) is None
    assert split_batch(rows(writer, reader)) is not None
    apart = one_slice((2,), 12, 16)
    assert split_batch(rows(reader, apart)) is not None


def test_a_predicted_timeline_hides_the_wire_behind_the_other_microbatch():
    costs = StageCosts(project=100, attend=300, shared=50, experts=200, dispatch=300, combine=300)
    end = {}
    for mode in ("no_overlap", "dispatch_overlap", "microbatch"):
        schedule = plan_schedule([(layer, True) for layer in range(20)], mode)
        events = predict(schedule, costs, costs.halved())
        end[mode] = max(event.end_us for event in events)
        for track in ("compute", "wire"):
            spans = sorted((e.begin_us, e.end_us) for e in events if e.track == track)
            assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert end["no_overlap"] == 20 * 1250
    assert end["dispatch_overlap"] == 20 * 1200
    assert 20 * 650 <= end["microbatch"] < 20 * 820


def test_a_trace_is_json_that_names_ranks_microbatches_and_layers():
    ticks = iter(range(100))
    timeline = Timeline(lambda: float(next(ticks)))
    timeline.add(2, Item(1, 5, Stage.SEND), timeline.now())
    entries = json.loads(chrome_trace(timeline.events))["traceEvents"]
    assert entries[0]["args"] == {"name": "rank 2"}
    (event,) = [e for e in entries if e["ph"] == "X"]
    assert (event["pid"], event["name"], event["ts"], event["dur"]) == (2, "send", 0.0, 1e6)
    assert event["args"] == {"microbatch": 1, "layer": 5}


def test_more_rows_than_fit_are_batches_one_after_another():
    batch = rows(
        one_slice((0, 1), 3, 20, write_from=9), one_slice((2,), 0, 2), one_slice((3,), 5, 9)
    )
    parts = split_rows(batch, 8)
    assert [part.num_rows for part in parts] == [8, 8, 7]
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    ranges = [[(s.page_table, s.start, s.end, s.write_from) for s in part.slices] for part in parts]
    assert ranges == [
        [((0, 1), 3, 11, 9)],
        [((0, 1), 11, 19, 9)],
        [((0, 1), 19, 20, 9), ((2,), 0, 2, 0), ((3,), 5, 9, 5)],
    ]
    assert split_rows(batch, 23)[0].slices == batch.slices
    tree = SequenceSlice((0,), 3, 7, 3, parents=(-1, 0, 0, 1))
    together = split_rows(rows(one_slice((1,), 0, 2), tree), 5)
    assert [len(part.slices) for part in together] == [1, 1]
    with pytest.raises(ValueError, match="a tree of 4 rows is more than 3"):
        split_rows(rows(tree), 3)

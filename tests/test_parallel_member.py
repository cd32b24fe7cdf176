"""Ranks as processes have them, over sockets: the same bits as one process, whoever is lost."""

import asyncio
import contextlib
import threading
import time

import pytest
import torch
from free_ports import free_port
from parallel_rig import a_step, later_rows, redundant, same, skewed_model, wide_model

from pdmesh.model.parallel.balancer import BalanceRule, imbalance
from pdmesh.model.parallel.meeting import Place
from pdmesh.model.parallel.member import Member
from pdmesh.model.parallel.payload import WireFormat
from pdmesh.model.parallel.plans import first_placement
from pdmesh.model.parallel.schedule import plan_schedule
from pdmesh.model.parallel.timeline import Timeline
from pdmesh.model.parallel.virtual import Settings
from pdmesh.wire.errors import ConfigError, Unavailable

UNEVEN = (5, 0, 1, 9)


def free_addresses(count):
    return tuple(f"127.0.0.1:{free_port()}" for _ in range(count))


def a_member(model, rank, addresses, **options):
    settings = options.pop("settings", Settings(mode="auto", threshold=4))
    silence_s = options.pop("silence_s", 30.0)
    place = Place(rank, addresses, options.pop("group", "test"), silence_s, step_s=30.0)
    return Member(model, place, settings=settings, **options)


@contextlib.contextmanager
def group(model, size, **options):
    """All ranks of a group, connected."""
    addresses = free_addresses(size)
    members = [a_member(model, rank, addresses, **options) for rank in range(size)]
    try:
        together([member.start for member in members])
        yield members
    finally:
        for member in members:
            member.close()


def together(calls):
    """The results of calls that are made at once, each on a thread of its own."""
    results = [None] * len(calls)

    def run(number, call):
        try:
            results[number] = call()
        except Exception as error:  # noqa: BLE001 - it is raised below
            results[number] = error

    threads = [
        threading.Thread(target=run, args=item) for item in enumerate(calls) if item[1] is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def check(members, step, *, mtp=True):
    """Each rank computes its part of a step, then its MTP rows."""
    inputs = step.inputs[: len(members)]

    def one(member, item, hidden):
        got = member.forward(item.batch, item.latents[0], item.form)
        later = later_rows(item.batch) if mtp else None
        if later is None:
            return got, None
        return got, member.mtp_forward(later, hidden[:-1], item.latents[0], item.form)

    calls = [
        None if item is None else lambda m=m, i=item, h=hidden: one(m, i, h)
        for m, item, hidden in zip(members, inputs, step.hidden, strict=False)
    ]
    found = together(calls)
    same([None if f is None else f[0] for f in found], step.hidden[: len(members)])
    if mtp:
        same([None if f is None else f[1] for f in found], step.mtp[: len(members)])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_over_sockets_give_what_one_process_gives_some_of_them_idle(size):
    model = wide_model()
    with group(model, size) as members:
        for _ in range(3):
            check(members, a_step(model, size, 1, UNEVEN))
        assert all(member.members == tuple(range(size)) for member in members)
        assert all(member.repeated == 0 for member in members)


@pytest.mark.parametrize("mode", ["no_overlap", "dispatch_overlap", "microbatch"])
def test_every_schedule_and_wire_and_copies_of_experts_keep_the_bits(mode):
    model = skewed_model()
    settings = Settings(mode=mode, wire=WireFormat("compute", "compute"))
    with group(model, 4, settings=settings, placement=redundant(288, 4)) as members:
        check(members, a_step(model, 4, 1, (7, 2, 0, 40)))


def test_ranks_that_call_as_often_as_they_like_wait_for_nobody_to_end():
    model = wide_model()
    step = a_step(model, 4, 1, (6,))
    with group(model, 4) as members:

        def many(number):
            item = step.inputs[number]
            for _ in range(1 + 4 * number):
                got = members[number].forward(item.batch, item.latents[0], item.form)
                assert torch.equal(got, step.hidden[number])
            return True

        assert together([lambda n=n: many(n) for n in range(4)]) == [True] * 4


@pytest.mark.parametrize("lost", [0, 2])
def test_after_the_loss_of_a_rank_the_others_hold_its_experts_and_it_can_come_back(lost):
    model = wide_model()
    with group(model, 4) as members:
        check(members, a_step(model, 4, 1, (5,)))
        members[lost].close()
        left = [member for member in members if member is not members[lost]]
        check(left, a_step(model, 3, 1, (4, 3)))
        want = tuple(m.place.rank for m in left)
        assert [member.members for member in left] == [want] * 3
        again = a_member(model, lost, left[0].place.addresses)
        try:
            again.start()
            step = a_step(model, 4, 1, (4, 3, 2))
            for _ in range(200):
                check([*left, again], step, mtp=False)
                if again.members == (0, 1, 2, 3):
                    break
            check([*left, again], step)
            assert {m.members for m in (*left, again)} == {(0, 1, 2, 3)}
        finally:
            again.close()


def test_a_rank_that_is_lost_in_the_middle_of_a_step_costs_the_others_time_only():
    model = wide_model()
    step = a_step(model, 4, 1, (5,))
    with group(model, 4) as members:
        dying = members[1]
        meeting = dying._meeting
        post = meeting.post

        def die(to, channel, message):
            if channel.kind == "combine":
                meeting.close()
            post(to, channel, message)

        meeting.post = die
        items = step.inputs

        def call(number):
            item = items[number]
            return members[number].forward(item.batch, item.latents[0], item.form)

        results = together([lambda: call(0), None, lambda: call(2), None])
        same([results[0], results[2]], [step.hidden[0], step.hidden[2]])
        assert members[0].members == members[2].members == (0, 2, 3)
        assert members[0].repeated + members[2].repeated > 0


def test_a_layer_is_told_once_even_if_its_step_is_computed_again():
    model = wide_model()
    step = a_step(model, 2, 1, (5,))
    told = []
    with group(model, 2) as members:
        dying = members[1]
        meeting = dying._meeting
        post = meeting.post

        def die(to, channel, message):
            if channel.kind == "combine":
                meeting.close()
            post(to, channel, message)

        meeting.post = die
        item = step.inputs[0]
        got = members[0].forward(item.batch, item.latents[0], item.form, told.append)
        same([got], [step.hidden[0]])
        assert told == list(range(len(model.layers)))


async def test_a_wait_for_the_end_that_is_given_up_is_none(caplog):
    """A worker that ends gives up its wait, and then leaves its group."""
    model = wide_model()
    with group(model, 2) as members:
        waiting = asyncio.ensure_future(members[0].ended())
        await asyncio.wait({waiting}, timeout=0)
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.to_thread(members[0].close)
        await members[0].ended()
    assert "the steps of this rank have ended" not in caplog.text


def test_a_step_that_fails_at_one_rank_fails_there_alone():
    model = wide_model()
    step = a_step(model, 2, 1, (5,))
    with group(model, 2) as members:
        item = step.inputs[0]

        def wrong():
            with pytest.raises(ValueError, match="pages of"):
                members[1].forward(item.batch, model.new_latents(2, 32), item.form)
            return True

        def right():
            return members[0].forward(item.batch, item.latents[0], item.form)

        found = together([right, wrong])
        assert torch.equal(found[0], step.hidden[0])
        check(members, step)


def test_experts_are_placed_anew_while_ranks_compute_and_no_bit_changes(monkeypatch):
    monkeypatch.setattr("pdmesh.model.parallel.member.LOAD_STEPS", 3)
    model = skewed_model()
    rule = BalanceRule(288, window=2, min_rows=50, tolerance=1.01)
    first = first_placement(2, 256, 4, 32)
    with group(model, 4, placement=first, rule=rule) as members:
        step = a_step(model, 4, 1, (20, 9, 0, 30))
        load = torch.zeros((2, 256), dtype=torch.int64)
        for member in members:
            count = member._plans.count
            monkeypatch.setattr(
                member._plans, "count", lambda rows, c=count: (load.add_(rows), c(rows))
            )
        for _ in range(20):
            check(members, step)
            if all(member.plan for member in members):
                break
        assert len({member.plan for member in members}) == 1
        plan = members[0].plan
        assert plan > 0
        after = members[0]._plans.placement(plan)
        assert imbalance(after, load).max() < imbalance(first, load).max()
        members[3].close()
        check(members[:3], a_step(model, 3, 1, (5, 6, 7)))
        again = a_member(model, 3, members[0].place.addresses, placement=first, rule=rule)
        try:
            again.start()
            for _ in range(200):
                check([*members[:3], again], step, mtp=False)
                if again.members == (0, 1, 2, 3) and again.plan >= plan:
                    break
            assert again.plan >= plan
            check([*members[:3], again], step)
        finally:
            again.close()


def test_a_rank_records_its_stages_and_within_them_its_waits_for_others():
    model, addresses = wide_model(), free_addresses(2)
    settings = Settings(mode="microbatch")
    lines = [Timeline(time.monotonic) for _ in range(2)]
    members = [
        a_member(model, rank, addresses, settings=settings, timeline=lines[rank])
        for rank in range(2)
    ]
    try:
        together([member.start for member in members])
        check(members, a_step(model, 2, 1, (5, 9)), mtp=False)
    finally:
        for member in members:
            member.close()
    layers = [(n, members[0]._builder.routed(n)) for n in range(len(model.layers))]
    planned = [
        (item.stage.name.lower(), item.microbatch, item.layer)
        for item in plan_schedule(layers, "microbatch")
    ]
    for rank, line in enumerate(lines):
        stages = [e for e in line.events if e.track == "compute"]
        waits = [e for e in line.events if e.track == "waits"]
        assert {e.rank for e in line.events} == {rank}
        named = [(e.name, e.microbatch, e.layer) for e in stages]
        assert named == planned * members[rank].steps  # one for both calls, or one for each
        assert {e.name for e in waits} == {"dispatch", "combine"}
        for wait in waits:
            name = "experts" if wait.name == "dispatch" else "receive"
            assert any(
                (e.name, e.microbatch, e.layer) == (name, wait.microbatch, wait.layer)
                and e.begin_us <= wait.begin_us <= wait.end_us <= e.end_us
                for e in stages
            )


def test_calls_that_wait_when_the_group_is_left_fail_by_name():
    model = wide_model()
    with group(model, 2) as members:
        members[0].close()
        item = a_step(model, 1, 1, (3,)).inputs[0]
        with pytest.raises(Unavailable, match="has left its expert-parallel group"):
            members[0].forward(item.batch, item.latents[0], item.form)


def test_ranks_of_different_models_or_groups_refuse_each_other_by_name():
    model, addresses = wide_model(), free_addresses(2)
    one = a_member(model, 0, addresses, digest="a")
    two = a_member(model, 1, addresses, digest="b")
    try:
        with pytest.raises(ConfigError, match=r"lacks rank 1 \(its model, arithmetic"):
            together([lambda: one.start(20), lambda: two.start(20)])
    finally:
        one.close()
        two.close()


def test_a_rank_that_never_comes_is_named():
    member = a_member(wide_model(), 0, free_addresses(2))
    with pytest.raises(ConfigError, match="rank 0 of group 'test' lacks rank 1"):
        member.start(0.2)

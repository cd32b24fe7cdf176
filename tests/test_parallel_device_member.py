"""Ranks in FP8 as processes have them: steps agreed on over sockets, rows through shared memory."""

import asyncio
import contextlib

import pytest
import torch
from device_cases import CPU
from device_ranks import PAGE, moe_layers, random_reference
from test_device_rank import Talk, alone, answers
from test_parallel_member import free_addresses, together

from pdmesh.kernels.expert_exchange import ExchangeSize
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device.building import build_expert, build_weights
from pdmesh.model.device.graphs import plain_capture
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.sources import ModelSource
from pdmesh.model.device.spread import Exchange, spread_over
from pdmesh.model.parallel.balancer import BalanceRule
from pdmesh.model.parallel.device_member import DeviceMember
from pdmesh.model.parallel.exchange import Channel, RankLost
from pdmesh.model.parallel.meeting import Place
from pdmesh.wire.errors import ConfigError, Unavailable

NEW = Channel("new", 0, -1, -1)
SMALL = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def models():
    return random_reference(11, **SMALL)


def a_member(model, rank, addresses, rows=64, threshold=2, digest="", redundant=0, **options):
    config = model.config
    ranks = len(addresses)
    spread = spread_over(config, True, rank, ranks, redundant, rows, threshold)
    weights = build_weights(config, ModelSource(model), CPU, held=spread.held)
    place = Place(rank, addresses, "test", 30.0, 30.0)
    device = DeviceModel(config, weights)
    return DeviceMember(device, place, spread.placement, spread.exchange, digest, **options)


@contextlib.contextmanager
def group(model, size, **options):
    addresses = free_addresses(size)
    members = [a_member(model, rank, addresses, **options) for rank in range(size)]
    try:
        together([member.start for member in members])
        yield members
    finally:
        for member in members:
            member.close()


def talking(member, lengths, seed, steps=4):
    talk = Talk(member._model, lengths, seed)
    return answers(member.forward, member.mtp_forward, talk, member, steps)


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_those_of_one_rank_whoever_has_rows(models, ranks):
    model, whole = models
    lengths = [(20, 33, 5), (), (17,), (9,)][:ranks]
    with group(model, ranks, redundant=ranks) as members:
        for rest in (lengths, lengths[:1] + [()] * (ranks - 1)):
            calls = [
                (lambda m=m, own=own, n=n: talking(m, own, 100 * n)) if own else None
                for n, (m, own) in enumerate(zip(members, rest, strict=True))
            ]
            given = together(calls)
            for n, own in enumerate(rest):
                assert given[n] == (alone(whole, own, 100 * n) if own else None)
        assert {member.status().members for member in members} == {tuple(range(ranks))}
        assert all(member.status().sent_bytes > 0 for member in members)
        assert len({member.steps for member in members}) == 1


def test_graphs_are_captured_by_all_before_the_first_step(models):
    model, whole = models
    between = []

    def prepare(rank, checked):
        pool = pools[rank.exchange.rank]
        modes = ("dispatch_overlap", "microbatch")
        rank.capture(pool, (1,), 2, (1,), modes, plain_capture)
        checked()
        between.append(rank.exchange.rank)

    pools = [whole.new_latents(16, PAGE) for _ in range(2)]
    with group(model, 2, prepare=prepare) as members:
        assert sorted(between) == [0, 1]
        talk = Talk(whole, (20, 33), 5)
        talk.pool = pools[1]
        assert answers(members[1].forward, members[1].mtp_forward, talk, whole) == alone(
            whole, (20, 33), 5
        )


def test_more_rows_than_an_exchange_takes_are_several_steps(models):
    model, whole = models
    with group(model, 2, rows=6) as members:
        assert talking(members[1], (20, 33), 1, steps=1) == alone(whole, (20, 33), 1)[:1]
        assert members[0].steps > (19 + 32) // 6


def test_a_batch_that_cannot_be_computed_fails_by_itself_and_costs_nobody_a_step(models):
    model, whole = models
    with group(model, 2) as members:
        batch = Batch.build([SequenceSlice((0,), 0, 2, 0)], [[1, 2]], PAGE)
        with pytest.raises(ValueError, match="pages of 32, the batch of 16"):
            members[0].forward(batch, whole.new_latents(2, 32), "mha")
        assert talking(members[0], (9,), 1, steps=1) == alone(whole, (9,), 1)[:1]


async def test_when_a_rank_is_lost_all_others_end_at_once_and_say_who(models):
    model, _ = models
    with group(model, 3, redundant=1) as members:
        await asyncio.to_thread(talking, members[0], (9,), 1, 1)
        members[1].close()  # as the connections of a process that dies
        for rank in (0, 2):
            with pytest.raises(RankLost, match="rank 1 is lost"):
                await asyncio.wait_for(members[rank].ended(), 20)
        waits = asyncio.ensure_future(asyncio.to_thread(talking, members[0], (9,), 1, 1))
        await asyncio.sleep(0)
        assert not waits.done()  # its answer is to end with the worker, and go on elsewhere
        members[0].close()
        with pytest.raises(Unavailable, match="left its expert-parallel group"):
            await waits
        await members[1].ended()


async def test_a_wait_for_the_end_that_is_given_up_does_not_hide_why_it_came(models):
    model, _ = models
    with group(model, 2) as members:
        waiting = asyncio.ensure_future(members[0].ended())
        await asyncio.wait({waiting}, timeout=0)
        waiting.cancel()
        await asyncio.wait({waiting})
        members[1].close()  # as the connections of a process that dies
        with pytest.raises(RankLost, match="rank 1 is lost"):
            await asyncio.wait_for(members[0].ended(), 20)


async def test_a_rank_that_is_lost_in_the_middle_of_a_step_ends_the_wait_for_its_rows(models):
    model, _ = models
    with group(model, 2) as members:
        step = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stands_still(mtp, mode, call):
            loop.call_soon_threadsafe(step.set)
            raise RuntimeError("this rank computes no more")

        members[1]._rank.forward = lambda *_: stands_still(*[None] * 3)
        asking = asyncio.ensure_future(asyncio.to_thread(talking, members[0], (9,), 1, 1))
        await asyncio.wait_for(step.wait(), 20)
        with pytest.raises(RuntimeError, match="computes no more"):
            await members[1].ended()
        members[1].close()
        with pytest.raises(RankLost, match="rank 1 is lost"):
            await asyncio.wait_for(members[0].ended(), 20)
        members[0].close()
        with pytest.raises(Unavailable):
            await asking


@pytest.mark.parametrize("leaves", [0, 1])
async def test_waits_of_a_device_end_when_a_rank_is_gone_and_when_this_one_leaves(models, leaves):
    model, _ = models
    with group(model, 2) as members:
        exchange = members[0]._rank.exchange
        exchange.check()
        members[leaves].close()
        async with asyncio.timeout(20):
            while not exchange._lost[leaves]:
                await asyncio.sleep(0.01)
        with pytest.raises(RankLost, match=f"rank {leaves} is lost"):
            exchange.check()


async def test_a_rank_that_leaves_in_the_middle_of_a_step_has_not_lost_another(models):
    model, _ = models
    with group(model, 2) as members:
        step, loop, meeting = asyncio.Event(), asyncio.get_running_loop(), members[1]._meeting

        def waits(*_):
            loop.call_soon_threadsafe(step.set)
            with meeting.changed:
                meeting.changed.wait_for(lambda: meeting.closed)
            raise RankLost(1, "what it had to send")  # as `check` says when waits have ended

        members[1]._rank.forward = waits
        asking = asyncio.ensure_future(asyncio.to_thread(talking, members[0], (9,), 1, 1))
        await asyncio.wait_for(step.wait(), 20)
        members[1].close()
        await members[1].ended()
        with pytest.raises(RankLost, match="rank 1 is lost"):
            await asyncio.wait_for(members[0].ended(), 20)
        members[0].close()
        with pytest.raises(Unavailable):
            await asking


def test_a_rank_of_an_earlier_group_is_waited_out_and_the_group_forms_anew(models):
    """Rank 1 is started again while rank 0 has not noticed that it was gone."""
    model, whole = models
    addresses = free_addresses(2)
    first = [a_member(model, rank, addresses) for rank in range(2)]
    together([member.start for member in first])
    first[1].close()
    second = [None, a_member(model, 1, addresses)]

    def renew():
        meeting = first[0]._meeting
        with meeting.changed:  # rank 1 is there again, and has said that it is new
            back = meeting.changed.wait_for(
                lambda: meeting.losses(1) and (1, NEW) in meeting._messages, 60
            )
        assert back
        first[0].close()
        second[0] = a_member(model, 0, addresses)
        second[0].start()

    try:
        together([renew, second[1].start])
        assert talking(second[1], (9,), 1, steps=1) == alone(whole, (9,), 1)[:1]
    finally:
        for member in second:
            if member is not None:
                member.close()


def test_experts_are_placed_anew_while_ranks_compute_and_no_token_changes(models, monkeypatch):
    monkeypatch.setattr("pdmesh.model.parallel.device_member.LOAD_STEPS", 3)
    model, whole = models
    rule = BalanceRule(10, window=2, min_rows=20, tolerance=1.0)
    source = ModelSource(model)
    layers = [n for n in range(3) if model.config.is_moe_layer(n)]

    def reader(layer, expert):
        return build_expert(model.config, source, layers[layer], expert, CPU)

    with group(model, 2, redundant=2, rule=rule, reader=reader) as members:
        plans = set()
        for turn in range(40):
            calls = [
                lambda m=m, seed=100 * n + turn: talking(m, (20, 33), seed, 2)
                for n, m in enumerate(members)
            ]
            expected = [alone(whole, (20, 33), 100 * n + turn)[:2] for n in range(2)]
            assert together(calls) == expected
            plans.add(members[0].status().plan)
            if max(plans) > 0:
                break
        assert {member.status().plan for member in members} == {max(plans)}
        assert max(plans) > 0
        assert members[0]._rank.placement == members[1]._rank.placement


def test_ranks_that_would_exchange_other_rows_refuse_each_other(models):
    model, _ = models
    addresses = free_addresses(2)
    members = [a_member(model, rank, addresses, digest=f"{rank}") for rank in range(2)]
    try:
        with pytest.raises(ConfigError, match="lacks rank"):
            together([lambda m=m: m.start(3.0) for m in members])
    finally:
        for member in members:
            member.close()


def test_what_a_rank_holds_and_exchanges_follows_from_the_model():
    model, _ = random_reference(1, **SMALL)
    spread = spread_over(model.config, True, 1, 2, 2, 48, 32)
    assert len(spread.held) == moe_layers(model.config)
    assert {len(own) for own in spread.held} == {5}
    assert spread.exchange.size == ExchangeSize(2, 5, 48, 128, 3, 128)
    assert spread.exchange.modes == ("dispatch_overlap", "microbatch")
    few = Exchange(spread.exchange.size, 49)
    assert (few.modes, few.lanes, few.nbytes) == (
        ("dispatch_overlap",),
        1,
        spread.exchange.nbytes / 2,
    )
    assert Exchange(spread.exchange.size, 1).modes == ("microbatch",)
    with pytest.raises(ConfigError, match="cannot be shared evenly by 3"):
        spread_over(model.config, True, 0, 3, 0, 48, 32)
    narrow, _ = random_reference(1, hidden_size=64)
    with pytest.raises(ConfigError, match="cannot be sent to ranks in FP8: rows of 64"):
        spread_over(narrow.config, True, 0, 2, 0, 48, 32)


def test_results_of_a_step_are_not_overwritten_by_the_next(models):
    model, _ = models
    with group(model, 2) as members:
        talk = Talk(members[0]._model, (9, 12), 3)
        hidden = members[0].forward(talk.prompt(), talk.pool, "mha")
        kept = hidden.clone()
        members[0].forward(talk.step(), talk.pool, "absorbed")
        assert torch.equal(hidden, kept)

"""Tensor parallelism between ranks that processes have: the same bits, whoever is lost."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from model_cases import one_slice, tiny_model, tokens_of
from parallel_rig import WIDE, a_step, later_rows, same, skewed_model, wide_model
from test_parallel_member import a_member, free_addresses, together
from test_parallel_random import PAGE, Talk
from test_parallel_random import pool as talk_pool
from test_parallel_runners import DRAFTS, PROMPTS, prompts_of, right
from test_parallel_runners import Group as RunnerGroup

from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.mailbox import Mailboxes
from pdmesh.model.parallel.team import TEAM, Rows, Team
from pdmesh.model.parallel.virtual import Settings
from pdmesh.wire.errors import ConfigError

UNEVEN = (5, 0, 1, 9)


@contextlib.contextmanager
def group(model, ep, tp, **options):
    """All ranks of a group, connected."""
    addresses = free_addresses(ep)
    members = [a_member(model, rank, addresses, tp=tp, **options) for rank in range(ep)]
    try:
        together([member.start for member in members])
        yield members
    finally:
        for member in members:
            member.close()


def check(members, tp, step, close=same):
    """Each leader computes its part of a step, then its MTP rows."""
    leaders = members[::tp]
    inputs = step.inputs[: len(leaders)]

    def one(member, item, hidden):
        got = member.forward(item.batch, item.latents[0], item.form)
        later = later_rows(item.batch)
        if later is None:
            return got, None
        return got, member.mtp_forward(later, hidden[:-1], item.latents[0], item.form)

    calls = [
        None if item is None else lambda m=m, i=item, h=hidden: one(m, i, h)
        for m, item, hidden in zip(leaders, inputs, step.hidden, strict=False)
    ]
    found = together(calls)
    close([None if f is None else f[0] for f in found], step.hidden[: len(leaders)])
    close([None if f is None else f[1] for f in found], step.mtp[: len(leaders)])


@pytest.mark.parametrize(("ep", "tp"), [(2, 2), (4, 2), (4, 4), (8, 4)])
@pytest.mark.parametrize("mode", ["auto", "microbatch"])
def test_groups_of_ranks_that_share_heads_give_what_one_process_gives(ep, tp, mode):
    model = wide_model()
    with group(model, ep, tp, settings=Settings(mode=mode, threshold=4)) as members:
        for _ in range(2):
            check(members, tp, a_step(model, ep // tp, 1, UNEVEN))
        assert all(member.repeated == 0 for member in members)
        assert all(member._holding._built[3].tensor_parallel is not None for member in members)


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"attention_bias": True}])
@pytest.mark.parametrize("arithmetic", ["exact", "fast"])
def test_a_rank_that_follows_frees_the_heads_of_others_and_computes_the_same(changes, arithmetic):
    def made():
        return tiny_model(4, **(WIDE | changes))

    def weights(model):
        return sum(p.numel() for b in model.blocks() for p in b.self_attn.parameters())

    whole, settings = made(), Settings(arithmetic, mode="no_overlap")
    step, addresses = a_step(whole, 2, 1, (6, 9)), free_addresses(4)
    models = [made() for _ in range(4)]
    members = [a_member(models[r], r, addresses, tp=2, settings=settings) for r in range(4)]
    for rank in (1, 3):
        members[rank].keep_heads()
        held = sum(
            p.numel()
            for layer in members[rank]._builder._layers(1)
            for p in (*layer.attention.k_b_proj, *layer.attention.v_b_proj)
        )
        freed = weights(whole) - weights(models[rank])
        assert freed >= 2 * held
    try:
        together([member.start for member in members])
        check(members, 2, step, same if arithmetic == "exact" else close)
        members[2].close()  # its follower goes on as the home of experts
        check(members[:2], 2, step, same if arithmetic == "exact" else close)
    finally:
        for member in members:
            member.close()


def test_sixteen_bit_weights_are_exact_too():
    model = tiny_model(3).bfloat16()
    with group(model, 4, 2) as members:
        check(members, 2, a_step(model, 2, 1, (7, 3)))


def close(found, expected):
    for got, wanted in zip(found, expected, strict=True):
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_partial_sums_of_fast_arithmetic_agree_within_rounding():
    model = wide_model()
    with group(model, 4, 2, settings=Settings("fast", mode="auto", threshold=4)) as members:
        check(members, 2, a_step(model, 2, 1, (7, 3)), close)


def arrived(model, lengths, pages):
    """A pool with the prompts of some sequences, as another worker computed them."""
    pool = model.new_latents(pages).fill_(float("nan"))
    tables = [(2 * i, 2 * i + 1) for i in range(len(lengths))]
    for seed, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        item = one_slice(table, 0, length)
        model(Batch.build([item], [tokens_of(length, seed)]), pool, "absorbed")
    return pool, tables


def decode(model, tables, lengths, pools, calls):
    """One more token of each sequence by the model and by others, each over a pool."""
    slices = [one_slice(t, n, n + 1) for t, n in zip(tables, lengths, strict=True)]
    batch = Batch.build(slices, [[n % 100] for n in lengths])
    wanted = model(batch, pools[0], "absorbed")
    for call, pool in zip(calls, pools[1:], strict=True):
        assert torch.equal(call(batch, pool, "absorbed"), wanted)


def test_pages_that_arrive_move_or_change_between_steps_are_what_followers_compute_over():
    """An arrival, a page given to another sequence, a draft whose latent was moved."""
    model = wide_model()
    lengths = [70, 3, 64]
    pool, tables = arrived(model, lengths, 8)
    mine = pool.clone()
    with group(model, 2, 2) as (leader, follower):
        sent, post = [], leader._meeting.post

        def posted(to, channel, message):
            if channel.kind == TEAM:
                sent.append(message[2].tolist())
            post(to, channel, message)

        leader._meeting.post = posted

        def step():
            decode(model, tables, lengths, (pool, mine), [leader.forward])
            lengths[:] = [n + 1 for n in lengths]
            return sent.pop()

        assert step() == [0, 1, 2, 4]
        assert step() == [5]  # the third sequence has begun a page
        assert step() == []
        for both in (pool, mine):  # as if two drafts had changed places
            both[1, :, [6, 7]] = both[1, :, [7, 6]]
        assert step() == [1]
        other, _ = arrived(skewed_model(), [70, 3, 64], 8)
        for both in (pool, mine):
            both[2:4] = other[4:6]
        lengths[1] = 64
        assert step() == [2]
        assert step() == [3]
        assert follower.repeated == leader.repeated == 0


def test_a_follower_that_is_lost_costs_time_only_and_computes_again_once_it_is_back():
    model = wide_model()
    lengths = [70, 3]
    pool, tables = arrived(model, lengths, 4)
    mine = pool.clone()
    with group(model, 4, 2) as members:
        leader, addresses = members[2], members[0].place.addresses

        def step():
            decode(model, tables, lengths, (pool, mine), [leader.forward])
            lengths[:] = [n + 1 for n in lengths]

        step()
        meeting = members[3]._meeting
        post = meeting.post

        def die(to, channel, message):
            if channel.kind == "heads":
                meeting.close()
            post(to, channel, message)

        meeting.post = die
        step()
        assert leader.members == (0, 1, 2)
        assert leader.repeated == 1
        step()
        assert leader._holding._built[3].tensor_parallel is None
        members[3] = a_member(model, 3, addresses, tp=2)
        members[3].start()
        for _ in range(50):
            step()
            if members[3].members == (0, 1, 2, 3):
                break
        step()
        assert leader._holding._built[3].tensor_parallel is not None
        check(members, 2, a_step(model, 2, 1, (4, 9)))


def test_a_lost_leader_takes_its_requests_along_and_its_follower_serves_experts():
    model = wide_model()
    with group(model, 4, 2) as members:
        check(members, 2, a_step(model, 2, 1, (4, 9)))
        members[0].close()
        check(members[2:], 2, a_step(model, 1, 1, (6,)))
        assert members[2].members == (1, 2, 3)


def test_rows_that_cannot_be_computed_fail_their_call_and_nothing_else():
    model = wide_model()
    step = a_step(model, 2, 1, (5,))
    with group(model, 4, 2) as members:
        item = step.inputs[0]
        beyond = one_slice(tuple(range(17)), 1023, 1025)
        pool = model.new_latents(17)
        with pytest.raises(ValueError, match="position 1024 is beyond"):
            members[0].forward(Batch.build([beyond], [[1, 2]]), pool, "absorbed")
        with pytest.raises(ValueError, match="pages of 32"):
            members[0].forward(item.batch, model.new_latents(2, 32), item.form)
        check(members, 2, step)
        with pytest.raises(ValueError, match="rank 1 follows rank 0"):
            members[1].forward(item.batch, item.latents[0], item.form)


class Called:
    """A rank as the code of a worker has it, with pages."""

    def __init__(self, model, member):
        self.new_latents, self.config = model.new_latents, model.config
        self.forward, self.mtp_forward = member.forward, member.mtp_forward
        self.logits, self.mtp_logits = member.logits, member.mtp_logits


@pytest.mark.parametrize("lost", [None, 3])
def test_runners_of_all_groups_give_the_answers_of_one_process_drafts_and_all(lost):
    """Prompts, then tokens with one draft, two, and none; a follower may be lost on the way."""
    model = skewed_model()
    with group(model, 8, 2) as members:
        served = [
            RunnerGroup(Called(model, members[2 * dp]), prompts_of(dp), DRAFTS[dp])
            if PROMPTS[dp]
            else None
            for dp in range(4)
        ]
        if lost is not None:
            dies_at(members[lost], 9)
        right(together([None if one is None else one.serve for one in served]))
        there = {member.members for member in members if member.place.rank != lost}
        assert there == {tuple(rank for rank in range(8) if rank != lost)}


def dies_at(member, number):
    """Leaves the group at the begin of its step of this number."""
    team, steps = member._team, iter(range(10_000))
    share = team.share

    def shared(*args):
        if next(steps) == number:
            member._meeting.close()
        return share(*args)

    team.share = shared


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_of_chunks_drafts_and_trees_over_shared_heads_give_the_same_bits(seed):
    rng, model = random.Random(seed), wide_model()
    talks = [[Talk(rng, dp, i) for i in range(rng.choice([1, 2, 5]))] for dp in range(2)]
    pools = [[talk_pool(model, len(some)) for _ in range(2)] for some in talks]
    mode = rng.choice(["dispatch_overlap", "microbatch"])
    with group(model, 4, 2, settings=Settings(mode=mode)) as members:
        for _ in range(6):
            calls, expected = [], []
            for member, some, (mine, plain) in zip(members[::2], talks, pools, strict=True):
                found = [rows for talk in some if (rows := talk.rows()) is not None]
                if not found:
                    calls.append(None)
                    expected.append(None)
                    continue
                batch = Batch.build([item for item, _ in found], [t for _, t in found], PAGE)
                calls.append(lambda m=member, b=batch, p=mine: m.forward(b, p, "absorbed"))
                expected.append(model(batch, plain, "absorbed"))
            same(together(calls), expected)
            for mine, plain in pools:
                assert torch.equal(mine.nan_to_num(), plain.nan_to_num())


def test_groups_that_cannot_be_are_refused():
    model, addresses = wide_model(), free_addresses(4)
    with pytest.raises(ConfigError, match="TP 3 does not divide EP 4"):
        a_member(model, 0, addresses, tp=3)
    with pytest.raises(ConfigError, match="TP 16 does not divide 8 attention heads"):
        a_member(model, 0, free_addresses(16), tp=16)


# ---- what a leader knows of its followers' pages ----------------------------------------------


class Pair:
    """A leader and a follower without a model: steps write random latents to both pools."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.losses = 0
        self.boxes = Mailboxes()
        self.pool = torch.zeros(6, 3, 4, 2)
        self.leader, self.follower = self.team(0), self.team(1)
        self.step = self.sent = 0

    def team(self, rank):
        return Team(Groups(2, 2), self.boxes.end(rank), lambda _: self.losses)

    def value(self):
        return self.rng.choice([self.rng.random(), float("nan"), -0.0, 0.0])

    def rows(self):
        """A random batch of one or two slices, none writing where the other reads."""
        pages = self.rng.sample(range(6), 6)
        slices = []
        for table in (tuple(pages[:3]), tuple(pages[3:]))[: self.rng.randint(1, 2)]:
            start = self.rng.randrange(11)
            end = self.rng.randint(start + 1, 12)
            slices.append(SequenceSlice(table, start, end, self.rng.randint(start, end)))
        tokens = [[self.rng.randrange(9)] * (s.end - s.start) for s in slices]
        return Rows(Batch.build(slices, tokens, 4), self.pool, "absorbed")

    def outside(self):
        """A change of the leader's pages between two steps."""
        kind = self.rng.randrange(4)
        if kind == 0:
            self.pool[self.rng.randrange(6)] = self.value()
        elif kind == 1:
            at = self.rng.randrange(6), self.rng.randrange(3), self.rng.randrange(4)
            self.pool[at] = self.value()
        elif kind == 2:
            self.follower, self.losses = self.team(1), self.losses + 1

    def compute(self, fails):
        self.step += 1
        rows = self.rows()
        self.leader.share(self.step, (0, 1), rows)
        if fails == "before":
            self.leader.failed(rows)
            return
        (message,) = self.boxes.waiting.pop(next(iter(self.boxes.waiting))).values()
        self.sent += len(message[2])
        theirs = self.follower._told(message)
        assert theirs.batch.slices == rows.batch.slices
        assert torch.equal(theirs.batch.tokens, rows.batch.tokens)
        for item in rows.batch.slices:
            for position in range(min(max(item.start, item.write_from), item.end)):
                page, slot = item.page_table[position // 4], position % 4
                got, wanted = theirs.latents[page, :, slot], self.pool[page, :, slot]
                assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))
        layers = self.rng.choice([range(2), range(2, 3)])
        flat = rows.batch.writes(3)[1]
        for pool in (self.pool, theirs.latents):
            values = torch.arange(len(flat)) + self.step
            pool[flat // 12, layers.start : layers.stop, flat % 12] = values[:, None, None].float()
            if fails == "halfway":
                break
        if fails:
            self.leader.failed(rows)
        else:
            self.leader.computed(rows, layers)


@pytest.mark.parametrize("seed", range(30))
def test_followers_have_whatever_a_step_reads_after_any_changes_losses_and_failures(seed):
    pair = Pair(seed)
    for _ in range(40):
        for _ in range(pair.rng.randrange(3)):
            pair.outside()
        pair.boxes.waiting.clear()
        pair.compute(pair.rng.choice(["", "", "", "before", "halfway"]))


def test_what_followers_have_is_not_sent_again():
    pair = Pair(0)
    for _ in range(30):
        pair.compute("")
    assert pair.sent <= 6 + 3  # each page once, and the few that a step wrote before any was read

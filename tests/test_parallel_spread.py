"""A worker's batches over the ranks of its own process: dealt out alike, and the same bits."""

import random

import pytest
import torch
from model_cases import tokens_of
from parallel_rig import same, stale, wide_model

from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.serving import Ranks, join_ranks
from pdmesh.model.parallel.spread import SpreadModel, spread
from pdmesh.model.parallel.virtual import Settings, VirtualRanks
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import PageFormat

PAGE = 64


def a_slice(pages, start, end, write_from=None, **rest):
    return SequenceSlice(pages, start, end, start if write_from is None else write_from, **rest)


def rows_of(slices, dealt):
    return [sum(slices[i].end - slices[i].start for i in indices) for indices in dealt]


def test_groups_get_about_as_many_rows_each_and_every_slice_once():
    rng = random.Random(1)
    for _ in range(50):
        slices = [a_slice((i,), 0, rng.randint(1, 40)) for i in range(rng.randint(1, 30))]
        groups = rng.randint(1, 12)
        dealt = spread(slices, groups, PAGE)
        assert sorted(i for indices in dealt for i in indices) == list(range(len(slices)))
        assert dealt == spread(slices, groups, PAGE)
        rows = rows_of(slices, dealt)
        assert max(rows) - min(rows) <= max(s.end - s.start for s in slices)


def test_as_few_sequences_as_groups_have_a_group_each():
    slices = [a_slice((i,), 9, 11) for i in range(7)]
    assert spread(slices, 128, PAGE)[:8] == [[0], [1], [2], [3], [4], [5], [6], []]


def test_slices_stay_together_where_one_writes_to_a_page_of_the_other():
    prompt = a_slice((5, 6), 0, 100)
    follower = a_slice((5, 7), 64, 80)
    other = a_slice((8,), 0, 3)
    assert spread([prompt, other, follower], 3, PAGE) == [[0, 2], [1], []]


def test_slices_that_only_read_the_same_pages_go_apart():
    answers = [a_slice((5, 6 + i), 70, 72) for i in range(3)]
    assert spread(answers, 3, PAGE) == [[0], [1], [2]]


def test_a_page_behind_the_last_row_binds_nobody():
    one, two = a_slice((1, 2), 3, 5), a_slice((3, 2), 3, 5)
    assert spread([one, two], 2, PAGE) == [[0], [1]]


def test_rows_that_are_computed_without_being_written_bind_nobody():
    one = a_slice((1,), 3, 5, write_from=5)
    assert spread([one, one], 2, PAGE) == [[0], [1]]


def a_spread(model, ep, **settings):
    ranks = VirtualRanks(model, Groups(ep), settings=Settings(mode="microbatch", **settings))
    return SpreadModel(model, ranks)


def check(model, over, batch, form, pages):
    """Hidden states, MTP rows, latents and the order of layers are those of the plain model."""
    told, pools = ([], []), [stale(model, pages) for _ in range(2)]
    hidden = [
        which.forward(batch, pool, form, heard.append)
        for which, pool, heard in zip((model, over), pools, told, strict=True)
    ]
    same(hidden[1:], hidden[:1])
    assert told[1] == told[0]
    later, kept = later_rows(batch)
    if later is not None:
        rows = [
            which.mtp_forward(later, hidden[0][kept], pool, form)
            for which, pool in zip((model, over), pools, strict=True)
        ]
        same(rows[1:], rows[:1])
    assert torch.equal(pools[0].isnan(), pools[1].isnan())
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


def later_rows(batch):
    """MTP rows of the prompts that begin at 0, and the hidden states before them."""
    slices, tokens, kept, at = [], [], [], 0
    for item in batch.slices:
        count = item.end - item.start
        if count > 1 and item.start == 0:
            slices.append(a_slice(item.page_table, 1, item.end))
            tokens.append(batch.tokens[at + 1 : at + count].tolist())
            kept += range(at, at + count - 1)
        at += count
    return (Batch.build(slices, tokens) if slices else None), kept


def prompts(lengths, seed=0):
    """One prompt a length; every third begins with the pages of the one before and waits for it."""
    slices, tokens, pages = [], [], 0
    for number, length in enumerate(lengths):
        own = tuple(range(pages, pages + 3))
        pages += 3
        ids = tokens_of(length, seed + number)
        if number % 3 == 2 and lengths[number - 1] >= PAGE < length:
            first = slices[-1].page_table[0]
            ids = [*tokens[-1][:PAGE], *ids[PAGE:]]
            slices.append(a_slice((first, *own[1:]), PAGE, length))
            tokens.append(ids)
        else:
            slices.append(a_slice(own, 0, length))
            tokens.append(ids)
    rows = [ids[s.start :] for s, ids in zip(slices, tokens, strict=True)]
    return Batch.build(slices, rows), pages


@pytest.mark.parametrize("form", ["absorbed", "mha"])
@pytest.mark.parametrize("ep", [1, 4, 128])
def test_rows_over_ranks_of_one_process_are_those_of_the_plain_model(ep, form):
    model = wide_model()
    batch, pages = prompts((3, 70, 90, 1, 64, 130, 2))
    check(model, a_spread(model, ep), batch, form, pages)


def test_trees_of_drafts_and_recomputed_rows_come_back_in_order():
    model = wide_model()
    filled, pages = prompts((40, 40, 40, 40))
    pool = stale(model, pages)
    model.forward(filled, pool, "absorbed")
    slices = [
        a_slice(filled.slices[0].page_table, 40, 44, parents=(-1, 0, 0, 1)),
        a_slice(filled.slices[1].page_table, 39, 40, write_from=40),
        a_slice(filled.slices[2].page_table, 40, 42),
        a_slice(filled.slices[3].page_table, 40, 41),
    ]
    batch = Batch.build(slices, [tokens_of(s.end - s.start, 7) for s in slices])
    over = a_spread(model, 128)
    pools = [pool.clone() for _ in range(2)]
    same([over.forward(batch, pools[0], "absorbed")], [model.forward(batch, pools[1], "absorbed")])
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_random_batches_over_random_numbers_of_ranks(seed):
    rng = random.Random(seed)
    model = wide_model()
    batch, pages = prompts([rng.randint(1, 180) for _ in range(rng.randint(1, 12))], seed)
    over = a_spread(model, 2 ** rng.randint(0, 8))
    check(model, over, batch, rng.choice(("absorbed", "mha")), pages)


def test_the_ranks_say_how_many_they_are_and_what_they_sent():
    model = wide_model()
    over = a_spread(model, 8)
    batch, pages = prompts((5, 6, 7))
    over.forward(batch, stale(model, pages), "absorbed")
    status = over.status()
    assert (status.virtual, status.size, status.members) == (True, 8, tuple(range(8)))
    assert status.steps == 1
    assert status.sent_bytes > 0


async def test_a_worker_is_one_of_a_group_or_has_one_of_its_own():
    model = wide_model()
    fmt = PageFormat("m", "w", "float32", PAGE, 3, 1, 24)
    called, rank = await join_ranks(model, fmt, Ranks(0, (), "test", 5.0, virtual=128))
    assert isinstance(called, SpreadModel)
    assert rank is None
    with pytest.raises(ConfigError, match="shares its experts with no other worker"):
        await join_ranks(model, fmt, Ranks(0, ("a:1", "b:2"), "test", 5.0, virtual=128))

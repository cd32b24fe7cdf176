"""A tree of draft tokens: each node is bitwise the last row of its path as a plain sequence."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import equal, one_slice, run, same_latents, stale_pool, tiny_model, tokens_of

from pdmesh.kernels.page_copy import move_latents
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.tree import TokenTree, node_chains

MODEL = tiny_model(11)
FORMS = ("absorbed", "mha")


def cached(length, page_size=16, room=24, seed=0):
    """A pool with a prompt of `length` tokens in it, its page table and its tokens."""
    count = -(-(length + room) // page_size)
    table = list(range(count))
    random.Random(seed).shuffle(table)
    whole = tokens_of(length, seed)
    pool = stale_pool(MODEL, count + 2, page_size)
    if length:
        run(MODEL, pool, "mha", (one_slice(tuple(table), 0, length), whole))
    return pool, tuple(table), whole


def random_tree(size, seed):
    pick = random.Random(seed)
    tokens = tuple(pick.randrange(131) for _ in range(size))
    return TokenTree(tokens, (-1, *(pick.randrange(node) for node in range(1, size))))


def tree_slice(table, start, tree, form=None):
    return SequenceSlice(table, start, start + len(tree), start, tree.parents, form)


def rows_of(pool, items, tokens, form):
    batch = Batch.build(items, tokens, pool.shape[2])
    lengths = [item.end - item.start for item in items]
    return MODEL(batch, pool, form).split(lengths)


def along(pool, table, whole, tree, node, form):
    """Hidden states of the path to `node` computed as a plain sequence; writes to the pool."""
    path = [tree.tokens[i] for i in tree.path(node)]
    item = one_slice(table, len(whole), len(whole) + len(path))
    return run(MODEL, pool, form, (item, whole + path))[0]


def slots(pool, table, positions):
    size = pool.shape[2]
    return torch.stack([pool[table[p // size], :, p % size] for p in positions])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 70), st.integers(1, 12), st.integers(0, 99), st.sampled_from([8, 16, 64]),
    st.sampled_from(FORMS),
)  # fmt: skip
def test_a_node_equals_its_path_as_a_plain_sequence(length, size, seed, page_size, form):
    pool, table, whole = cached(length, page_size, seed=seed)
    tree = random_tree(size, seed)
    plain = pool.clone()
    got = rows_of(pool, [tree_slice(table, length, tree)], [tree.tokens], form)[0]
    for node in range(size):
        expected = along(plain, table, whole, tree, node, form)
        assert equal(got[node], expected[-1]), (node, tree.parents)
        path = tree.path(node)
        assert same_latents(
            slots(pool, table, [length + i for i in path]),
            slots(plain, table, range(length, length + len(path))),
        )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(1, 70), st.integers(2, 12), st.integers(0, 99), st.sampled_from([8, 64]))
def test_after_compaction_a_branch_is_the_sequence(length, size, seed, page_size):
    pool, table, whole = cached(length, page_size, seed=seed)
    tree = random_tree(size, seed)
    node = random.Random(seed).randrange(size)
    path, plain = tree.path(node), pool.clone()
    rows_of(pool, [tree_slice(table, length, tree)], [tree.tokens], "absorbed")
    move_latents(
        pool, table, page_size, [length + i for i in path], range(length, length + len(path))
    )
    along(plain, table, whole, tree, node, "absorbed")
    end = length + len(path)
    assert same_latents(slots(pool, table, range(end)), slots(plain, table, range(end)))
    more = whole + [tree.tokens[i] for i in path] + [7]
    item = one_slice(table, end, end + 1)
    left, right = (run(MODEL, p, "absorbed", (item, more))[0] for p in (pool, plain))
    assert equal(left, right)


@pytest.mark.parametrize("form", FORMS)
def test_a_tree_and_its_neighbours_do_not_see_each_other(form):
    tree, other = TokenTree((3, 5, 8, 5, 9, 1), (-1, 0, 0, 1, 2, 0)), random_tree(9, 4)
    pool, table, whole = cached(59)
    shift = pool.shape[0]
    pools = torch.cat([pool, pool])
    second = tuple(page + shift for page in table)
    items = [
        tree_slice(table, 59, tree),
        one_slice(second, 58, 59, 59),
        tree_slice(second, 59, other),
    ]
    tokens = [tree.tokens, whole[58:], other.tokens]
    together = rows_of(pools.clone(), items, tokens, form)
    for item, ids, got in zip(items, tokens, together, strict=True):
        assert equal(rows_of(pools.clone(), [item], [ids], form)[0], got)
    swapped = rows_of(pools.clone(), items[::-1], tokens[::-1], form)[::-1]
    assert all(equal(a, b) for a, b in zip(together, swapped, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_sibling_that_is_nan_reaches_no_other_branch(form):
    tree = TokenTree((3, 5, 8, 5, 9), (-1, 0, 0, 1, 2))
    pool, table, _ = cached(20)
    item = tree_slice(table, 20, tree)
    clean = rows_of(pool.clone(), [item], [tree.tokens], form)[0]
    embedded = MODEL.embed_tokens[8].clone()
    try:
        MODEL.embed_tokens[8] = float("nan")
        got = rows_of(pool, [item], [tree.tokens], form)[0]
    finally:
        MODEL.embed_tokens[8] = embedded
    assert equal(got[[0, 1, 3]], clean[[0, 1, 3]])
    assert bool(got[[2, 4]].isnan().any(-1).all())


def test_mtp_rows_of_a_tree_equal_those_of_its_paths():
    tree = random_tree(10, 8)
    pool, table, whole = cached(40)
    previous = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    for form in FORMS:
        for start in (1, 40):
            base = pool.clone()
            base[:, -1] = torch.randn(base[:, -1].shape, generator=torch.Generator().manual_seed(2))
            tree_pool, plain = base.clone(), base.clone()
            batch = Batch.build([tree_slice(table, start, tree)], [tree.tokens], 16)
            got = MODEL.mtp_forward(batch, previous, tree_pool, form)
            for node in range(10):
                path = list(tree.path(node))
                item = one_slice(table, start, start + len(path))
                ids = [tree.tokens[i] for i in path]
                rows = MODEL.mtp_forward(
                    Batch.build([item], [ids], 16), previous[path], plain, form
                )
                assert equal(rows[-1], got[node])


def test_a_chain_given_as_parents_has_the_plan_of_a_plain_slice():
    table = tuple(range(8))
    for size in (1, 2, 7, 30):
        parents = tuple(range(-1, size - 1))
        for form in FORMS:
            plain, chain = (
                Batch.build([SequenceSlice(table, 61, 61 + size, 61, p)], [[1] * size], 16)
                for p in (None, parents)
            )
            left, right = (batch.attention(form, 0)[0].walk for batch in (plain, chain))
            assert torch.equal(left.take, right.take)
            for a, b in zip(left.groups, right.groups, strict=True):
                assert torch.equal(a.rows, b.rows)
                for c, d in zip(a.chunks, b.chunks, strict=True):
                    assert torch.equal(c.pages, d.pages)
                    assert torch.equal(c.slots, d.slots)
                    assert c.counts == d.counts


def test_several_nodes_may_stand_right_under_the_cached_keys():
    pool, table, whole = cached(30)
    item = SequenceSlice(table, 30, 33, 30, (-1, -1, 1))
    got = rows_of(pool.clone(), [item], [(4, 6, 9)], "absorbed")[0]
    for tokens, rows in (([4], [0]), ([6, 9], [1, 2])):
        plain = one_slice(table, 30, 30 + len(tokens))
        expected = run(MODEL, pool.clone(), "absorbed", (plain, whole + tokens))[0]
        assert equal(got[rows], expected)


def test_a_tree_knows_its_paths():
    tree = TokenTree((9, 1, 2, 3, 4), (-1, 0, 0, 2, 1))
    assert tree.depths == (0, 1, 1, 2, 2)
    assert tree.path(3) == (0, 2, 3)
    assert tree.path(0) == (0,)
    assert not tree.is_chain
    assert node_chains(tree.parents) == [(0, 1, 4), (2, 3)]
    chain = TokenTree.chain([5, 6, 7])
    assert (chain.tokens, chain.parents, chain.is_chain) == ((5, 6, 7), (-1, 0, 1), True)


@pytest.mark.parametrize(
    ("tokens", "parents", "sentence"),
    [
        ((), (), "0 tokens and 0 parents"),
        ((1, 2), (-1,), "2 tokens and 1 parents"),
        ((1, 2), (-1, 1), "the parent of node 1 is 1"),
        ((1, 2), (-1, -2), "the parent of node 1 is -2"),
        ((1, 2), (-1, -1), "only the first node"),
    ],
)
def test_parents_that_are_no_tree_are_refused(tokens, parents, sentence):
    with pytest.raises(ValueError, match=sentence):
        TokenTree(tokens, parents)


def test_a_slice_with_parents_that_are_no_tree_is_refused():
    for parents, sentence in (((-1,), "1 parents for 2 tokens"), ((-1, 1), "before its node")):
        with pytest.raises(ValueError, match=sentence):
            Batch.build([SequenceSlice((0,), 3, 5, 3, parents)], [[1, 2]])

"""Paged attention in both forms against softmax over the whole sequence; rope; page writes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.kernels.latent_attention import (
    absorbed_attention,
    mha_attention,
    project_keys,
    project_values,
)
from pdmesh.kernels.page_copy import append_latents, flat_rows, gather_latents, move_latents
from pdmesh.kernels.page_walk import SPLIT, Span, Tiling, plan_walk
from pdmesh.kernels.rope import (
    RopeTable,
    Yarn,
    apply_rope,
    cos_sin_factor,
    inverse_frequencies,
    softmax_scale,
)

HEADS, NOPE, ROPE, RANK, VALUE, LAYERS = 3, 8, 4, 12, 16, 2
CPU = torch.device("cpu")


class Case:
    """Sequences of random latents in a pool whose unused slots are NaN.

    `ranges` are (start, end) of rows; the query, the latents of a sequence and the pages' order
    depend on `seed`, the sequence's number and `ranges` only.
    """

    def __init__(self, ranges, page_size=8, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.page_size, self.ranges = page_size, ranges
        per = [-(-end // page_size) for _, end in ranges]
        ids = torch.randperm(sum(per), generator=torch.Generator().manual_seed(seed)).tolist()
        self.pool = torch.full((sum(per), LAYERS, page_size, RANK + ROPE), float("nan"))
        self.spans, self.latents, row = [], [], 0
        for (start, end), count in zip(ranges, per, strict=True):
            table, ids = ids[:count], ids[count:]
            latents = torch.randn(end, RANK + ROPE, generator=generator)
            for position in range(end):
                page = table[position // page_size]
                self.pool[page, 1, position % page_size] = latents[position]
            self.spans.append((table, start, end, range(row, row + end - start)))
            self.latents.append(latents)
            row += end - start
        self.query = torch.randn(row, HEADS, NOPE + ROPE, generator=generator)
        self.key_up = torch.randn(HEADS, NOPE, RANK, generator=generator)
        self.value_up = torch.randn(HEADS, VALUE, RANK, generator=generator)

    def plain(self, first_key=0):
        rows = []
        for (start, end), latents in zip(self.ranges, self.latents, strict=True):
            keys = project_keys(latents[None], self.key_up)
            values = project_values(latents[None], self.value_up)
            for position in range(start, end):
                query = self.query[len(rows)]
                seen = slice(first_key, position + 1)
                scores = torch.einsum("hd,hkd->hk", query, keys[0, :, seen])
                weights = torch.softmax(scores.double(), -1).float()
                rows.append(torch.einsum("hk,hkv->hv", weights, values[0, :, seen]))
        return torch.stack(rows)

    def walk(self, tiling, first_key=0):
        spans = [Span(*span, tiling, number) for number, span in enumerate(self.spans)]
        return plan_walk(spans, self.page_size, first_key, CPU)

    def mha(self, first_key=0, entries=256, share=False):
        walk = self.walk(Tiling(SPLIT, entries, share), first_key)
        return mha_attention(self.query, self.pool, 1, walk, (self.key_up, self.value_up))

    def absorbed(self, tile_rows=1, first_key=0, entries=256):
        absorbed = torch.einsum("thn,hnr->thr", self.query[..., :NOPE], self.key_up)
        full = torch.cat([absorbed, self.query[..., NOPE:]], -1)
        walk = self.walk(Tiling(tile_rows, entries), first_key)
        out = absorbed_attention(full, self.pool, 1, walk, RANK)
        return torch.einsum("thr,hvr->thv", out, self.value_up)


RANGES = [
    [(0, 1)],
    [(0, 8)],
    [(3, 20)],
    [(15, 16), (0, 9), (40, 42), (8, 24)],
    [(63, 64)],
    [(60, 70), (130, 200), (0, 1)],
]


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("first_key", [0, 1])
def test_both_forms_equal_softmax_over_the_sequence(ranges, first_key):
    ranges = [(max(start, first_key), end) for start, end in ranges if end > first_key]
    if not ranges:
        return
    case = Case(ranges)
    expected = case.plain(first_key)
    for got in (case.mha(first_key), case.absorbed(1, first_key), case.absorbed(64, first_key)):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-3)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), min_size=1, max_size=5),
    st.integers(1, 12),
    st.sampled_from([1, 2, 5, 8, 16, 64, 128]),
    st.integers(0, 9),
)
def test_chunks_tiles_neighbours_and_page_size_change_no_bit(plan, entries, page_size, seed):
    ranges = [(start, start + rows) for start, rows in plan]
    case, paged = Case(ranges, seed=seed), Case(ranges, page_size, seed)
    mha, absorbed = case.mha(), case.absorbed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdmesh.kernels.page_walk.MAX_ENTRIES", entries)
        for share in (False, True):
            assert torch.equal(paged.mha(entries=entries, share=share), mha)
        for tile_rows in (1, 2, 64):
            assert torch.equal(paged.absorbed(tile_rows, entries=entries), absorbed)
    assert not bool(mha.isnan().any())
    torch.testing.assert_close(mha, case.plain(), atol=5e-4, rtol=5e-3)


def test_rows_with_few_and_many_keys_over_one_to_four_splits_give_no_nan():
    """vllm-project/vllm#27491: a row's keys end before others' splits, and pages end in NaN."""
    cached = [0, 1, 40, 63, 64, 65, 130, 250]
    for rows in (1, 2, 7):
        case = Case([(start, start + rows) for start in cached], page_size=16)
        expected = case.plain()
        parts = [case.mha(entries=1), case.mha(), case.mha(entries=3, share=True)]
        parts += [case.absorbed(size, entries=e) for size in (1, 2, 64) for e in (1, 256)]
        for got in parts:
            assert not bool(got.isnan().any())
            torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_scores_far_apart_do_not_overflow():
    case = Case([(20, 23)])
    case.query *= 200.0
    for got in (case.mha(), case.absorbed()):
        assert bool(got.isfinite().all())
        torch.testing.assert_close(got, case.plain(), atol=5e-3, rtol=1e-2)


def test_padding_rows_repeat_row_0_and_pages_are_only_read():
    case = Case([(3, 5)])
    before = case.pool.clone()
    exact = case.mha()
    case.query = torch.cat([case.query, torch.full((2, HEADS, NOPE + ROPE), float("nan"))])
    padded = case.mha()
    assert torch.equal(padded[:2], exact)
    assert torch.equal(padded[2], padded[0])
    assert torch.equal(case.pool.nan_to_num(), before.nan_to_num())


def test_latents_are_written_to_their_slots_only():
    pool = torch.zeros(3, LAYERS, 8, 5)
    pages, slots = torch.tensor([2, 0]), torch.tensor([7, 0])
    rows = flat_rows(pages, slots, LAYERS, 8)
    values = torch.arange(10.0).view(2, 5) + 1
    append_latents(pool, 1, rows, values)
    assert torch.equal(pool[2, 1, 7], values[0])
    assert torch.equal(pool[0, 1, 0], values[1])
    assert int((pool != 0).sum()) == 10
    assert torch.equal(gather_latents(pool, 1, rows), values)


def test_moved_latents_are_those_that_stood_there_before():
    pool = torch.randn(4, LAYERS, 8, 5)
    table, before = (2, 0, 3), pool.clone()

    def at(tensor, position):
        return tensor[table[position // 8], :, position % 8]

    moves = {6: 7, 7: 6, 8: 9, 9: 10, 10: 8, 15: 16, 3: 3}
    move_latents(pool, table, 8, list(moves), list(moves.values()))
    for source, target in moves.items():
        assert torch.equal(at(pool, target), at(before, source)), (source, target)
    untouched = set(range(24)) - set(moves.values())
    assert all(torch.equal(at(pool, position), at(before, position)) for position in untouched)
    assert torch.equal(pool[1], before[1])


@pytest.mark.parametrize(
    ("sources", "targets", "sentence"),
    [
        ([1, 2], [3], "2 sources do not go to 1 targets"),
        ([1, 2], [3, 3], "2 sources do not go to 1 targets"),
        ([1], [16], "position 16 is not one of the 16"),
        ([-1], [0], "position -1 is not one of the 16"),
    ],
)
def test_a_move_that_makes_no_sense_is_refused(sources, targets, sentence):
    pool = torch.zeros(2, LAYERS, 8, 5)
    with pytest.raises(ValueError, match=sentence):
        move_latents(pool, (0, 1), 8, sources, targets)
    with pytest.raises(ValueError, match="pages of 8, not of 16"):
        move_latents(pool, (0, 1), 16, [0], [1])


@pytest.mark.parametrize("interleave", [True, False])
def test_rope_turns_pairs_by_position_times_frequency(interleave):
    frequencies = inverse_frequencies(8, 10000.0, None)
    table = RopeTable.build(frequencies, 200, 1.0, interleave)
    x = torch.randn(8, generator=torch.Generator().manual_seed(0))
    for position in (0, 1, 100, 199):
        got = apply_rope(x, table.cos[position], table.sin[position], interleave)
        for pair in range(4):
            a, b = (2 * pair, 2 * pair + 1) if interleave else (pair, pair + 4)
            angle = position * 10000.0 ** (-2 * pair / 8)
            turned = complex(x[a], x[b]) * complex(math.cos(angle), math.sin(angle))
            assert abs(complex(got[a], got[b]) - turned) < 1e-5


@pytest.mark.parametrize(
    ("mscale", "all_dim", "cos_factor", "scale_factor"),
    [
        (0.0, 0.0, 1.0, 1.0),
        (0.707, 0.707, 1.0, (0.0707 * math.log(40) + 1) ** 2),
        (1.0, 1.0, 1.0, (0.1 * math.log(40) + 1) ** 2),
        (1.0, 0.0, 0.1 * math.log(40) + 1, 1.0),
    ],
)
def test_yarn_has_two_separate_scales(mscale, all_dim, cos_factor, scale_factor):
    yarn = Yarn(40.0, 4096, mscale=mscale, mscale_all_dim=all_dim)
    assert cos_sin_factor(yarn) == pytest.approx(cos_factor)
    assert softmax_scale(192, yarn) == pytest.approx(192**-0.5 * scale_factor)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain = inverse_frequencies(64, 10000.0, None)
    stretched = inverse_frequencies(64, 10000.0, Yarn(40.0, 4096))
    torch.testing.assert_close(stretched[:8], plain[:8])
    torch.testing.assert_close(stretched[-4:], plain[-4:] / 40)
    assert bool((stretched.diff() < 0).all())

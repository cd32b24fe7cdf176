"""Paged attention in both forms against softmax over the whole sequence; rope; page writes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.kernels.latent_attention import absorbed_attention, mha_attention, project_latents
from pdmesh.kernels.page_copy import append_latents, flat_rows, gather_latents
from pdmesh.kernels.page_walk import Span, plan_walk
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
    """Sequences of random latents in a pool whose unused slots are NaN."""

    def __init__(self, ranges, page_size=8, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.page_size, self.ranges = page_size, ranges
        per = [-(-end // page_size) for _, end in ranges]
        ids = torch.randperm(sum(per), generator=generator).tolist()
        self.pool = torch.full((sum(per), LAYERS, page_size, RANK + ROPE), float("nan"))
        self.spans, self.latents, row = [], [], 0
        for (start, end), count in zip(ranges, per, strict=True):
            table, ids = ids[:count], ids[count:]
            latents = torch.randn(end, RANK + ROPE, generator=generator)
            for position in range(end):
                page = table[position // page_size]
                self.pool[page, 1, position % page_size] = latents[position]
            self.spans.append(Span(table, start, end, row))
            self.latents.append(latents)
            row += end - start
        self.query = torch.randn(row, HEADS, NOPE + ROPE, generator=generator)
        self.key_up = torch.randn(HEADS, NOPE, RANK, generator=generator)
        self.value_up = torch.randn(HEADS, VALUE, RANK, generator=generator)

    def plain(self, first_key=0):
        rows = []
        for span, latents in zip(self.spans, self.latents, strict=True):
            keys, values = project_latents(latents[None], (self.key_up, self.value_up))
            for position in range(span.start, span.end):
                query = self.query[len(rows)]
                seen = slice(first_key, position + 1)
                scores = torch.einsum("hd,hkd->hk", query, keys[0, :, seen])
                weights = torch.softmax(scores.double(), -1).float()
                rows.append(torch.einsum("hk,hkv->hv", weights, values[0, :, seen]))
        return torch.stack(rows)

    def walk(self, tile_rows, first_key=0, entries=256):
        shape = (self.page_size, tile_rows)
        return plan_walk(self.spans, shape, first_key, CPU, entries)

    def mha(self, first_key=0, entries=256):
        walk = self.walk(self.page_size, first_key, entries)
        return mha_attention(self.query, self.pool, 1, walk, (self.key_up, self.value_up))

    def absorbed(self, tile_rows=1, first_key=0, entries=256):
        absorbed = torch.einsum("thn,hnr->thr", self.query[..., :NOPE], self.key_up)
        full = torch.cat([absorbed, self.query[..., NOPE:]], -1)
        walk = self.walk(tile_rows, first_key, entries)
        out = absorbed_attention(full, self.pool, 1, walk, RANK)
        return torch.einsum("thr,hvr->thv", out, self.value_up)


RANGES = [[(0, 1)], [(0, 8)], [(3, 20)], [(15, 16), (0, 9), (40, 42), (8, 24)], [(63, 64)]]


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("first_key", [0, 1])
def test_both_forms_equal_softmax_over_the_sequence(ranges, first_key):
    ranges = [(max(start, first_key), end) for start, end in ranges if end > first_key]
    if not ranges:
        return
    case = Case(ranges)
    expected = case.plain(first_key)
    for got in (case.mha(first_key), case.absorbed(1, first_key), case.absorbed(8, first_key)):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-3)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(0, 9),
)
def test_chunking_tiles_and_neighbours_change_no_bit(plan, entries, seed):
    case = Case([(start, start + rows) for start, rows in plan], seed=seed)
    mha, absorbed = case.mha(), case.absorbed()
    assert torch.equal(case.mha(entries=entries), mha)
    assert torch.equal(case.absorbed(entries=entries), absorbed)
    assert not bool(mha.isnan().any())
    torch.testing.assert_close(mha, case.plain(), atol=5e-4, rtol=5e-3)


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

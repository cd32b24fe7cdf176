"""Rows to the layouts of experts and back, in Triton's interpreter, beside the definitions."""

import pytest
import torch
from quantised_cases import padded_rows_of, rows_with_extremes

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/test_gpu_small.py has the cases of a device", allow_module_level=True)

from pdmesh.kernels import routing as definition  # noqa: E402
from pdmesh.kernels.moe import weighted_sum  # noqa: E402
from pdmesh.kernels.quantised import Rows, new_scales, quantise_rows  # noqa: E402
from pdmesh.kernels.routing import Permuted, contiguous_capacity, place_choices  # noqa: E402
from pdmesh.kernels.triton import permute as fast  # noqa: E402

EXPERTS = 5


def choices(m, k, seed=0):
    """Ids [m, k] int32, each expert at most once a row, some of them none, and their places."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(m, EXPERTS, generator=generator).argsort(dim=1)[:, :k].int()
    ids[torch.rand(m, k, generator=generator) < 0.2] = -1
    return ids.contiguous(), place_choices(ids, EXPERTS)


def poisoned(*shape):
    scales = new_scales(*shape[:-1], -(-shape[-1] // 128)).fill_(torch.nan)
    return Rows(torch.full(shape, torch.nan).to(torch.float8_e4m3fn), scales)


def assert_same_rows(got: Permuted, want: Permuted, used) -> None:
    """Equal where a choice stands, untouched elsewhere."""
    assert torch.equal(got.targets, want.targets)
    for mine, theirs in zip(got.rows, want.rows, strict=True):
        mine, theirs = mine.float().flatten(0, -2), theirs.float().flatten(0, -2)
        assert torch.equal(mine[used], theirs[used])
        rest = torch.ones(len(mine), dtype=torch.bool)
        rest[used] = False
        assert bool(mine[rest].isnan().all())


@pytest.mark.parametrize(("m", "k", "width"), [(0, 2, 128), (1, 1, 128), (9, 3, 300), (6, 2, 512)])
def test_rows_go_to_their_place_in_the_masked_layout(m, k, width):
    ids, where = choices(m, k)
    x = quantise_rows(rows_with_extremes(m, width))
    room = max(1, int(where.counts.max()))
    blank = Permuted(poisoned(EXPERTS, room, width), torch.full_like(ids, 77), None)
    got = fast.permute_masked(x, ids, where.places, EXPERTS, room, out=blank)
    want = definition.permute_masked(x, ids, where.places, EXPERTS, room)
    assert_same_rows(got, want, want.targets[want.targets >= 0].long())
    assert padded_rows_of(fast.permute_masked(x, ids, where.places, EXPERTS, room).rows)


def test_a_choice_beyond_the_masked_layout_is_left_out():
    ids = torch.zeros(4, 1, dtype=torch.int32)
    places = place_choices(ids, EXPERTS).places
    x = quantise_rows(rows_with_extremes(4, 128))
    blank = Permuted(poisoned(EXPERTS, 2, 128), torch.empty_like(ids), None)
    got = fast.permute_masked(x, ids, places, EXPERTS, 2, out=blank)
    assert got.targets.flatten().tolist() == [0, 1, -1, -1]
    want = definition.permute_masked(x, ids, places, EXPERTS, 2)
    assert_same_rows(got, want, torch.tensor([0, 1]))


@pytest.mark.parametrize(("m", "k", "width"), [(0, 2, 128), (1, 1, 128), (9, 3, 300)])
def test_rows_go_to_their_place_in_the_contiguous_layout(m, k, width):
    ids, where = choices(m, k, 1)
    x = quantise_rows(rows_with_extremes(m, width))
    room = contiguous_capacity(m, k, EXPERTS)
    blank = Permuted(poisoned(room, width), torch.full_like(ids, 77), ids.new_full((room,), 77))
    got = fast.permute_contiguous(x, ids, where.places, where.counts, room, out=blank)
    want = definition.permute_contiguous(x, ids, where.places, where.counts, room)
    assert_same_rows(got, want, want.targets[want.targets >= 0].long())
    assert torch.equal(got.row_expert, want.row_expert)
    assert int((got.row_expert >= 0).sum()) == int((ids >= 0).sum())


def test_many_rows_of_one_expert_take_several_blocks_of_the_contiguous_layout(monkeypatch):
    monkeypatch.setattr(fast, "ALIGNMENT", 4)
    monkeypatch.setattr(definition, "ALIGNMENT", 4)
    ids = torch.tensor([[1], [1], [1], [1], [1], [3], [1], [1], [1]], dtype=torch.int32)
    where = place_choices(ids, EXPERTS)
    x = quantise_rows(rows_with_extremes(9, 128))
    got = fast.permute_contiguous(x, ids, where.places, where.counts, 16)
    assert got.row_expert.tolist() == [1] * 8 + [3] + [-1] * 7
    assert got.targets.flatten().tolist() == [0, 1, 2, 3, 4, 8, 5, 6, 7]


def test_the_capacity_holds_any_choice():
    assert contiguous_capacity(0, 8, 256) == 0
    assert contiguous_capacity(1, 1, 256) == 128
    assert contiguous_capacity(2, 1, 4) == 256
    assert contiguous_capacity(256, 1, 1) == 384


@pytest.mark.parametrize(("m", "k", "h"), [(0, 2, 64), (1, 1, 64), (5, 3, 200), (2, 2, 1500)])
def test_parts_come_back_as_the_weighted_sum_in_the_order_of_the_choices(m, k, h):
    ids, where = choices(m, k, 2)
    room = max(1, m)
    targets = torch.where(ids >= 0, ids * room + where.places, -1).int()
    weights = torch.rand(m, k, generator=torch.Generator().manual_seed(5))
    parts = torch.full((EXPERTS, room, h), torch.nan, dtype=torch.bfloat16)
    used = targets[targets >= 0].long()
    parts.view(-1, h)[used] = rows_with_extremes(len(used), h)
    got = fast.unpermute(parts, targets, weights)
    assert torch.equal(got, definition.unpermute(parts, targets, weights))
    plus = rows_with_extremes(m, h)
    more = fast.unpermute(parts, targets, weights, plus)
    assert torch.equal(more, definition.unpermute(parts, targets, weights, plus))
    assert torch.equal(more, got + plus)
    whole = torch.where(
        (targets >= 0).unsqueeze(-1), parts.view(-1, h)[targets.clamp_min(0).long()], 0.0
    ).to(torch.bfloat16)
    if m:
        assert torch.equal(got, weighted_sum(whole, weights))


def test_what_does_not_fit_is_refused():
    ids, where = choices(3, 2)
    x = quantise_rows(rows_with_extremes(3, 128))
    with pytest.raises(ValueError, match="ids"):
        fast.permute_masked(x, ids.long(), where.places, EXPERTS, 3)
    with pytest.raises(ValueError, match="rows"):
        fast.permute_masked(x, ids[:2], where.places[:2], EXPERTS, 3)
    with pytest.raises(ValueError, match="parts"):
        fast.unpermute(torch.zeros(3, 4), ids, torch.zeros(3, 2))
    parts = torch.zeros(3, 4).bfloat16()
    with pytest.raises(ValueError, match="beside sums"):
        fast.unpermute(parts, ids, torch.zeros(3, 2), parts[:2])

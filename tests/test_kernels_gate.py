"""The gate in Triton's interpreter beside its definition; ties, NaN and padding."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/test_gpu_small.py has the cases of a device", allow_module_level=True)

from pdmesh.kernels import routing as definition  # noqa: E402
from pdmesh.kernels.gate import GateRule, choose_experts  # noqa: E402
from pdmesh.kernels.triton import gate as fast  # noqa: E402
from pdmesh.kernels.triton import place, project  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:All-NaN slice", "ignore:invalid value", "ignore:overflow"
)
V3 = GateRule("noaux_tc", 256, 8, 8, 4, True, 2.5)
RULES = {
    "v3": V3,
    "v2": GateRule("group_limited_greedy", 160, 6, 8, 3, False, 16.0),
    "lite": GateRule("greedy", 64, 6, 1, 1, False, 1.0),
    "tiny": GateRule("noaux_tc", 8, 2, 4, 2, True, 1.5),
    "ungrouped": GateRule("noaux_tc", 12, 3, 1, 1, True, 1.0),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Large tiles and few chunks, and counting, a program an expert, only with few experts."""
    monkeypatch.setattr(project, "CHUNKS", 2)
    monkeypatch.setattr(fast, "tile_for", lambda rows, wide: project.Tile(256, 16, 32, 4, 1))
    real = place.place

    def cheap(ids, out, chained=False):
        if out.counts.shape[0] <= 16:
            return real(ids, out, chained)
        for mine, theirs in zip(out, definition.place_choices(ids, len(out.counts)), strict=True):
            mine.copy_(theirs)
        return out

    monkeypatch.setattr(fast, "place", cheap)


def inputs(rule, m, hidden, seed=0, weight_dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, hidden, generator=generator).to(torch.bfloat16)
    weight = (torch.randn(rule.num_experts, hidden, generator=generator) / hidden**0.5).to(
        weight_dtype
    )
    bias = torch.randn(rule.num_experts, generator=generator) / 10
    return x, weight, bias if rule.method == "noaux_tc" else None


def assert_same(got, want):
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-5, atol=1e-6, equal_nan=True)
    for name in ("counts", "offsets", "places"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_the_gate_chooses_and_counts_as_its_definition(name, dtype):
    rule = RULES[name]
    x, weight, bias = inputs(rule, 5, 80, weight_dtype=dtype)
    assert_same(fast.gate_topk(x, weight, bias, rule), definition.gate_topk(x, weight, bias, rule))


@pytest.mark.parametrize("m", [0, 1, 17])
def test_any_number_of_rows_will_do(m):
    rule = RULES["tiny"]
    x, weight, bias = inputs(rule, m, 64)
    assert_same(fast.gate_topk(x, weight, bias, rule), definition.gate_topk(x, weight, bias, rule))


def test_a_rows_logits_do_not_depend_on_how_the_chunks_are_summed(monkeypatch):
    monkeypatch.setattr(project, "CHUNKS", 4)
    rule = RULES["lite"]
    x, weight, _ = inputs(rule, 3, 256)
    few = fast.gate_topk(x, weight, None, rule)
    assert len(fast.workspace(3, 64, "cpu")) == 4
    work = torch.empty(1, 3, rule.num_experts)
    many = fast.gate_topk(x, weight, None, rule, work=work)
    assert torch.equal(few.ids, many.ids)
    assert torch.equal(few.weights, many.weights)


def test_of_equal_experts_the_lower_id_is_chosen_and_of_equal_groups_too():
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    weight = torch.zeros(256, 16, dtype=torch.bfloat16)
    bias = torch.zeros(256)
    got = fast.gate_topk(x, weight, bias, V3)
    assert got.ids.tolist() == [list(range(8))] * 2
    bias[[200, 77, 5]] = 1.0
    got = fast.gate_topk(x, weight, bias, V3)
    assert got.ids[0].tolist() == [5, 77, 200, 0, 1, 2, 3, 4]
    assert_same(got, definition.gate_topk(x, weight, bias, V3))


def test_the_definition_takes_the_lower_of_equal_ids():
    ids, _ = choose_experts(torch.zeros(3, 256), torch.zeros(256), V3)
    assert ids.tolist() == [list(range(8))] * 3


@pytest.mark.parametrize("name", ["v3", "v2", "lite"])
def test_nan_and_infinite_logits_end_in_experts_that_exist(name):
    rule = RULES[name]
    x, weight, bias = inputs(rule, 6, 32)
    x[0] = torch.nan
    x[1] = torch.inf
    x[2] = 0.0
    x[2, 3] = 1.0
    weight[[3, 60], 3] = torch.nan
    weight[7, 3] = torch.inf
    got = fast.gate_topk(x, weight, bias, rule)
    assert bool(((got.ids >= 0) & (got.ids < rule.num_experts)).all())
    assert all(len(set(row)) == rule.top_k for row in got.ids.tolist())
    assert int(got.counts.sum()) == 6 * rule.top_k


def test_a_nan_logit_counts_as_the_largest():
    logits = torch.zeros(1, 8)
    logits[0, 5] = torch.nan
    ids, _ = choose_experts(logits, None, RULES["tiny"])
    assert ids[0, 0] == 5
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    got = fast.gate_topk(x, logits.t().to(torch.bfloat16).contiguous(), None, RULES["tiny"])
    assert got.ids.tolist() == ids.tolist()


def test_padding_rows_do_not_count_whatever_they_hold():
    x, weight, bias = inputs(V3, 7, 48)
    want = fast.gate_topk(x[:4], weight, bias, V3)
    x[4:] = torch.nan
    got = fast.gate_topk(x, weight, bias, V3, torch.tensor([4], dtype=torch.int32))
    assert torch.equal(got.ids[:4], want.ids)
    assert torch.equal(got.weights[:4], want.weights)
    assert torch.equal(got.counts, want.counts)
    assert bool((got.ids[4:] == -1).all())
    assert bool((got.places[4:] == -1).all())
    assert bool((got.weights[4:] == 0).all())
    x[4:] = 0
    rows = torch.tensor(4, dtype=torch.int32)
    assert_same(got, definition.gate_topk(x, weight, bias, V3, rows))


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (40, 3), (9, 8)])
def test_choices_are_counted_and_numbered_in_the_order_of_the_rows(shape):
    ids = torch.randint(-1, 6, shape, generator=torch.Generator().manual_seed(3)).int()
    got, want = place.place_choices(ids, 6), definition.place_choices(ids, 6)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


def test_more_choices_than_a_block_are_numbered_on(monkeypatch):
    monkeypatch.setattr(place, "MAX_BLOCK", 16)
    ids = torch.randint(0, 5, (30, 2), generator=torch.Generator().manual_seed(3)).int()
    got, want = place.place_choices(ids, 5), definition.place_choices(ids, 5)
    assert torch.equal(got.places, want.places)
    assert torch.equal(got.counts, want.counts)


def test_what_does_not_fit_is_refused():
    x, weight, bias = inputs(V3, 2, 32)
    with pytest.raises(ValueError, match="weight"):
        fast.gate_topk(x, weight[:, 1:], bias, V3)
    with pytest.raises(ValueError, match="bias"):
        fast.gate_topk(x, weight, bias.to(torch.bfloat16), V3)
    with pytest.raises(ValueError, match="rows"):
        fast.gate_topk(x.float(), weight, bias, V3)

"""Routers and routed experts against loops over tokens."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from pdmesh.kernels.gate import GateRule, choose_experts
from pdmesh.kernels.moe import order_by_expert, routed_experts, weighted_sum


def rule(method, experts, top_k, groups=1, top_groups=1, normalise=True, scale=1.0):
    return GateRule(method, experts, top_k, groups, top_groups, normalise, scale)


def plainly(logits, bias, gate):
    """One row: {expert: weight}."""
    scores = torch.sigmoid(logits) if gate.method == "noaux_tc" else torch.softmax(logits, 0)
    choice = scores + bias if gate.method == "noaux_tc" else scores
    size = gate.num_experts // gate.num_groups
    best = 2 if gate.method == "noaux_tc" else 1
    rank = [sum(sorted(choice[g * size :][:size].tolist())[-best:]) for g in range(gate.num_groups)]
    groups = sorted(range(gate.num_groups), key=lambda g: -rank[g])[: gate.top_groups]
    allowed = [e for e in range(gate.num_experts) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -float(choice[e]))[: gate.top_k]
    total = sum(float(scores[e]) for e in chosen) if gate.normalise else 1.0
    return {e: gate.scale * float(scores[e]) / total for e in chosen}


@pytest.mark.parametrize(
    "gate",
    [
        rule("noaux_tc", 32, 4, 4, 2, scale=2.5),
        rule("noaux_tc", 8, 8, 4, 4),
        rule("noaux_tc", 8, 1, 2, 1, normalise=False),
        rule("noaux_tc", 6, 3),
        rule("greedy", 16, 6, normalise=False, scale=16.0),
        rule("group_limited_greedy", 16, 3, 8, 3, normalise=False),
        rule("group_limited_greedy", 12, 4, 4, 2),
    ],
)
def test_choice_and_weights_follow_the_published_rule(gate):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, gate.num_experts, generator=generator)
    bias = torch.randn(gate.num_experts, generator=generator) * 0.3
    ids, weights = choose_experts(logits, bias, gate)
    for row in range(50):
        expected = plainly(logits[row], bias, gate)
        got = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert got.keys() == expected.keys()
        assert all(abs(got[e] - expected[e]) < 1e-5 for e in got)
    for begin, end in ((0, 1), (3, 9), (17, 50)):
        part = choose_experts(logits[begin:end], bias, gate)
        assert torch.equal(part[0], ids[begin:end])
        assert torch.equal(part[1], weights[begin:end])


def test_the_bias_chooses_but_does_not_weigh():
    logits = torch.zeros(1, 4)
    bias = torch.tensor([0.0, 5.0, 0.0, 3.0])
    ids, weights = choose_experts(logits, bias, rule("noaux_tc", 4, 2, normalise=False))
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def experts_case(rows, experts=6, top_k=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=generator)
    gate_up = torch.randn(experts, 24, 16, generator=generator)
    down = torch.randn(experts, 16, 12, generator=generator)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)])
    return x, ids, torch.rand(rows, top_k, generator=generator), gate_up, down


def loop(x, ids, weights, gate_up, down):
    out = torch.zeros_like(x)
    for row, choice in itertools.product(range(len(x)), range(ids.shape[1])):
        expert = ids[row, choice]
        gate, up = (gate_up[expert] @ x[row]).chunk(2)
        out[row] += weights[row, choice] * (down[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 130])
def test_routed_experts_equal_a_loop_over_tokens(rows):
    case = experts_case(rows)
    torch.testing.assert_close(routed_experts(*case), loop(*case), atol=1e-3, rtol=1e-4)


def test_all_tokens_may_go_to_one_expert_and_others_stay_empty():
    x, ids, weights, gate_up, down = experts_case(129, top_k=1)
    ids.fill_(4)
    out = routed_experts(x, ids, weights, gate_up, down)
    torch.testing.assert_close(out, loop(x, ids, weights, gate_up, down), atol=1e-3, rtol=1e-4)
    assert order_by_expert(ids, 6).groups == ((4, 0, 132),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_neighbours_or_its_place(dtype):
    x, ids, weights, gate_up, down = experts_case(90)
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    whole = routed_experts(x, ids, weights, gate_up, down)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(3))
    shuffled = routed_experts(x[order], ids[order], weights[order], gate_up, down)
    assert torch.equal(shuffled, whole[order])
    for row in (0, 5, 89):
        alone = routed_experts(
            x[row : row + 1], ids[row : row + 1], weights[row : row + 1], gate_up, down
        )
        assert torch.equal(alone, whole[row : row + 1])


def test_no_token_reads_a_padding_row():
    """Padding rows are zeros; each (token, choice) has a row of its own."""
    _, ids, *_ = experts_case(33)
    order = order_by_expert(ids, 6)
    assert len(set(order.slots.flatten().tolist())) == 66
    for expert, begin, end in order.groups:
        inside = order.slots[(ids == expert)]
        assert bool(((inside >= begin) & (inside < end)).all())
        assert (end - begin) % 4 == 0


def test_a_token_that_is_not_finite_stays_alone():
    x, ids, weights, gate_up, down = experts_case(40)
    clean = routed_experts(x, ids, weights, gate_up, down)
    x[7] = torch.nan
    spoilt = routed_experts(x, ids, weights, gate_up, down)
    keep = [i for i in range(40) if i != 7]
    assert torch.equal(spoilt[keep], clean[keep])
    assert bool(spoilt[7].isnan().all())


def test_the_weighted_sum_is_in_float32_and_rounds_to_bfloat16_once():
    # 256 + 1 + 1 = 258: a sum kept in bfloat16 would stay at 256, whose neighbour is 258.
    parts = torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16)
    total = weighted_sum(parts, torch.ones(1, 3))
    assert total.dtype == torch.bfloat16
    assert total.item() == 258.0
    # Products are not rounded to bfloat16 either: 3 x 1.0078125 = 3.0234375 lies between two.
    parts = torch.tensor([[[3.0], [3.0]]], dtype=torch.bfloat16)
    weights = torch.tensor([[1.0078125, 1.0078125]])
    assert weighted_sum(parts, weights).item() == torch.tensor(6.046875).bfloat16().item()


def test_the_weighted_sum_rounds_halves_to_even():
    for low, high, want in ((256.0, 1.0, 256.0), (258.0, 1.0, 260.0)):
        parts = torch.tensor([[[low], [high]]], dtype=torch.bfloat16)
        assert weighted_sum(parts, torch.ones(1, 2)).item() == want


def test_the_weighted_sum_is_taken_in_the_order_of_the_choices():
    parts = torch.tensor([[[1.0], [2.0**24], [-(2.0**24)]]])
    assert weighted_sum(parts, torch.ones(1, 3)).item() == 0.0
    assert weighted_sum(parts[:, [1, 2, 0]], torch.ones(1, 3)).item() == 1.0

"""Dispatch to the contiguous grouped layout and back: ranks of one process."""

import random

import put_in_process
import pytest
import torch
from exact_experts import ExactExperts
from model_cases import tiny_model
from parallel_rig import MOE_LAYERS, WIDE, a_step
from symmetric_rig import Group, Walk, channel, inputs, layout_differs, same_bits, scattered

from pdmesh.kernels.expert_exchange import ExchangeSize, arrive
from pdmesh.kernels.quantised import quantise_rows
from pdmesh.kernels.routing import permute_contiguous, place_choices
from pdmesh.kernels.symmetric import in_process_heaps
from pdmesh.model.parallel.exchange import RankLost
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.nvshmem import ExpertsFull, NvshmemExperts, ReceivedContiguous
from pdmesh.model.parallel.payload import WireFormat
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable
from pdmesh.model.parallel.virtual import Settings, VirtualRanks

EXPERTS, TOP = 8, 3
MODEL = {**WIDE, "hidden_size": 128, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
MODEL["num_experts_per_tok"] = 2


def sized(placement, tokens=5, hidden=128, capacity=None):
    slots = max(len(experts) for experts in placement.layers[0])
    return ExchangeSize.contiguous(placement.num_ranks, slots, tokens, hidden, TOP, capacity)


COUNTS = {1: (5,), 2: (5, 2), 4: (5, 0, 1, 4), 8: (1, 5, 0, 0, 2, 0, 1, 0)}
EVERY = [(kind, ranks) for kind in ("balanced", "skewed", "one", "padded") for ranks in COUNTS]
FEW = {("balanced", 4), ("skewed", 2), ("one", 8), ("padded", 1)}
KINDS = [pytest.param(*p, marks=[pytest.mark.full] * (p not in FEW)) for p in EVERY]


@pytest.mark.parametrize(("kind", "ranks"), KINDS)
def test_what_arrives_and_what_comes_back_are_bit_for_bit_the_definition(kind, ranks):
    placement = scattered(ranks, EXPERTS, seed=ranks)
    group = Group(placement, sized(placement, hidden=384 if ranks < 4 else 256))
    group.check(*inputs(group.size, COUNTS[ranks], kind, EXPERTS, seed=1))


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.full)])
def test_steps_without_rows_leave_nobodys_rows_behind(ranks):
    placement = Placement.even(1, EXPERTS, ranks)
    group = Group(placement, sized(placement))
    for counts in (COUNTS[ranks], (0,) * ranks, COUNTS[ranks][::-1]):
        group.check(*inputs(group.size, counts, "balanced", EXPERTS, seed=1))


def first_choices(size, counts, seed=1):
    """All rows for expert 0, and for no other."""
    rows, ids, weights = inputs(size, counts, "one", EXPERTS, seed)
    for own in ids:
        own[:, 1:] = -1
    return rows, ids, weights


def test_an_expert_with_more_rows_than_a_block_moves_the_next_one_by_two():
    placement = Placement(EXPERTS, ((tuple(range(EXPERTS)), ()),))
    group = Group(placement, sized(placement, tokens=70))
    rows, ids, weights = first_choices(group.size, (70, 70))
    ids[1][-1, 1] = 1
    group.check(rows, ids, weights)
    full, empty = (end.lanes[0].arrived for end in group.ends)
    want = [0] * 140 + [-1] * 116 + [1] + [-1] * (group.size.capacity - 257)
    assert full.row_expert.tolist() == want
    assert full.used.tolist() == [3 * 128]
    assert (empty.row_expert == -1).all()
    assert empty.used.tolist() == [0]


def test_one_rank_lays_rows_out_as_the_local_permutation_does():
    rows, ids, _ = inputs(sized(Placement.even(1, EXPERTS, 1), 9), (9,), "padded", EXPERTS, 2)
    size = sized(Placement.even(1, EXPERTS, 1), 9)
    mine = arrive(rows, [(ids[0].clamp(max=0), ids[0])], 0, size)
    few, (counts, _, places) = ids[0].int(), place_choices(ids[0], EXPERTS)
    there = permute_contiguous(quantise_rows(rows[0]), few, places, counts, size.capacity)
    assert torch.equal(mine.row_expert, there.row_expert)
    used = mine.row_expert >= 0
    assert used.sum() == (ids[0] >= 0).sum() > 0
    assert same_bits(mine.rows.values[used], there.rows.values[used])
    assert same_bits(mine.rows.scales[used], there.rows.scales[used])


@pytest.mark.parametrize("seed", range(6))
def test_a_stated_capacity_holds_whatever_gates_may_choose_and_a_block_less_does_not(seed):
    rng = random.Random(seed)
    ranks, slots, tokens, top = (
        rng.choice([1, 2, 8]),
        rng.choice([1, 3, 40]),
        rng.randint(1, 300),
        4,
    )
    size = ExchangeSize.contiguous(ranks, slots, tokens, 128, top)
    pairs = ranks * tokens * min(top, slots)
    worst = 0
    for _ in range(200):
        # One row for each of some experts, all others for one: padding is largest so.
        lonely = rng.randint(0, min(slots - 1, pairs - 1))
        counts = [pairs - lonely] + [1] * lonely
        worst = max(worst, sum(-(-count // 128) * 128 for count in counts))
    assert worst <= size.capacity < worst + 128 * 2


@pytest.mark.parametrize(("kind", "ranks"), KINDS)
def test_experts_in_fp8_give_the_bits_of_one_rank(kind, ranks):
    placement = scattered(ranks, EXPERTS, seed=ranks)
    group, experts = Group(placement, sized(placement, hidden=256)), ExactExperts(EXPERTS, 256, 128)
    rows, ids, weights = inputs(group.size, COUNTS[ranks], kind, EXPERTS, seed=3)
    sent = [
        end.dispatch_send(channel(1), 0, rows[rank], ids[rank])
        for rank, end in enumerate(group.ends)
    ]
    back = []
    for rank, end in enumerate(group.ends):
        group.poison(end)
        received = end.dispatch_recv(sent[rank])
        made = received.quantised_outputs(experts.ops, *experts.held(placement.layers[0][rank]))
        assert made.data_ptr() == end.lanes[0].made.data_ptr()
        back.append(end.combine_send(sent[rank], received, made))
    for rank, end in enumerate(group.ends):
        found = end.combine_recv(back[rank], weights[rank])
        end.check()
        assert found.isfinite().all()
        assert same_bits(found, experts.one_rank(rows[rank], ids[rank], weights[rank]))


def test_the_kernels_of_grouped_products_take_the_layout_as_it_arrives():
    from pdmesh.kernels.triton import grouped_gemm, quantise

    placement = Placement.even(1, EXPERTS, 2)
    group, experts = Group(placement, sized(placement, hidden=256)), ExactExperts(EXPERTS, 256, 128)
    ops = experts.ops_with(
        contiguous_grouped_gemm=grouped_gemm.contiguous_grouped_gemm,
        masked_silu_mul_quantise=quantise.masked_silu_mul_quantise,
    )
    rows, ids, weights = inputs(group.size, (5, 4), "balanced", EXPERTS, 1)
    received, _, _ = group.exchange(rows, ids, weights)
    for rank, there in received.items():
        held = experts.held(placement.layers[0][rank])
        used = there.arrived.row_expert >= 0
        # Neither NaN nor large: the interpreter warns of these, a device does not.
        there.arrived.rows.values.view(torch.uint8)[~used] = 0x7E
        there.arrived.rows.scales[~used] = 1e-2
        found = there.quantised_outputs(ops, *held)[used].float()  # a copy: `made` is written anew
        want = there.quantised_outputs(experts.ops, *held)[used].float()
        assert (found - want).norm() < 0.01 * want.norm()
        assert want.norm() > 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_ranks_that_run_ahead_overwrite_nothing_that_others_still_read(seed):
    assert Walk(seed, sized, EXPERTS).go()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200, 212))
def test_ranks_at_any_pace_get_the_same_sums(seed):
    ranks = random.Random(seed).choice([2, 3, 4])
    assert Walk(seed, sized, EXPERTS, exchanges=6, ranks=ranks).go()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(16))
def test_random_placements_routings_and_batches_up_to_4096_equal_the_definition(seed):
    rng = random.Random(seed)
    ranks = [1, 2, 4, 8][seed % 4]
    tokens = [1, 33, 300, 4096 // ranks][seed // 4]
    placement = scattered(ranks, 16, seed, most=2)
    group = Group(placement, sized(placement, tokens, rng.choice([128, 256])))
    counts = [rng.choice([0, 1, tokens, rng.randint(0, tokens)]) for _ in range(ranks)]
    counts[rng.randrange(ranks)] = tokens
    kind = rng.choice(["balanced", "skewed", "one", "padded"])
    group.check(*inputs(group.size, counts, kind, 16, seed))


@pytest.mark.parametrize(
    "mapped",
    [
        pytest.param(lambda rank: (rank,), id="to all others"),
        pytest.param(lambda rank: (rank, rank ^ 1), id="to those beyond a pair"),
    ],
)
def test_rows_and_outputs_are_put_to_peers_that_are_not_mapped(monkeypatch, mapped):
    placement = scattered(4, EXPERTS, seed=4)
    group = Group(placement, sized(placement, tokens=3), mapped=mapped)
    puts = put_in_process.install(monkeypatch, group.heaps)
    for seed, (kind, counts) in enumerate((("balanced", (3, 0, 1, 2)), ("skewed", (1, 3, 2, 0)))):
        group.check(*inputs(group.size, counts, kind, EXPERTS, seed))
    assert puts.calls > 8


def test_more_rows_than_there_is_room_for_are_an_error_and_touch_no_other_memory():
    placement = Placement.even(1, EXPERTS, 2)
    group = Group(placement, sized(placement, tokens=65, capacity=128))
    rows, ids, weights = first_choices(group.size, (65, 64))
    behind = group.ends[0].lanes[0].arrived
    received, _, _ = group.exchange(rows, ids, weights)
    with pytest.raises(
        ExpertsFull,
        match="all experts of the rank got 256 rows with padding; there is room for 128",
    ):
        group.ends[0].check()
    with pytest.raises(RankLost, match="rank 0 is lost"):
        group.ends[1].check()
    assert behind.counts.tolist() == [128, 0, 0, 0]
    assert behind.used.tolist() == [128]
    assert (received[1].arrived.row_expert == -1).all()
    for end in group.ends:
        end.reset([0, 1])
    group.check(*first_choices(group.size, (3, 8), 2))
    with pytest.raises(ValueError, match="256 rows; there is room for 128"):
        arrive(rows, group.choices(ids), 0, group.size)


def test_the_layout_that_came_says_which_it_is_and_the_plain_experts_take_it():
    group = Group(Placement.even(1, EXPERTS, 2), sized(Placement.even(1, EXPERTS, 2)))
    rows, ids, weights = inputs(group.size, (5, 4), "balanced", EXPERTS, 1)
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 32, 128, generator=generator) * 0.1
    down = torch.randn(EXPERTS, 128, 16, generator=generator) * 0.1
    sent = [group.ends[r].dispatch_send(channel(1), 0, rows[r], ids[r]) for r in (0, 1)]
    back = []
    for rank, end in enumerate(group.ends):
        received = end.dispatch_recv(sent[rank])
        assert isinstance(received, ReceivedContiguous)
        own = slice(4 * rank, 4 * rank + 4)
        outputs = received.outputs(gate_up[own], down[own])
        back.append(end.combine_send(sent[rank], received, outputs))
    for rank, end in enumerate(group.ends):
        found = end.combine_recv(back[rank], weights[rank]).float()
        gate, up = (rows[rank].float() @ gate_up.transpose(1, 2)).chunk(2, dim=-1)
        every = (torch.nn.functional.silu(gate) * up) @ down.transpose(1, 2)
        picked = every.transpose(0, 1)[torch.arange(len(rows[rank]))[:, None], ids[rank]]
        want = (picked * weights[rank][..., None]).sum(1)
        assert (found - want).norm() < 0.05 * want.norm()


def test_the_layers_of_a_model_run_over_it_as_over_the_masked_layout():
    model = tiny_model(0, **MODEL)
    step = a_step(model, 2, 1, (5, 3))
    wire = Settings(wire=WireFormat("fp8", "bf16"), mode="dispatch_overlap")
    found = []
    for size in (ExchangeSize(2, 4, 8, 128, 2, 32), ExchangeSize.contiguous(2, 4, 8, 128, 2)):
        ranks = VirtualRanks(model, Groups(2), settings=wire)
        tables = [ReplicaTable.build(ranks.placement, n) for n in range(MOE_LAYERS)]
        for rank, heap in enumerate(in_process_heaps(2)):
            ranks._ranks[rank].expert_parallel = NvshmemExperts(heap, tables, size)
        found.append(ranks.forward(step.inputs))
    for masked, contiguous in zip(*found, strict=True):
        assert (masked - contiguous).norm() < 1e-3 * masked.norm()


def test_memory_is_what_the_rows_need_and_not_what_each_expert_might():
    masked = ExchangeSize(8, 32, 4096, 7168, 8, max_rows=8 * 4096)
    contiguous = ExchangeSize.contiguous(8, 32, 4096, 7168, 8)
    assert masked.layout == (32, 32768)
    assert 8 * 4096 * 8 < contiguous.capacity <= 8 * 4096 * 8 + 32 * 128
    assert masked.slots * masked.max_rows == 4 * 8 * 4096 * 8


def test_sizes_that_do_not_fit_are_refused_by_a_sentence():
    with pytest.raises(ValueError, match="100 rows of all experts: a multiple of 128"):
        ExchangeSize.contiguous(2, 3, 5, 128, TOP, 100)
    with pytest.raises(ValueError, match="one of the layouts has room, the other none"):
        ExchangeSize(2, 3, 5, 128, TOP, 9, 256)
    with pytest.raises(ValueError, match="one of the layouts has room, the other none"):
        ExchangeSize(2, 3, 5, 128, TOP, 0)


def test_a_difference_of_one_bit_is_seen():
    size = sized(Placement.even(1, EXPERTS, 1))
    rows, ids, _ = inputs(size, (5,), "balanced", EXPERTS, 1)
    found, want = (arrive(rows, [(ids[0] * 0, ids[0])], 0, size) for _ in range(2))
    assert layout_differs(found, want) is None
    at = int((want.row_expert >= 0).nonzero()[0])
    found.rows.values.view(torch.uint8)[at, 3] ^= 1
    assert "values of slot" in layout_differs(found, want)

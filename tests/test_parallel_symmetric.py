"""Dispatch and combine over symmetric memory equal their definition: ranks of one process."""

import importlib
import random

import put_in_process
import pytest
import torch
from model_cases import tiny_model
from parallel_rig import MOE_LAYERS, WIDE, a_step
from symmetric_rig import Group, Walk, channel, experts_made, inputs, same_bits, scattered

from pdmesh.kernels.expert_exchange import ExchangeSize, places
from pdmesh.kernels.symmetric import in_process_heaps
from pdmesh.model.parallel import nvshmem_lane
from pdmesh.model.parallel.exchange import RankLost
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.nvshmem import ExpertsFull, NvshmemExperts
from pdmesh.model.parallel.nvshmem_memory import Tuning
from pdmesh.model.parallel.payload import WireFormat
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable
from pdmesh.model.parallel.virtual import Settings, VirtualRanks
from pdmesh.wire.errors import ConfigError

EXPERTS, TOP = 6, 3
MODEL = {**WIDE, "hidden_size": 128, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
MODEL["num_experts_per_tok"] = 2


def sized(placement, tokens=5, hidden=128, max_rows=24):
    slots = max(len(experts) for experts in placement.layers[0])
    return ExchangeSize(placement.num_ranks, slots, tokens, hidden, TOP, max_rows)


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("balanced", (1, 3)),
        ("skewed", (0, 5, 1)),
        ("one", (2, 0, 5)),
        ("padded", (4, 2)),
        ("balanced", (0, 0, 3, 0)),
        ("balanced", (0, 0)),
        ("skewed", (3,)),
    ],
)
def test_what_arrives_and_what_comes_back_are_bit_for_bit_the_definition(kind, counts):
    placement = scattered(len(counts), EXPERTS, seed=len(counts))
    group = Group(placement, sized(placement, hidden=384))
    group.check(*inputs(group.size, counts, kind, EXPERTS, seed=1))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_random_placements_batches_and_widths_equal_the_definition(seed):
    rng = random.Random(seed)
    ranks = rng.choice([1, 2, 3, 5, 8])
    placement = scattered(ranks, 16, seed, most=4)
    tokens = rng.choice([1, 5, 9])
    size = sized(placement, tokens, rng.choice([128, 256, 896]), ranks * tokens)
    group = Group(placement, size)
    for step in range(2):
        counts = [rng.choice([0, 1, size.tokens]) for _ in range(ranks)]
        kind = rng.choice(["balanced", "skewed", "one", "padded"])
        group.check(*inputs(size, counts, kind, 16, seed + 1000 * step))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_ranks_that_run_ahead_overwrite_nothing_that_others_still_read(seed):
    assert Walk(seed, sized, EXPERTS).go()


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_run_ahead_in_memory_of_the_host_overwrite_nothing_either(seed):
    ranks = random.Random(seed).choice([2, 3, 4])
    assert Walk(seed, sized, EXPERTS, exchanges=6, ranks=ranks, host=True).go()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 130))
def test_ranks_at_any_pace_get_the_same_sums(seed):
    assert Walk(seed, sized, EXPERTS, exchanges=6, ranks=random.Random(seed).choice([2, 3, 4])).go()


@pytest.mark.parametrize("before", [2**31 - 2, 2**32 - 2])
def test_a_lane_goes_on_when_numbers_of_exchanges_no_longer_fit_into_their_tag(before):
    group = Group(Placement.even(1, EXPERTS, 2), ExchangeSize(2, 3, 5, 128, TOP, 24))
    for end in group.ends:
        end.lanes[0].step.fill_(before)
    for seed in range(3):
        group.check(*inputs(group.size, (5, 3), "balanced", EXPERTS, seed))
        for end in group.ends:
            end.check()


def test_two_microbatches_are_in_flight_at_once():
    placement = scattered(2, EXPERTS, seed=4)
    group = Group(placement, sized(placement), lanes=2)
    data = [inputs(group.size, (5, 2), "balanced", EXPERTS, seed) for seed in (1, 2)]
    sent = [
        [
            end.dispatch_send(channel(1, half), 0, data[half][0][rank], data[half][1][rank])
            for rank, end in enumerate(group.ends)
        ]
        for half in (0, 1)
    ]
    for half in (1, 0):
        rows, ids, weights = data[half]
        back = []
        for rank, end in enumerate(group.ends):
            received = end.dispatch_recv(sent[half][rank])
            made = experts_made(received.arrived, rank)
            back.append(end.combine_send(sent[half][rank], received, made))
        for rank, end in enumerate(group.ends):
            _, want = group.expected(rows, ids, weights, rank)
            # What the shared experts gave is added to the rounded sum, as it would be afterwards.
            plus = rows[rank] if half else None
            want = want if plus is None else want + plus
            assert same_bits(end.combine_recv(back[rank], weights[rank], plus), want)


def test_experts_that_moved_are_found_where_they_are_now():
    group = Group(Placement.even(1, EXPERTS, 2), ExchangeSize(2, 5, 5, 128, TOP, 24), most_copies=3)
    data = inputs(group.size, (5, 3), "balanced", EXPERTS, 1)
    group.check(*data)
    moved = Placement(EXPERTS, (((5, 4, 0, 1), (3, 2, 0, 1, 0)),))
    group.tables = [ReplicaTable.build(moved, 0)]
    for end in group.ends:
        end.place(group.tables)
    group.check(*data)


def test_a_rank_that_sends_nothing_is_named_and_the_others_go_on_without_it():
    group = Group(Placement.even(1, EXPERTS, 3), ExchangeSize(3, EXPERTS, 5, 128, TOP, 24))
    rows, ids, weights = inputs(group.size, (5, 5, 5), "balanced", EXPERTS, 1)
    group.check(rows, ids, weights)
    for rank in (0, 2):
        handle = group.ends[rank].dispatch_send(channel(2), 0, rows[rank], ids[rank])
        group.ends[rank].dispatch_recv(handle)
        with pytest.raises(RankLost, match="rank 1 is lost"):
            group.ends[rank].check()
    left = Placement.even(1, EXPERTS, 3).without([1])
    group.tables = [ReplicaTable.build(left, 0)]
    for rank in (0, 2):
        group.ends[rank].place(group.tables)
    for rank in (0, 2):
        group.ends[rank].reset([0, 2])
    rows[1], ids[1], weights[1] = rows[1][:0], ids[1][:0], weights[1][:0]
    for _ in range(2):
        _, _, sums = group.exchange(rows, ids, weights, members=[0, 2])
        for rank in (0, 2):
            group.ends[rank].check()
            assert same_bits(sums[rank], group.expected(rows, ids, weights, rank)[1])


def test_outputs_that_do_not_come_back_name_the_rank():
    group = Group(Placement.even(1, EXPERTS, 2), ExchangeSize(2, 3, 5, 128, TOP, 24))
    rows, ids, weights = inputs(group.size, (5, 5), "balanced", EXPERTS, 1)
    sent = [group.ends[r].dispatch_send(channel(1), 0, rows[r], ids[r]) for r in (0, 1)]
    received = group.ends[0].dispatch_recv(sent[0])
    back = group.ends[0].combine_send(sent[0], received, received.made.zero_())
    group.ends[0].combine_recv(back, weights[0])
    with pytest.raises(RankLost, match="rank 1 is lost"):
        group.ends[0].check()


def test_more_rows_than_an_expert_has_room_for_are_an_error_and_not_a_loss():
    group = Group(Placement.even(1, EXPERTS, 2), ExchangeSize(2, 3, 5, 128, TOP, 9))
    rows, ids, _ = inputs(group.size, (5, 5), "one", EXPERTS, 1)
    sent = [group.ends[r].dispatch_send(channel(1), 0, rows[r], ids[r]) for r in (0, 1)]
    group.ends[0].dispatch_recv(sent[0])
    with pytest.raises(ExpertsFull, match="an expert got 10 rows; there is room for 9"):
        group.ends[0].check()


def test_bytes_are_counted_by_peer_and_kind_and_a_row_goes_to_a_rank_once():
    group = Group(Placement.even(1, EXPERTS, 2), ExchangeSize(2, 3, 4, 256, TOP, 24))
    rows, _, weights = inputs(group.size, (2, 1), "balanced", EXPERTS, 1)
    ids = [torch.tensor([[3, 4, 5], [0, 3, 1]]), torch.tensor([[2, 1, 5]])]
    group.check(rows, ids, weights)
    group.check(rows, ids, weights)
    row, head = 256 + 2 * 4 + 8 + (1 + TOP) * 4, 8 + 3 * 4  # 8: a record is a multiple of 16
    assert group.ends[0].sent.by_peer("dispatch") == {1: 2 * (2 * row + head)}
    assert group.ends[1].sent.by_peer("dispatch") == {0: 2 * (row + head)}
    assert group.ends[0].sent.by_peer("combine") == {1: 2 * 2 * 512}
    assert group.ends[1].sent.by_peer("combine") == {0: 2 * 4 * 512}


def test_experts_in_plain_torch_compute_on_the_masked_layout():
    group = Group(Placement.even(1, EXPERTS, 2), ExchangeSize(2, 3, 5, 128, TOP, 24))
    rows, ids, weights = inputs(group.size, (5, 4), "balanced", EXPERTS, 1)
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 32, 128, generator=generator) * 0.1
    down = torch.randn(EXPERTS, 128, 16, generator=generator) * 0.1
    sent = [group.ends[r].dispatch_send(channel(1), 0, rows[r], ids[r]) for r in (0, 1)]
    back = []
    for rank, end in enumerate(group.ends):
        received = end.dispatch_recv(sent[rank])
        own = slice(3 * rank, 3 * rank + 3)
        outputs = received.outputs(gate_up[own], down[own])
        back.append(end.combine_send(sent[rank], received, outputs))
    for rank, end in enumerate(group.ends):
        found = end.combine_recv(back[rank], weights[rank]).float()
        x = rows[rank].float()
        gate, up = (x @ gate_up.transpose(1, 2)).chunk(2, dim=-1)
        every = (torch.nn.functional.silu(gate) * up) @ down.transpose(1, 2)
        picked = every.transpose(0, 1)[torch.arange(len(x))[:, None], ids[rank]]
        want = (picked * weights[rank][..., None]).sum(1)
        assert (found - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("mode", ["dispatch_overlap", "microbatch"])
def test_the_layers_of_a_model_run_over_it_as_over_messages(mode):
    model = tiny_model(0, **MODEL)
    step = a_step(model, 2, 1, (5, 3))
    wire = Settings(wire=WireFormat("fp8", "bf16"), mode=mode)
    found = []
    for symmetric in (False, True):
        ranks = VirtualRanks(model, Groups(2), settings=wire)
        if symmetric:
            tables = [ReplicaTable.build(ranks.placement, n) for n in range(MOE_LAYERS)]
            size = ExchangeSize(2, 4, 8, 128, 2, 32)
            for rank, heap in enumerate(in_process_heaps(2)):
                ranks._ranks[rank].expert_parallel = NvshmemExperts(heap, tables, size)
        found.append(ranks.forward(step.inputs))
    for messages, symmetric in zip(*found, strict=True):
        assert (messages - symmetric).norm() < 1e-3 * messages.norm()


def test_sizes_that_do_not_fit_are_refused_by_a_sentence():
    with pytest.raises(ValueError, match="rows of 100 are not a multiple of 128"):
        ExchangeSize(2, 3, 5, 100, TOP, 9)
    with pytest.raises(ValueError, match="0 experts a rank"):
        ExchangeSize(2, 0, 5, 128, TOP, 9)
    with pytest.raises(ValueError, match="31 bits"):
        ExchangeSize(4096, 1, 1 << 17, 128, 8, 9)
    group = Group(Placement.even(1, EXPERTS, 2), ExchangeSize(2, 3, 2, 128, TOP, 9))
    end = group.ends[0]
    with pytest.raises(ValueError, match=r"\[3, 128\] rows; at most 2 of 128"):
        end.dispatch_send(channel(1), 0, torch.zeros(3, 128), torch.zeros(3, TOP).long())
    with pytest.raises(ValueError, match=r"ids are \(1, 2\), not \(1, 3\)"):
        end.dispatch_send(channel(1), 0, torch.zeros(1, 128), torch.zeros(1, 2).long())
    with pytest.raises(ConfigError, match="3 copies of an expert in 5 slots"):
        end.place([ReplicaTable.build(Placement(EXPERTS, (((0, 0, 0), (1, 2, 3, 4, 5)),)), 0)])
    with pytest.raises(ValueError, match="not mapped"):
        NvshmemExperts(Far(), group.tables, group.size)


class Far:
    """A heap whose peers cannot be mapped."""

    rank, size, device = 0, 2, torch.device("cpu")

    def __init__(self):
        self._heap = in_process_heaps(2)[0]

    def allocate(self, nbytes):
        return self._heap.allocate(nbytes)

    def addresses(self, memory):
        return memory.data_ptr(), 0


@pytest.mark.parametrize(
    "mapped",
    [
        pytest.param(lambda rank: (), id="to all", marks=pytest.mark.full),
        pytest.param(lambda rank: (rank,), id="to others"),
    ],
)
def test_rows_and_outputs_are_put_to_peers_that_are_not_mapped(monkeypatch, mapped):
    placement = scattered(2, EXPERTS, seed=3)
    group = Group(placement, sized(placement), mapped=mapped)
    puts = put_in_process.install(monkeypatch, group.heaps)
    steps = (("balanced", (5, 0)), ("skewed", (1, 3)), ("one", (2, 5)))
    for seed, (kind, counts) in enumerate(steps):
        group.check(*inputs(group.size, counts, kind, EXPERTS, seed))
    assert puts.calls > 2 * len(steps)


def test_many_rows_are_put_in_more_pieces_and_ranks_need_not_agree_in_how_many(monkeypatch):
    monkeypatch.setattr(nvshmem_lane, "PUT_ROWS", 1)
    placement = Placement(EXPERTS, (((0, 1, 2), (3, 4, 5)),))
    calls = []
    for most in (1, 3, 9):
        monkeypatch.setattr(nvshmem_lane, "PUT_CHUNKS", (1, most))
        group = Group(placement, sized(placement), mapped=lambda rank: (rank,))
        puts = put_in_process.install(monkeypatch, group.heaps)
        for seed, counts in enumerate(((5, 1), (0, 4), (5, 5))):
            group.check(*inputs(group.size, counts, "skewed", EXPERTS, seed))
        calls.append(puts.calls)
    assert calls[0] < calls[1] < calls[2]


@pytest.mark.parametrize("layout", ["masked", "contiguous"])
@pytest.mark.parametrize("hidden", [128, 384])
def test_rows_that_are_spread_as_a_whole_lie_as_those_that_are_spread_in_parts(layout, hidden):
    placement = scattered(3, EXPERTS, seed=3)
    size = sized(placement, hidden=hidden)
    if layout == "contiguous":
        size = ExchangeSize.contiguous(size.ranks, size.slots, size.tokens, hidden, TOP)
    group = Group(placement, size)
    for end in group.ends:
        end.lanes[0].tune(Tuning(part=128, whole=True))
    for seed, counts in enumerate(((5, 0, 2), (1, 5, 5))):
        group.check(*inputs(group.size, counts, "padded", EXPERTS, seed))
        for end in group.ends:
            arrived = end.lanes[0].arrived
            nobodys = torch.ones(arrived.homes.shape, dtype=torch.bool)
            for at in places(arrived):
                nobodys[at] = False
            assert (arrived.rows.values.view(torch.uint8)[nobodys] == 0x7F).all()


def test_placements_with_more_or_fewer_slots_put_with_one_kernel(monkeypatch):
    constants = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *given, **named: constants.append(named)

    for ranks_of in ((0, 1, 0, 1), (0, 0, 0, 1)):
        slots = [tuple(e for e in range(4) if ranks_of[e] == rank) for rank in (0, 1)]
        placement = Placement(4, (tuple(slots),))
        group = Group(placement, sized(placement, tokens=1), mapped=lambda rank: (rank,))
        put_in_process.install(monkeypatch, group.heaps)
        kernels = importlib.import_module(put_in_process.KERNELS)
        monkeypatch.setattr(kernels, "put_outputs_kernel", Recorder())
        group.ends[0].lanes[0].send_outputs(group.ends[0].lanes[0].made)
    assert constants[0] == constants[1]

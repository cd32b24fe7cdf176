"""Dispatch and combine by themselves: any routing over any placement equals all experts at home."""

import random

import pytest
import torch

from pdmesh.kernels.moe import routed_experts
from pdmesh.model.parallel.exchange import Channel, RankLost
from pdmesh.model.parallel.local import LocalExperts
from pdmesh.model.parallel.mailbox import Mailboxes
from pdmesh.model.parallel.messages import MessageExperts
from pdmesh.model.parallel.payload import WireFormat
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable

HIDDEN, SIZE, EXPERTS, TOP = 16, 8, 256, 8
CHANNEL = Channel("dispatch", 1, 0, -1)
GENERATOR = torch.Generator().manual_seed(0)
GATE_UP = torch.randn(EXPERTS, 2 * SIZE, HIDDEN, generator=GENERATOR)
DOWN = torch.randn(EXPERTS, HIDDEN, SIZE, generator=GENERATOR)


def scattered(ranks: int, seed: int) -> Placement:
    """Experts anywhere: ranks with many slots, with few and with none; one to five copies."""
    rng = random.Random(seed)
    copies = [e for e in range(EXPERTS) for _ in range(rng.choice([1, 1, 1, 2, 5]))]
    rng.shuffle(copies)
    slots = [[] for _ in range(ranks)]
    for expert in copies:
        slots[min(rng.randrange(ranks), rng.randrange(ranks))].append(expert)
    return Placement(EXPERTS, (tuple(map(tuple, slots)),))


def routing(kind: str, count: int, seed: int) -> torch.Tensor:
    """ids [count, 8]."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, EXPERTS, generator=generator)
    if kind == "skewed":
        scores += torch.linspace(0, 3, EXPERTS) ** 2
    if kind == "narrow":
        scores[:, :TOP] += 1.0
    return scores.topk(TOP, dim=1).indices


class Ranks:
    """All ends of one exchange."""

    def __init__(self, placement, wire=WireFormat(), members=None):  # noqa: B008 - immutable
        self.placement, self.mail = placement, Mailboxes()
        self.members = list(range(placement.num_ranks)) if members is None else members
        tables = [ReplicaTable.build(placement, 0)]
        self.ends = {
            rank: MessageExperts(self.mail.end(rank), self.members, tables, wire)
            for rank in self.members
        }

    def send(self, rows, ids):
        return {r: self.ends[r].dispatch_send(CHANNEL, 0, rows[r], ids[r]) for r in self.members}

    def compute(self, sent):
        handles = {}
        for rank, handle in sent.items():
            received = self.ends[rank].dispatch_recv(handle)
            held = list(self.placement.layers[0][rank])
            outputs = received.outputs(GATE_UP[held], DOWN[held])
            handles[rank] = self.ends[rank].combine_send(handle, received, outputs)
        return handles

    def run(self, rows, ids, weights, plus=None):
        handles = self.compute(self.send(rows, ids))
        found = {}
        for r in self.members:
            more = plus and plus[r]
            found[r] = self.ends[r].combine_recv(handles[r], weights[r], more)
        assert not any(self.mail.waiting.values()), "a message that nobody took"
        return found


def inputs(kind, counts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, HIDDEN, generator=generator) for n in counts]
    ids = [routing(kind, n, seed + i) for i, n in enumerate(counts)]
    weights = [torch.rand(n, TOP, generator=generator) for n in counts]
    return rows, ids, weights


def at_home(rows, ids, weights):
    return routed_experts(rows, ids, weights, GATE_UP, DOWN)


@pytest.mark.parametrize("kind", ["balanced", "skewed", "narrow"])
@pytest.mark.parametrize("ranks", [1, 3, 16, 128])
def test_any_routing_over_any_placement_equals_all_experts_at_home(kind, ranks):
    counts = [(0, 5, 1, 12)[r % 4] for r in range(ranks)]
    rows, ids, weights = inputs(kind, counts, seed=ranks)
    found = Ranks(scattered(ranks, ranks)).run(rows, ids, weights)
    for rank, count in enumerate(counts):
        if count:
            assert torch.equal(found[rank], at_home(rows[rank], ids[rank], weights[rank]))
        else:
            assert found[rank].shape == (0, HIDDEN)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_shared_experts_gave_is_added_to_the_sum(ranks):
    rows, ids, weights = inputs("skewed", [5, 1, 12][:ranks])
    found = Ranks(scattered(ranks, ranks)).run(rows, ids, weights, plus=rows)
    for rank in range(ranks):
        home = at_home(rows[rank], ids[rank], weights[rank])
        assert torch.equal(found[rank], home + rows[rank])


def test_one_expert_may_get_every_row_of_every_rank():
    rows, _, weights = inputs("balanced", [9] * 16)
    ids = [torch.full((9, 1), 77) for _ in range(16)]
    weights = [w[:, :1] for w in weights]
    found = Ranks(Placement.even(1, EXPERTS, 16)).run(rows, ids, weights)
    for rank in range(16):
        assert torch.equal(found[rank], at_home(rows[rank], ids[rank], weights[rank]))


def test_nobody_may_have_a_row():
    rows, ids, weights = inputs("balanced", [0] * 8)
    ranks = Ranks(Placement.even(1, EXPERTS, 8))
    assert all(x.shape == (0, HIDDEN) for x in ranks.run(rows, ids, weights).values())
    assert all(end.sent.total() == 0 for end in ranks.ends.values())


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200))
def test_random_routings_over_random_placements(seed):
    rng = random.Random(seed)
    ranks = rng.choice([1, 2, 5, 8, 33, 72, 144])
    counts = [rng.choice([0, 1, 2, 3, 17, 64]) for _ in range(ranks)]
    kind = rng.choice(["balanced", "skewed", "narrow"])
    rows, ids, weights = inputs(kind, counts, seed)
    found = Ranks(scattered(ranks, seed)).run(rows, ids, weights)
    for rank, count in enumerate(counts):
        if count:
            assert torch.equal(found[rank], at_home(rows[rank], ids[rank], weights[rank]))


@pytest.mark.parametrize("wire", [WireFormat("fp8"), WireFormat("fp8", "bf16")])
def test_one_rank_rounds_for_the_wire_as_many_do(wire):
    rows, ids, weights = inputs("skewed", [6, 0, 11, 3])
    found = Ranks(scattered(4, 1), wire).run(rows, ids, weights)
    one = LocalExperts(wire)
    for rank in (0, 2, 3):
        handle = one.dispatch_send(CHANNEL, 0, rows[rank], ids[rank])
        got = one.dispatch_recv(handle)
        outputs = got.outputs(GATE_UP, DOWN)
        alone = one.combine_recv(one.combine_send(handle, got, outputs), weights[rank])
        assert torch.equal(found[rank], alone)
        exact = at_home(rows[rank], ids[rank], weights[rank])
        assert not torch.equal(alone, exact)
        assert float((alone - exact).norm() / exact.norm()) < 0.06


def test_a_row_that_is_not_finite_stays_with_its_token():
    rows, ids, weights = inputs("narrow", [4, 4])
    rows[0][2] = torch.nan
    found = Ranks(Placement.even(1, EXPERTS, 2)).run(rows, ids, weights)
    assert bool(found[0][2].isnan().all())
    for rank, keep in ((0, [0, 1, 3]), (1, [0, 1, 2, 3])):
        expected = at_home(rows[rank], ids[rank], weights[rank])
        assert torch.equal(found[rank][keep], expected[keep])


def test_a_row_goes_to_a_rank_once_however_many_of_its_experts_it_is_for():
    """Two ranks, all choices on the other one: rows of 64 bytes, 8 bytes a choice."""
    rows, _, weights = inputs("balanced", [3, 0])
    ids = [128 + routing("balanced", 3, 5) // 2, torch.empty((0, TOP), dtype=torch.int64)]
    ranks = Ranks(Placement.even(1, EXPERTS, 2))
    ranks.run(rows, ids, weights)
    assert ranks.ends[0].sent.by_peer() == {1: 3 * 64 + 24 * 8}
    assert ranks.ends[1].sent.by_peer() == {0: 24 * 64}
    fp8 = Ranks(Placement.even(1, EXPERTS, 2), WireFormat("fp8", "bf16"))
    fp8.run(rows, ids, weights)
    assert fp8.ends[0].sent.by_peer() == {1: 3 * (16 + 4) + 24 * 8}
    assert fp8.ends[1].sent.by_peer() == {0: 24 * 32}


def test_a_rank_that_sends_nothing_is_named_by_whoever_waits_for_it():
    rows, ids, weights = inputs("balanced", [2] * 4)
    ranks = Ranks(Placement.even(1, EXPERTS, 4))
    ranks.members.remove(2)
    sent = ranks.send(rows, ids)
    with pytest.raises(RankLost, match=r"rank 2 is lost: dispatch of layer 0 in step 1"):
        ranks.compute(sent)


def test_a_rank_lost_before_it_sends_results_is_named_by_those_who_need_them():
    rows, ids, weights = inputs("balanced", [8] * 4)
    ranks = Ranks(Placement.even(1, EXPERTS, 4))
    sent = ranks.send(rows, ids)
    del sent[1]
    handles = ranks.compute(sent)
    with pytest.raises(RankLost, match=r"rank 1 is lost: combine of layer 0 in step 1"):
        ranks.ends[3].combine_recv(handles[3], weights[3])

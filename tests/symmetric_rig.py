"""Exchanges over symmetric memory of ranks in one process, and what they have to give."""

from __future__ import annotations

import random

import torch

from pdmesh.kernels.expert_exchange import ExchangeSize, arrive, come_back
from pdmesh.kernels.moe import weighted_sum
from pdmesh.kernels.symmetric import in_process_heaps
from pdmesh.model.parallel.exchange import Channel
from pdmesh.model.parallel.nvshmem import NvshmemExperts
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable


def channel(step: int, microbatch: int = -1) -> Channel:
    return Channel("dispatch", step, 0, microbatch)


def scattered(ranks: int, experts: int, seed: int, most: int = 3) -> Placement:
    """Experts anywhere, one copy to `most`; ranks may hold none."""
    rng = random.Random(seed)
    copies = [e for e in range(experts) for _ in range(rng.randint(1, most))]
    rng.shuffle(copies)
    slots = [[] for _ in range(ranks)]
    for expert in copies:
        slots[min(rng.randrange(ranks), rng.randrange(ranks))].append(expert)
    return Placement(experts, (tuple(map(tuple, slots)),))


def routing(kind: str, count: int, experts: int, top: int, seed: int, device="cpu"):
    """ids [count, top] int64."""
    generator = torch.Generator(device=device).manual_seed(seed)
    if kind == "one" and count:
        return torch.arange(top, device=device).expand(count, top).contiguous()
    scores = torch.rand(count, experts, generator=generator, device=device)
    if kind == "skewed":
        scores += torch.linspace(0, 3, experts, device=device) ** 2
    ids = scores.topk(top, dim=1).indices
    if kind == "padded" and count:
        ids[torch.rand(count, generator=generator, device=device) < 0.4] = -1
    return ids


def experts_made(arrived, rank: int):
    """What stands in for the experts: bfloat16 numbers from a row, its slot and its rank."""
    slots = arrived.counts.shape[0]
    factor = 1 + torch.arange(slots, device=arrived.counts.device) + 0.5 * rank
    scales = arrived.rows.scales.repeat_interleave(128, dim=-1)
    return (arrived.rows.values.float() * scales * factor[:, None, None]).to(torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


class Group:
    """All ranks of one process over `placement`."""

    def __init__(self, placement, size, device="cpu", lanes=1, timeout_s=2.0, mapped=None, **more):
        self.size, self.device = size, device
        self.heaps = in_process_heaps(size.ranks, device)
        self.tables = [ReplicaTable.build(placement, 0, device)]
        self.ends = [
            NvshmemExperts(
                heap,
                self.tables,
                size,
                None if mapped is None else mapped(heap.rank),
                lanes,
                timeout_s,
                **more,
            )
            for heap in self.heaps
        ]
        self.step = 0

    def choices(self, ids):
        """The rank and slot of every choice, by the definition; -1 where an id is none."""
        found = []
        for home, own in enumerate(ids):
            real = own >= 0
            ranks, slots = own.clone(), own.clone()
            ranks[real], slots[real] = self.tables[0].choose(own[real][:, None], home)[0][:, 0], 0
            one = self.tables[0].choose(own[real][:, None], home)
            ranks[real], slots[real] = one[0][:, 0], one[1][:, 0]
            found.append((ranks, slots))
        return found

    def exchange(self, rows, ids, weights, poison=True, members=None):
        """One dispatch and combine of all; each rank's `Arrived` as copied, outputs and sums."""
        members = range(self.size.ranks) if members is None else members
        self.step += 1
        handles = {}
        for rank in members:
            if poison:
                self.poison(self.ends[rank])
            handles[rank] = self.ends[rank].dispatch_send(
                channel(self.step), 0, rows[rank], ids[rank]
            )
        received = {r: self.ends[r].dispatch_recv(handles[r]) for r in members}
        made = {r: experts_made(received[r].arrived, r) for r in members}
        combined = {r: self.ends[r].combine_send(handles[r], received[r], made[r]) for r in members}
        sums = {r: self.ends[r].combine_recv(combined[r], weights[r]) for r in members}
        return received, made, sums

    def poison(self, end):
        """Nothing of an earlier exchange is left to be taken for this one's."""
        for lane in end.lanes:
            lane.arrived.rows.values.view(torch.uint8).fill_(0x7F)
            lane.arrived.rows.scales.fill_(float("nan"))
            lane.arrived.homes.fill_(-7)
            lane.made.fill_(float("nan"))

    def expected(self, rows, ids, weights, rank):
        choices = self.choices(ids)
        arrived = [arrive(rows, choices, r, self.size) for r in range(self.size.ranks)]
        made = [experts_made(there, r) for r, there in enumerate(arrived)]
        back = come_back(made, arrived, rank, rows[rank].shape[0], self.size)
        return arrived[rank], weighted_sum(back, weights[rank].clone())

    def check(self, rows, ids, weights):
        """An exchange equals the definition, bit for bit."""
        received, _, sums = self.exchange(rows, ids, weights)
        choices = self.choices(ids)
        wanted = [arrive(rows, choices, r, self.size) for r in range(self.size.ranks)]
        made = [experts_made(there, r) for r, there in enumerate(wanted)]
        for rank, want in enumerate(wanted):
            self.ends[rank].check()
            found = received[rank].arrived
            assert found.counts.tolist() == want.counts.tolist()
            for slot, count in enumerate(want.counts.tolist()):
                for mine, theirs in (
                    (found.rows.values, want.rows.values),
                    (found.rows.scales, want.rows.scales),
                    (found.homes, want.homes),
                ):
                    assert same_bits(mine[slot, :count], theirs[slot, :count])
            back = come_back(made, wanted, rank, rows[rank].shape[0], self.size)
            scaled = weights[rank].masked_fill(ids[rank] < 0, 0.0)
            if rows[rank].shape[0]:
                assert same_bits(sums[rank], weighted_sum(back, scaled))


def inputs(size: ExchangeSize, counts, kind, experts, seed, device="cpu"):
    """rows, ids and weights of every rank."""
    generator = torch.Generator(device=device).manual_seed(seed)
    rows, ids, weights = [], [], []
    for rank, count in enumerate(counts):
        wide = torch.randn(count, size.hidden, generator=generator, device=device)
        wide *= torch.rand(count, 1, generator=generator, device=device) * 8
        rows.append(wide.to(torch.bfloat16))
        ids.append(routing(kind, count, experts, size.top_k, seed * 97 + rank, device))
        shape = (count, size.top_k)
        weights.append(torch.rand(shape, generator=generator, device=device))
    return rows, ids, weights

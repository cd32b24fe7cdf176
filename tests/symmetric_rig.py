"""Exchanges over symmetric memory of ranks in one process, and what they have to give."""

from __future__ import annotations

import random

import torch

from pdmesh.kernels.expert_exchange import (
    ArrivedContiguous,
    ExchangeSize,
    arrive,
    come_back,
    places,
)
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
    """What stands in for the experts: bfloat16 numbers from a row, its slot and its rank.

    In the contiguous layout there is NaN where there is no row.
    """
    if isinstance(arrived, ArrivedContiguous):
        slot = arrived.row_expert.float().masked_fill(arrived.row_expert < 0, torch.nan)[:, None]
    else:
        slots = arrived.counts.shape[0]
        slot = torch.arange(slots, device=arrived.counts.device)[:, None, None]
    scales = arrived.rows.scales.repeat_interleave(128, dim=-1)
    wide = arrived.rows.values.float() * scales
    return (wide * (1 + slot + 0.5 * rank)).to(torch.bfloat16)


def layout_differs(found, want) -> str | None:
    """What of an arrival is not the definition's, bit for bit; None if all of it is."""
    if found.counts.tolist() != want.counts.tolist():
        return f"counts {found.counts.tolist()}, not {want.counts.tolist()}"
    if isinstance(want, ArrivedContiguous):
        there = len(found.row_expert)  # on a host only those that are used
        same = torch.equal(found.row_expert, want.row_expert[:there])
        if not same or (want.row_expert[there:] >= 0).any():
            return "the rows' experts differ"
        if found.used.tolist() != want.used.tolist():
            return f"{found.used.tolist()} rows are used, not {want.used.tolist()}"
    for slot, at in enumerate(places(want)):
        for name, mine, theirs in (
            ("values", found.rows.values, want.rows.values),
            ("scales", found.rows.scales, want.rows.scales),
            ("homes", found.homes, want.homes),
        ):
            if not same_bits(mine[at], theirs[at]):
                return f"{name} of slot {slot} differ"
    return None


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
            if isinstance(lane.arrived, ArrivedContiguous):
                lane.arrived.row_expert.fill_(-7)
                lane.arrived.used.fill_(-7)
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
            assert layout_differs(received[rank].arrived, want) is None
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


class Walk:
    """Ranks at their own pace: each runs the parts of its exchanges once their waits would end.

    A part may run before others have run theirs of the same or of the exchange before.
    """

    def __init__(self, seed, sized, experts, exchanges=3, ranks=3, **more):
        self.rng = random.Random(seed)
        placement = scattered(ranks, experts, seed)
        self.group = Group(placement, sized(placement), **more)
        self.ranks, self.exchanges = ranks, exchanges
        counts = [[self.rng.choice([0, 0, 1, 5]) for _ in range(ranks)] for _ in range(exchanges)]
        self.data = [
            inputs(self.group.size, row, "balanced", experts, seed + 50 * i)
            for i, row in enumerate(counts)
        ]
        self.choices = [self.group.choices(ids) for _, ids, _ in self.data]
        self.at = [0] * ranks
        self.state = [None] * ranks
        self.sums = {}

    def ready(self, rank):
        exchange, part = divmod(self.at[rank], 4)
        if exchange == self.exchanges:
            return False
        done = [4 * exchange] * self.ranks
        if part == 1:
            return all(at > begun for at, begun in zip(self.at, done, strict=True))
        if part == 3:
            asked = set(self.choices[exchange][rank][0].flatten().tolist())
            return all(self.at[peer] > 4 * exchange + 2 for peer in asked)
        return True

    def run(self, rank):
        exchange, part = divmod(self.at[rank], 4)
        rows, ids, weights = self.data[exchange]
        end = self.group.ends[rank]
        match part:
            case 0:
                self.state[rank] = end.dispatch_send(channel(exchange), 0, rows[rank], ids[rank])
            case 1:
                self.state[rank] = (self.state[rank], end.dispatch_recv(self.state[rank]))
            case 2:
                handle, received = self.state[rank]
                made = experts_made(received.arrived, rank)
                self.state[rank] = end.combine_send(handle, received, made)
            case 3:
                self.sums[exchange, rank] = end.combine_recv(self.state[rank], weights[rank])
        end.check()
        self.at[rank] += 1

    def wanted(self, exchange, rank):
        rows, _, weights = self.data[exchange]
        size, choices = self.group.size, self.choices[exchange]
        arrived = [arrive(rows, choices, r, size) for r in range(self.ranks)]
        made = [experts_made(there, r) for r, there in enumerate(arrived)]
        back = come_back(made, arrived, rank, rows[rank].shape[0], size)
        return weighted_sum(back, weights[rank])

    def go(self):
        """Whether all sums are right. A rank is favoured for a while: others fall behind."""
        favoured, left = 0, 0
        while ready := [rank for rank in range(self.ranks) if self.ready(rank)]:
            if not left:
                favoured, left = self.rng.randrange(self.ranks), self.rng.randint(1, 8)
            left -= 1
            self.run(favoured if favoured in ready else self.rng.choice(ready))
        assert self.at == [4 * self.exchanges] * self.ranks
        return all(
            same_bits(found, self.wanted(*key)) for key, found in self.sums.items() if len(found)
        )

"""Expert parallelism over symmetric memory: ranks on GPUs.

**What runs.** All in stream order on the rank's device, nothing waits on the host, and every count
stays on the device; so a CUDA graph may hold any of it.

=============  ===================================================================================
dispatch_send  `choose`: the copy of each choice, and each row's number among its source's rows for
               that copy. `number`: each row's place in the inbox of each of its ranks; tells every
               member how many rows come and how many for each of its slots (the *tag*, one 64-bit
               word of step and rows, is stored last, with release). `send`: quantises and writes
               rows. Peers beyond a network: rows were written to an outbox, `put_rows` puts them.
dispatch_recv  `wait_rows`: waits for tags and rows of all members, and says where each member's
               rows begin in each expert's. `spread`: rows from the inboxes to their experts, in the
               masked grouped layout, or in the contiguous one, whose rows `label` gives an expert.
combine_send   `return`: each output to its place at the row's home; or `put_outputs`.
combine_recv   `wait_outputs`, then `sum`: in float32 in the order of the choices.
=============  ===================================================================================

**A row goes to a rank once.** At EP8 that is 0.57 of the bytes of one copy an expert, at EP128
0.98; the copies are made from the inbox by the receiver, whose memory is ten times as fast as
NVLink and eighty times as fast as the network. Places need no agreement: a sender numbers its rows
for each expert, the receiver adds where that sender begins. So timing does not change the layout.

**Why data is there when a signal says so.** A program stores its part of rows, its threads meet at
a barrier, then one thread adds the number of parts to the peer's counter with release at the scope
of the system; releases are cumulative, so stores of the other threads, which the barrier ordered
before it, are covered. The receiver acquires the counter once it equals the number of rows in the
tag times parts a row, that is, when *every* program's release has been read from; kernels after the
wait on its stream see all of it. Counters only grow; the receiver remembers up to where it has
counted. A put raises the same counter by the library, after its data.

**Why nothing is overwritten that somebody still reads.** Let D(i), R(i), S(i), C(i) be dispatch
send, dispatch receive, combine send and combine receive of exchange i on one lane; a rank runs them
in this order, exchange after exchange. Inboxes, counts and tags have two halves by the parity of i.

1. Rank s writes to d's half of i in D(i+2) only after R(i+1) on s, which waited for d's tag of i+1;
   d stores that in D(i+1), after R(i) and S(i) on d, the last readers of d's half of i. Every
   member sends every member a tag, with or without rows. So two halves are enough, and one is not:
   s may have no row for d in i, then waits for no output of d, and may run D(i+1) while d has not
   read the tag of i.
2. d writes outputs to the home h in S(i), after R(i) on d, which waited for h's tag of i; h stores
   that in D(i), after C(i-1) on h, the last reader of the outputs of i-1. So outputs need one half.
3. Outboxes are read by blocking puts of the same stream; received rows and outputs belong to their
   lane until its next dispatch is received.

Stores that follow an acquire, and stores that precede a release, carry the order over ranks; within
a rank the stream does. Two microbatches in flight have a lane each.

**A lost rank.** Waits have a bound. One that runs out sets a flag in memory that the host reads
without synchronising, and treats the rank as one that sent nothing; results of that step are void.
`check` raises `RankLost`. Then survivors agree on members, `reset` and go on. The host may set that
flag itself (`lose`). Once it is set, whoever set it, waits of this rank that lack something end at
once, whoever has not sent, and name nobody else.

A wait for rows that ends so breaks the order above: what follows may overwrite what others still
read. So from then on this rank tells nobody anything, its tags go nowhere. Let R(i) on s end early.
s has told all members of i, and tells nobody of i+1; what it overwrites, from D(i+1) on, are halves
of i-1 and later. A step that has an exchange i+1 cannot end well on any member, which would need
the tag; one that has none is over on s, which overwrites nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.kernels.activation import silu_mul
from pdmesh.kernels.backends import Backends
from pdmesh.kernels.expert_exchange import (
    AnyArrived,
    Arrived,
    ArrivedContiguous,
    ExchangeSize,
    places,
)
from pdmesh.kernels.quantised import BlockWeight, Rows, dequantise_rows
from pdmesh.kernels.symmetric import SymmetricHeap
from pdmesh.model.parallel.exchange import (
    Channel,
    CombineHandle,
    DispatchHandle,
    RankLost,
    Received,
    WireBytes,
)
from pdmesh.model.parallel.host_lane import HostLane
from pdmesh.model.parallel.nvshmem_lane import Lane
from pdmesh.model.parallel.nvshmem_tables import LayerTable, Tables
from pdmesh.model.parallel.replicas import ReplicaTable
from pdmesh.wire.errors import PdmeshError

TIMEOUT_S = 5.0
"""A wait that lasts longer means a lost rank."""


class ExpertsFull(PdmeshError):
    """Experts were to get more rows than their rank has memory for; the step is void."""


@dataclass(frozen=True)
class ReceivedMasked:
    """Rows in the masked grouped layout, as grouped products take them.

    Attributes:
        channel: the dispatch that they came by.
        arrived: rows [slots, rows, h] in FP8 and counts [slots], valid until the lane's next
            dispatch is received; rows is max_rows, or on a host the most that a slot got.
        made: [slots, rows, h] bfloat16 in the lane's own memory. Outputs written there need no
            copy before they are put.
    """

    channel: Channel
    arrived: Arrived
    made: Tensor

    def outputs(self, gate_up: Tensor, down: Tensor) -> Tensor:
        """See `Received`: [slots, max_rows, h] bfloat16; rows behind an expert's count are junk."""
        rows = dequantise_rows(self.arrived.rows).to(gate_up.dtype)
        held = gate_up.shape[0]
        hidden = silu_mul(rows[:held] @ gate_up.transpose(1, 2))
        self.made[:held].copy_(hidden @ down.transpose(1, 2))
        return self.made


@dataclass(frozen=True)
class ReceivedContiguous:
    """Rows in the contiguous grouped layout.

    Attributes:
        channel: the dispatch that they came by.
        arrived: rows [capacity, h] in FP8 and the expert of each, valid until the lane's next
            dispatch is received; on a host as many as are used.
        made: [capacity, h] bfloat16 in the lane's own memory, where `combine_send` reads outputs
            without a copy.
    """

    channel: Channel
    arrived: ArrivedContiguous
    made: Tensor

    def outputs(self, gate_up: Tensor, down: Tensor) -> Tensor:
        """See `Received`: [capacity, h] bfloat16, junk where there is no row.

        In plain torch, an expert at a time; so it waits for the device to know how many rows.
        """
        values, scales = self.arrived.rows
        for slot, at in enumerate(places(self.arrived)[: gate_up.shape[0]]):
            rows = dequantise_rows(Rows(values[at], scales[at])).to(gate_up.dtype)
            hidden = silu_mul(rows @ gate_up[slot].t())
            self.made[at] = (hidden @ down[slot].t()).to(self.made.dtype)
        return self.made

    def quantised_outputs(
        self, ops: Backends, gate_up: BlockWeight, down: BlockWeight, expected: int = 0
    ) -> Tensor:
        """What experts in FP8 make of them: `made`, junk where there is no row.

        gate_up [slots, 2 i, h], down [slots, h, i]; `expected` rows of an expert are likely (0:
        many). The host waits for nothing, and rows that are not used cost neither products nor
        quantising, however many there is room for.
        """
        rows, _, _, row_expert, used = self.arrived
        both = ops.contiguous_grouped_gemm(rows, gate_up, row_expert, expected)
        # All used rows are the rows of one expert in the masked layout.
        values, scales = ops.masked_silu_mul_quantise(both.unsqueeze(0), used)
        hidden = Rows(values.squeeze(0), scales.squeeze(0))
        held: Tensor = ops.contiguous_grouped_gemm(
            hidden, down, row_expert, expected, out=self.made
        )
        return held


def _received(
    channel: Channel, arrived: AnyArrived, made: Tensor
) -> ReceivedMasked | ReceivedContiguous:
    """What the dispatch `channel` brought, in the layout that it has."""
    if isinstance(arrived, Arrived):
        return ReceivedMasked(channel, arrived, made[:, : arrived.rows.values.shape[1]])
    return ReceivedContiguous(channel, arrived, made[: arrived.rows.values.shape[0]])


@dataclass(frozen=True)
class _Dispatched:
    channel: Channel
    lane: Lane | HostLane
    ids: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class _Combined:
    channel: Channel
    sent: _Dispatched


class NvshmemExperts:
    """The `ExpertParallel` of one rank over symmetric memory.

    Constructing is collective; callers meet once more on the host before the first exchange.

    Args:
        heap: this rank's end of the symmetric memory.
        tables: where the experts are, for each MoE layer.
        size: of the exchange.
        mapped: ranks to write to directly; the others, and those that cannot be mapped, get puts.
            None: all that can be mapped. All ranks say the same of each pair.
        lanes: microbatches in flight.
        timeout_s: how long a wait may last; without a device clock, that many polls.
        most_copies: of an expert, now and in later placements.
        host: ranks exchange rows in memory of the host without kernels, see `HostLane`.
    """

    def __init__(
        self,
        heap: SymmetricHeap,
        tables: Sequence[ReplicaTable],
        size: ExchangeSize,
        mapped: Collection[int] | None = None,
        lanes: int = 2,
        timeout_s: float = TIMEOUT_S,
        most_copies: int = 1,
        host: bool = False,
    ) -> None:
        if heap.size != size.ranks:
            raise ValueError(f"{heap.size} ranks have memory, not {size.ranks}")
        self.size = size
        self.rank = heap.rank
        self._device = heap.device
        most = max([most_copies, *(int(table.counts.max()) for table in tables)])
        experts = tables[0].counts.shape[0]
        self._tables = [LayerTable(size, experts, most, heap.device) for _ in tables]
        self.place(tables)
        pinned = heap.device.type == "cuda"
        self._lost = torch.zeros(size.ranks + 1, dtype=torch.int32, pin_memory=pinned)
        self._members = torch.ones(size.ranks, dtype=torch.int32, device=heap.device)
        self._unit = 1e9 if host or heap.device.type == "cuda" else 1
        self._shared = Tables(self._lost, self._members, 0)
        self.wait_for(timeout_s)
        kind: type[Lane] | type[HostLane] = HostLane if host else Lane
        self.lanes = [kind(heap, size, mapped, self._shared) for _ in range(lanes)]

    def wait_for(self, timeout_s: float) -> None:
        """How long waits may last that are launched, or captured, from now on."""
        self._shared.bound = int(timeout_s * self._unit)

    def place(self, tables: Sequence[ReplicaTable]) -> None:
        """Other places of the experts, in the memory that captured graphs read. Between steps."""
        for own, table in zip(self._tables, tables, strict=True):
            own.fill(table, self.rank)

    @property
    def sent(self) -> WireBytes:
        """See `ExpertParallel`; reads counters from the device, so it waits for it."""
        wire = WireBytes()
        for lane in self.lanes:
            for kind, peers in lane.sent_bytes().items():
                for peer, size in enumerate(peers):
                    if peer != self.rank and size:
                        wire.count(peer, kind, size)
        return wire

    def check(self) -> None:
        """Whether waits so far found everybody; to be called before a step's results are used.

        Raises:
            RankLost: a rank did not send in time.
            ExpertsFull: experts of this rank got more rows than fit. The others lack outputs, so
                to them it is a rank that did not send.
        """
        if not self._lost.any():
            return
        *lost, rows = self._lost.tolist()
        if rows:  # first: what did not fit is not sent back either, not even to this rank
            who = "all experts of the rank" if self.size.capacity else "an expert"
            padded = " with padding" if self.size.capacity else ""
            raise ExpertsFull(f"{who} got {rows} rows{padded}; there is room for {self.size.room}")
        for rank, flag in enumerate(lost):
            if flag:
                raise RankLost(rank, "what it had to send to the experts or back from them")

    def lose(self, rank: int) -> None:
        """Notes that a rank is lost: waits under way and to come end at once, for good or till
        `reset`, and `check` says so. On any thread; it does not wait for the device."""
        with torch.inference_mode():  # a worker makes its tensors in it
            self._lost[rank] = 1

    def close(self) -> None:
        """Gives the symmetric memory back. Collective; no exchange may be under way."""
        for lane in self.lanes:
            lane.close()

    def reset(self, members: Collection[int]) -> None:
        """Begins anew with `members`, after an exchange that failed.

        All members meet on the host before this and after it: no kernel of an earlier exchange may
        run any more. Their placements must name members only.
        """
        self._members.copy_(torch.tensor([int(rank in members) for rank in range(self.size.ranks)]))
        for lane in self.lanes:
            lane.reset(members)
        self._lost.zero_()

    def dispatch_send(
        self, channel: Channel, moe_layer: int, rows: Tensor, ids: Tensor
    ) -> DispatchHandle:
        """See `ExpertParallel`. ids may be int32; one out of range (-1, say) is no choice.

        Raises:
            ValueError: more rows than `size.tokens`, or of another width.
            RankLost, ExpertsFull: see `check`, which this calls; it does not wait for the device.
        """
        self.check()
        count, width = rows.shape
        if count > self.size.tokens or width != self.size.hidden:
            raise ValueError(
                f"[{count}, {width}] rows; at most {self.size.tokens} of {self.size.hidden}"
            )
        if ids.shape != (count, self.size.top_k):
            raise ValueError(f"ids are {tuple(ids.shape)}, not {(count, self.size.top_k)}")
        lane = self.lanes[max(channel.microbatch, 0)]
        ids = ids.contiguous()
        lane.send_rows(rows, ids, self._tables[moe_layer])
        return _Dispatched(channel, lane, ids, rows.dtype)

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        """See `ExpertParallel`; a lost rank is noticed by `check`."""
        assert isinstance(handle, _Dispatched)
        arrived = handle.lane.receive_rows()
        return _received(handle.channel, arrived, handle.lane.made)

    def combine_send(
        self, handle: DispatchHandle, received: Received, outputs: Tensor
    ) -> CombineHandle:
        """See `ExpertParallel`. outputs bfloat16 in the layout of what was received."""
        assert isinstance(handle, _Dispatched)
        handle.lane.send_outputs(outputs)
        return _Combined(handle.channel._replace(kind="combine"), handle)

    def combine_recv(
        self,
        handle: CombineHandle,
        weights: Tensor,
        plus: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `ExpertParallel`; written to `out` [n, h] if that is given."""
        assert isinstance(handle, _Combined)
        sent = handle.sent
        if out is None:
            shape = (sent.ids.shape[0], self.size.hidden)
            out = torch.empty(shape, dtype=sent.dtype, device=self._device)
        sent.lane.sum_outputs(sent.ids, weights, out, self._tables[0].experts, plus)
        return out

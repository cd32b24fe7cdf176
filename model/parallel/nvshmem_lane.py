"""The memory of one exchange in flight, and the launches of its kernels.

See `pdmesh.model.parallel.nvshmem` for what they do and why that is safe.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from pdmesh.kernels.expert_exchange import (
    AnyArrived,
    ArrivedContiguous,
    ExchangeSize,
    room_for,
)
from pdmesh.kernels.symmetric import SymmetricHeap
from pdmesh.model.parallel.nvshmem_memory import Arena, Region, Tuning, power
from pdmesh.model.parallel.nvshmem_tables import LayerTable, Tables

PUT_CHUNKS, PUT_ROWS = (4, 32), 32
"""Puts at a time to one peer: the least and the most; between them one for so many rows. Where the
library finds a peer's memory mapped, a put is as fast as one program copies, far below NVLink."""
PUT_SLOTS = 256
"""Up to so many slots of a rank make one kernel: linking the device library in takes seconds."""


class Lane:
    """One microbatch's exchange.

    Attributes:
        arrived: rows for the experts of this rank, in the layout of the size.
        made: bfloat16 for their outputs, in the same layout; in symmetric memory where puts need
            that.
    """

    def __init__(
        self,
        heap: SymmetricHeap,
        size: ExchangeSize,
        mapped: Collection[int] | None,
        shared: Tables,
        tuning: Tuning = Tuning(),  # noqa: B008 - it is immutable
    ) -> None:
        self.size = size
        self._heap = heap
        self._shared = shared
        self._mapped = mapped
        ranks, slots = size.ranks, size.slots
        arena = Arena()
        self._tags = arena.region(2 * ranks * 8)
        self._arrivals = arena.region(2 * ranks * 8)
        self._returned = arena.region(ranks * 8)
        self._there = arena.region(2 * ranks * slots * 4)
        self._signals_end = arena.nbytes
        self._outcounts = arena.region(ranks * slots * 4)
        self._sink = arena.region(8)
        self._stage = arena.region(2 * ranks * size.inbox_bytes)
        self._back = arena.region(size.tokens * size.top_k * size.hidden * 2)
        puts = mapped is not None and len(set(mapped)) < ranks
        self._outbox = arena.region(ranks * size.inbox_bytes if puts else 0)
        shape = (*size.layout, size.hidden)
        self._outputs = arena.region(math.prod(shape) * 2 if puts else 0)
        self._memory = heap.allocate(arena.nbytes)
        self._bases = heap.addresses(self._memory)
        if not puts and not all(self._bases):
            raise ValueError("some ranks' memory is not mapped: name those that are")
        device = heap.device
        self.arrived = room_for(size, device)
        if puts:
            self.made = self._view(self._outputs).view(torch.bfloat16).view(shape)
        else:
            self.made = torch.empty(shape, dtype=torch.bfloat16, device=device)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        pairs = size.tokens * size.top_k
        self.step = ints(1, dtype=torch.int64)
        self._rank_of, self._where, self._target = ints(pairs), ints(pairs), ints(pairs)
        self._counts = ints(ranks, slots)
        self._rows_to, self._pairs_to = ints(ranks), ints(ranks)
        self._sent = ints(2, ranks, dtype=torch.int64)
        self._sent_back = ints(ranks, dtype=torch.int64)
        self._seen = ints(2, ranks, dtype=torch.int64)
        self._seen_back = ints(ranks, dtype=torch.int64)
        self._ends, self._starts = ints(ranks), ints(ranks, slots)
        arrived = self.arrived
        self._used = arrived.used if isinstance(arrived, ArrivedContiguous) else ints(1)
        self._boxes_at = ints(2, ranks, dtype=torch.int64)
        self._counts_at = ints(2, ranks, dtype=torch.int64)
        self._tags_at = ints(2, ranks, dtype=torch.int64)
        self._arrivals_at = ints(2, ranks, dtype=torch.int64)
        self._backs_at = ints(ranks, dtype=torch.int64)
        self._returned_at = ints(ranks, dtype=torch.int64)
        self._units = ints(ranks, dtype=torch.int64)
        self._units_back = ints(ranks, dtype=torch.int64)
        self._puts = ints(ranks)
        self.tune(tuning)
        self._connect(range(ranks))

    def tune(self, tuning: Tuning) -> None:
        """Launches that way from now on; `part` has to be alike on all ranks."""
        self._part = tuning.part
        while self.size.hidden % self._part:
            self._part //= 2
        if self._heap.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._heap.device)
            self._programs = tuning.programs or 16 * properties.multi_processor_count
        else:
            self._programs = tuning.programs or 3
        self._warps = tuning.warps
        self._scan, self._whole = tuning.scan, tuning.whole
        self._parts = self.size.hidden // self._part
        for peer in range(self.size.ranks):
            put = bool(self._puts[peer])
            self._units[peer] = 2 if put else self._parts
            self._units_back[peer] = 1 if put else self._parts

    def _view(self, region: Region) -> Tensor:
        return self._memory[region.offset : region.offset + region.nbytes]

    def _own(self, region: Region) -> int:
        return self._memory.data_ptr() + region.offset

    def _connect(self, members: Collection[int]) -> None:
        """Where to write for each peer; for one that is no member, nowhere."""
        size, me = self.size, self._heap.rank
        for peer, base in enumerate(self._bases):
            direct = bool(base) and (self._mapped is None or peer in self._mapped)
            there = peer in members
            self._puts[peer] = int(there and not direct)
            self._units[peer] = self._parts if direct else 2
            self._units_back[peer] = self._parts if direct else 1
            written = there and direct
            for parity in (0, 1):
                number = parity * size.ranks + me
                self._boxes_at[parity, peer] = (
                    base + self._stage.offset + number * size.inbox_bytes
                    if direct
                    else self._own(self._outbox) + peer * size.inbox_bytes
                )
                self._counts_at[parity, peer] = (
                    base + self._there.offset + number * size.slots * 4
                    if written
                    else self._own(self._outcounts) + peer * size.slots * 4
                )
                self._tags_at[parity, peer] = (
                    base + self._tags.offset + number * 8 if written else self._own(self._sink)
                )
                self._arrivals_at[parity, peer] = (
                    base + self._arrivals.offset + number * 8 if written else 0
                )
            self._backs_at[peer] = base + self._back.offset if written else 0
            self._returned_at[peer] = base + self._returned.offset + me * 8 if written else 0

    def close(self) -> None:
        """Gives the symmetric memory back."""
        self.made = torch.empty(0, device=self._heap.device)
        self._heap.free(self._memory)

    def reset(self, members: Collection[int]) -> None:
        """As if nothing had been exchanged yet, with `members`."""
        self._memory[: self._signals_end].zero_()
        for state in (self.step, self._seen, self._seen_back):
            state.zero_()
        self._connect(members)

    def sent_bytes(self) -> dict[str, list[int]]:
        """Bytes written for each rank, this one included: "dispatch" and "combine"."""
        steps, rows = int(self.step), self._sent[0].tolist()
        head = self.size.dispatch_bytes(0)
        each = self.size.dispatch_bytes(1) - head
        return {
            "dispatch": [steps * head + count * each for count in rows],
            "combine": [self.size.combine_bytes(count) for count in self._sent_back.tolist()],
        }

    def send_rows(self, rows: Tensor, ids: Tensor, table: LayerTable) -> None:
        """dispatch_send: rows [n, h], ids [n, k] int64 or int32."""
        self.plan_rows(ids, table)
        self.write_rows(rows, ids, table.experts)

    def plan_rows(self, ids: Tensor, table: LayerTable) -> None:
        """The first part of dispatch_send: where rows go; peers are told how many come."""
        from pdmesh.kernels.triton.ep_dispatch import choose_kernel, number_kernel

        size, count = self.size, ids.shape[0]
        pairs = count * size.top_k
        block = min(self._scan, max(128, power(pairs)))
        choose_kernel[(table.experts,)](
            ids, table.ranks, table.slots, table.copies, table.begins, self._rank_of, self._where,
            self._counts, self.step, pairs, table.experts, MOST=table.most, SLOTS=size.slots,
            BLOCK=block, COPIES=power(table.most), num_warps=min(16, max(4, block // 512)),
        )  # fmt: skip
        number_kernel[(size.ranks,)](
            ids, self._rank_of, self._target, self._counts, table.used, self._rows_to,
            self._pairs_to, self._sent, self._counts_at, self._tags_at, self.step, count,
            table.experts, RANKS=size.ranks, SLOTS=size.slots, TOP=size.top_k,
            BLOCK=min(1024, max(16, power(count))), SLOTS_P2=power(size.slots),
            TOP_P2=power(size.top_k), num_warps=16 if count > 512 else 8 if count > 128 else 4,
        )  # fmt: skip

    def write_rows(self, rows: Tensor, ids: Tensor, experts: int) -> None:
        """The second part: the rows themselves."""
        from pdmesh.kernels.triton.ep_dispatch import send_kernel

        size, count = self.size, rows.shape[0]
        if count:
            send_kernel[(min(self._programs, count * self._parts),)](
                rows, ids, self._rank_of, self._where, self._target, self._boxes_at,
                self._arrivals_at, self.step, count, rows.stride(0), experts, size.notes_bytes,
                RANKS=size.ranks, TOP=size.top_k, HIDDEN=size.hidden, RECORD=size.record,
                PART=self._part, RANKS_P2=power(size.ranks), TOP_P2=power(size.top_k),
                num_warps=self._warps,
            )  # fmt: skip
        if self._outbox.nbytes:
            from pdmesh.kernels.triton.ep_put import put_rows_kernel

            chunks = min(max(count // PUT_ROWS, PUT_CHUNKS[0]), PUT_CHUNKS[1])
            put_rows_kernel[(size.ranks, chunks)](
                self._own(self._outbox), self._own(self._outcounts), self._own(self._stage),
                self._own(self._there), self._own(self._tags), self._own(self._arrivals),
                self._rows_to, self._puts, self.step, self._heap.rank, chunks,
                size.ranks, size.slots, size.note, size.record, size.notes_bytes,
                size.inbox_bytes, num_warps=8,
            )  # fmt: skip

    def receive_rows(self) -> AnyArrived:
        """dispatch_recv: `arrived`."""
        self.wait_rows()
        self.spread_rows()
        return self.arrived

    def wait_rows(self) -> None:
        """The first half of dispatch_recv: until everybody's rows are here."""
        from pdmesh.kernels.triton.ep_wait import wait_rows_kernel

        size = self.size
        wait_rows_kernel[(1,)](
            self._view(self._tags).view(torch.int64), self._view(self._arrivals).view(torch.int64),
            self._view(self._there).view(torch.int32), self._seen, self._units,
            self._shared.members, self._shared.lost, self._sent_back, self._ends, self._starts,
            self.arrived.counts, self._used, self.step, self._tags_at, self._puts,
            self._own(self._sink), size.room, self._shared.bound, RANKS=size.ranks,
            SLOTS=size.slots, RANKS_P2=power(size.ranks), SLOTS_P2=power(size.slots),
            ALIGN=size.align, CLOCK=self._heap.device.type == "cuda", num_warps=4,
        )  # fmt: skip

    def spread_rows(self, whole: bool | None = None) -> None:
        """The second half: to their experts; as a whole each, or in parts, or as `tune` says."""
        from pdmesh.kernels.triton.ep_dispatch import label_kernel, spread_kernel

        size, arrived, rows = self.size, self.arrived, self.arrived.rows
        whole = self._whole if whole is None else whole
        spread_kernel[(self._programs,)](
            self._own(self._stage), self._ends, self._starts, rows.values.view(torch.int32),
            rows.scales, arrived.homes, self.step, size.room, rows.scales.stride(-1),
            size.tokens, size.notes_bytes, size.inbox_bytes, RANKS=size.ranks, SLOTS=size.slots,
            TOP=size.top_k, HIDDEN=size.hidden, RECORD=size.record,
            PART=size.hidden if whole else self._part, RANKS_P2=power(size.ranks),
            CONTIGUOUS=bool(size.align), num_warps=self._warps * (1 + whole),
        )  # fmt: skip
        if isinstance(arrived, ArrivedContiguous):
            label_kernel[(size.capacity // size.align,)](
                arrived.counts, arrived.row_expert, SLOTS=size.slots,
                SLOTS_P2=power(size.slots), ALIGN=size.align, num_warps=1,
            )  # fmt: skip

    def send_outputs(self, outputs: Tensor) -> None:
        """combine_send: bfloat16 in the layout of what arrived."""
        from pdmesh.kernels.triton.ep_combine import return_kernel

        size, arrived = self.size, self.arrived
        each = size.tokens * size.top_k
        if self._outbox.nbytes and outputs.data_ptr() != self.made.data_ptr():
            outputs = self.made.copy_(outputs)
        return_kernel[(self._programs,)](
            outputs, arrived.counts, arrived.homes, self._backs_at, self._returned_at,
            size.max_rows, each, RANKS=size.ranks, SLOTS=size.slots, HIDDEN=size.hidden,
            PART=self._part, RANKS_P2=power(size.ranks), SLOTS_P2=power(size.slots),
            ALIGN=size.align, num_warps=self._warps,
        )  # fmt: skip
        if self._outbox.nbytes:
            from pdmesh.kernels.triton.ep_put import put_outputs_kernel

            put_outputs_kernel[(self._programs,)](
                self._own(self._outputs), arrived.counts, arrived.homes, self._own(self._back),
                self._own(self._returned), self._puts, size.max_rows, size.align, self._heap.rank,
                size.slots, each, size.hidden,
                SLOTS_P2=power(max(size.slots, PUT_SLOTS)), num_warps=8,
            )  # fmt: skip

    def wait_outputs(self) -> None:
        """The first half of combine_recv."""
        from pdmesh.kernels.triton.ep_wait import wait_outputs_kernel

        size = self.size
        wait_outputs_kernel[(1,)](
            self._view(self._returned).view(torch.int64), self._seen_back, self._pairs_to,
            self._units_back, self._shared.members, self._shared.lost, self._shared.bound,
            RANKS=size.ranks, RANKS_P2=power(size.ranks),
            CLOCK=self._heap.device.type == "cuda", num_warps=4,
        )  # fmt: skip

    def sum_outputs(
        self,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        experts: int,
        plus: Tensor | None = None,
    ) -> None:
        """combine_recv: out [n, h], with `plus` [n, h] contiguous of its dtype if that is given."""
        from pdmesh.kernels.triton.ep_combine import sum_kernel

        self.wait_outputs()
        if ids.shape[0]:
            sum_kernel[(ids.shape[0] * self._parts,)](
                self._view(self._back).view(torch.bfloat16), ids, weights,
                out if plus is None else plus, out, experts, TOP=self.size.top_k,
                HIDDEN=self.size.hidden, PART=self._part, PLUS=plus is not None,
                num_warps=self._warps, enable_fp_fusion=False,
            )  # fmt: skip

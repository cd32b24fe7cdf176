"""One exchange in flight over memory of the host: what `Lane`'s kernels do, in plain torch.

What goes where, and when, is as in `pdmesh.model.parallel.nvshmem`; so is the proof that two halves
are enough. A tag or a signal is stored after the data that it speaks for, and read before them;
processors that keep stores and loads in order (x86-64) need no more.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from pdmesh.kernels.expert_exchange import (
    AnyArrived,
    Arrived,
    ArrivedContiguous,
    ExchangeSize,
    room_for,
)
from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.moe import weighted_sum
from pdmesh.kernels.quantised import Rows, quantise_rows
from pdmesh.kernels.symmetric import SymmetricHeap
from pdmesh.model.parallel.nvshmem_tables import LayerTable, Tables
from pdmesh.model.parallel.replicas import turns
from pdmesh.wire.errors import ConfigError

_ORDERED = ("x86_64", "AMD64")
_PAUSE_S = 50e-6


class HostLane:
    """See `Lane`: the same calls, over a heap in memory of the host.

    Args:
        heap: all ranks' blocks are mapped here.
        size: of the exchange.
        mapped: of no meaning here.
        shared: what the lanes of a rank share; its bound is in nanoseconds.
    """

    def __init__(
        self,
        heap: SymmetricHeap,
        size: ExchangeSize,
        mapped: Collection[int] | None,
        shared: Tables,
    ) -> None:
        if platform.machine() not in _ORDERED:
            raise ConfigError(
                f"ranks in FP8 on a CPU exchange rows through shared memory, which is tried on "
                f"x86-64 only, not on {platform.machine()}; use --precision plain"
            )
        self.size = size
        self._heap = heap
        self._shared = shared
        ranks, tokens, top = size.ranks, size.tokens, size.top_k
        self._layout: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._nbytes = 0
        self._region("tags", torch.int64, (2, ranks))
        self._region("returned", torch.int64, (ranks,))
        self._signals_end = self._nbytes
        self._region("counts", torch.int32, (2, ranks))
        self._region("rows", torch.int32, (2, ranks, tokens))
        self._region("slots", torch.int32, (2, ranks, tokens, top))
        self._region("values", torch.float8_e4m3fn, (2, ranks, tokens, size.hidden))
        self._region("scales", torch.float32, (2, ranks, tokens, size.hidden // BLOCK))
        self._region("back", torch.bfloat16, (tokens * top, size.hidden))
        self._memory = heap.allocate(self._nbytes)
        self._blocks = [self._views(base) for base in heap.addresses(self._memory)]
        self._own = self._blocks[heap.rank]
        self.arrived = room_for(size, heap.device)
        shape = (*size.layout, size.hidden)
        self.made = torch.empty(shape, dtype=torch.bfloat16, device=heap.device)
        self.step = 0
        self._asked = [0] * ranks
        self._bytes: dict[str, list[int]] = {"dispatch": [0] * ranks, "combine": [0] * ranks}
        self.gone: Callable[[int], bool] = lambda rank: False
        """Whether a rank is known to send nothing any more."""

    def _region(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._layout[name] = (self._nbytes, dtype, shape)
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        self._nbytes += -(-nbytes // 128) * 128

    def _views(self, base: int) -> dict[str, Tensor]:
        whole = torch.frombuffer(
            (ctypes.c_uint8 * self._nbytes).from_address(base), dtype=torch.uint8
        )
        return {
            name: whole[at : at + dtype.itemsize * torch.Size(shape).numel()]
            .view(dtype)
            .view(shape)
            for name, (at, dtype, shape) in self._layout.items()
        }

    def close(self) -> None:
        """Gives the memory back."""
        self._blocks, self._own = [], {}
        self._heap.free(self._memory)

    def reset(self, members: Collection[int]) -> None:
        """As if nothing had been exchanged yet."""
        self._memory[: self._signals_end].zero_()
        self.step = 0

    def sent_bytes(self) -> dict[str, list[int]]:
        """Bytes written for each rank, this one included: "dispatch" and "combine"."""
        return {kind: list(sizes) for kind, sizes in self._bytes.items()}

    def send_rows(self, rows: Tensor, ids: Tensor, table: LayerTable) -> None:
        """dispatch_send: rows [n, h], ids [n, k]."""
        size, me = self.size, self._heap.rank
        self.step += 1
        half = self.step % 2
        ranks, slots = _chosen(ids, table)
        quantised = quantise_rows(rows)
        self._asked = [int((ranks == peer).sum()) for peer in range(size.ranks)]
        for peer in self._members():
            mine = ranks == peer
            chosen = mine.any(dim=1).nonzero()[:, 0]
            count, block = chosen.shape[0], self._blocks[peer]
            block["rows"][half, me, :count] = chosen.int()
            places = torch.where(mine, slots, -1)[chosen]
            block["slots"][half, me, :count] = places.int()
            block["values"][half, me, :count].view(torch.uint8).copy_(
                quantised.values.view(torch.uint8)[chosen]
            )
            block["scales"][half, me, :count] = quantised.scales[chosen]
            block["counts"][half, me] = count
            block["tags"][half, me] = self.step
            self._bytes["dispatch"][peer] += size.dispatch_bytes(count)

    def receive_rows(self) -> AnyArrived:
        """dispatch_recv: waits, and lays the rows out; only as many as there are."""
        half, size, own = self.step % 2, self.size, self._own
        tags = own["tags"][half]
        self._wait(lambda rank: int(tags[rank]) == self.step, list(self._members()))
        parts = []
        for home in self._members():
            if int(tags[home]) != self.step:
                continue
            count = int(own["counts"][half, home])
            row, choice = (own["slots"][half, home, :count] >= 0).nonzero(as_tuple=True)
            numbers = own["rows"][half, home, :count][row].long()
            where = (home * size.tokens + numbers) * size.top_k + choice
            slots = own["slots"][half, home, :count][row, choice].long()
            parts.append(torch.stack([slots, torch.full_like(slots, home), row, where]))
        pairs = torch.cat(parts, dim=1) if parts else torch.empty((4, 0), dtype=torch.int64)
        slots, homes, row, where = pairs[:, pairs[0].argsort(stable=True)]
        counts = torch.bincount(slots, minlength=size.slots)
        place = torch.arange(slots.shape[0]) - (counts.cumsum(0) - counts)[slots]
        # Contiguous: an expert begins behind the last block of the one before; masked: each at 0.
        blocks = -(-counts // size.align) * size.align if size.align else torch.zeros_like(counts)
        begins = blocks.cumsum(0) - blocks
        need = int(blocks.sum() if size.align else counts.max())
        if need > size.room:
            self._shared.lost[-1] = need
        used = min(need, size.room)
        place += begins[slots]
        kept = place < size.room
        at = (place[kept],) if size.align else (slots[kept], place[kept])
        source = (half, homes[kept], row[kept])
        arrived = self.arrived
        arrived.rows.values.view(torch.uint8)[at] = own["values"].view(torch.uint8)[source]
        arrived.rows.scales[at] = own["scales"][source]
        arrived.homes[at] = where[kept].int()
        arrived.counts.copy_(counts.minimum((size.room - begins).clamp(min=0)))
        (values, scales), found = arrived.rows, arrived.counts
        if isinstance(arrived, Arrived):
            rows = Rows(values[:, :used], scales[:, :used])
            return Arrived(rows, found, arrived.homes[:, :used])
        arrived.row_expert.fill_(-1)
        arrived.row_expert[at] = slots[kept].int()
        arrived.used.fill_(used)
        rows, experts = Rows(values[:used], scales[:used]), arrived.row_expert[:used]
        return ArrivedContiguous(rows, found, arrived.homes[:used], experts, arrived.used)

    def send_outputs(self, outputs: Tensor) -> None:
        """combine_send: [..., h] bfloat16 in the layout of what was received."""
        size, arrived = self.size, self.arrived
        if isinstance(arrived, Arrived):
            real = torch.arange(outputs.shape[1]) < arrived.counts[:, None]
            where = arrived.homes[:, : outputs.shape[1]][real].long()
        else:
            real = arrived.row_expert[: outputs.shape[0]] >= 0
            where = arrived.homes[: outputs.shape[0]][real].long()
        each = size.tokens * size.top_k
        made = outputs[real]
        for home in self._members():
            mine = where // each == home
            count = int(mine.sum())
            if count:
                self._blocks[home]["back"][where[mine] % each] = made[mine]
                self._blocks[home]["returned"][self._heap.rank] = self.step
                self._bytes["combine"][home] += size.combine_bytes(count)

    def sum_outputs(
        self,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        experts: int,
        plus: Tensor | None = None,
    ) -> None:
        """combine_recv: waits, and adds up, `plus` too: out [n, h]."""
        returned = self._own["returned"]
        awaited = [rank for rank in self._members() if self._asked[rank]]
        self._wait(lambda rank: int(returned[rank]) >= self.step, awaited)
        if not ids.shape[0]:
            return
        real = (ids >= 0) & (ids < experts)
        parts = self._own["back"][: ids.numel()].view(*ids.shape, -1)
        parts = torch.where(real.unsqueeze(-1), parts, 0.0)
        out.copy_(weighted_sum(parts, torch.where(real, weights, 0.0), plus))

    def _members(self) -> range | list[int]:
        return [rank for rank, there in enumerate(self._shared.members.tolist()) if there]

    def _wait(self, ready: Callable[[int], bool], ranks: list[int]) -> None:
        """Until all are ready, one is lost, or the bound is over: then those are lost that lack.

        Once one is lost, others may lack what they need of it, and are not.
        """
        lost = self._shared.lost
        deadline = time.monotonic() + self._shared.bound / 1e9
        while missing := [rank for rank in ranks if not ready(rank)]:
            late = missing if time.monotonic() > deadline else []
            gone = [rank for rank in missing if self.gone(rank)] or late
            if bool(lost.any()):
                return
            if gone:
                lost[gone] = 1
                return
            time.sleep(_PAUSE_S)


def _chosen(ids: Tensor, table: LayerTable) -> tuple[Tensor, Tensor]:
    """The rank and slot [n, k] of a copy of each choice; -1 where an id is none."""
    flat = ids.flatten().long()
    real = (flat >= 0) & (flat < table.experts)
    known = flat[real]
    copy = turns(known, table.begins.long(), table.copies.long())
    ranks, slots = torch.full_like(flat, -1), torch.full_like(flat, -1)
    ranks[real] = table.ranks[known, copy].long()
    slots[real] = table.slots[known, copy].long()
    return ranks.view_as(ids), slots.view_as(ids)

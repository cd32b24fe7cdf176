"""What expert parallelism's dispatch and combine do to memory, in plain torch.

Rows go out in FP8 (`quantise_rows`), to a rank once however many of its experts they are for, and
land there expert by expert in one of the layouts of grouped products. Masked: every expert has room
for `max_rows`, which suits the few rows of a decode step. Contiguous: an expert's rows begin where
the block of 128 ends that has the last of the expert before, which suits a prefill's thousands,
whoever they are for. What the experts made of them comes back in bfloat16, one output an expert, to
the row's home.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.quantised import Rows, new_scales, quantise_rows
from pdmesh.kernels.routing import ALIGNMENT, contiguous_capacity

OCCURRENCE_BITS = 20
"""Of a word that says where a row goes: below the slot, the row's number among its source's rows
for that slot."""


@dataclass(frozen=True)
class ExchangeSize:
    """The sizes of an exchange, the same on every rank.

    Attributes:
        ranks: R.
        slots: S, the most experts that one rank holds.
        tokens: T, the most rows that one rank sends.
        hidden: h, a multiple of 128.
        top_k: k, choices of a row.
        max_rows: rows that an expert can take in the masked layout; 0 in the other. A step that
            brings more is an error, never a loss that nobody sees.
        capacity: rows of the contiguous layout, padding included; 0 in the masked one. Likewise.

    Raises:
        ValueError: a size that the formats cannot hold.
    """

    ranks: int
    slots: int
    tokens: int
    hidden: int
    top_k: int
    max_rows: int
    capacity: int = 0

    @staticmethod
    def contiguous(
        ranks: int, slots: int, tokens: int, hidden: int, top_k: int, capacity: int | None = None
    ) -> ExchangeSize:
        """With the contiguous layout; `capacity` None: room for whatever the gates may choose."""
        if capacity is None:
            capacity = contiguous_capacity(ranks * tokens, min(top_k, slots), slots)
        return ExchangeSize(ranks, slots, tokens, hidden, top_k, 0, capacity)

    def __post_init__(self) -> None:
        if self.hidden % BLOCK or self.hidden <= 0:
            raise ValueError(f"rows of {self.hidden} are not a multiple of {BLOCK}")
        if not 0 < self.tokens < 1 << OCCURRENCE_BITS:
            raise ValueError(f"{self.tokens} rows of a rank: 1 to {(1 << OCCURRENCE_BITS) - 1}")
        if not 0 < self.slots < 1 << (31 - OCCURRENCE_BITS):
            raise ValueError(f"{self.slots} experts a rank: 1 to 2,047")
        if self.ranks * self.tokens * self.top_k + self.slots * ALIGNMENT >= 1 << 31:
            raise ValueError("ranks x tokens x choices must fit 31 bits")
        if self.max_rows < 0 or (self.max_rows > 0) == (self.capacity != 0):
            raise ValueError(
                f"room for {self.max_rows} rows an expert and for {self.capacity} of all: one of "
                "the layouts has room, the other none"
            )
        if self.capacity % ALIGNMENT or not 0 <= self.capacity < 1 << 31:
            raise ValueError(f"{self.capacity} rows of all experts: a multiple of {ALIGNMENT}")

    @property
    def align(self) -> int:
        """Rows of a block of the contiguous layout; 0 in the masked one."""
        return ALIGNMENT if self.capacity else 0

    @property
    def room(self) -> int:
        """Rows of all experts together in the contiguous layout, of one in the masked one."""
        return self.capacity or self.max_rows

    @property
    def layout(self) -> tuple[int, ...]:
        """The layout's shape before the columns: (slots, max_rows) or (capacity,)."""
        return (self.capacity,) if self.capacity else (self.slots, self.max_rows)

    @property
    def record(self) -> int:
        """Bytes of a row: e4m3 values, a float32 scale for each 128; a multiple of 16."""
        return -(-(self.hidden + self.hidden // BLOCK * 4) // 16) * 16

    @property
    def note(self) -> int:
        """Bytes that go with a row: its number at home, and a word for each choice."""
        return 4 * (1 + self.top_k)

    @property
    def notes_bytes(self) -> int:
        """The notes of `tokens` rows, padded to 128 bytes."""
        return -(-self.tokens * self.note // 128) * 128

    @property
    def inbox_bytes(self) -> int:
        """What one rank can send another at once: notes, then records; padded to 128 bytes."""
        return self.notes_bytes + -(-self.tokens * self.record // 128) * 128

    def symmetric_bytes(self) -> int:
        """Symmetric memory of one exchange in flight, where all ranks are mapped."""
        ranks, slots = self.ranks, self.slots
        regions = (
            *(2 * ranks * 8, 2 * ranks * 8, ranks * 8, 2 * ranks * slots * 4),
            *(ranks * slots * 4, 8, 2 * ranks * self.inbox_bytes),
            self.tokens * self.top_k * self.hidden * 2,
        )
        return sum(-(-nbytes // 128) * 128 for nbytes in regions)

    def arrived_bytes(self) -> int:
        """What `room_for` takes, and bfloat16 outputs of the same shape."""
        row = self.hidden + self.hidden // BLOCK * 4 + 4 + 2 * self.hidden
        return math.prod(self.layout) * (row + 4 if self.capacity else row)

    def dispatch_bytes(self, rows: int) -> int:
        """Bytes on the wire to one peer that gets `rows` rows: counts for its slots come along."""
        return 8 + 4 * self.slots + rows * (self.record + self.note)

    def combine_bytes(self, pairs: int) -> int:
        """Bytes on the wire for `pairs` outputs."""
        return pairs * self.hidden * 2


class Arrived(NamedTuple):
    """The rows for the experts of a rank.

    Attributes:
        rows: `Rows` [slots, max_rows, h].
        counts: [slots] int32; what lies behind an expert's count is undefined.
        homes: [slots, max_rows] int32: (home rank * T + row there) * k + choice.
    """

    rows: Rows
    counts: Tensor
    homes: Tensor


class ArrivedContiguous(NamedTuple):
    """The rows for the experts of a rank, one expert's behind the other's.

    Attributes:
        rows: `Rows` [capacity, h]. An expert's begin at a multiple of 128; what lies between them
            and behind them all is undefined, and may be NaN: no result depends on it.
        counts: [slots] int32.
        homes: [capacity] int32, as in `Arrived`; undefined where there is no row.
        row_expert: [capacity] int32, the slot of each row, -1 where there is none: what contiguous
            grouped products take. They skip a block of 128 that begins with -1, and compute one
            that has rows whole; outputs of its padding go nowhere.
        used: [1] int32, rows up to the end of the last block that has any.
    """

    rows: Rows
    counts: Tensor
    homes: Tensor
    row_expert: Tensor
    used: Tensor


AnyArrived = Arrived | ArrivedContiguous


def new_arrived(size: ExchangeSize, device: torch.device | str) -> Arrived:
    """Empty memory for an `Arrived`."""
    shape = (size.slots, size.max_rows)
    homes = torch.empty(shape, dtype=torch.int32, device=device)
    counts = torch.zeros(size.slots, dtype=torch.int32, device=device)
    return Arrived(_new_rows(size, shape, device), counts, homes)


def new_arrived_contiguous(size: ExchangeSize, device: torch.device | str) -> ArrivedContiguous:
    """Empty memory for an `ArrivedContiguous`."""
    homes = torch.empty(size.capacity, dtype=torch.int32, device=device)
    counts = torch.zeros(size.slots, dtype=torch.int32, device=device)
    rows, used = _new_rows(size, (size.capacity,), device), torch.zeros_like(counts[:1])
    return ArrivedContiguous(rows, counts, homes, torch.full_like(homes, -1), used)


def room_for(size: ExchangeSize, device: torch.device | str) -> AnyArrived:
    """Empty memory for what arrives, in the layout that `size` has room for."""
    return (new_arrived_contiguous if size.capacity else new_arrived)(size, device)


def _new_rows(size: ExchangeSize, shape: tuple[int, ...], device: torch.device | str) -> Rows:
    values = torch.empty((*shape, size.hidden), dtype=torch.float8_e4m3fn, device=device)
    return Rows(values, new_scales(*shape, size.hidden // BLOCK, device=device))


def arrive(
    rows: Sequence[Tensor],
    choices: Sequence[tuple[Tensor, Tensor]],
    rank: int,
    size: ExchangeSize,
) -> AnyArrived:
    """What rank `rank` gets of everybody's rows.

    Args:
        rows: of each rank, [n, h].
        choices: of each rank, the rank and the slot [n, k] of each choice; rank -1 is none.

    Returns:
        An expert's rows are in the order of their homes, and of one home in the order of rows.

    Raises:
        ValueError: they are more than there is room for.
    """
    arrived = room_for(size, rows[0].device)
    quantised = [quantise_rows(own) for own in rows]
    values = torch.cat([own.values.view(torch.uint8) for own in quantised])
    scales = torch.cat([own.scales for own in quantised])
    firsts = [sum(own.shape[0] for own in rows[:home]) for home in range(len(rows))]
    found = []
    for home, (ranks, slots) in enumerate(choices):
        row, choice = (ranks == rank).nonzero(as_tuple=True)
        back = (home * size.tokens + row) * size.top_k + choice
        found.append(torch.stack([slots[row, choice], firsts[home] + row, back]))
    slot, row, back = torch.cat(found, dim=1)
    order = slot.argsort(stable=True)
    slot, row, back = slot[order], row[order], back[order]
    counts = torch.bincount(slot, minlength=size.slots)
    begins = counts.cumsum(0) - counts
    place = torch.arange(len(slot), device=slot.device) - begins[slot]
    padded = -(-counts // ALIGNMENT) * ALIGNMENT
    need = int(padded.sum() if size.capacity else counts.max())
    if need > size.room:
        raise ValueError(f"{need} rows; there is room for {size.room}")
    at = ((padded.cumsum(0) - padded)[slot] + place,) if size.capacity else (slot, place)
    arrived.rows.values.view(torch.uint8)[at] = values[row]
    arrived.rows.scales[at] = scales[row]
    arrived.homes[at] = back.int()
    arrived.counts.copy_(counts)
    if isinstance(arrived, ArrivedContiguous):
        arrived.row_expert[at] = slot.int()
        arrived.used.fill_(need)
    return arrived


def places(arrived: AnyArrived) -> list[tuple[int | slice, ...]]:
    """Where each slot's rows are, as an index of the layout; waits for the device."""
    counts: list[int] = arrived.counts.tolist()
    if isinstance(arrived, Arrived):
        return [(slot, slice(0, count)) for slot, count in enumerate(counts)]
    padded = [-(-count // ALIGNMENT) * ALIGNMENT for count in counts]
    begins = [sum(padded[:slot]) for slot in range(len(counts))]
    return [(slice(at, at + count),) for at, count in zip(begins, counts, strict=True)]


def come_back(
    outputs: Sequence[Tensor],
    arrived: Sequence[AnyArrived],
    home: int,
    rows: int,
    size: ExchangeSize,
) -> Tensor:
    """The outputs [..., h] bfloat16 of all ranks at their home: [rows, k, h].

    A choice that is none gives zeros.
    """
    back = outputs[0].new_zeros((rows, size.top_k, size.hidden))
    each = size.tokens * size.top_k
    for made, there in zip(outputs, arrived, strict=True):
        for at in places(there):
            homes = there.homes[at].long()
            mine = homes // each == home
            back.view(-1, size.hidden)[homes[mine] % each] = made[at][mine]
    return back

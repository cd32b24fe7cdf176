"""What expert parallelism's dispatch and combine do to memory, in plain torch.

Rows go out in FP8 (`quantise_rows`), to a rank once however many of its experts they are for, and
land there expert by expert: the masked grouped layout. What the experts made of them comes back in
bfloat16, one output an expert, to the row's home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.quantised import Rows, new_scales, quantise_rows

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
        max_rows: rows that an expert can take. A step that brings more is an error, never a loss
            that nobody sees.

    Raises:
        ValueError: a size that the formats cannot hold.
    """

    ranks: int
    slots: int
    tokens: int
    hidden: int
    top_k: int
    max_rows: int

    def __post_init__(self) -> None:
        if self.hidden % BLOCK or self.hidden <= 0:
            raise ValueError(f"rows of {self.hidden} are not a multiple of {BLOCK}")
        if not 0 < self.tokens < 1 << OCCURRENCE_BITS:
            raise ValueError(f"{self.tokens} rows of a rank: 1 to {(1 << OCCURRENCE_BITS) - 1}")
        if not 0 < self.slots < 1 << (31 - OCCURRENCE_BITS):
            raise ValueError(f"{self.slots} experts a rank: 1 to 2,047")
        if self.ranks * self.tokens * self.top_k >= 1 << 31:
            raise ValueError("ranks x tokens x choices must fit 31 bits")

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
        """What `new_arrived` takes, and bfloat16 outputs of the same shape."""
        row = self.hidden + self.hidden // BLOCK * 4 + 4 + 2 * self.hidden
        return self.slots * self.max_rows * row

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


def new_arrived(size: ExchangeSize, device: torch.device | str) -> Arrived:
    """Empty memory for an `Arrived`."""
    shape = (size.slots, size.max_rows)
    values = torch.empty((*shape, size.hidden), dtype=torch.float8_e4m3fn, device=device)
    scales = new_scales(*shape, size.hidden // BLOCK, device=device)
    counts = torch.zeros(size.slots, dtype=torch.int32, device=device)
    return Arrived(
        Rows(values, scales), counts, torch.empty(shape, dtype=torch.int32, device=device)
    )


def arrive(
    rows: Sequence[Tensor],
    choices: Sequence[tuple[Tensor, Tensor]],
    rank: int,
    size: ExchangeSize,
) -> Arrived:
    """What rank `rank` gets of everybody's rows.

    Args:
        rows: of each rank, [n, h].
        choices: of each rank, the rank and the slot [n, k] of each choice; rank -1 is none.

    Returns:
        An expert's rows are in the order of their homes, and of one home in the order of rows.

    Raises:
        ValueError: an expert has more than `max_rows`.
    """
    arrived = new_arrived(size, rows[0].device)
    filled = [0] * size.slots
    for home, (own, (ranks, slots)) in enumerate(zip(rows, choices, strict=True)):
        values, scales = quantise_rows(own)
        for row, choice in (ranks == rank).nonzero().tolist():
            slot = int(slots[row, choice])
            if filled[slot] == size.max_rows:
                raise ValueError(f"slot {slot} gets more than {size.max_rows} rows")
            at = (slot, filled[slot])
            arrived.rows.values[at], arrived.rows.scales[at] = values[row], scales[row]
            arrived.homes[at] = (home * size.tokens + row) * size.top_k + choice
            filled[slot] += 1
    arrived.counts.copy_(torch.tensor(filled))
    return arrived


def come_back(
    outputs: Sequence[Tensor], arrived: Sequence[Arrived], home: int, rows: int, size: ExchangeSize
) -> Tensor:
    """The outputs [slots, max_rows, h] bfloat16 of all ranks at their home: [rows, k, h].

    A choice that is none gives zeros.
    """
    back = outputs[0].new_zeros((rows, size.top_k, size.hidden))
    each = size.tokens * size.top_k
    for made, there in zip(outputs, arrived, strict=True):
        for slot, count in enumerate(there.counts.tolist()):
            homes = there.homes[slot, :count].long()
            mine = homes // each == home
            at = homes[mine] % each
            back.view(-1, size.hidden)[at] = made[slot, :count][mine]
    return back

"""One step's rows: which positions of which sequences are computed, and where their pages are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pdmesh.kernels.linear import padded_rows
from pdmesh.kernels.page_copy import flat_rows
from pdmesh.kernels.page_walk import PageWalk, Span, plan_walk

Form = Literal["mha", "absorbed"]

# From this many rows of one sequence the absorbed form computes a page's rows at once.
_TILE_FROM = 8

# Rows of a tile where a sequence has few: the last known token and its draft.
_PAIR = 2

# Entries (rows of a tile against one page) computed at once: what stays in a processor's cache.
_GROUP_ENTRIES = {("mha", True): 256, ("absorbed", True): 8, ("absorbed", False): 32}


@dataclass(frozen=True)
class SequenceSlice:
    """One sequence's rows in a step.

    Attributes:
        page_table: page ids of the sequence; page i holds positions i * page_size onwards.
        start, end: positions start..end-1 are computed; each sees keys 0..itself from the pages.
        write_from: latents of positions >= write_from are written to the pages. Rows before it
            are recomputed without writing, to get a hidden state back after a prefix hit.
    """

    page_table: tuple[int, ...]
    start: int
    end: int
    write_from: int


class Batch:
    """The rows of one step, in the order of the slices; see `build`.

    Attributes:
        slices: as given.
        page_size: slots a page.
        num_rows: T, rows that were asked for.
        tokens, positions: [T] int64.
        padded_tokens, padded_positions: [num_padded] int64, followed by rows of token 0 at
            position 0 up to a multiple of four; these are never written to a page.
    """

    slices: tuple[SequenceSlice, ...]
    page_size: int
    num_rows: int
    tokens: Tensor
    positions: Tensor
    padded_tokens: Tensor
    padded_positions: Tensor

    def __init__(
        self, slices: tuple[SequenceSlice, ...], page_size: int, padded: tuple[Tensor, Tensor]
    ) -> None:
        self.slices = slices
        self.page_size = page_size
        self.num_rows = sum(item.end - item.start for item in slices)
        self.padded_tokens, self.padded_positions = padded
        self.tokens = self.padded_tokens[: self.num_rows]
        self.positions = self.padded_positions[: self.num_rows]
        self._walks: dict[tuple[Form, int], PageWalk] = {}
        self._writes: dict[int, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def build(
        slices: Sequence[SequenceSlice],
        token_ids: Sequence[Sequence[int]],
        page_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> "Batch":
        """Flatten slices and their tokens (one per computed position).

        Raises:
            ValueError: no rows, an empty or negative range, tokens that do not match the range,
                or a page table that is too short.
        """
        if not slices:
            raise ValueError("a batch needs at least one slice")
        for item, tokens in zip(slices, token_ids, strict=True):
            _check_slice(item, len(tokens), page_size)
        positions = np.concatenate([np.arange(item.start, item.end) for item in slices])
        num_padded = padded_rows(len(positions))
        packed = np.zeros((2, num_padded), dtype=np.int64)
        packed[0, : len(positions)] = np.concatenate([np.asarray(t, np.int64) for t in token_ids])
        packed[1, : len(positions)] = positions
        both = torch.from_numpy(packed).to(device)
        return Batch(tuple(slices), page_size, (both[0], both[1]))

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.padded_tokens.device

    def walk(self, form: Form, first_key: int) -> PageWalk:
        """The plan of attention over keys first_key..position; made once and kept."""
        key = (form, first_key)
        if key not in self._walks:
            tiled = form == "mha" or any(
                item.end - item.start >= _TILE_FROM for item in self.slices
            )
            shape = (self.page_size, self.page_size if tiled else min(_PAIR, self.page_size))
            spans, row = [], 0
            for item in self.slices:
                spans.append(Span(item.page_table, item.start, item.end, row))
                row += item.end - item.start
            self._walks[key] = plan_walk(
                spans, shape, first_key, self.device, _GROUP_ENTRIES[form, tiled]
            )
        return self._walks[key]

    def writes(self, num_layers: int) -> tuple[Tensor, Tensor]:
        """Rows of this batch to be written [w], and their flat layer-0 rows in the pool [w]."""
        if num_layers not in self._writes:
            rows: list[int] = []
            pages: list[int] = []
            slots: list[int] = []
            first = 0
            for item in self.slices:
                for position in range(max(item.start, item.write_from), item.end):
                    rows.append(first + position - item.start)
                    pages.append(item.page_table[position // self.page_size])
                    slots.append(position % self.page_size)
                first += item.end - item.start
            index = torch.tensor([rows, pages, slots], dtype=torch.int64, device=self.device)
            flat = flat_rows(index[1], index[2], num_layers, self.page_size)
            self._writes[num_layers] = (index[0], flat)
        return self._writes[num_layers]


def _check_slice(item: SequenceSlice, num_tokens: int, page_size: int) -> None:
    if not 0 <= item.start < item.end:
        raise ValueError(f"positions {item.start}..{item.end - 1} are not a range of positions")
    if num_tokens != item.end - item.start:
        raise ValueError(f"{num_tokens} tokens for {item.end - item.start} positions")
    if len(item.page_table) * page_size < item.end:
        raise ValueError(
            f"{len(item.page_table)} pages of {page_size} do not hold {item.end} positions"
        )

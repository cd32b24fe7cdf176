"""One step's rows: which positions of which sequences are computed, and where their pages are."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdmesh.kernels.linear import padded_rows
from pdmesh.kernels.page_copy import flat_rows
from pdmesh.kernels.page_walk import SPLIT, PageWalk, Span, Tiling, plan_walk
from pdmesh.model.tree import check_parents, node_chains, node_depths, node_path

Form = Literal["mha", "absorbed"]

# A tile's rows, and its entries computed at once: what stays in a processor's cache. MHA form has
# tiles of a whole split, where rows cost little beside the projection of the keys.
_MHA = Tiling(SPLIT, 256, share=True)
_FEW = 8
"""Rows a slice, up to which their tokens are taken one by one."""
_ABSORBED = tuple(Tiling(rows, min(32, 512 // rows)) for rows in (2, 4, 8, 16, 32, SPLIT))


@dataclass(frozen=True)
class SequenceSlice:
    """One sequence's rows in a step.

    Attributes:
        page_table: page ids of the sequence; page i holds positions i * page_size onwards.
        start, end: positions start..end-1 are computed; each sees keys 0..itself from the pages.
        write_from: latents of positions >= write_from are written to the pages. Rows before it
            are recomputed without writing, to get a hidden state back after a prefix hit.
        parents: None, or the rows are nodes of a tree under position start - 1, and parents[i] is
            the node before node i (-1: none). Node i's latent goes to the slot of position
            start + i; it is rotated for position start + its depth, and sees keys 0..start-1
            and those of its ancestors: its hidden state is that of its path as a plain sequence.
        form: this slice's form of attention where it is not that of the step.
    """

    page_table: tuple[int, ...]
    start: int
    end: int
    write_from: int
    parents: tuple[int, ...] | None = None
    form: Form | None = None


@dataclass(frozen=True)
class AttentionPart:
    """Rows of a step whose attention has one form.

    Attributes:
        form: which.
        walk: the plan of these rows.
        rows: [n] int64, the batch rows, repeated from the first up to a multiple of four; None
            if they are all rows of the batch.
    """

    form: Form
    walk: PageWalk
    rows: Tensor | None


class Batch:
    """The rows of one step, in the order of the slices; see `build`.

    Attributes:
        slices: as given.
        page_size: slots a page.
        num_rows: T, rows that were asked for.
        last_position: the largest position of a row.
        bounds: [slices, 3] int64 on the host: start, end and write_from of each slice.
        tokens, positions: [T] int64, copied to the device when they are first asked for.
        host_tokens: [T] int64 on the host.
        padded_tokens, padded_positions: [num_padded] int64, followed by rows of token 0 at
            position 0 up to a multiple of four; these are never written to a page.
    """

    slices: tuple[SequenceSlice, ...]
    page_size: int
    bounds: NDArray[np.int64]
    num_rows: int
    last_position: int
    host_tokens: NDArray[np.int64]
    device: torch.device
    """Where the rows are."""

    def __init__(
        self,
        slices: tuple[SequenceSlice, ...],
        page_size: int,
        bounds: NDArray[np.int64],
        packed: NDArray[np.int64],
        device: torch.device | str,
    ) -> None:
        self.slices = slices
        self.page_size = page_size
        self.bounds = bounds
        self.num_rows = int((bounds[:, 1] - bounds[:, 0]).sum())
        self.last_position = int(packed[1].max())
        self.host_tokens = packed[0, : self.num_rows]
        self.device = torch.device(device)
        self._packed = packed
        self._parts: dict[tuple[Form, int], tuple[AttentionPart, ...]] = {}
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
                parents that are no tree, or a page table that is too short.
        """
        if not slices:
            raise ValueError("a batch needs at least one slice")
        for item, tokens in zip(slices, token_ids, strict=True):
            _check_slice(item, len(tokens), page_size)
        bounds = np.array([(i.start, i.end, i.write_from) for i in slices], np.int64)
        positions = _positions(slices, bounds)
        rows = len(positions)
        packed = np.zeros((2, padded_rows(rows)), dtype=np.int64)
        if rows <= _FEW * len(slices):
            packed[0, :rows] = np.fromiter(itertools.chain.from_iterable(token_ids), np.int64, rows)
        else:
            packed[0, :rows] = np.concatenate([np.asarray(t, np.int64) for t in token_ids])
        packed[1, :rows] = positions
        return Batch(tuple(slices), page_size, bounds, packed, device)

    @cached_property
    def _rows(self) -> Tensor:
        return torch.from_numpy(self._packed).to(self.device)

    @property
    def padded_tokens(self) -> Tensor:
        """See the attributes."""
        return self._rows[0]

    @property
    def padded_positions(self) -> Tensor:
        """See the attributes."""
        return self._rows[1]

    @property
    def tokens(self) -> Tensor:
        """See the attributes."""
        return self._rows[0, : self.num_rows]

    @property
    def positions(self) -> Tensor:
        """See the attributes."""
        return self._rows[1, : self.num_rows]

    def attention(self, form: Form, first_key: int) -> tuple[AttentionPart, ...]:
        """The plans of attention over keys first_key..position, one a form; made once and kept.

        `form` is that of the slices which name none.
        """
        key = (form, first_key)
        if key not in self._parts:
            forms = [item.form or form for item in self.slices]
            self._parts[key] = tuple(
                self._part(which, forms, first_key) for which in sorted(set(forms))
            )
        return self._parts[key]

    def _part(self, form: Form, forms: Sequence[Form], first_key: int) -> AttentionPart:
        spans: list[Span] = []
        rows: list[range] = []
        first = done = 0
        for index, item in enumerate(self.slices):
            count = item.end - item.start
            if forms[index] == form:
                spans += _spans(item, index, done, form)
                rows.append(range(first, first + count))
                done += count
            first += count
        walk = plan_walk(spans, self.page_size, first_key, self.device)
        if done == self.num_rows:
            return AttentionPart(form, walk, None)
        chosen = np.concatenate([np.arange(r.start, r.stop) for r in rows])
        chosen = np.pad(chosen, (0, padded_rows(done) - done), constant_values=chosen[0])
        return AttentionPart(form, walk, torch.from_numpy(chosen).to(self.device))

    def writes(self, num_layers: int) -> tuple[Tensor, Tensor]:
        """Rows of this batch to be written [w], and their flat layer-0 rows in the pool [w]."""
        if num_layers not in self._writes:
            rows: list[NDArray[np.int64]] = []
            pages: list[NDArray[np.int64]] = []
            slots: list[NDArray[np.int64]] = []
            first = 0
            for item in self.slices:
                held = np.arange(max(item.start, item.write_from), item.end)
                rows.append(held - item.start + first)
                pages.append(np.asarray(item.page_table, np.int64)[held // self.page_size])
                slots.append(held % self.page_size)
                first += item.end - item.start
            index = torch.from_numpy(np.stack([np.concatenate(x) for x in (rows, pages, slots)]))
            index = index.to(self.device)
            flat = flat_rows(index[1], index[2], num_layers, self.page_size)
            self._writes[num_layers] = (index[0], flat)
        return self._writes[num_layers]


def _positions(slices: Sequence[SequenceSlice], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = bounds[:, 1] - bounds[:, 0]
    ends = counts.cumsum()
    positions: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(
        bounds[:, 0] - ends + counts, counts
    )
    for item, end in zip(slices, ends, strict=True):
        if item.parents is not None:
            depths = np.asarray(node_depths(item.parents), np.int64)
            positions[end - len(depths) : end] = item.start + depths
    return positions


def _spans(item: SequenceSlice, index: int, first_row: int, form: Form) -> list[Span]:
    """The rows of a slice, a tree as one span a chain of nodes; `first_row` is that of node 0."""
    if item.parents is None:
        rows = range(first_row, first_row + item.end - item.start)
        return [Span(item.page_table, item.start, item.end, rows, _tiling(form, rows), index)]
    spans = []
    for chain in node_chains(item.parents):
        path = node_path(item.parents, chain[-1])
        end = item.start + len(path)
        straight = next((i for i, node in enumerate(path) if node != i), len(path))
        spans.append(
            Span(
                item.page_table,
                end - len(chain),
                end,
                [first_row + node for node in chain],
                _tiling(form, chain),
                index,
                item.start + straight,
                tuple(item.start + node for node in path[straight:]),
            )
        )
    return spans


def _tiling(form: Form, rows: Sequence[int]) -> Tiling:
    if form == "mha":
        return _MHA
    fitting = (tiling for tiling in _ABSORBED if tiling.rows >= len(rows))
    return next(fitting, _ABSORBED[-1])


def _check_slice(item: SequenceSlice, num_tokens: int, page_size: int) -> None:
    if not 0 <= item.start < item.end:
        raise ValueError(f"positions {item.start}..{item.end - 1} are not a range of positions")
    if num_tokens != item.end - item.start:
        raise ValueError(f"{num_tokens} tokens for {item.end - item.start} positions")
    if len(item.page_table) * page_size < item.end:
        raise ValueError(
            f"{len(item.page_table)} pages of {page_size} do not hold {item.end} positions"
        )
    if item.parents is not None:
        if len(item.parents) != num_tokens:
            raise ValueError(f"{len(item.parents)} parents for {num_tokens} tokens")
        check_parents(item.parents)

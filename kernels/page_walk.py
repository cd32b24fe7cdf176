"""The order in which attention visits keys, made once a step and used by every layer.

Keys are visited in splits of SPLIT, whatever the page size is, so that results do not depend on
it. Rows are put into tiles: either the rows of one sequence whose positions share a split, each at
the place `position % SPLIT`, or a few consecutive rows of one sequence (decode: the last known
token and its draft read each key once). A tile visits the splits 0..its last row's one. Entries
(tile, split) are listed split first, tiles with most splits first, so that the tiles that still
have a split j are a prefix of the tiles: partial results are added by plain slices, strictly in
order, and a split that is absent or wholly masked adds nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# Keys whose scores and sums are computed at once. Results depend on it.
SPLIT = 64

# Entries computed at once where a single tile has more; bounds memory.
MAX_ENTRIES = 256

# Tiles of one sequence that share the keys of a long context at most; bounds memory.
MAX_SHARED_TILES = 32


@dataclass(frozen=True)
class Tiling:
    """How a span's rows become tiles; it changes the speed but no result.

    Attributes:
        rows: rows a tile; SPLIT, or fewer.
        entries: entries computed at once, unless one tile has more.
        share: keep tiles of one sequence together over a long context, because getting at the
            keys costs much (MHA form projects them).
    """

    rows: int
    entries: int
    share: bool = False


@dataclass(frozen=True)
class Span:
    """Rows of a batch: the positions start..end-1 along one path of a sequence.

    Attributes:
        page_table: page ids of the sequence; page i holds slots i * page_size onwards.
        start, end: the rows' positions.
        rows: the batch row of each position.
        tiling: how the rows become tiles.
        sequence: a number; spans of one sequence have the same.
        fork, slots: the key of position fork + i stands in the sequence's slot slots[i]; a key
            before `fork`, or any where there are no slots, stands in the slot of its position.
    """

    page_table: Sequence[int]
    start: int
    end: int
    rows: Sequence[int]
    tiling: Tiling
    sequence: int
    fork: int = 0
    slots: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """Entries that are computed at once: a range of splits for all tiles of a group.

    Attributes:
        tiles: [n] int64, the tile of each entry within its group.
        pages, slots: [n, SPLIT] int64. Where each key is read. A key that no row of the tile
            may see is read from a key that some row may: so what stands in unwritten slots (or
            another owner's numbers) cannot reach the result, NaN included.
        distinct: [d] int64, entries that between them hold each set of keys once.
        same: [n] int64, for each entry the index into `distinct` of its keys.
        masked: [n, rows, SPLIT] bool, keys that a row may not see; None if every row sees all.
        counts: entries of each split, never rising.
    """

    tiles: Tensor
    pages: Tensor
    slots: Tensor
    distinct: Tensor
    same: Tensor
    masked: Tensor | None
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Tiles whose running results are kept together; rows [tiles, rows] int64 index the batch."""

    rows: Tensor
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class PageWalk:
    """The groups, and where batch row i's result stands in their concatenated rows [num_rows]."""

    groups: tuple[Group, ...]
    take: Tensor


@dataclass(frozen=True)
class _Tile:
    """`first` is the position of its first place, `last` of its last row."""

    span: Span
    index: int
    first: int
    last: int

    @property
    def splits(self) -> int:
        return self.last // SPLIT + 1


@dataclass(frozen=True)
class _Plan:
    """What all chunks are made from: tables [spans, pages], forks [spans], tails [spans, slots]."""

    page_size: int
    first_key: int
    tables: Ints
    forks: Ints
    tails: Ints
    device: torch.device

    def tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def plan_walk(
    spans: Sequence[Span], page_size: int, first_key: int, device: torch.device
) -> PageWalk:
    """Plan attention of each row at position p over the keys first_key..p of its path.

    Args:
        spans: the batch's sequences; their rows are 0.. without gaps, in any order.
        page_size: slots a page.
        first_key: 0, or 1 for a layer whose slot 0 stays empty.
        device: where the index tensors go.
    """
    plan = _plan(spans, page_size, first_key, device)
    tiles = [tile for index, span in enumerate(spans) for tile in _tiles(span, index)]
    tiles.sort(key=lambda t: (t.span.tiling.rows, -t.span.end, t.span.sequence, -t.last))
    take = np.zeros(sum(span.end - span.start for span in spans), dtype=np.int64)
    groups: list[Group] = []
    base = 0
    for members in _grouped(tiles):
        members.sort(key=lambda tile: -tile.splits)
        rows = _rows_of(members, base, take)
        base += rows.size
        groups.append(Group(plan.tensor(rows), _chunks(members, plan)))
    return PageWalk(tuple(groups), plan.tensor(take))


def _plan(spans: Sequence[Span], page_size: int, first_key: int, device: torch.device) -> _Plan:
    tables = np.zeros((len(spans), max(len(span.page_table) for span in spans)), dtype=np.int64)
    tails = np.zeros((len(spans), max(1, *(len(span.slots) for span in spans))), dtype=np.int64)
    forks = np.full(len(spans), np.iinfo(np.int64).max, dtype=np.int64)
    for index, span in enumerate(spans):
        tables[index, : len(span.page_table)] = span.page_table
        if span.slots:
            forks[index] = span.fork
            tails[index, : len(span.slots)] = span.slots
    return _Plan(page_size, first_key, tables, forks, tails, device)


def _tiles(span: Span, index: int) -> list[_Tile]:
    rows = span.tiling.rows
    first = span.start // SPLIT * SPLIT if rows == SPLIT else span.start
    return [
        _Tile(span, index, begin, min(begin + rows, span.end) - 1)
        for begin in range(first, span.end, rows)
    ]


def _grouped(tiles: Sequence[_Tile]) -> list[list[_Tile]]:
    """Tiles in order, cut where the entries of a group become too many."""
    groups: list[list[_Tile]] = []
    entries = 0
    for tile in tiles:
        if groups and _joins(tile, groups[-1], entries):
            groups[-1].append(tile)
            entries += tile.splits
        else:
            groups.append([tile])
            entries = tile.splits
    return groups


def _joins(tile: _Tile, group: Sequence[_Tile], entries: int) -> bool:
    """Sharing keys over chunks computes scores twice: it pays where few tiles would fit a group."""
    tiling, first = tile.span.tiling, group[0]
    if tiling != first.span.tiling:
        return False
    if entries + tile.splits <= tiling.entries:
        return True
    long = 4 * tile.splits > tiling.entries
    related = tile.span.sequence == first.span.sequence
    return tiling.share and long and related and len(group) < MAX_SHARED_TILES


def _rows_of(tiles: Sequence[_Tile], base: int, take: Ints) -> Ints:
    """Batch rows of the tiles [tiles, rows]; places without a row repeat row 0. Fills take."""
    size = tiles[0].span.tiling.rows
    rows = np.zeros((len(tiles), size), dtype=np.int64)
    for number, tile in enumerate(tiles):
        span = tile.span
        low = max(span.start, tile.first)
        places = np.arange(low - tile.first, tile.last + 1 - tile.first)
        batch_rows = np.asarray(span.rows[low - span.start : tile.last + 1 - span.start], np.int64)
        rows[number, places] = batch_rows
        take[batch_rows] = base + number * size + places
    return rows


def _chunks(tiles: Sequence[_Tile], plan: _Plan) -> tuple[Chunk, ...]:
    per_tile = np.array([tile.splits for tile in tiles])
    counts = np.searchsorted(-per_tile, -np.arange(per_tile[0]), side="left").tolist()
    chunks: list[Chunk] = []
    first = 0
    while first < len(counts):
        last, total = first, 0
        while last < len(counts) and (last == first or total + counts[last] <= MAX_ENTRIES):
            total += counts[last]
            last += 1
        chunks.append(_chunk(tiles, range(first, last), counts[first:last], plan))
        first = last
    return tuple(chunks)


def _chunk(tiles: Sequence[_Tile], splits: range, counts: Sequence[int], plan: _Plan) -> Chunk:
    tile_of = np.concatenate([np.arange(count) for count in counts])
    split_of = np.repeat(np.arange(splits.start, splits.stop), counts)
    span_of = np.array([tile.index for tile in tiles])[tile_of]
    first_row = np.array([tile.first for tile in tiles])[tile_of]
    last_row = np.array([tile.last for tile in tiles])[tile_of]
    key = split_of[:, None] * SPLIT + np.arange(SPLIT)[None, :]
    dead = (key > last_row[:, None]) | (key < plan.first_key)
    slot = _slots_of(np.where(dead, plan.first_key, key), span_of, plan)
    pages = plan.tables[span_of[:, None], slot // plan.page_size]
    distinct, same = _distinct(tiles, tile_of, split_of, plan)
    masked = None
    if splits.start * SPLIT < plan.first_key or ((split_of + 1) * SPLIT > first_row + 1).any():
        row = first_row[:, None] + np.arange(tiles[0].span.tiling.rows)[None, :]
        masked = (key[:, None, :] > row[:, :, None]) | (key < plan.first_key)[:, None, :]
    return Chunk(
        tiles=plan.tensor(tile_of),
        pages=plan.tensor(pages),
        slots=plan.tensor(slot % plan.page_size),
        distinct=plan.tensor(distinct),
        same=plan.tensor(same),
        masked=None if masked is None else plan.tensor(masked),
        counts=tuple(counts),
    )


def _slots_of(key: Ints, span_of: Ints, plan: _Plan) -> Ints:
    """The sequence's slots that hold the keys [n, SPLIT] of entries of the spans [n]."""
    forks = plan.forks[span_of][:, None]
    beyond = key >= forks
    if not beyond.any():
        return key
    tails: Ints = plan.tails[span_of[:, None], np.where(beyond, key - forks, 0)]
    return np.where(beyond, tails, key)


def _distinct(
    tiles: Sequence[_Tile], tile_of: Ints, split_of: Ints, plan: _Plan
) -> tuple[Ints, Ints]:
    """The first entry of each set of keys, and for each entry the number of its set.

    A split before the fork of a path is the same on all paths of its sequence. The first entry is
    that of the tile with most splits, which sees all keys that another tile may see.
    """
    index_of = np.array([tile.index for tile in tiles])[tile_of]
    sequence_of = np.array([tile.span.sequence for tile in tiles])[tile_of]
    own = (split_of + 1) * SPLIT > plan.forks[index_of]
    owner = np.where(own, sequence_of.max() + 1 + index_of, sequence_of)
    width = int(split_of[-1]) + 1
    _, distinct, same = np.unique(owner * width + split_of, return_index=True, return_inverse=True)
    return distinct, same.reshape(-1)

"""The order in which attention visits pages, made once a step and used by every layer.

Rows are put into tiles: either the rows of one sequence whose positions share a page, each row at
the place `position % page_size`, or a few consecutive rows of one sequence (decode: the last known
token and its draft read each page once). A tile visits the pages 0..its last row's one. Entries
(tile, page) are listed page index first, tiles with most pages first, so that the tiles that
still have a page of index j are a prefix of the tiles: partial results are added by plain slices,
strictly in page order, and a page that is absent or wholly masked adds nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# Entries computed at once where a single tile has more; bounds memory.
MAX_ENTRIES = 256


@dataclass(frozen=True)
class Span:
    """Rows `first_row`.. of a batch: the positions start..end-1 of the sequence on page_table."""

    page_table: Sequence[int]
    start: int
    end: int
    first_row: int


@dataclass(frozen=True)
class Chunk:
    """Entries that are computed at once: a range of page indices for all tiles of a group.

    Attributes:
        tiles: [n] int64, the tile of each entry within its group.
        pages, slots: [n, page_size] int64. Where each key is read. A key that no row of the tile
            may see is read from a key that some row may: so what stands in unwritten slots (or
            another owner's numbers) cannot reach the result, NaN included.
        distinct: [d] int64, entries that between them hold each (sequence, page) once.
        same: [n] int64, for each entry the index into `distinct` of its (sequence, page).
        masked: [n, rows, page_size] bool, keys that a row may not see.
        counts: entries of each page index, never rising.
    """

    tiles: Tensor
    pages: Tensor
    slots: Tensor
    distinct: Tensor
    same: Tensor
    masked: Tensor
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
    tile_rows: int


@dataclass(frozen=True)
class _Tile:
    span: Span
    span_index: int
    page: int
    """Index of the last page that a row of the tile sees."""
    first_position: int


def plan_walk(
    spans: Sequence[Span],
    shape: tuple[int, int],
    first_key: int,
    device: torch.device,
    group_entries: int = 256,
) -> PageWalk:
    """Plan attention of each row at position p over the keys first_key..p of its sequence.

    Args:
        spans: the batch's sequences; their rows are consecutive from 0.
        shape: slots a page, and rows a tile: as many as a page has slots, or fewer.
        first_key: 0, or 1 for a layer whose slot 0 stays empty.
        device: where the index tensors go.
        group_entries: entries computed at once, unless one tile has more; small enough to stay in
            a processor's cache, it changes the speed but no result.
    """
    page_size, tile_rows = shape
    tiles = [t for i, span in enumerate(spans) for t in _tiles(span, i, page_size, tile_rows)]
    tiles.sort(key=lambda tile: -tile.page)
    groups: list[Group] = []
    num_rows = sum(span.end - span.start for span in spans)
    take = np.zeros(num_rows, dtype=np.int64)
    begin = 0
    while begin < len(tiles):
        stop, entries = begin, 0
        while stop < len(tiles) and (stop == begin or entries + tiles[stop].page < group_entries):
            entries += tiles[stop].page + 1
            stop += 1
        members = tiles[begin:stop]
        rows = _rows_of(members, tile_rows, page_size, begin * tile_rows, take)
        chunks = _chunks(members, (page_size, tile_rows, first_key), device)
        groups.append(Group(torch.from_numpy(rows).to(device), chunks))
        begin = stop
    return PageWalk(tuple(groups), torch.from_numpy(take).to(device), tile_rows)


def _tiles(span: Span, index: int, page_size: int, tile_rows: int) -> list[_Tile]:
    if tile_rows < page_size:
        firsts = range(span.start, span.end, tile_rows)
        lasts = [min(first + tile_rows, span.end) - 1 for first in firsts]
        return [_Tile(span, index, b // page_size, a) for a, b in zip(firsts, lasts, strict=True)]
    pages = range(span.start // page_size, (span.end - 1) // page_size + 1)
    return [_Tile(span, index, page, page * page_size) for page in pages]


def _rows_of(tiles: Sequence[_Tile], tile_rows: int, page_size: int, base: int, take: Ints) -> Ints:
    """Batch rows of the tiles [tiles, tile_rows]; places without a row repeat row 0. Fills take."""
    rows = np.zeros((len(tiles), tile_rows), dtype=np.int64)
    for number, tile in enumerate(tiles):
        span = tile.span
        low = max(span.start, tile.first_position)
        high = min(span.end, tile.first_position + tile_rows)
        places = np.arange(low, high) - tile.first_position
        batch_rows = np.arange(low, high) - span.start + span.first_row
        rows[number, places] = batch_rows
        take[batch_rows] = base + number * tile_rows + places
    return rows


def _chunks(
    tiles: Sequence[_Tile], shape: tuple[int, int, int], device: torch.device
) -> tuple[Chunk, ...]:
    per_tile = np.array([tile.page + 1 for tile in tiles])
    counts = [int((per_tile > j).sum()) for j in range(int(per_tile[0]))]
    chunks: list[Chunk] = []
    first = 0
    while first < len(counts):
        last, total = first, 0
        while last < len(counts) and (last == first or total + counts[last] <= MAX_ENTRIES):
            total += counts[last]
            last += 1
        chunks.append(_chunk(tiles, shape, range(first, last), counts[first:last], device))
        first = last
    return tuple(chunks)


def _chunk(
    tiles: Sequence[_Tile],
    shape: tuple[int, int, int],
    indices: range,
    counts: Sequence[int],
    device: torch.device,
) -> Chunk:
    page_size, tile_rows, first_key = shape
    tile_of = np.concatenate([np.arange(count) for count in counts])
    index_of = np.repeat(np.arange(indices.start, indices.stop), counts)
    pages = np.array(
        [tiles[t].span.page_table[j] for t, j in zip(tile_of, index_of, strict=True)], np.int64
    )
    span_of = np.array([tile.span_index for tile in tiles])[tile_of]
    _, distinct, same = np.unique(
        span_of * (indices.stop + 1) + index_of, return_index=True, return_inverse=True
    )
    first_row = np.array([tile.first_position for tile in tiles])[tile_of]
    # The last position of the tile that the batch really holds: no row sees a key beyond it.
    last_row = np.array([min(t.span.end, t.first_position + tile_rows) - 1 for t in tiles])
    key = index_of[:, None] * page_size + np.arange(page_size)[None, :]
    row = first_row[:, None] + np.arange(tile_rows)[None, :]
    masked = (key[:, None, :] > row[:, :, None]) | (key < first_key)[:, None, :]
    dead = (key > last_row[tile_of][:, None]) | (key < first_key)
    home_page = np.array([tile.span.page_table[first_key // page_size] for tile in tiles])[tile_of]
    slots = np.broadcast_to(np.arange(page_size)[None, :], key.shape)

    def tensor(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return Chunk(
        tiles=tensor(tile_of),
        pages=tensor(np.where(dead, home_page[:, None], pages[:, None])),
        slots=tensor(np.where(dead, first_key % page_size, slots)),
        distinct=tensor(distinct),
        same=tensor(same.reshape(-1)),
        masked=tensor(masked),
        counts=tuple(counts),
    )

"""Cutting a batch into two microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.model.batch import Batch, SequenceSlice


def split_batch(batch: Batch) -> tuple[Batch, Batch] | None:
    """Two batches of nearly as many rows, which together are `batch`, in its order.

    Cuts between sequences where that is even enough, else inside of one. None if the batch has one
    row only, is one tree, or if rows before the cut would read latents that rows behind it write:
    then it has to run as a whole.
    """
    cut = _cut(batch.slices)
    if cut is None:
        return None
    first: list[SequenceSlice] = []
    second: list[SequenceSlice] = []
    at = 0
    for item in batch.slices:
        rows = item.end - item.start
        if at + rows <= cut:
            first.append(item)
        elif at >= cut:
            second.append(item)
        else:
            middle = item.start + cut - at
            first.append(_part(item, item.start, middle))
            second.append(_part(item, middle, item.end))
        at += rows
    if reads_ahead(first, second, batch.page_size):
        return None
    tokens = batch.host_tokens.tolist()
    return (
        _build(first, tokens[:cut], batch),
        _build(second, tokens[cut:], batch),
    )


def split_rows(batch: Batch, most: int) -> list[Batch]:
    """Batches of at most `most` rows, to be computed one after another; together they are `batch`.

    Raises:
        ValueError: a tree has more rows.
    """
    parts: list[list[SequenceSlice]] = [[]]
    room = most
    for item in batch.slices:
        at = item.start
        while at < item.end:
            if not room or (item.parents is not None and room < item.end - item.start):
                parts.append([])
                room = most
            end = min(item.end, at + room)
            if item.parents is not None and end < item.end:
                raise ValueError(f"a tree of {item.end - item.start} rows is more than {most}")
            parts[-1].append(item if (at, end) == (item.start, item.end) else _part(item, at, end))
            room -= end - at
            at = end
    found, begin, tokens = [], 0, batch.host_tokens.tolist()
    for slices in parts:
        count = sum(item.end - item.start for item in slices)
        found.append(_build(slices, tokens[begin : begin + count], batch))
        begin += count
    return found


def _cut(slices: Sequence[SequenceSlice]) -> int | None:
    """The number of rows in the first microbatch."""
    total = sum(item.end - item.start for item in slices)
    half = (total + 1) // 2
    bounds: list[int] = []
    at, inside = 0, False
    for item in slices:
        end = at + item.end - item.start
        inside |= at < half < end and item.parents is None
        at = end
        bounds.append(end)
    bounds = [bound for bound in bounds if bound < total]
    best = min(bounds, key=lambda bound: abs(bound - half), default=None)
    if best is not None and (not inside or abs(best - half) * 8 <= total):
        return best
    return half if inside and half < total else best


def _part(item: SequenceSlice, start: int, end: int) -> SequenceSlice:
    return SequenceSlice(item.page_table, start, end, item.write_from, form=item.form)


def _build(slices: Sequence[SequenceSlice], tokens: Sequence[int], batch: Batch) -> Batch:
    rows, at = [], 0
    for item in slices:
        end = at + item.end - item.start
        rows.append(tokens[at:end])
        at = end
    return Batch.build(slices, rows, batch.page_size, batch.device)


def reads_ahead(
    first: Sequence[SequenceSlice], second: Sequence[SequenceSlice], page_size: int
) -> bool:
    """Whether a slot that `second` writes is one that `first` may read."""
    written: dict[int, int] = {}
    for item in second:
        for position in _page_starts(max(item.start, item.write_from), item.end, page_size):
            page, slot = item.page_table[position // page_size], position % page_size
            written[page] = min(slot, written.get(page, page_size))
    for item in first:
        for position in _page_starts(0, item.end, page_size):
            page = item.page_table[position // page_size]
            read = min(item.end - position, page_size)
            if written.get(page, page_size) < read:
                return True
    return False


def _page_starts(start: int, end: int, page_size: int) -> list[int]:
    """The first of the positions start..end-1 in each page that they touch."""
    return [p for p in [start] if start < end] + list(
        range((start // page_size + 1) * page_size, end, page_size)
    )

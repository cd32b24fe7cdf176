"""The rows of one step as a device's attention takes them. Planned on the host, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdmesh.kernels.page_walk import PageWalk
from pdmesh.model.batch import Batch, Form, SequenceSlice
from pdmesh.model.config import ModelConfig

MOST_KEYS = 1 << 14
"""Keys of all heads that are projected at once in MHA form, by `heads_at_once` fewer heads of a
sequence that has more: with 128 heads of (192 + 256) bfloat16 1.9 GB, however long a prompt is."""
HEADS = 128
"""Of DeepSeek-V3, whose keys `MOST_KEYS` counts."""


def heads_at_once(config: ModelConfig, keys: int) -> int:
    """Heads whose keys and values are there at a time in MHA form: all of them, or such a part of
    these, halved as often as it takes, that no more than `MOST_KEYS` x `HEADS` are."""
    heads, per_head = config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim
    while keys * heads > MOST_KEYS * HEADS and not heads % 2 and not (heads // 2 * per_head) % 128:
        heads //= 2
    return heads


@dataclass(frozen=True)
class Paged:
    """Rows in absorbed form, `count` for each sequence.

    Attributes:
        page_table: [n, pages] int32.
        lengths: [n] int32, keys of each sequence up to its last row.
        plan: what the backend of attention planned for all layers.
    """

    count: int
    page_table: Tensor
    lengths: Tensor
    plan: Any = None


@dataclass(frozen=True)
class Ragged:
    """Rows in MHA form, sequence after sequence.

    Attributes:
        query_ends, key_ends: [n + 1] int32.
        slots: [s] int64, flat layer-0 rows of all keys.
        host_ends: both ends on the host.
        plan: as of `Paged`.
    """

    query_ends: Tensor
    key_ends: Tensor
    slots: Tensor
    host_ends: tuple[Tensor, Tensor]
    plan: Any = None


@dataclass(frozen=True)
class Walked:
    """Rows in absorbed form that are nodes of trees."""

    walk: PageWalk


Attention = Paged | Ragged | Walked


@dataclass(frozen=True)
class Part:
    """Rows [r] int64 of the step (None: all of them, in order), and their attention."""

    rows: Tensor | None
    attention: Attention


@dataclass(frozen=True)
class DeviceStep:
    """One batch over one pool.

    Attributes:
        tokens, positions: [m] int64.
        slots: [m] int64, flat layer-0 rows of the pool; -1: not written.
        num_rows: [1] int32, the rows before padding; None if there is none.
        first_key: position of the first key.
        parts: together all rows.
        merge: [m] int64, where each row stands in the concatenated parts; None if there is one.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    num_rows: Tensor | None
    first_key: int
    parts: tuple[Part, ...]
    merge: Tensor | None


def plan_step(batch: Batch, form: Form, num_layers: int, first_key: int) -> DeviceStep:
    """The step of any batch.

    Raises:
        ValueError: a tree in MHA form.
    """
    device = batch.device
    forms = [item.form or form for item in batch.slices]
    starts = np.cumsum([0] + [item.end - item.start for item in batch.slices])
    trees = [item.parents is not None for item in batch.slices]
    if any(tree and which == "mha" for tree, which in zip(trees, forms, strict=True)):
        raise ValueError("a tree of drafts is computed in absorbed form only")
    parts: list[Part] = []
    orders: list[NDArray[np.int64]] = []

    def add(chosen: Sequence[int], attention: Attention) -> None:
        order = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
        whole = len(order) == batch.num_rows
        parts.append(Part(None if whole else torch.from_numpy(order).to(device), attention))
        orders.append(order)

    absorbed = [i for i, which in enumerate(forms) if which == "absorbed"]
    if any(trees[i] for i in absorbed):
        walk = next(p.walk for p in batch.attention(form, first_key) if p.form == "absorbed")
        add(absorbed, Walked(walk))
    else:
        counts = {i: batch.slices[i].end - batch.slices[i].start for i in absorbed}
        for count in sorted(set(counts.values())):
            chosen = [i for i in absorbed if counts[i] == count]
            add(chosen, _paged([batch.slices[i] for i in chosen], count, device))
    for chosen in _within_keys(batch, [i for i, f in enumerate(forms) if f == "mha"]):
        items = [batch.slices[i] for i in chosen]
        add(chosen, _ragged(items, batch.page_size, num_layers, first_key, device))
    merge = None
    if len(parts) > 1:
        merge = torch.from_numpy(np.argsort(np.concatenate(orders))).to(device)
    slots = torch.from_numpy(slots_of(batch, num_layers)).to(device)
    return DeviceStep(batch.tokens, batch.positions, slots, None, first_key, tuple(parts), merge)


def halved(step: DeviceStep, cut: int) -> tuple[DeviceStep, DeviceStep]:
    """A step of `Paged` rows alone, cut behind its first `cut` sequences; both share its memory.

    Which of their rows are padding is the step's own affair: see `padding_of_halves`.
    """
    (part,) = step.parts
    paged = part.attention
    assert isinstance(paged, Paged)
    rows = cut * paged.count

    def piece(at: slice, sequences: slice) -> DeviceStep:
        attention = Paged(paged.count, paged.page_table[sequences], paged.lengths[sequences])
        where = (step.tokens[at], step.positions[at], step.slots[at])
        return DeviceStep(*where, step.num_rows, step.first_key, (Part(None, attention),), None)

    return piece(slice(None, rows), slice(None, cut)), piece(slice(rows, None), slice(cut, None))


def padding_of_halves(whole: DeviceStep, cut: int) -> tuple[Tensor | None, Tensor | None]:
    """How many rows [1] of a step's first `cut` ones, and of the others, are no padding."""
    if whole.num_rows is None:
        return None, None
    return whole.num_rows.clamp(max=cut), (whole.num_rows - cut).clamp(min=0)


def slots_of(batch: Batch, num_layers: int) -> NDArray[np.int64]:
    """The flat layer-0 row of the pool that each row is written to, -1 for none: [m]."""
    pieces = []
    for item in batch.slices:
        at = np.arange(item.start, item.end)
        slots = _flat(item, at, batch.page_size, num_layers)
        slots[: max(0, item.write_from - item.start)] = -1
        pieces.append(slots)
    return np.concatenate(pieces)


def _flat(
    item: SequenceSlice, at: NDArray[np.int64], page_size: int, num_layers: int
) -> NDArray[np.int64]:
    pages = np.asarray(item.page_table, np.int64)[at // page_size]
    return pages * (num_layers * page_size) + at % page_size


def _within_keys(batch: Batch, chosen: Sequence[int]) -> list[list[int]]:
    """Sequences in groups of at most MOST_KEYS keys."""
    groups: list[list[int]] = []
    keys = 0
    for index in chosen:
        count = batch.slices[index].end
        if not groups or keys + count > MOST_KEYS:
            groups.append([])
            keys = 0
        groups[-1].append(index)
        keys += count
    return groups


def page_tables(items: Sequence[SequenceSlice], columns: int) -> NDArray[np.int32]:
    """The pages of each sequence [n, columns], zeros behind its last one."""
    table = np.zeros((len(items), columns), np.int32)
    for row, item in zip(table, items, strict=True):
        held = _page_row(item.page_table)[:columns]
        row[: len(held)] = held
    return table


@lru_cache(8192)
def _page_row(pages: tuple[int, ...]) -> NDArray[np.int32]:
    """A sequence's pages as an array: they change once in many steps."""
    return np.asarray(pages, np.int32)


def _paged(items: Sequence[SequenceSlice], count: int, device: torch.device) -> Paged:
    table = page_tables(items, max(len(item.page_table) for item in items))
    lengths = np.array([item.end for item in items], np.int32)
    return Paged(count, torch.from_numpy(table).to(device), torch.from_numpy(lengths).to(device))


def _ragged(
    items: Sequence[SequenceSlice],
    page_size: int,
    num_layers: int,
    first_key: int,
    device: torch.device,
) -> Ragged:
    keys = [np.arange(first_key, item.end) for item in items]
    slots = [_flat(item, at, page_size, num_layers) for item, at in zip(items, keys, strict=True)]
    ends = np.zeros((2, len(items) + 1), np.int32)
    ends[0, 1:] = np.cumsum([item.end - item.start for item in items])
    ends[1, 1:] = np.cumsum([len(at) for at in keys])
    host = torch.from_numpy(ends)
    both = host.to(device)
    flat = torch.from_numpy(np.concatenate(slots)).to(device)
    return Ragged(both[0], both[1], flat, (host[0], host[1]))

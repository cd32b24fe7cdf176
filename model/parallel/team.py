"""Tensor parallelism between processes: one worker has the batch, its whole group computes it.

The *leader* of a TP group is its first rank: the worker that requests go to, with the pages that
others send to and read from. The *followers* have a pool of their own and no request. Before a step
the leader tells them its batch, and what pages of it they lack. Which these are it does not have to
be told by whatever changes a page (an arrival, a pull, a move, a draft that was accepted): it keeps
a copy of what the followers have, and compares what the step will read with that.

Where a member of the group is not there, the leader computes all heads by itself, and the followers
that are left serve their experts. In exact arithmetic no bit depends on that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import torch
from torch import Tensor

from pdmesh.model.batch import Batch, Form, SequenceSlice
from pdmesh.model.parallel.exchange import Channel, Transport
from pdmesh.model.parallel.groups import Groups

TEAM = "team"
"""Channel of what a leader tells its followers before a step."""
_compare = ctypes.CDLL(None).memcmp
"""Of the C library: 0 where so many bytes at two addresses are the same."""
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_Slice = tuple[
    tuple[int, ...], int, int, int, tuple[int, ...] | None, Form | None
]  # as in SequenceSlice


class _Header(msgspec.Struct, frozen=True, array_like=True):
    slices: list[_Slice]
    page_size: int
    form: Form
    pool: tuple[int, int, int, int]


@dataclass(frozen=True)
class Rows:
    """What a TP group computes in a step, over one member's pool.

    Attributes:
        batch, latents, form: as in `DeepseekV3.forward`.
        previous: of the MTP layer, [T, hidden]; None for the main model.
    """

    batch: Batch
    latents: Tensor
    form: Form
    previous: Tensor | None = None


class Team:
    """One rank's part of its TP group.

    Args:
        groups: of all ranks.
        transport: how messages go.
        losses: how often a rank has been lost so far; what it had is forgotten then.
    """

    def __init__(self, groups: Groups, transport: Transport, losses: Callable[[int], int]) -> None:
        rank = transport.rank
        self.ranks = groups.tp_group(groups.coordinates(rank).dp)
        self.leads = rank == self.ranks[0]
        self._transport = transport
        self._losses = losses
        self._followers = [r for r in self.ranks if r != self.ranks[0]]
        self._lost: list[int] = []
        self._known = _Known()
        self._pool: Tensor | None = None

    def whole(self, members: Sequence[int]) -> bool:
        """Whether heads are shared in a step of these ranks."""
        return len(self.ranks) > 1 and set(self.ranks) <= set(members)

    def share(self, step: int, members: Sequence[int], rows: Rows | None) -> Rows | None:
        """What this rank computes in a step: the own rows of a leader, those of its leader else.

        Raises:
            RankLost: the leader did not say.
        """
        if not self.whole(members):
            return rows
        channel = Channel(TEAM, step, -1, -1)
        if not self.leads:
            return self._told(self._transport.take(self.ranks[0], channel))
        message: tuple[Tensor, ...] = ()
        if rows is not None:
            losses = [self._losses(rank) for rank in self._followers]
            if losses != self._lost:
                self._known, self._lost = _Known(), losses
            message = self._message(rows)
        for rank in self._followers:
            self._transport.post(rank, channel, message)
        return rows

    def computed(self, rows: Rows, layers: range) -> None:
        """A step of these rows is over: every member has written their latents of `layers`."""
        if self.leads and self._known.pool is not None:
            self._known.written(rows, layers)

    def failed(self, rows: Rows) -> None:
        """A step of these rows broke off: nobody knows what the followers have of their pages."""
        self._known.forget(rows)

    def _message(self, rows: Rows) -> tuple[Tensor, ...]:
        batch, pool = rows.batch, rows.latents
        slices = [
            (s.page_table, s.start, s.end, s.write_from, s.parents, s.form) for s in batch.slices
        ]
        shape = cast("tuple[int, int, int, int]", tuple(pool.shape))
        header = msgspec.msgpack.encode(_Header(slices, batch.page_size, rows.form, shape))
        lacking = self._known.lacking(rows)
        told = (
            torch.frombuffer(bytearray(header), dtype=torch.uint8),
            batch.tokens,
            lacking,
            pool.index_select(0, lacking.to(pool.device)),
        )
        return told if rows.previous is None else (*told, rows.previous)

    def _told(self, message: tuple[Tensor, ...]) -> Rows | None:
        if not message:
            return None
        packed, tokens, ids, pages, *previous = message
        header = msgspec.msgpack.decode(packed.numpy().tobytes(), type=_Header)
        pool = self._pool
        if pool is None or tuple(pool.shape) != header.pool or pool.dtype != pages.dtype:
            pool = self._pool = torch.zeros(header.pool, dtype=pages.dtype)
        pool.index_copy_(0, ids, pages)
        slices = [SequenceSlice(*item) for item in header.slices]
        sizes = [item.end - item.start for item in slices]
        parts = [part.tolist() for part in torch.split(tokens, sizes)]
        batch = Batch.build(slices, parts, header.page_size)
        return Rows(batch, pool, header.form, previous[0] if previous else None)


class _Known:
    """What a leader knows that its followers have.

    Attributes:
        pool: a copy of theirs, as far as pages are `known`.
    """

    def __init__(self) -> None:
        self.pool: Tensor | None = None
        self._known: set[int] = set()

    def lacking(self, rows: Rows) -> Tensor:
        """The pages [k] int64 of which a step of these rows will read what the followers lack.

        From now on they have them.
        """
        latents = rows.latents
        if self.pool is None or self.pool.shape != latents.shape:
            self.pool = torch.zeros_like(latents)
            self._known.clear()
        found = [
            page
            for page, upto in _read(rows.batch).items()
            if not (page in self._known and _same(latents[page], self.pool[page], upto))
        ]
        lacking = torch.tensor(found, dtype=torch.int64)
        self.pool[lacking] = latents[lacking]
        self._known.update(found)
        return lacking

    def written(self, rows: Rows, layers: range) -> None:
        """The followers have written the latents of these rows as the leader has."""
        assert self.pool is not None
        latents = rows.latents
        size = latents.shape[1] * latents.shape[2]
        flat = rows.batch.writes(latents.shape[1])[1]
        pages, slots = flat // size, flat % size
        at = slice(layers.start, layers.stop)
        self.pool[pages, at, slots] = latents[pages, at, slots]

    def forget(self, rows: Rows) -> None:
        """The followers may have anything in the pages of these rows."""
        if self.pool is not None:
            for item in rows.batch.slices:
                self._known.difference_update(item.page_table)


def _same(left: Tensor, right: Tensor, upto: int) -> bool:
    """Whether two pages [layers, slots, width] have the same bits in their slots below `upto`."""
    if left.device.type != "cpu" or not (left.is_contiguous() and right.is_contiguous()):
        parts = (page[:, :upto].contiguous().view(torch.uint8) for page in (left, right))
        return torch.equal(*parts)
    if upto == left.shape[1]:
        return not _compare(left.data_ptr(), right.data_ptr(), left.nbytes)
    layer, size = left[0].nbytes, left[0, :upto].nbytes
    starts = range(0, left.nbytes, layer)
    one, other = left.data_ptr(), right.data_ptr()
    return not any(_compare(one + at, other + at, size) for at in starts)


def _read(batch: Batch) -> dict[int, int]:
    """The pages whose slots a step reads before it writes them, and how many slots of each."""
    size, found = batch.page_size, dict[int, int]()
    for item in batch.slices:
        end = max(item.start, min(item.write_from, item.end))
        for index in range(-(-end // size)):
            page = item.page_table[index]
            found[page] = max(found.get(page, 0), min(size, end - index * size))
    return found

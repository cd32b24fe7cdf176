"""Expert parallelism over any transport of messages between ranks.

A rank sends each of the others one message in a dispatch, empty if it has no row for it: every row
once, however many of that rank's experts it is for, and for each (row, expert) pair the number of
its row in the message and the expert's slot. Back comes one output a pair, from those ranks only
that got any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.kernels.moe import weighted_sum
from pdmesh.model.parallel.exchange import (
    Channel,
    CombineHandle,
    DispatchHandle,
    Message,
    Received,
    ReceivedRows,
    Transport,
    WireBytes,
)
from pdmesh.model.parallel.payload import WireFormat
from pdmesh.model.parallel.replicas import ReplicaTable

NOTHING: Message = ()
"""The message of a rank that has no row for its receiver."""


@dataclass(frozen=True)
class _Dispatched:
    """`order` [n * k]: the choices of the own rows as they were sent; `counts` of them a rank."""

    channel: Channel
    rows: Tensor
    shape: torch.Size
    order: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class _Combined:
    channel: Channel
    dispatched: _Dispatched


class MessageExperts:
    """The `ExpertParallel` of one rank over `transport`.

    Args:
        transport: how messages go.
        peers: the ranks that take part, this one included, in ascending order.
        tables: where the experts are, for each MoE layer.
        wire: how rows travel.
    """

    def __init__(
        self,
        transport: Transport,
        peers: Sequence[int],
        tables: Sequence[ReplicaTable],
        wire: WireFormat = WireFormat(),  # noqa: B008 - it is immutable
    ) -> None:
        self._transport = transport
        self._peers = tuple(peers)
        self._tables = tuple(tables)
        self._wire = wire
        self.sent = WireBytes()

    def dispatch_send(
        self, channel: Channel, moe_layer: int, rows: Tensor, ids: Tensor
    ) -> DispatchHandle:
        """See `ExpertParallel`."""
        ranks, slots = self._tables[moe_layer].choose(ids, self._transport.rank)
        flat = ranks.flatten()
        order = flat.argsort(stable=True)
        size = self._peers[-1] + 1
        counts = torch.bincount(flat, minlength=size)
        to, row = flat.index_select(0, order), order // ids.shape[1]
        # Choices of one row for one rank stand side by side now: they share a row of the message.
        fresh = torch.ones_like(row, dtype=torch.bool)
        fresh[1:] = (to[1:] != to[:-1]) | (row[1:] != row[:-1])
        number = fresh.cumsum(0) - 1
        distinct = torch.bincount(to[fresh], minlength=size)
        packed = self._wire.pack_rows(rows.index_select(0, row[fresh]))
        before = (distinct.cumsum(0) - distinct).index_select(0, to)
        pairs = torch.stack([number - before, slots.flatten().index_select(0, order)], 1).int()
        sizes, widths = counts.tolist(), distinct.tolist()
        at = first = 0
        for peer in self._peers:
            message = NOTHING
            if sizes[peer]:
                end, last = at + sizes[peer], first + widths[peer]
                message = (pairs[at:end], *(part[first:last] for part in packed))
                at, first = end, last
            self._post(peer, channel, message)
        return _Dispatched(channel, rows, ids.shape, order, tuple(sizes))

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        """See `ExpertParallel`."""
        assert isinstance(handle, _Dispatched)
        channel, rows = handle.channel, handle.rows
        messages = [self._transport.take(peer, channel) for peer in self._peers]
        filled = [message for message in messages if message]
        counts = tuple(message[0].shape[0] if message else 0 for message in messages)
        if not filled:
            empty = torch.empty((0, 1), dtype=torch.int64, device=rows.device)
            return ReceivedRows(rows.new_empty((0, rows.shape[1])), empty, channel, counts)
        begin, index = 0, []
        for pairs, *packed in filled:
            index.append(pairs[:, 0].long() + begin)
            begin += packed[0].shape[0]
        packed = [torch.cat(tensors) for tensors in zip(*(m[1:] for m in filled), strict=True)]
        arrived = self._wire.unpack_rows(tuple(packed), rows.dtype)
        slots = torch.cat([message[0][:, 1:] for message in filled]).long()
        return ReceivedRows(arrived.index_select(0, torch.cat(index)), slots, channel, counts)

    def combine_send(
        self, handle: DispatchHandle, received: Received, outputs: Tensor
    ) -> CombineHandle:
        """See `ExpertParallel`."""
        assert isinstance(handle, _Dispatched)
        assert isinstance(received, ReceivedRows)
        channel = handle.channel._replace(kind="combine")
        packed, at = self._wire.pack_outputs(outputs[:, 0]), 0
        for peer, count in zip(self._peers, received.counts, strict=True):
            if count:
                self._post(peer, channel, (packed[at : at + count],))
                at += count
        return _Combined(channel, handle)

    def combine_recv(
        self, handle: CombineHandle, weights: Tensor, plus: Tensor | None = None
    ) -> Tensor:
        """See `ExpertParallel`."""
        assert isinstance(handle, _Combined)
        sent, rows = handle.dispatched, handle.dispatched.rows
        parts = [
            self._transport.take(rank, handle.channel)[0]
            for rank, count in enumerate(sent.counts)
            if count
        ]
        if not parts:
            return rows.new_empty((0, rows.shape[1]))
        outputs = rows.new_empty((sent.order.shape[0], rows.shape[1]))
        outputs.index_copy_(0, sent.order, torch.cat(parts).to(rows.dtype))
        return weighted_sum(outputs.view(*sent.shape, -1), weights, plus)

    def _post(self, peer: int, channel: Channel, message: Message) -> None:
        if peer != self._transport.rank:
            self.sent.add(peer, channel.kind, message)
        self._transport.post(peer, channel, message)

"""Expert parallelism of one rank: every expert is here and nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.kernels.moe import weighted_sum
from pdmesh.model.parallel.exchange import (
    Channel,
    CombineHandle,
    DispatchHandle,
    Received,
    ReceivedRows,
    WireBytes,
)
from pdmesh.model.parallel.payload import WireFormat


@dataclass(frozen=True)
class _Dispatched:
    channel: Channel
    rows: Tensor
    ids: Tensor


@dataclass(frozen=True)
class _Combined:
    channel: Channel
    outputs: Tensor
    dtype: torch.dtype


class LocalExperts:
    """The `ExpertParallel` of EP1; slot e of the rank holds expert e."""

    def __init__(self, wire: WireFormat = WireFormat()) -> None:  # noqa: B008 - it is immutable
        self._wire = wire
        self.sent = WireBytes()

    def dispatch_send(
        self, channel: Channel, moe_layer: int, rows: Tensor, ids: Tensor
    ) -> DispatchHandle:
        """See `ExpertParallel`."""
        packed = self._wire.pack_rows(rows)
        return _Dispatched(channel, self._wire.unpack_rows(packed, rows.dtype), ids)

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        """See `ExpertParallel`."""
        assert isinstance(handle, _Dispatched)
        counts = (handle.rows.shape[0],)
        return ReceivedRows(handle.rows, handle.ids, handle.channel, counts)

    def combine_send(
        self, handle: DispatchHandle, received: Received, outputs: Tensor
    ) -> CombineHandle:
        """See `ExpertParallel`."""
        assert isinstance(received, ReceivedRows)
        return _Combined(received.channel, self._wire.pack_outputs(outputs), received.rows.dtype)

    def combine_recv(
        self, handle: CombineHandle, weights: Tensor, plus: Tensor | None = None
    ) -> Tensor:
        """See `ExpertParallel`."""
        assert isinstance(handle, _Combined)
        return weighted_sum(handle.outputs.to(handle.dtype), weights, plus)

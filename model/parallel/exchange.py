"""Dispatch and combine: the interface that every backend of expert parallelism has.

Each collective is a send and a receive, so that something else can be computed in between. A rank
sends what it has: any number of rows, none included, known to nobody beforehand. The weighted sum
over a token's experts is taken at the token's home rank, in the order of its choices, so where an
expert stands cannot change a bit of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from pdmesh.kernels.moe import expert_outputs
from pdmesh.wire.errors import WorkerLost

Message = tuple[Tensor, ...]


class RankLost(WorkerLost):
    """A rank that did not send what it had to; `rank` says which."""

    def __init__(self, rank: int, missing: str) -> None:
        super().__init__(f"rank {rank} is lost: {missing} did not come from it")
        self.rank = rank


class Channel(NamedTuple):
    """Which exchange a message belongs to: there is one message a pair of ranks in each.

    Attributes:
        kind: "dispatch", "combine", or one of tensor parallelism's.
        step: number of the forward pass; a late message of an earlier one belongs to no other.
        layer, microbatch: as in the schedule.
    """

    kind: str
    step: int
    layer: int
    microbatch: int

    def __str__(self) -> str:
        part = "" if self.microbatch < 0 else f", microbatch {self.microbatch}"
        return f"{self.kind} of layer {self.layer}{part} in step {self.step}"


class Transport(Protocol):
    """Messages between ranks; what a gloo backend has to bring."""

    @property
    def rank(self) -> int:
        """The own number."""

    def post(self, to: int, channel: Channel, message: Message) -> None:
        """Send without waiting; `to` may be the own rank."""

    def take(self, source: int, channel: Channel) -> Message:
        """Wait for the message of `source`.

        Raises:
            RankLost: it will not come.
        """


class WireBytes:
    """Bytes that a rank has sent, by peer and kind of exchange; to itself it sends nothing."""

    def __init__(self) -> None:
        self.all = 0
        """Of all kinds to all peers; may be read on any thread."""
        self._sent: Counter[tuple[int, str]] = Counter()

    def add(self, peer: int, kind: str, message: Message) -> None:
        """Count a message."""
        if message:
            self.count(peer, kind, sum(tensor.nbytes for tensor in message))

    def count(self, peer: int, kind: str, size: int) -> None:
        """Count `size` bytes."""
        self._sent[peer, kind] += size
        self.all += size

    def by_peer(self, kind: str | None = None) -> dict[int, int]:
        """Bytes to each peer, of all kinds or one."""
        found: Counter[int] = Counter()
        for (peer, which), size in self._sent.items():
            if kind in (None, which):
                found[peer] += size
        return dict(sorted(found.items()))

    def total(self, kind: str | None = None) -> int:
        """Bytes to all peers."""
        return sum(self.by_peer(kind).values())


class Received(Protocol):
    """Rows at the experts of a rank, in whatever layout the backend has them."""

    @property
    def channel(self) -> Channel:
        """The dispatch that they came by."""

    def outputs(self, gate_up: Tensor, down: Tensor) -> Tensor:
        """What the rank's experts make of them, in the layout that the backend sends back.

        gate_up [slots, 2 i, h] and down [slots, h, i]. A result depends on its row and expert only.
        """


@dataclass(frozen=True)
class ReceivedRows:
    """Rows as a plain matrix.

    Attributes:
        rows: [p, h].
        slots: [p, j] int64, the slots of this rank whose experts a row is for.
        channel: the dispatch that they came by.
        counts: rows from each rank, in order.
    """

    rows: Tensor
    slots: Tensor
    channel: Channel
    counts: tuple[int, ...]

    def outputs(self, gate_up: Tensor, down: Tensor) -> Tensor:
        """See `Received`: [p, j, h]."""
        if not self.rows.shape[0]:
            return self.rows.new_empty((*self.slots.shape, self.rows.shape[1]))
        return expert_outputs(self.rows, self.slots, gate_up, down)


class DispatchHandle(Protocol):
    """A dispatch that has been sent."""

    @property
    def channel(self) -> Channel:
        """Which."""


class CombineHandle(Protocol):
    """A combine whose own part has been sent."""

    @property
    def channel(self) -> Channel:
        """Which."""


class ExpertParallel(Protocol):
    """One rank's end of the all-to-all, for all layers.

    Calls of one microbatch and layer come in the order of the methods; those of two microbatches
    may interleave.
    """

    @property
    def sent(self) -> WireBytes:
        """What this rank has sent."""

    def dispatch_send(
        self, channel: Channel, moe_layer: int, rows: Tensor, ids: Tensor
    ) -> DispatchHandle:
        """Send every row to the ranks of its experts.

        Args:
            channel: a number for this exchange that all ranks give it.
            moe_layer: which layer of the placement.
            rows: [n, h], the rows that this rank is home to; n may be 0.
            ids: [n, k] int64, the logical experts of each.
        """

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        """Wait for the rows that all ranks sent here.

        Raises:
            RankLost: a rank did not send.
        """

    def combine_send(
        self, handle: DispatchHandle, received: Received, outputs: Tensor
    ) -> CombineHandle:
        """Send what `received.outputs` gave back to the rows' homes."""

    def combine_recv(
        self, handle: CombineHandle, weights: Tensor, plus: Tensor | None = None
    ) -> Tensor:
        """Wait for the outputs of the own rows and add them up: [n, h] in the rows' dtype.

        weights [n, k] float32, as `ids` were. `plus` [n, h] in the rows' dtype, what the shared
        experts gave, is added to the sum.

        Raises:
            RankLost: a rank did not send.
        """

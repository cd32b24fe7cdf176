"""Exchanges within a tensor-parallel group: every member is home to a share of the group's rows.

Attention gives each member all rows of some heads. In exact arithmetic a row's heads are brought
together at its home, and o_proj is the product that a single rank takes. In fast arithmetic each
member multiplies its heads by its part of o_proj, and the home adds the parts up in the order of
the ranks, in float32. After the feed-forward part all rows go back to every member.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pdmesh.model.parallel.exchange import Channel, Transport, WireBytes
from pdmesh.model.parallel.groups import share


class TensorParallel:
    """One member's end; members are consecutive ranks."""

    def __init__(self, transport: Transport, members: Sequence[int]) -> None:
        self._transport = transport
        self._members = tuple(members)
        self._place = self._members.index(transport.rank)
        self.sent = WireBytes()

    @property
    def size(self) -> int:
        """TP."""
        return len(self._members)

    def own(self, num_rows: int) -> range:
        """The rows that this member is home to."""
        return share(num_rows, self.size, self._place)

    def scatter_send(self, channel: Channel, x: Tensor) -> None:
        """Send each member its rows of x [n, ...]."""
        for place, member in enumerate(self._members):
            rows = share(x.shape[0], self.size, place)
            self._post(member, channel, x[rows.start : rows.stop])

    def gather_send(self, channel: Channel, own: Tensor) -> None:
        """Send every member the own rows."""
        for member in self._members:
            self._post(member, channel, own)

    def receive(self, channel: Channel) -> list[Tensor]:
        """What the members sent, in order.

        Raises:
            RankLost: one did not.
        """
        return [self._transport.take(member, channel)[0] for member in self._members]

    def sum_received(self, channel: Channel) -> Tensor:
        """What the members sent, added up in order.

        Raises:
            RankLost: one did not send.
        """
        first, *others = self.receive(channel)
        for part in others:
            first = first + part
        return first

    def _post(self, member: int, channel: Channel, x: Tensor) -> None:
        if member != self._transport.rank:
            self.sent.add(member, channel.kind, (x,))
        self._transport.post(member, channel, (x,))

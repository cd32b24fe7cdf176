"""A lease of a decode worker: one answer's claim to pages, and the answers it arrives with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdmesh.decode.queue import Rank
from pdmesh.kvcache.reservation import Reservation
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.messages import ReserveRequest

if TYPE_CHECKING:
    from pdmesh.decode.sequence import DecodeSequence


@dataclass
class LeaseEntry:
    """A promise of pages to one answer of a request, from Reserve to Release.

    ``ended`` says why it was ended from outside, and is set once; the pages follow (``freed``)
    when no step touches them. It stays None where the sequence comes to its own end.
    """

    lease_id: str
    generation: int
    request: ReserveRequest
    reservation: Reservation
    """Until the prompt has arrived, that of the whole group."""
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    sequence: DecodeSequence | None = None
    streaming: bool = False
    ended: PdmeshError | None = None
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    answer: int = 0
    """0 for the lease itself, i for its i-th fork."""
    rank: Rank = field(default_factory=lambda: Rank(0.0))
    group: LeaseGroup | None = None


@dataclass(eq=False)
class LeaseGroup:
    """The answers of one request, and the transfer that all of them wait for.

    Attributes:
        transfer_id: lease id that the prefill worker writes under; that of the first answer,
            whether or not it is still wanted.
        reservation: holds the pages and promises of all until the prompt has arrived.
        members: answers not yet freed, in order.
        arrived: each member has a reservation of its own.
    """

    transfer_id: str
    reservation: Reservation
    members: list[LeaseEntry] = field(default_factory=list)
    arrived: bool = False

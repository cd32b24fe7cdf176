"""A lease of a decode worker: one answer's claim to pages, and the answers it arrives with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
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
    idle_s: float = math.inf
    """Longest time without a sign of whoever wants it, where that is less than the worker's."""
    deadline: float = 0.0
    """On the event loop's clock."""
    readers: int = 0
    """Transfers that read its pages; these are given back when none is left."""
    leaving: bool = False
    """It is over, and only its readers keep the pages."""
    on_freed: Callable[[], None] | None = None


@dataclass(eq=False)
class LeaseGroup:
    """The answers of one request, and the transfers that all of them wait for.

    Attributes:
        reservation: holds the pages and promises of all until the prompt has arrived.
        transfers: lease ids that others write under, each with its part of the page table. For a
            prompt it is one, that of the first answer, whether or not it is still wanted; for an
            answer taken over from another worker one a round.
        members: answers not yet freed, in order.
        arrived: each member has a reservation of its own.
    """

    reservation: Reservation
    transfers: dict[str, slice] = field(default_factory=dict)
    members: list[LeaseEntry] = field(default_factory=list)
    arrived: bool = False

    @property
    def transfer_id(self) -> str:
        """The lease id that the prefill worker writes under."""
        return next(iter(self.transfers))

"""One handoff as the router sees it, and what is left to do at its source after it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pdmesh.router.clients import RELEASE_TIMEOUT, DecodeClient
from pdmesh.router.leases import HeldLease
from pdmesh.router.silence import Watched
from pdmesh.wire.admin import MoveState
from pdmesh.wire.handoff import DecideRequest, StreamItem
from pdmesh.wire.messages import WorkerRecord


@dataclass
class Move:
    """One handoff of one answer, from its offer until it is known how it went."""

    number: int
    source: WorkerRecord
    target: WorkerRecord
    committed: bool = False
    state: MoveState = "moving"
    reason: str = ""
    pause_s: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """``state`` is final."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Committed or not."""


async def farewell(
    source: DecodeClient, lease: HeldLease, number: int, stream: Watched[StreamItem]
) -> None:
    """The source may forget an answer that was handed over."""
    request = DecideRequest(lease_id=lease.lease_id, handoff=number, committed=True)
    try:
        await source.decide(request)
    finally:
        await stream.aclose()
        await lease.release("moved", RELEASE_TIMEOUT)

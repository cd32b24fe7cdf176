"""What a target promises for a handoff, and what it knows of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pdmesh.decode.lease import LeaseEntry
from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.kvcache.manager import KvManager, Reservation
from pdmesh.kvtransfer.protocol.migration_target import TargetState
from pdmesh.wire.errors import Incompatible, InvalidRequest
from pdmesh.wire.handoff import Adoption, AdoptRequest, CapsuleMessage, RoundRequest
from pdmesh.wire.messages import Lease, ReserveRequest


@dataclass(eq=False)
class Adopted:
    """One handoff at its target.

    ``capsule`` is set once one has been taken; ``sequence`` once it has been rebuilt. ``settled``
    is set when the handoff is ready, or over.
    """

    entry: LeaseEntry
    answer: Adoption
    state: TargetState = field(default_factory=TargetState)
    rounds: dict[int, tuple[RoundRequest, Lease]] = field(default_factory=dict)
    capsule: CapsuleMessage | None = None
    sequence: DecodeSequence | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = "the handoff is over at the target"


def check_adoption(limits: DecodeLimits, request: AdoptRequest) -> None:
    """Refuses what can never be adopted here.

    Raises:
        Incompatible: the page formats differ.
        InvalidRequest: the numbers make no sense, or exceed the context.
    """
    if difference := limits.page_format.difference(request.page_format):
        raise Incompatible(
            f"decode workers {limits.instance} (here) and {request.source} (there)"
            f" differ: {difference}"
        )
    if request.num_tokens < 1 or request.max_tokens < 1:
        raise InvalidRequest("an answer that moves has tokens, and may get more")
    if request.num_tokens + request.max_tokens > limits.max_context:
        raise InvalidRequest(f"the answer exceeds the context of {limits.max_context} tokens")
    if len(request.hashes) > request.num_tokens // limits.page_format.page_size:
        raise InvalidRequest(f"{len(request.hashes)} page hashes for {request.num_tokens} tokens")


def reserve_adoption(
    kv: KvManager, limits: DecodeLimits, request: AdoptRequest
) -> Reservation | None:
    """Promises the pages; with stamps, only pages that are the very ones that were looked at."""
    total = limits.pages(request.num_tokens + request.max_tokens)
    hashes, stamps = request.hashes, list(request.stamps)
    if stamps:
        hashes = hashes[: kv.unchanged(hashes, stamps)]
    elif limits.page_format.arithmetic == "fast":
        hashes = ()  # the same hash may be owned by other bits
    reservation = kv.reserve(hashes, len(hashes), total)
    if reservation is None or not stamps:
        return reservation
    if kv.stamps(reservation.pages) == stamps[: reservation.matched]:
        return reservation
    reservation.release()  # another thread has just put others in their place
    return kv.reserve((), 0, total)


def as_reservation(request: AdoptRequest) -> ReserveRequest:
    """The promise as one of a prompt that ends where the answer stands."""
    return ReserveRequest(
        request_id=request.request_id,
        attempt=0,
        num_prompt_tokens=request.num_tokens,
        hashes=request.hashes,
        max_tokens=request.max_tokens,
        priority=request.priority,
        waited_ms=request.waited_ms,
        deadline_ms=request.deadline_ms,
    )

"""What workers say of themselves when they are asked, as a policy sees it."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.router.policy import Candidate
from pdmesh.wire.messages import WorkerRecord, WorkerStatus


@dataclass(frozen=True)
class Polled:
    """A worker's answer, and how many requests of ours were there when it was asked."""

    status: WorkerStatus
    own_requests: int


def seen_as(
    record: WorkerRecord, polled: Polled | None, *, own_requests: int, own_tokens: int
) -> Candidate:
    """A worker to a prompt of which it has nothing.

    Args:
        polled: its last answer, if it has given one.
        own_requests, own_tokens: this router's load there.
    """
    others, free, empty = 0, None, None
    if polled is not None:
        status = polled.status
        there = max(status.queued + status.running, status.leases)
        others = max(0, there - polled.own_requests)
        free, empty = status.pool.free + status.pool.cached, status.pool.free
    return Candidate(
        record=record,
        own_requests=own_requests,
        own_tokens=own_tokens,
        other_requests=others,
        free_pages=free,
        empty_pages=empty,
    )

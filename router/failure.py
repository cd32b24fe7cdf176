"""What a failure at a worker means for the request and for the worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdmesh.wire.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    LeaseGone,
    Overloaded,
    PdmeshError,
    Preempted,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from pdmesh.wire.messages import WorkerRecord


class AttemptFailed(Exception):
    """A worker failed a request that another worker may still serve."""

    def __init__(self, worker: WorkerRecord, error: PdmeshError, *, moving: bool = False) -> None:
        super().__init__(error.message)
        self.worker = worker
        self.error = error
        self.moving = moving
        """The answer had been handed over to the worker, which did not take it up."""

    @property
    def full(self) -> bool:
        """The worker is well but has no room."""
        return isinstance(self.error, Overloaded)

    @property
    def preempted(self) -> bool:
        """The worker is well and gave the pages to others; nothing went wrong."""
        return isinstance(self.error, Preempted)

    @property
    def draining(self) -> bool:
        """The worker is well but takes nothing new."""
        return isinstance(self.error, Draining)

    @property
    def broken(self) -> bool:
        """Something went wrong with the request, and not only with moving it."""
        return not (self.full or self.preempted or self.draining or self.moving)

    @property
    def suspect(self) -> bool:
        """The fault may have been another worker's."""
        return isinstance(self.error, (TransferFailed, LeaseGone))

    @property
    def unreachable(self) -> bool:
        """The worker itself does not answer, so no other request should go there."""
        return isinstance(self.error, (WorkerLost, DeadlineExceeded))

    def lost(self, instance: str) -> bool:
        """Whether it is this worker that does not answer."""
        return self.unreachable and self.worker.instance == instance


@contextmanager
def blame(worker: WorkerRecord) -> Iterator[None]:
    """Turns an error that another worker may not have into AttemptFailed."""
    try:
        yield
    except (Unavailable, LeaseGone, Overloaded, Preempted, Cancelled) as error:
        raise AttemptFailed(worker, error) from error

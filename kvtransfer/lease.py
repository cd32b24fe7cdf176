"""The leases a decode worker has issued: which pages one writer may fill, and under what number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.wire.errors import LeaseGone


@dataclass(frozen=True, slots=True)
class IssuedLease:
    """Pages promised to one writer until ``deadline``, after which they are drained."""

    lease_id: str
    generation: int
    pages: tuple[int, ...]
    deadline: float
    """In the clock of whoever issued it, seconds."""


class LeaseTable:
    """Leases by id. Pure: the clock is handed in.

    Every issue gets a generation above all issued before, of this lease and of any other, so a
    generation is never used twice, not even for an id that was released in between.
    """

    def __init__(self) -> None:
        self._leases: dict[str, IssuedLease] = {}
        self._last_generation = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._leases

    def issue(self, lease_id: str, pages: Sequence[int], deadline: float) -> IssuedLease:
        """Issues a lease; an id that is out already is re-issued, and its old writer loses it."""
        self._last_generation += 1
        lease = IssuedLease(lease_id, self._last_generation, tuple(pages), deadline)
        self._leases[lease_id] = lease
        return lease

    def get(self, lease_id: str) -> IssuedLease | None:
        return self._leases.get(lease_id)

    def require(self, lease_id: str, generation: int) -> IssuedLease:
        """The lease, if it is out under this generation.

        Raises:
            LeaseGone: it was released, re-issued, or never existed.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseGone(f"lease {lease_id} was released or never existed")
        if lease.generation != generation:
            raise LeaseGone(f"lease {lease_id} has generation {lease.generation}, not {generation}")
        return lease

    def release(self, lease_id: str) -> IssuedLease | None:
        """Takes a lease out of the table. Idempotent."""
        return self._leases.pop(lease_id, None)

    def expired(self, now: float) -> list[IssuedLease]:
        """Leases past their deadline, in order of issue. They stay until released."""
        return [lease for lease in self._leases.values() if lease.deadline <= now]

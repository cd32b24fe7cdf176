"""Names of the keys of a mesh. The hash tags put what one call needs into one slot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """Names of all keys of a mesh: the control keys, and those of each partition."""

    mesh: str

    def _control(self, *parts: str) -> str:
        return ":".join((f"pdmesh:{{{self.mesh}:ctl}}", *parts))

    def _partition(self, number: int, *parts: str) -> str:
        return ":".join((f"pdmesh:{{{self.mesh}:{number:x}}}", *parts))

    @property
    def shared(self) -> list[str]:
        """What every control function gets first."""
        names = ("meta", "leases", "roster", "events", "dead", "free")
        return [self._control(name) for name in names]

    @property
    def events(self) -> str:
        """The stream of changes of the membership."""
        return self._control("events")

    def worker(self, worker_id: str) -> str:
        """What is known of one worker."""
        return self._control("worker", worker_id)

    def partition(self, number: int) -> list[str]:
        """What every function of a partition gets first: rows, events, bitmap."""
        return [self._partition(number, name) for name in ("dg", "ev", "bm")]

    def page_events(self, number: int) -> str:
        """The stream of changes of a partition."""
        return self._partition(number, "ev")

    def bucket(self, number: int, bucket: int) -> str:
        """Owners of some pages of a partition."""
        return self._partition(number, "b", f"{bucket:x}")

"""Workers that no worker of the other role fits: said once, with the reason, and not routed to."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from pdmesh.wire.logs import event
from pdmesh.wire.messages import WorkerRecord

log = logging.getLogger(__name__)


def unpaired(records: Iterable[WorkerRecord]) -> list[tuple[WorkerRecord, WorkerRecord]]:
    """Workers whose page format no worker of the other role has, each with one that differs.

    Where a role has no worker at all nobody is to blame.
    """
    found = []
    all_records = list(records)
    for record in all_records:
        others = [r for r in all_records if r.role != record.role]
        if others and all(r.page_format != record.page_format for r in others):
            found.append((record, others[0]))
    return found


class Pairing:
    """Says of each instance once that it fits none."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def look(self, records: Iterable[WorkerRecord]) -> None:
        """Logs ``worker_unpaired`` for those that are new."""
        found = unpaired(records)
        for record, other in found:
            if record.instance not in self._said:
                event(
                    log,
                    "worker_unpaired",
                    logging.WARNING,
                    worker=record.worker_id,
                    other=other.worker_id,
                    reason=record.page_format.difference(other.page_format),
                )
        self._said = {record.instance for record, _ in found}

"""What a worker logs while it reads its checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

EVERY_S = 1.0


class LoadingLog:
    """Logs the beginning, the progress at most once a second, and the end of a load.

    Args:
        worker_id: of the loading worker.
        checkpoint: its directory.
        clock: seconds, monotone.
    """

    def __init__(
        self, worker_id: str, checkpoint: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker_id = worker_id
        self._clock = clock
        self._began = self._told = clock()
        event(log, "loading", worker=worker_id, checkpoint=checkpoint)

    def progress(self, _: str, done: int, total: int) -> None:
        """``done`` of ``total`` tensors are read."""
        now = self._clock()
        if now - self._told >= EVERY_S:
            self._told = now
            event(log, "loading", worker=self._worker_id, tensors=f"{done}/{total}")

    def loaded(self) -> None:
        """The model is in memory."""
        seconds = self._clock() - self._began
        event(log, "loaded", worker=self._worker_id, seconds=f"{seconds:.1f}")

"""Calls to be made later, on one small thread that exists while there are any."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count


class Alarms:
    """Makes calls after a delay. They must be short. Pending ones end with ``close``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Makes ``call`` once, ``seconds`` from now."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._due, (self._clock() + seconds, next(self._numbers), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-alarms", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Drops pending calls. Idempotent."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        """Waits for the next call that is due; None, and no thread any more, if there is none."""
        with self._changed:
            while self._due:
                left = self._due[0][0] - self._clock()
                if left <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(left)
            self._thread = None
            return None

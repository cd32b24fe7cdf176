"""A worker whose step does not end leaves the mesh: a device that hangs answers nothing.

So does one that has lost what it computes with.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType

from pdmesh.wire.errors import InternalError
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

EXIT_STUCK = 70
"""Exit status of a worker that gave up (EX_SOFTWARE of sysexits.h)."""
LEAVING_S = 10.0
"""Seconds to deregister in before the process ends, however it hangs."""
LIBRARIES_S = 2.0
"""Seconds for what libraries do when Python has ended."""


class Watchdog:
    """Knows for how long the step under way has run. One step at a time, on any thread.

    Args:
        bound_s: seconds that a step may take; 0: any.
        clock: seconds that only grow.
    """

    def __init__(self, bound_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.bound_s = bound_s
        self._clock = clock
        self._began: float | None = None

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._began = None

    def overdue(self) -> float | None:
        """Seconds that the step has taken, if they are more than it may take."""
        began = self._began
        if began is None or self.bound_s <= 0:
            return None
        taken = self._clock() - began
        return taken if taken > self.bound_s else None


def step_bound_s(device: str) -> float:
    """Seconds that a step on a device may take where nothing else was said."""
    return 60.0 if device.startswith("cuda") else 600.0


def end_process(after_s: float = LEAVING_S) -> None:
    """Ends the process in a while, whatever hangs. On the main thread.

    A thread that hangs would keep it for ever: the status is EXIT_STUCK then. So may a library, in
    what it does at exit (leaving an NVSHMEM job, or a device whose kernels wait for a rank that is
    gone); threads of Python no longer run by then, so it is the kernel that ends the process, by
    SIGALRM.
    """
    timer = threading.Timer(after_s, partial(os._exit, EXIT_STUCK))
    timer.daemon = True
    timer.start()
    signal.setitimer(signal.ITIMER_REAL, after_s + LIBRARIES_S)
    atexit.register(signal.setitimer, signal.ITIMER_REAL, LIBRARIES_S)


async def watched(
    run: Callable[[], Awaitable[None]],
    watchdog: Watchdog,
    give_up: Callable[[], None] = end_process,
    every_s: float = 1.0,
) -> None:
    """A worker's loop, which ends when one of its steps is overdue.

    Args:
        run: the loop.
        watchdog: entered by every step.
        give_up: called once a step is overdue, before the loop is left.
        every_s: how often it is looked at.

    Raises:
        InternalError: a step did not end within its bound.
        Exception: what ended the loop.
    """
    running = asyncio.ensure_future(run())
    try:
        while not running.done():
            await asyncio.wait({running}, timeout=every_s)
            taken = watchdog.overdue()
            if taken is not None and not running.done():
                message = f"a step has not ended within {watchdog.bound_s:g} s; the worker leaves"
                event(log, message, level=logging.ERROR, seconds=round(taken, 1))
                give_up()
                raise InternalError(message)
        running.result()
    finally:
        running.cancel()
        await asyncio.wait({running})


async def while_there(
    run: Callable[[], Awaitable[None]],
    gone: Callable[[], Awaitable[None]],
    what: str,
    give_up: Callable[[], None] = end_process,
) -> None:
    """A worker's loop, which ends when something that it cannot do without has gone.

    Args:
        run: the loop.
        gone: returns when that has happened.
        what: has gone, for the log.
        give_up: called then, before the loop is left.

    Raises:
        InternalError: it has gone.
        Exception: what ended the loop.
    """
    running, waiting = asyncio.ensure_future(run()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            waiting.result()
            message = f"{what} has ended; the worker leaves"
            event(log, message, level=logging.ERROR)
            give_up()
            raise InternalError(message)
        running.result()
    finally:
        running.cancel()
        waiting.cancel()
        await asyncio.wait({running, waiting})

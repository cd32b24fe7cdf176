"""An event loop on virtual time, and the processes that its callbacks belong to.

Time stands still while callbacks run and jumps to the next timer when none is left; so a run takes
as long as its computing, and the same program gives the same order. Every callback belongs to the
process in whose context it was made (a context variable, inherited by tasks): one that is paused
keeps its callbacks for later, those of a killed one never run.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import sys
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing will ever happen any more, and what was waited for has not happened."""


class TooManyEvents(Exception):
    """The run goes on and on."""


class Process:
    """A simulated operating-system process: a name, and what may run of it.

    Attributes:
        context: callbacks that run in it (or in a copy) belong to this process.
        alive: False once it was killed or has ended.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.backlog: deque[_Handle | _Timer] = deque()
        self.ended: list[Callable[[], None]] = []
        """Called when the process ends: what its operating system does then."""
        self.context = contextvars.copy_context()
        self.context.run(_current.set, self)

    def __repr__(self) -> str:
        return self.name


_current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def current_process() -> Process | None:
    """The process that the running callback belongs to; None outside of all."""
    return _current.get()


class _Handle(asyncio.Handle):
    __slots__ = ("owner",)

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: contextvars.Context | None,
    ) -> None:
        context = context or contextvars.copy_context()
        super().__init__(callback, args, loop, context)
        self.owner = context.get(_current, None)


class _Timer(asyncio.TimerHandle):
    __slots__ = ("owner",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: contextvars.Context | None,
    ) -> None:
        context = context or contextvars.copy_context()
        super().__init__(when, callback, args, loop, context)
        self.owner = context.get(_current, None)


class VirtualLoop(asyncio.AbstractEventLoop):
    """See the module.

    Args:
        rng: draws how long a call to another thread takes, and when in that time it acts.
        max_events: callbacks after which a run has failed.
        executor_s: longest virtual time of a call to another thread; a few take much longer.
    """

    def __init__(
        self, rng: random.Random, max_events: int = 150_000, executor_s: float = 0.02
    ) -> None:
        self._rng = rng
        self._max_events = max_events
        self._executor_s = executor_s
        self._now = 0.0
        self._ready: deque[_Handle | _Timer] = deque()
        self._timers: list[tuple[float, int, _Timer]] = []
        self._number = 0
        self._busy_until: dict[int, float] = {}
        self._executors: list[Any] = []
        self._grave: list[_Handle | _Timer] = []
        self._closed = False
        self.events = 0
        """Callbacks run so far."""
        self.faults: list[str] = []
        """What callbacks and tasks raised that nobody caught."""

    # ---- time and callbacks ---------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, timer))
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs ``func`` here: at the beginning or at the end of the time that it takes."""
        future: asyncio.Future[T] = self.create_future()
        begin = self._now
        alone = executor is not None and getattr(executor, "_max_workers", 0) == 1
        if alone:
            begin = max(begin, self._busy_until.get(id(executor), 0.0))
        slow = 20.0 if self._rng.random() < 0.03 else 1.0
        end = begin + slow * self._rng.uniform(0.0001, self._executor_s)
        if alone:
            self._executors.append(executor)  # so that its id stays its own
            self._busy_until[id(executor)] = end
        outcome: list[Callable[[], None]] = []

        def act() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - it belongs to the future
                failure = error
                outcome.append(lambda: future.set_exception(failure))
            else:
                outcome.append(lambda: future.set_result(result))

        def settle() -> None:
            if not outcome:
                act()
            if not future.done():
                outcome[0]()

        if self._rng.random() < 0.5:
            self.call_at(begin, act)
        self.call_at(end, settle)
        return future

    # ---- processes ------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """Ends a process at once: nothing of it runs any more. Idempotent."""
        if not process.alive:
            return
        process.alive = False
        self._grave.extend(process.backlog)
        process.backlog.clear()
        for told in process.ended:
            told()

    def pause(self, process: Process) -> None:
        """Stops a process as SIGSTOP does."""
        process.paused = True

    def resume(self, process: Process) -> None:
        """Lets a paused process run on, with all that has come for it meanwhile."""
        process.paused = False
        self._ready.extend(process.backlog)
        process.backlog.clear()

    def spawn(self, process: Process, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs ``work`` as a task of ``process``."""
        return self.create_task(work, context=process.context.copy())

    # ---- running --------------------------------------------------------------------------

    def run_until_complete(  # type: ignore[override]
        self, future: asyncio.Future[T] | Coroutine[Any, Any, T]
    ) -> T:
        """Runs until ``future`` is done.

        Raises:
            Deadlock: nothing is scheduled, and it is not done.
            TooManyEvents: see the class.
        """
        main = cast("asyncio.Future[T]", asyncio.ensure_future(future, loop=self))
        before = events._get_running_loop()
        hooks = sys.get_asyncgen_hooks()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._close_generator)
        try:
            while not main.done():
                self._run_once()
        finally:
            events._set_running_loop(before)
            sys.set_asyncgen_hooks(*hooks)
        return main.result()

    def _close_generator(self, generator: AsyncGenerator[Any, None]) -> None:
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())

    def _run_once(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._ready:
            if not self._timers:
                raise Deadlock("nothing is scheduled any more")
            self._now = max(self._now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(self._timers)[2])
        for _ in range(len(self._ready)):
            self._dispatch(self._ready.popleft())

    def _dispatch(self, handle: _Handle | _Timer) -> None:
        if handle.cancelled():
            return
        owner = handle.owner
        if owner is not None and not owner.alive:
            self._grave.append(handle)
        elif owner is not None and owner.paused:
            owner.backlog.append(handle)
        else:
            self.events += 1
            if self.events > self._max_events:
                raise TooManyEvents(f"{self.events} callbacks by {self._now:.3f} s")
            handle._run()

    # ---- what asyncio needs of a loop -----------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name or "task", context=context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def abandon(self) -> None:
        """Ends a run: what is still to be done never is, and its tasks are ended quietly."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            self._ready.extend(self._grave)  # tasks end only when what woke them is run
            for _ in range(100):
                tasks = asyncio.all_tasks(self)
                for task in tasks:
                    task.cancel()
                for _ in range(50):
                    self._turn_quietly()
                if not tasks:
                    break
        finally:
            events._set_running_loop(before)
        self.close()

    def _turn_quietly(self) -> None:
        self._timers.clear()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.faults.append(f"{context.get('message')}: {error!r}")

    async def shutdown_asyncgens(self) -> None:
        """Generators are closed by who opened them."""

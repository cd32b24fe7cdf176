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
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, TypeVar, cast

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
        self.backlog: deque[_Handle] = deque()
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


class _Handle(asyncio.TimerHandle):
    """A callback, and the process that it belongs to: less than asyncio's, for speed."""

    __slots__ = ("owner",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        context = context or contextvars.copy_context()
        self._when = when
        self._callback: Callable[..., object] | None = callback
        self._args: tuple[Any, ...] | None = args  # type: ignore[assignment]
        self._context = context
        self._cancelled = False
        self.owner: Process | None = context.get(_current)

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None

    def cancelled(self) -> bool:
        return self._cancelled

    def __repr__(self) -> str:
        return f"<{self._callback} at {self._when:.6f}>"


def in_pieces(function: Callable[..., Generator[float | None, None, T]]) -> Callable[..., T]:
    """A blocking call that is watched between its pieces: it yields where time may pass.

    What it yields are seconds, or None for a share of the time of any call to a thread.

    A simulated thread takes virtual time from one ``yield`` to the next, and all else goes on
    meanwhile; called by anybody else it runs to its end.
    """

    @wraps(function)
    def whole(*args: Any) -> T:
        pieces = function(*args)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                return cast("T", end.value)

    whole.pieces = function  # type: ignore[attr-defined]
    return whole


@dataclass(eq=False)
class _Work(Generic[T]):
    """A call to another thread, and what came of it."""

    future: asyncio.Future[T]
    func: Callable[..., T]
    args: tuple[Any, ...]
    result: T | None = None
    failure: Exception | None = None
    acted: bool = False

    def act(self) -> None:
        """The call itself."""
        self.acted = True
        try:
            self.result = self.func(*self.args)
        except Exception as error:  # noqa: BLE001 - it belongs to the future
            self.failure = error

    def settle(self) -> None:
        """Tells the future."""
        if not (self.acted or hasattr(self.func, "pieces")):
            self.act()
        if self.future.done():
            return
        if self.failure is not None:
            self.future.set_exception(self.failure)
        else:
            self.future.set_result(cast("T", self.result))


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
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._number = 0
        self._busy_until: dict[int, float] = {}
        self._executors: list[Any] = []
        self._grave: list[_Handle] = []
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
        handle = _Handle(self._now, callback, args, context)
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
        timer = _Handle(when, callback, args, context)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, timer))
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs ``func`` here: at the beginning or at the end of the time that it takes, or piece
        by piece (``in_pieces``)."""
        future: asyncio.Future[T] = self.create_future()
        begin = self._now
        alone = executor is not None and getattr(executor, "_max_workers", 0) == 1
        if alone:
            begin = max(begin, self._busy_until.get(id(executor), 0.0))
        slow = 20.0 if self._rng.random() < 0.03 else 1.0
        takes = slow * self._rng.uniform(0.0001, self._executor_s)
        if alone:
            self._executors.append(executor)  # so that its id stays its own
            self._busy_until[id(executor)] = begin + takes
        work = _Work(future, func, args)
        pieces = getattr(func, "pieces", None)
        if pieces is not None:
            self.call_at(begin, self._next_piece, work, pieces, begin + takes)
            return future
        if self._rng.random() < 0.5:
            self.call_at(begin, work.act)
        self.call_at(begin + takes, work.settle)
        return future

    def _next_piece(self, work: _Work[T], pieces: Any, end: float) -> None:
        """Runs up to the next pause; pauses are longer while more of the time is left."""
        if callable(pieces):
            pieces = pieces(getattr(work.func, "__self__", None), *work.args)
        try:
            asked = next(pieces)
        except StopIteration as done:
            work.result = done.value
            self.call_at(max(self._now, end), work.settle)
        except Exception as error:  # noqa: BLE001 - it belongs to the future
            work.failure = error
            self.call_at(max(self._now, end), work.settle)
        else:
            pause = asked
            if pause is None:
                pause = self._rng.random() * max(0.0, end - self._now) * 0.6
            self.call_at(self._now + pause, self._next_piece, work, pieces, end)

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
        timers, ready = self._timers, self._ready
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise Deadlock("nothing is scheduled any more")
            self._now = max(self._now, timers[0][0])
        now = self._now
        while timers and timers[0][0] <= now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                self._dispatch(handle)

    def _dispatch(self, handle: _Handle) -> None:
        owner = handle.owner
        if owner is not None and not owner.alive:
            self._grave.append(handle)
        elif owner is not None and owner.paused:
            owner.backlog.append(handle)
        else:
            self.events += 1
            if self.events > self._max_events:
                raise TooManyEvents(f"{self.events} callbacks by {self._now:.3f} s")
            self._call(handle)

    def _call(self, handle: _Handle) -> None:
        assert handle._callback is not None
        assert handle._args is not None
        try:
            handle._context.run(handle._callback, *handle._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as asyncio's own handles do
            self.call_exception_handler({"message": f"in {handle}", "exception": error})

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
                self._call(handle)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.faults.append(f"{context.get('message')}: {error!r}")

    async def shutdown_asyncgens(self) -> None:
        """Generators are closed by who opened them."""

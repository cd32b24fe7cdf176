"""A step that does not end: it is told, and the process ends though a thread of it hangs."""

import asyncio
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdmesh.registry.watchdog import EXIT_STUCK, Watchdog, watched, while_there
from pdmesh.wire.errors import InternalError


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_only_a_step_under_way_can_be_overdue():
    clock = Clock()
    dog = Watchdog(60.0, clock)
    clock.now += 1000.0
    assert dog.overdue() is None
    with dog:
        clock.now += 60.0
        assert dog.overdue() is None
        clock.now += 0.5
        assert dog.overdue() == 60.5
    assert dog.overdue() is None
    with pytest.raises(KeyError), dog:
        raise KeyError
    clock.now += 1000.0
    assert dog.overdue() is None


def test_without_a_bound_a_step_may_take_any_time():
    clock = Clock()
    dog = Watchdog(0.0, clock)
    with dog:
        clock.now += 1e9
        assert dog.overdue() is None


async def test_a_loop_whose_step_hangs_is_left_and_the_end_of_the_process_asked_for():
    clock, hang, begun = Clock(), threading.Event(), threading.Event()
    dog, given_up = Watchdog(60.0, clock), []
    thread = ThreadPoolExecutor(1)

    def step():
        with dog:
            begun.set()
            hang.wait()

    async def loop():
        await asyncio.get_running_loop().run_in_executor(thread, step)

    watching = asyncio.ensure_future(watched(loop, dog, lambda: given_up.append(1), 0.001))
    await asyncio.to_thread(begun.wait)
    await asyncio.sleep(0.01)
    assert not watching.done()
    clock.now += 61.0
    with pytest.raises(InternalError, match="not ended within 60 s"):
        await watching
    assert given_up == [1]
    hang.set()
    thread.shutdown()


async def test_a_loop_that_ends_by_itself_ends_as_it_did_before():
    async def fails():
        raise ValueError("its own")

    async def ends():
        return None

    with pytest.raises(ValueError, match="its own"):
        await watched(fails, Watchdog(1.0), pytest.fail)
    await watched(ends, Watchdog(1.0), pytest.fail)


def test_a_process_with_a_thread_that_hangs_ends_with_its_own_status():
    program = """
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pdmesh.registry.watchdog import Watchdog, end_process, watched
dog = Watchdog(0.05)
def step():
    with dog:
        threading.Event().wait()
async def loop():
    await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), step)
asyncio.run(watched(loop, dog, partial(end_process, 0.2), 0.01))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == EXIT_STUCK, done.stderr
    assert "InternalError" in done.stderr


def test_a_process_whose_libraries_hang_at_exit_is_ended_by_the_kernel():
    """Python's threads stand still by then: a timer among them ends nothing."""
    program = """
import ctypes
from pdmesh.registry.watchdog import end_process
library = ctypes.CDLL(None)
library.on_exit(library.pause, None)
end_process()
print("left", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGALRM, "left\n"), done.stderr


async def test_a_loop_that_has_lost_what_it_needs_is_left_at_once():
    lost, given_up = asyncio.Event(), []

    async def loop():
        await asyncio.Event().wait()

    def needed():
        return while_there(loop, lost.wait, "the weights' holder", lambda: given_up.append(1))

    running = asyncio.ensure_future(needed())
    await asyncio.wait({running}, timeout=0.01)
    assert not running.done()
    lost.set()
    with pytest.raises(InternalError, match="the weights' holder has ended; the worker leaves"):
        await running
    assert given_up == [1]
    with pytest.raises(InternalError, match="has ended"):
        await needed()


async def test_a_loop_that_loses_nothing_ends_as_it_did_before():
    async def fails():
        raise ValueError("its own")

    async def ends():
        return None

    async def never():
        await asyncio.Event().wait()

    with pytest.raises(ValueError, match="its own"):
        await while_there(fails, never, "it", pytest.fail)
    await while_there(ends, never, "it", pytest.fail)
    stopped = asyncio.ensure_future(while_there(never, never, "it", pytest.fail))
    await asyncio.sleep(0)
    stopped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped

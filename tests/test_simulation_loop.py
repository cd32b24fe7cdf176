"""The event loop on virtual time: order, time, processes that stop and end."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdmesh.simulation.loop import Deadlock, Process, TooManyEvents, VirtualLoop, current_process


def new_loop(**options):
    return VirtualLoop(random.Random(1), **options)


def test_time_jumps_to_the_next_timer_and_callbacks_come_in_its_order():
    loop, seen = new_loop(), []

    async def main():
        loop.call_later(1000.0, lambda: seen.append(("late", loop.time())))
        loop.call_later(10.0, lambda: seen.append(("early", loop.time())))
        await asyncio.sleep(2000.0)

    loop.run_until_complete(main())
    assert seen == [("early", 10.0), ("late", 1000.0)]
    assert loop.time() == 2000.0


def test_timers_of_one_moment_run_in_the_order_in_which_they_were_made():
    loop, seen = new_loop(), []

    async def main():
        for number in range(50):
            loop.call_at(1.0, seen.append, number)
        await asyncio.sleep(2.0)

    loop.run_until_complete(main())
    assert seen == list(range(50))


def test_waiting_for_what_never_comes_is_a_deadlock():
    loop = new_loop()
    with pytest.raises(Deadlock):
        loop.run_until_complete(loop.create_future())
    loop.abandon()


def test_a_run_without_end_is_cut():
    loop = new_loop(max_events=100)

    async def spin():
        while True:
            await asyncio.sleep(0)

    with pytest.raises(TooManyEvents):
        loop.run_until_complete(spin())
    loop.abandon()


def test_a_timeout_is_on_virtual_time():
    loop = new_loop()

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600.0):
                await asyncio.Event().wait()

    loop.run_until_complete(main())
    assert loop.time() == 3600.0


def test_calls_to_a_thread_run_here_one_after_another_and_take_time():
    loop, seen = new_loop(), []
    pool = ThreadPoolExecutor(1)

    async def main():
        calls = [loop.run_in_executor(pool, seen.append, number) for number in range(20)]
        await asyncio.gather(*calls)
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(pool, lambda: 1 // 0)
        assert await asyncio.to_thread(lambda: current_process()) is None

    loop.run_until_complete(main())
    assert seen == list(range(20))
    assert loop.time() > 0
    pool.shutdown()


def test_a_paused_process_does_all_of_it_later_and_a_killed_one_never():
    loop, seen = new_loop(), []
    paused, killed = Process("paused"), Process("killed")

    async def tick(name):
        try:
            while True:
                await asyncio.sleep(1.0)
                seen.append((name, loop.time()))
        finally:
            seen.append((name, "its clean-up"))

    async def main():
        for process in (paused, killed):
            loop.spawn(process, tick(process.name))
        await asyncio.sleep(1.5)
        loop.pause(paused)
        loop.kill(killed)
        await asyncio.sleep(10.0)
        assert seen == [("paused", 1.0), ("killed", 1.0)]
        loop.resume(paused)
        await asyncio.sleep(0.5)

    loop.run_until_complete(main())
    assert seen[2:] == [("paused", 11.5)]
    loop.abandon()


def test_the_end_of_a_process_is_told_to_its_system_once():
    loop, told = new_loop(), []
    process = Process("p")
    process.ended.append(lambda: told.append(process.alive))
    loop.kill(process)
    loop.kill(process)
    assert told == [False]


def test_what_a_callback_raises_is_noted():
    loop = new_loop()

    async def main():
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1.0)

    loop.run_until_complete(main())
    assert "ZeroDivisionError" in loop.faults[0]

"""Moves, deaths, refusals and departures in any order: each token once, and nothing left behind."""

import asyncio
import tempfile
from pathlib import Path

import grpc
import router_fakes as fakes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_moving import SOURCE_PLANS, STORY, TARGET_PLANS, moving_mesh

from pdmesh.wire.errors import PdmeshError

WORKERS = 4
SOURCES = st.sampled_from([p for p in SOURCE_PLANS if p != "finish instead"])
TARGETS = st.sampled_from(TARGET_PLANS)
PLANS = st.lists(st.tuples(st.lists(SOURCES, max_size=3), st.lists(TARGETS, max_size=2)),
                 min_size=WORKERS, max_size=WORKERS)  # fmt: skip
ANSWERS = [STORY, STORY[::-1]]


async def read(call, got, leave_after):
    """Collects the tokens of each answer; leaves after so many messages."""
    count = 0
    try:
        async for response in call:
            got.setdefault(response.index, []).extend(response.token_ids)
            count += 1
            if count == leave_after:
                call.cancel()
                return "left"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "whole"


async def keep_moving(moving, moves):
    """One move after another, of any answer, to wherever the router wants."""
    for _ in range(moves):
        try:
            reports = await moving.move()
        except PdmeshError:
            return
        if reports[-1].state == "ended":
            return


async def scenario(path, plans, n, moves, leave_after, drain):
    async with moving_mesh(path, decode=WORKERS, pause_at=None, poll_interval=0.02) as moving:
        moving.forget_load()
        for worker, (source, target) in zip(moving.decode, plans, strict=True):
            worker.plans, worker.welcomes, worker.pace_s = list(source), list(target), 0.002
        for worker in moving.mesh.workers:
            worker.answers = ANSWERS
        if drain is not None:
            moving.decode[drain].state = "draining"
        got = {}
        request = fakes.ask(request_id="r", max_tokens=len(STORY), n=n)
        call = moving.mesh.stub.StreamChat(request, timeout=30)
        reading = asyncio.create_task(read(call, got, leave_after))
        async with asyncio.timeout(60):
            while not got and not reading.done():
                await asyncio.sleep(0.002)
        mover = asyncio.create_task(keep_moving(moving, moves))
        async with asyncio.timeout(60):
            outcome = await reading
            await mover
        for index, ids in got.items():
            assert ids == ANSWERS[index][: len(ids)], "each position once, in order"
        if outcome == "whole":
            assert [len(got[index]) for index in range(n)] == [len(STORY)] * n
        elif outcome != "left":
            assert outcome == "UNAVAILABLE"
            used = [plan for source, target in plans for plan in (*source, *target)]
            assert used, "an honest mesh serves"
        await moving.at_rest()


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    plans=PLANS,
    n=st.integers(1, 2),
    moves=st.integers(0, 6),
    leave_after=st.none() | st.integers(1, 30),
    drain=st.none() | st.integers(0, WORKERS - 1),
)
def test_any_order_of_moves_and_faults_shows_each_token_once(plans, n, moves, leave_after, drain):
    with tempfile.TemporaryDirectory() as path:
        asyncio.run(scenario(Path(path), plans, n, moves, leave_after, drain))

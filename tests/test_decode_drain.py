"""A decode worker begins to drain while something is half done there: nothing is lost by it."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from migration_rig import Moving
from test_decode_migration_faults import OPTIONS, frozen, right
from test_decode_pull import pulled_reserve, reservation
from test_prefill_pull import pulling
from worker_rig import PAGE, prompt_of, rig, until

from pdmesh.registry.draining import Drain, Life, Workload, counted
from pdmesh.wire.errors import Draining
from pdmesh.wire.messages import ReserveRequest
from pdmesh.wire.rpc import Method
from pdmesh.wire.sampling import SamplingParams


class Told:
    """A lease of a worker, which counts how often the store was told that it drains."""

    def __init__(self):
        self.drains = 0

    async def drain(self):
        self.drains += 1


@asynccontextmanager
async def draining(worker):
    """What decides whether ``worker`` drains, as its process has it."""
    work = Workload(lambda: counted(worker.leases, "answer"), worker.hand_back)
    drain = Drain("decode", Life("ready"), work, Told())
    try:
        yield drain
    finally:
        await drain.close()


async def test_a_reservation_that_pulls_when_the_drain_begins_is_granted_and_its_answer_moved():
    prompt = prompt_of(3 * PAGE + 5)
    params = SamplingParams(max_tokens=6, temperature=0.0)
    async with pulling(decodes=2, arithmetic="exact") as made:
        mesh = made.mesh
        alone = await mesh.ask(prompt, 6, temperature=0.0)
        async with draining(mesh.decodes[1].worker) as drain:
            served = Method("Reserve", ReserveRequest, unary=pulled_reserve(made).reserve)
            reserve = drain.guard(served).unary
            begun, go_on = asyncio.Event(), asyncio.Event()

            async def slow():
                begun.set()
                await go_on.wait()

            made.ways["d0"].before["lend"] = slow
            reserving = asyncio.ensure_future(reserve(reservation(made, prompt, wait_ms=5_000)))
            await begun.wait()
            emptied = drain.begin("a test")
            assert drain.left() == "1 request"
            with pytest.raises(Draining):
                await reserve(reservation(made, prompt))
            go_on.set()
            lease = await reserving
            assert drain.left() == "1 answer"
            assert not emptied.done()
            first = await mesh.compute(prompt, lease, params)
            answer = Moving(mesh, prompt, params, lease, first, [(2, 0)], worker=1)
            await answer.run()
            assert answer.tokens == alone.tokens
            assert answer.decisions == ["committed to decode"]
            await asyncio.wait_for(emptied, 60)
            assert drain.left() == ""


async def test_an_answer_that_is_taken_over_is_unfinished_work_of_a_target_that_drains():
    async with rig(**OPTIONS) as mesh:
        answer, running = await frozen(mesh)
        target = mesh.decodes[1].worker
        assert target.running == 0
        async with draining(target) as drain:
            emptied = drain.begin("a test")
            assert drain.left() == "1 answer"
            answer.decide = True
            await answer.take(answer.asked[0])
            await until(lambda: target.running == 1)
            assert not emptied.done()
            await running
            assert right(answer)
            assert answer.decisions == ["committed to decode1"]
            await asyncio.wait_for(emptied, 60)
        await mesh.rest()


async def test_a_handoff_that_is_given_up_leaves_a_draining_target_empty():
    async with rig(**OPTIONS) as mesh:
        answer, running = await frozen(mesh)
        async with draining(mesh.decodes[1].worker) as drain:
            emptied = drain.begin("a test")
            assert drain.left() == "1 answer"
            answer.decide = True
            mesh.decodes[0].worker.migrations.lost(answer.sequence)
            await asyncio.wait_for(emptied, 60)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

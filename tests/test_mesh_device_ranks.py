"""`pdmesh up --precision fp8 --prefill-ep 2 --decode-ep 2` on a CPU: the processes that a GPU has,
with rows in shared memory of the host in place of NVSHMEM's. Steps of a prefill are of 576 rows at
most, so its ranks take the contiguous layout."""

import asyncio
import os
import signal

import meshes
import pytest
from mesh_device_ranks import check_answers, check_loss, check_prefill_loss


@pytest.fixture(scope="module")
def mesh():
    topology = "[decode]\nmicrobatch_rows = 4\nredundant_experts = 2\n"
    arguments = ("--precision", "fp8", "--prefill-ep", "2", "--decode-ep", "2")
    with meshes.running_mesh(*arguments, topology=topology) as running:
        running.workers = 4
        yield running


async def test_answers_are_those_of_the_reference_but_for_near_ties(mesh):
    await check_answers(mesh, tokens=12, together=4)


async def test_a_killed_rank_ends_its_group_which_forms_anew(mesh):
    await check_loss(mesh, tokens=60)


async def test_a_killed_prefill_rank_ends_no_running_answer_and_its_group_forms_anew(mesh):
    await check_prefill_loss(mesh, tokens=40)


@pytest.mark.full
async def test_answers_of_a_group_that_ends_go_on_at_another_group():
    arguments = ("--precision", "fp8", "--prefill", "1", "--decode", "4", "--decode-ep", "2")
    with meshes.running_mesh(*arguments) as mesh:
        mesh.workers = 5
        async with meshes.chat_stub(mesh.address) as stub:
            asked = {"max_tokens": 40, "ignore_eos": True}
            prompts = [[n, 8, 9] for n in range(20, 28)]
            calls = [asyncio.ensure_future(meshes.ask(stub, p, **asked)) for p in prompts]
            while not any(s.running for s in await mesh.statuses() if s.worker_id == "decode-1"):
                await asyncio.sleep(0.1)
            os.kill(mesh.pids()["decode-0"], signal.SIGKILL)
            answers = await asyncio.gather(*calls)
        assert [len(answer.token_ids) for answer in answers] == [40] * len(prompts)
        assert await mesh.problems() == []

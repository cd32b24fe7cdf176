"""Chats in a real mesh: pages of the last answer are pulled for the next turn, or computed."""

import os
import random
import signal

import meshes
import pytest
from mesh_changes import published

PAGE = 64


@pytest.fixture(scope="module")
def mesh():
    with meshes.running_mesh("--arithmetic", "exact") as running:
        yield running


def turn(seed, length):
    return [random.Random(seed + i).randrange(20, 4000) for i in range(length)]


async def by_name(mesh):
    return {status.worker_id: status for status in await mesh.statuses()}


async def second_turn(mesh, stub, seed, kill=False):
    """Both turns of a chat; returns how many pages the second one pulled at prefill."""
    prompt = turn(seed, 2 * PAGE + 5)
    before = await by_name(mesh)
    first = await meshes.ask(stub, prompt, max_tokens=PAGE + 20, ignore_eos=True)
    longer = [*prompt, *first.token_ids, *turn(seed + 1, 7)]
    await published(mesh)
    if kill:
        now = await by_name(mesh)
        grown = {n: now[n].tokens_generated - before[n].tokens_generated for n in now}
        os.kill(mesh.pids()[max(grown, key=grown.__getitem__)], signal.SIGKILL)
    again = await meshes.ask(stub, longer, max_tokens=12)
    cold = await meshes.ask(stub, longer, max_tokens=12, tenant="other")
    assert again.token_ids == cold.token_ids
    async with mesh.watch() as statuses:  # a killed worker does not answer yet
        (after,) = await statuses("prefill-0")
    return after.pulled_pages - before["prefill-0"].pulled_pages


async def test_pages_of_an_answer_are_pulled_for_the_next_turn(mesh):
    async with meshes.chat_stub(mesh.address) as stub:
        for chat in range(10):  # the router hears a moment after the store
            if pulled := await second_turn(mesh, stub, 10 + chat):
                break
    assert pulled
    assert not await mesh.problems()


async def test_an_owner_that_was_just_killed_is_done_without(mesh):
    """The registry still names it (compare LMCache/LMCache#1814)."""
    async with meshes.chat_stub(mesh.address) as stub:
        assert await second_turn(mesh, stub, 2, kill=True) == 0
    assert not await mesh.problems()

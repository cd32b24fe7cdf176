"""Pools whose workers share attention heads too: the same tokens, whoever is lost meanwhile.

Real processes of ``pdmesh up``: the first of each two ranks has the requests, the other follows it.
"""

import asyncio
import os
import signal

import meshes
import pytest
import torch
from mesh_changes import moved_in_the_middle, pdmesh
from mesh_faults import busy
from test_mesh_parallel import all_at_once, model, prompts, together

from pdmesh.model.reference import generate_reference

__all__ = ["model", "prompts"]  # fixtures

pytestmark = pytest.mark.full  # test_mesh_parallel.py has a prefill worker that is followed

SMALL = ("--decode-ep", "2", "--decode-tp", "2")
LARGE = ("--prefill-ep", "2", "--prefill-tp", "2", "--decode-ep", "4", "--decode-tp", "2")


@pytest.fixture(scope="module")
def expected(model, prompts):
    torch.set_num_threads(1)
    return [generate_reference(model, p, 40, arithmetic="exact") for p in prompts]


@pytest.fixture(
    scope="module",
    params=[SMALL, LARGE],
    ids=["one-decode-worker", "two-decode-workers"],
)
def mesh(request):
    topology = "[decode]\nredundant_experts = 8\n"
    with meshes.running_mesh(*request.param, "--arithmetic", "exact", topology=topology) as running:
        running.large = request.param == LARGE
        running.workers = 3 if running.large else 2
        yield running


def large(mesh):
    if not mesh.large:
        pytest.skip("one decode worker")


def asked(mesh, prompts, tenant):
    return all_at_once(mesh, prompts, tenant, max_tokens=40)


async def all_share(mesh):
    """Waits until every worker shares its heads with the rank that follows it."""
    for _ in range(100):
        statuses = await together(mesh)
        shared = {s.worker_id: s.ranks.heads for s in statuses if s.ranks is not None}
        if all(shared.values()):
            return shared
        await asked(mesh, [[1, 2, 3]], "wake")
    raise AssertionError(shared)


async def test_tokens_are_those_of_one_process_and_only_those_that_lead_have_requests(
    mesh, prompts, expected
):
    more = {"prefill-0": (0, 1), "decode-2": (2, 3)} if mesh.large else {}
    assert await all_share(mesh) == {"decode-0": (0, 1), **more}
    for tenant in ("a", "a"):
        answers = await asked(mesh, prompts, tenant)
        assert [answer.token_ids for answer in answers] == expected
        used = {a.timing.decode_worker for a in answers}
        assert used == ({"decode-0", "decode-2"} if mesh.large else {"decode-0"})
    assert "decode-1" in mesh.pids()
    assert await mesh.problems() == []


async def test_an_answer_that_moves_takes_its_pages_to_other_followers(mesh, prompts):
    large(mesh)
    await moved_in_the_middle(mesh, prompts[3], ("decode-0", "decode-2"))


@pytest.mark.parametrize("victim", ["decode-1", "decode-2", "prefill-1"])
async def test_a_killed_rank_costs_no_answer_and_comes_back(mesh, prompts, expected, victim):
    if victim != "decode-1":
        large(mesh)
    await all_share(mesh)
    async with mesh.watch() as statuses:
        asking = asyncio.ensure_future(asked(mesh, prompts, f"during {victim}"))
        await busy(statuses)
    os.kill(mesh.pids()[victim], signal.SIGKILL)
    answers = await asyncio.wait_for(asking, 240)
    assert [answer.token_ids for answer in answers] == expected
    await all_share(mesh)
    answers = await asked(mesh, prompts, f"after {victim}")
    assert [answer.token_ids for answer in answers] == expected
    assert await mesh.problems() == []


async def test_a_follower_that_stands_still_is_done_without(mesh, prompts, expected):
    large(mesh)
    await all_share(mesh)
    stopped = mesh.pids()["decode-3"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        answers = await asyncio.wait_for(asked(mesh, prompts, "stopped"), 240)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert [answer.token_ids for answer in answers] == expected
    await all_share(mesh)
    assert await mesh.problems() == []


async def test_a_rolling_restart_renews_followers_too(mesh, prompts, expected):
    large(mesh)
    await all_share(mesh)
    pids = mesh.pids()
    asking = asyncio.ensure_future(asked(mesh, prompts, "renewed"))
    await pdmesh(mesh, "restart", "decode-0", "decode-1", "decode-2", "decode-3")
    answers = await asyncio.wait_for(asking, 240)
    assert [answer.token_ids for answer in answers] == expected
    renewed = {name for name, pid in mesh.pids().items() if pids[name] != pid}
    assert renewed == {f"decode-{n}" for n in range(4)}
    await all_share(mesh)
    answers = await asked(mesh, prompts, "new")
    assert [answer.token_ids for answer in answers] == expected
    assert await mesh.problems() == []

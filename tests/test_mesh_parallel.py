"""Pools whose workers share the routed experts: the same tokens, whoever is lost meanwhile.

Real processes of ``pdmesh up``: each worker is a rank with requests of its own, and computes the
experts that it holds for the rows of all.
"""

import asyncio
import contextlib
import os
import random
import signal

import meshes
import pytest
import torch
from mesh_changes import moved_in_the_middle, pdmesh
from mesh_faults import busy

from pdmesh.launch.topology import shipped_model
from pdmesh.model.reference import generate_reference
from pdmesh.model.weights import load_model
from pdmesh.wire.errors import PdmeshError

NEW_TOKENS = 12
FURTHER = [(2, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 1)]
SIZES = [(2, 2, 2), *(pytest.param(size, marks=pytest.mark.full) for size in FURTHER)]
"""Prefill EP, decode EP, prefill TP."""


def named(size):
    return f"prefill-ep{size[0]}-tp{size[2]}-decode-ep{size[1]}"


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model(shipped_model(), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts(model):
    """Half random ids, half repeating ones, where drafts are right."""
    rng = random.Random(3)
    found = []
    for length in (3, 64, 65, 150, 7, 130, 20, 200):
        ids = [rng.randrange(20, model.config.vocab_size) for _ in range(length)]
        found.append(ids if len(found) % 2 else [ids[j % 11] for j in range(length)])
    return found


@pytest.fixture(scope="module")
def expected(model, prompts):
    """What one process answers that holds all experts."""
    return [generate_reference(model, p, NEW_TOKENS, arithmetic="exact") for p in prompts]


@pytest.fixture(scope="module", params=SIZES, ids=named)
def mesh(request):
    prefill, decode, tp = request.param
    flags = ["--prefill-ep", str(prefill), "--decode-ep", str(decode), "--arithmetic", "exact"]
    flags += ["--prefill-tp", str(tp)]
    copies = 2 * decode if decode > 1 else 0
    topology = f"[decode]\nredundant_experts = {copies}\n"
    with meshes.running_mesh(*flags, topology=topology) as running:
        running.workers = prefill // tp + max(decode, 2 if decode == 1 else 0)
        running.heads = tuple(range(tp)) if tp > 1 else ()
        running.sizes = {"prefill": prefill, "decode": decode}
        yield running


async def all_at_once(mesh, prompts, tenant, **rest):
    fields = {"max_tokens": NEW_TOKENS, "ignore_eos": True, **rest}
    async with meshes.chat_stub(mesh.address) as stub:
        return await asyncio.gather(
            *(meshes.ask(stub, prompt, tenant=tenant, **fields) for prompt in prompts)
        )


async def together(mesh, patience=240):
    """Waits until all ranks of every group compute together; their workers' statuses."""
    async with asyncio.timeout(patience):
        while True:
            statuses = []
            with contextlib.suppress(PdmeshError):  # one that has died may still be listed
                statuses = await mesh.statuses()
            ranks = [s.ranks for s in statuses if s.ranks is not None]
            if len(statuses) == mesh.workers and all(len(r.members) == r.size for r in ranks):
                return statuses
            await all_at_once(mesh, [[1, 2, 3]], "wake")  # ranks meet when there is something to do
            await asyncio.sleep(0.2)


async def test_tokens_are_those_of_one_process_cold_and_warm_alone_and_together(
    mesh, prompts, expected
):
    for tenant in ("a", "a", "b"):
        answers = await all_at_once(mesh, prompts, tenant)
        assert [answer.token_ids for answer in answers] == expected
    alone = [(await all_at_once(mesh, [prompt], "c"))[0].token_ids for prompt in prompts]
    assert alone == expected
    for status in await mesh.statuses():
        size = mesh.sizes[status.role]
        if size > 1:
            assert status.ranks.size == size
            assert status.ranks.members == tuple(range(size))
            assert status.ranks.sent_bytes > 0
            assert status.ranks.heads == (mesh.heads if status.role == "prefill" else ())
        else:
            assert status.ranks is None
    assert await mesh.problems() == []


async def test_an_answer_that_moves_between_ranks_goes_on_to_the_last_bit(mesh, prompts, expected):
    if mesh.sizes["decode"] < 2:
        pytest.skip("one decode rank")
    await moved_in_the_middle(mesh, prompts[3], ("decode-0", "decode-1"))


async def test_experts_are_placed_anew_while_answers_stream(mesh, prompts, expected):
    if mesh.sizes["decode"] < 2:
        pytest.skip("one decode rank")
    want = await all_at_once(mesh, prompts, "unmoved", max_tokens=60)
    for turn in range(40):
        answers = await all_at_once(mesh, prompts, f"moved {turn}", max_tokens=60)
        assert [a.token_ids for a in answers] == [a.token_ids for a in want]
        plans = {s.ranks.plan for s in await mesh.statuses() if s.role == "decode"}
        if len(plans) == 1 and plans != {0}:
            break
    assert plans != {0}, plans
    assert await mesh.problems() == []


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_killed_rank_costs_no_answer_and_comes_back(mesh, prompts, expected, role):
    if mesh.sizes[role] < 2:
        pytest.skip(f"one {role} rank")
    await together(mesh)
    before = await all_at_once(mesh, prompts, "before", max_tokens=60)
    async with mesh.watch() as statuses:
        asking = asyncio.ensure_future(all_at_once(mesh, prompts, "during", max_tokens=60))
        await busy(statuses)
    os.kill(mesh.pids()[f"{role}-1"], signal.SIGKILL)
    during = await asyncio.wait_for(asking, 240)
    assert [a.token_ids for a in during] == [a.token_ids for a in before]
    statuses = await together(mesh)
    after = await all_at_once(mesh, prompts, "after", max_tokens=60)
    assert [a.token_ids for a in after] == [a.token_ids for a in before]
    assert {s.worker_id for s in statuses} == {s.worker_id for s in await mesh.statuses()}
    assert await mesh.problems() == []


async def test_a_rank_that_stands_still_is_left_out_and_comes_back(mesh, prompts, expected):
    if mesh.sizes["decode"] < 2:
        pytest.skip("one decode rank")
    await together(mesh)
    stopped = mesh.pids()["decode-1"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        answers = await asyncio.wait_for(all_at_once(mesh, prompts, "stopped"), 240)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert [answer.token_ids for answer in answers] == expected
    await together(mesh)
    assert await mesh.problems() == []


@pytest.mark.full
async def test_a_rolling_restart_of_ranks_fails_no_answer(mesh, prompts):
    if mesh.sizes["decode"] < 2:
        pytest.skip("one decode rank")
    await together(mesh)
    before = await all_at_once(mesh, prompts, "old", max_tokens=30)
    pids = mesh.pids()
    asking = asyncio.ensure_future(all_at_once(mesh, prompts, "renewed", max_tokens=30))
    await pdmesh(mesh, "restart", "decode-0", "decode-1")
    during = await asyncio.wait_for(asking, 240)
    assert [a.token_ids for a in during] == [a.token_ids for a in before]
    renewed = {name for name, pid in mesh.pids().items() if pids[name] != pid}
    assert renewed == {"decode-0", "decode-1"}
    await together(mesh)
    after = await all_at_once(mesh, prompts, "new", max_tokens=30)
    assert [a.token_ids for a in after] == [a.token_ids for a in before]
    assert await mesh.problems() == []


@pytest.mark.full
async def test_another_group_serves_and_goes_again(mesh, prompts, expected):
    if mesh.sizes["decode"] < 2:
        pytest.skip("one decode rank")
    size, workers = mesh.sizes["decode"], mesh.workers
    await pdmesh(mesh, "scale", f"decode={2 * size}")
    mesh.workers = workers + size
    try:
        await together(mesh)
        answers = await all_at_once(mesh, 3 * prompts, "two groups")
        assert [answer.token_ids for answer in answers] == 3 * expected
        assert {int(a.timing.decode_worker.split("-")[1]) // size for a in answers} == {0, 1}
        asking = asyncio.ensure_future(all_at_once(mesh, 2 * prompts, "one goes"))
        await pdmesh(mesh, "scale", f"decode={size}")
        answers = await asyncio.wait_for(asking, 240)
        assert [answer.token_ids for answer in answers] == 2 * expected
    finally:
        mesh.workers = workers
    assert await mesh.problems() == []

"""A mesh whose processes make their weights: tokens are those of one process, and a worker of other
weights takes no part.

Real processes of ``pdmesh up``.
"""

import asyncio
import random
import subprocess
import sys
from contextlib import contextmanager

import mesh_changes
import meshes
import pytest
import torch

from pdmesh.launch.topology import shipped_config
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.random_weights import random_model, served_config
from pdmesh.model.reference import generate_reference
from pdmesh.registry.store import read_members
from pdmesh.wire.random_weights import RandomWeights

SMALL = shipped_config("small")
WEIGHTS = RandomWeights(seed=3, layers=3, experts=8)
FLAGS = ("--random-weights", "--model", "small", "--layers", "3", "--experts", "8")
SEEDED = (*FLAGS, "--weights-seed", "3", "--page-size", "16", "--decode", "1")
NEW_TOKENS = 10
LENGTHS = (1, 15, 16, 17, 50, 90)


def prompts():
    rng = random.Random(11)
    return [[rng.randrange(20, 4096) for _ in range(length)] for length in LENGTHS]


async def one_by_one(mesh, tenant):
    async with meshes.chat_stub(mesh.address) as stub:
        return [
            (
                await meshes.ask(
                    stub, prompt, max_tokens=NEW_TOKENS, ignore_eos=True, tenant=tenant
                )
            ).token_ids
            for prompt in prompts()
        ]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@contextmanager
def other_worker(mesh, seed):
    """A decode worker started by hand with random weights of another seed."""
    place = ("--redis", mesh.info["redis_url"], "--mesh", mesh.info["name"], "--id", "other")
    secret = ("--secret-file", str(mesh.state_dir / "secret.key"), "--page-size", "16")
    made = (*FLAGS, "--weights-seed", str(seed), "--model-name", "small-random", "--threads", "1")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pdmesh.launch.cli", "serve", "decode", *place, *secret, *made]
        + ["--arithmetic", "exact"],
        env=mesh_changes.environment(mesh),
        stdin=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def joining(mesh, *flags):
    """A decode worker that asks the router for what it has to know, as from another machine."""
    secret = ("--secret-file", str(mesh.state_dir / "secret.key"))
    place = ("serve", "decode", "--join", mesh.address, *secret)
    return subprocess.run(
        [sys.executable, "-P", "-m", "pdmesh.launch.cli", *place, *flags],
        env=mesh_changes.environment(mesh),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


async def ready(mesh, name):
    async with asyncio.timeout(meshes.START_S):
        while True:
            members = await read_members(mesh.info["redis_url"], mesh.info["name"])
            if any(m.record.worker_id == name and m.state == "ready" for m in members):
                return
            await asyncio.sleep(0.1)


async def test_answers_are_those_of_one_process_and_a_worker_of_other_weights_gets_none():
    model = random_model(served_config(SMALL, WEIGHTS), 3)
    expected = [generate_reference(model, p, NEW_TOKENS, arithmetic="exact") for p in prompts()]
    with meshes.running_mesh(*SEEDED, "--arithmetic", "exact") as mesh:
        mesh.workers = 2
        assert mesh.info["model"] == "small-random"
        assert await one_by_one(mesh, "alone") == expected
        with other_worker(mesh, seed=4):
            await ready(mesh, "other")
            assert await one_by_one(mesh, "beside") == expected
            statuses = {s.worker_id: s for s in await mesh.statuses()}
            assert statuses["other"].tokens_generated == 0
            assert statuses["decode-0"].tokens_generated > 0
            formats = statuses["other"].page_format, statuses["decode-0"].page_format
            assert "seed 4" in formats[0].weights
            assert "weights is 'random, seed 4" in formats[0].difference(formats[1])
        refused = await asyncio.to_thread(joining, mesh, "--weights-seed", "9")
        while "cannot join the mesh at" in refused.stderr:  # a busy machine: asked again
            refused = await asyncio.to_thread(joining, mesh, "--weights-seed", "9")
        assert refused.returncode == 2
        assert "--weights-seed makes weights_seed 9, but the mesh to join has 3" in refused.stderr
        mesh.instances.clear()
        text = await talk(mesh)
        assert text.token_ids
        assert await mesh.problems(patience=60) == []


async def talk(mesh):
    async with meshes.chat_stub(mesh.address) as stub:
        return await meshes.ask(stub, "Hello! Who are you?", max_tokens=5, ignore_eos=True)


async def test_ranks_that_make_their_own_experts_answer_as_one_process():
    model = random_model(served_config(SMALL, WEIGHTS), 3)
    expected = [generate_reference(model, p, NEW_TOKENS, arithmetic="exact") for p in prompts()]
    flags = [flag for flag in SEEDED if flag not in ("--decode", "1")]
    with meshes.running_mesh(*flags, "--arithmetic", "exact", "--decode-ep", "2") as mesh:
        mesh.workers = 3
        assert await one_by_one(mesh, "ranks") == expected
        assert await mesh.problems() == []


async def test_a_mesh_in_fp8_answers_as_one_process_in_fp8():
    model = DeviceModel.load(SMALL, mtp=False, page_size=16, random=WEIGHTS)
    expected = [generate_reference(model, p, NEW_TOKENS, page_size=16) for p in prompts()]
    with meshes.running_mesh(*SEEDED, "--precision", "fp8", "--no-mtp") as mesh:
        mesh.workers = 2
        assert await one_by_one(mesh, "fp8") == expected
        assert await mesh.problems() == []

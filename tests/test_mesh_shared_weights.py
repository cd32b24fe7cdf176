"""A mesh whose workers map the weights of one process: its answers, and what ends with whom.

Real processes of ``pdmesh up``.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import grpc
import mesh_faults
import meshes
import pytest
import torch
from child_path import python_path

from pdmesh.launch.topology import shipped_model
from pdmesh.model.reference import generate_reference
from pdmesh.model.weights import load_model
from pdmesh.wire.errors import PdmeshError

FLAGS = ("--share-weights", "--page-size", "16", "--arithmetic", "exact")
PROMPTS = ([5] * 3, list(range(40, 57)), list(range(100, 170)))
TOKENS = 10
PATIENCE = 400
"""Seconds that bound a failure on a busy machine."""


def expected():
    """What a model that has loaded its own weights answers, in one process."""
    torch.set_num_threads(1)
    model = load_model(shipped_model())
    return [generate_reference(model, p, TOKENS, arithmetic="exact") for p in PROMPTS]


async def answers(mesh):
    async with meshes.chat_stub(mesh.address) as stub:
        return [
            (await meshes.ask(stub, prompt, max_tokens=TOKENS, ignore_eos=True)).token_ids
            for prompt in PROMPTS
        ]


async def back(mesh, old):
    """Waits until workers serve under other instances than the old ones, then asks them."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(PdmeshError, grpc.aio.AioRpcError):
                statuses = await mesh.statuses()
                if len(statuses) == 3 and not old & {status.instance for status in statuses}:
                    return await answers(mesh)
            await asyncio.sleep(0.2)


def log_of(mesh, name):
    return (mesh.state_dir / "logs" / f"{name}.log").read_text()


def mapped_file(pid):
    """The pages of a file of weights that a process has mapped: device and inode, and how."""
    with open(f"/proc/{pid}/maps") as lines:
        rows = [line.split() for line in lines if "pdmesh-weights" in line]
    return {(row[3], row[4], row[1]) for row in rows}


def pdmesh(mesh, *arguments, **options):
    """A command on the mesh's machine, under way."""
    runtime = mesh.state_dir.parent.parent
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pdmesh.launch.cli", *arguments],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": python_path()},
        text=True,
        **options,
    )


def mapped_by_a_guest(mesh):
    """What a worker has mapped that was started with no more than the name of the mesh."""
    log = mesh.state_dir / "logs" / "guest.log"
    with log.open("w") as sink:
        guest = pdmesh(mesh, "serve", "decode", "--join", "default", stdout=sink, stderr=sink)
    end = time.monotonic() + PATIENCE
    try:
        while "event=ready" not in log.read_text():
            assert guest.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        return mapped_file(guest.pid)
    finally:
        guest.terminate()
        guest.wait(PATIENCE)


@pytest.mark.timeout(1800)
async def test_workers_map_one_copy_answer_the_same_and_come_back_without_loading(
    monkeypatch,
):
    monkeypatch.setattr(meshes, "START_S", PATIENCE)  # workers start after their weights
    wanted = expected()
    with meshes.running_mesh(*FLAGS) as mesh:
        pids = mesh.pids()
        assert set(pids) >= {"weights", "prefill-0", "decode-0", "decode-1"}
        mapped = [mapped_file(pids[name]) for name in ("prefill-0", "decode-0", "decode-1")]
        assert mapped[0] == mapped[1] == mapped[2], "one file, in all of them"
        ((_, _, how),) = mapped[0]
        assert how.startswith("r--"), "which none of them can write to"
        assert await answers(mesh) == wanted
        assert "weights shared" in log_of(mesh, "decode-0")
        assert mapped_by_a_guest(mesh) == mapped[0], "one that joins by hand finds it too"
        told = pdmesh(mesh, "status", stdout=subprocess.PIPE).communicate(timeout=PATIENCE)[0]
        assert "  weights: ready, one copy for the workers on cpu\n" in told

        found = {status.worker_id: status.instance for status in await mesh.statuses()}
        os.kill(pids["decode-0"], signal.SIGKILL)
        assert await back(mesh, {found["decode-0"]}) == wanted
        assert mesh.pids()["weights"] == pids["weights"]
        assert "tensors=" not in log_of(mesh, "decode-0"), "it has loaded none"
        assert mapped_file(mesh.pids()["decode-0"]) == mapped[0]

        found = {status.worker_id: status.instance for status in await mesh.statuses()}
        os.kill(pids["weights"], signal.SIGKILL)
        assert await back(mesh, set(found.values())) == wanted
        for name in ("prefill-0", "decode-0", "decode-1"):
            gone = "the process that holds the weights has ended; the worker leaves"
            assert gone in log_of(mesh, name)
        again = [mapped_file(mesh.pids()[name]) for name in ("prefill-0", "decode-0", "decode-1")]
        assert again[0] == again[1] == again[2] != set(), "one file in all of them once more"
        assert await mesh.problems() == []
        holder = mesh.pids()["weights"]
        assert holder != pids["weights"]
    async with asyncio.timeout(60):
        while mesh_faults.alive(holder):
            await asyncio.sleep(0.05)

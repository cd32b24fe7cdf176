"""One copy of the weights on a GPU: a mesh whose workers map it, and the memory that this takes.

``test_launch_sharing.py`` maps a holder's weights bit for bit, on a GPU too.
"""

import os
import signal

import meshes
import pytest
import torch
from test_gpu_mesh import check_answer
from test_mesh_shared_weights import back

from pdmesh.launch.topology import shipped_config
from pdmesh.model.device.memory import weight_bytes
from pdmesh.model.random_weights import random_model, served_config
from pdmesh.model.reference import generate_reference
from pdmesh.wire.random_weights import RandomWeights

pytestmark = pytest.mark.gpu
RANDOM = RandomWeights(seed=2, layers=3)
MADE = ("--random-weights", "--model", "small", "--layers", "3", "--weights-seed", "2")
FLAGS = ("--device", "cuda", "--share-weights", *MADE)
TOKENS = 16


@pytest.fixture(scope="module")
def expected():
    """The plain model, prompts, and its answers."""
    model = random_model(served_config(shipped_config("small"), RANDOM), 2)
    prompts = [[(7 * i * i + 31 * n) % 4000 + 20 for i in range(n)] for n in (3, 64, 100)]
    return model, [(prompt, generate_reference(model, prompt, TOKENS)) for prompt in prompts]


async def check_answers(mesh, expected):
    model, talks = expected
    async with meshes.chat_stub(mesh.address) as stub:
        for prompt, wanted in talks:
            answer = await meshes.ask(stub, prompt, max_tokens=TOKENS, ignore_eos=True)
            check_answer(model, prompt, answer.token_ids, wanted)


async def test_workers_answer_from_one_copy_and_outlive_neither_it_nor_each_other(expected):
    with meshes.running_mesh(*FLAGS, topology=meshes.SMALL_STEPS) as mesh:
        await check_answers(mesh, expected)
        before = mesh.pids()
        found = {status.worker_id: status.instance for status in await mesh.statuses()}
        os.kill(before["decode-0"], signal.SIGKILL)
        await back(mesh, {found["decode-0"]})
        assert mesh.pids()["weights"] == before["weights"]
        await check_answers(mesh, expected)
        found = {status.worker_id: status.instance for status in await mesh.statuses()}
        os.kill(before["weights"], signal.SIGKILL)
        await back(mesh, set(found.values()))
        await check_answers(mesh, expected)
        assert await mesh.problems() == []


def test_two_workers_of_full_width_layers_take_one_copy_of_the_weights():
    layers = ("--random-weights", "--layers", "4", "--no-mtp", "--decode", "1")
    free = torch.cuda.mem_get_info()[0]
    flags = ("--device", "cuda", "--share-weights", *layers)
    topology = "[prefill]\npages = 64\nchunk_tokens = 64\n[decode]\npages = 64\nmax_batch = 8\n"
    with meshes.running_mesh(*flags, topology=topology) as mesh:
        config = served_config(shipped_config("deepseek-v3"), RandomWeights(layers=4))
        needed = weight_bytes(config, mtp=False)
        taken = free - torch.cuda.mem_get_info()[0]
        assert needed < taken < 1.6 * needed, mesh.log()

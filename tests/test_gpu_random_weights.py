"""Random weights on a GPU: a mesh answers as the plain model does, and full width is finite."""

import meshes
import pytest
import torch
from test_gpu_mesh import check_answer

from pdmesh.launch.topology import shipped_config
from pdmesh.model.device.memory import weight_bytes
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.random_weights import random_model, served_config
from pdmesh.model.reference import generate_reference
from pdmesh.wire.random_weights import RandomWeights

pytestmark = pytest.mark.gpu
SMALL = RandomWeights(seed=2, layers=3)
TOKENS = 16


async def test_a_mesh_of_random_weights_answers_as_the_plain_model_but_for_near_ties():
    model = random_model(served_config(shipped_config("small"), SMALL), 2)
    prompts = [[(7 * i * i + 31 * n) % 4000 + 20 for i in range(n)] for n in (3, 64, 100)]
    flags = ("--device", "cuda", "--random-weights", "--model", "small", "--layers", "3")
    more = ("--weights-seed", "2", "--decode", "1")
    with meshes.running_mesh(*flags, *more, topology=meshes.SMALL_STEPS) as mesh:
        mesh.workers = 2
        async with meshes.chat_stub(mesh.address) as stub:
            for prompt in prompts:
                wanted = {"max_tokens": TOKENS, "ignore_eos": True}
                answer = await meshes.ask(stub, prompt, **wanted)
                expected = generate_reference(model, prompt, TOKENS)
                check_answer(model, prompt, answer.token_ids, expected)
        assert await mesh.problems() == []


def test_full_width_layers_take_the_memory_that_was_planned_and_give_finite_rows():
    random = RandomWeights(layers=4)
    before = torch.cuda.memory_allocated()
    model = DeviceModel.load(shipped_config("deepseek-v3"), "cuda", mtp=False, random=random)
    held = torch.cuda.memory_allocated() - before
    assert held < 1.01 * weight_bytes(model.config, mtp=False) + (1 << 28)
    rows = []
    generate_reference(model, list(range(100, 200)), 8, on_logits=rows.append)
    assert len(rows) == 8
    assert all(bool(torch.isfinite(row).all()) for row in rows)

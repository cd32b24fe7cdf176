"""Random weights on a GPU: a mesh answers as the plain model does, and full width is finite."""

import sys

import meshes
import pytest
import torch
from live_memory import PAGE, batch_of
from test_gpu_mesh import check_answer

from pdmesh.launch.topology import shipped_config
from pdmesh.model.device.bound import MemoryBound, limit, starting
from pdmesh.model.device.memory import MemoryPlan, weight_bytes
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.step_memory import step_bytes
from pdmesh.model.random_weights import random_model, served_config
from pdmesh.model.reference import generate_reference
from pdmesh.wire.errors import ConfigError
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


@pytest.fixture(scope="module")
def wide():
    """Four layers of full width, three dense and one MoE, and what of the device they take."""
    before = torch.cuda.memory_allocated()
    random = RandomWeights(layers=4)
    model = DeviceModel.load(shipped_config("deepseek-v3"), "cuda", mtp=False, random=random)
    return model, torch.cuda.memory_allocated() - before


def test_full_width_layers_take_the_memory_that_was_planned_and_give_finite_rows(wide):
    model, held = wide
    assert held < 1.01 * weight_bytes(model.config, mtp=False) + (1 << 28)
    rows = []
    generate_reference(model, list(range(100, 200)), 8, on_logits=rows.append)
    assert len(rows) == 8
    assert all(bool(torch.isfinite(row).all()) for row in rows)


def taken(call):
    """Bytes that a call allocates and reserves at most, beside what is there before; what it
    compiles, and what libraries keep, is there already."""
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    call()
    torch.cuda.synchronize()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return [peak - there for peak, there in zip(peaks, before, strict=True)]


def say(capsys, what, allocated, reserved, counted):
    with capsys.disabled():
        sys.stdout.write(
            f"\n{what}: {allocated / 1e9:.3f} GB allocated, {reserved / 1e9:.3f} reserved, "
            f"{counted / 1e9:.3f} counted"
        )


LONG = 131_072
STEPS = {
    "the largest masked layout": ([(0, 512)], "mha"),
    "the smallest contiguous one": ([(0, 576)], "mha"),
    "a chunk of 4,096": ([(0, 4160)], "mha"),
    "a chunk behind a long prefix": ([(LONG - 1088, LONG)], "mha"),
    "32 prompts behind what is cached": ([(8192, 8320)] * 32, "absorbed"),
    "16 sequences": ([(2048, 2049)] * 16, "absorbed"),
    "256 sequences with a draft": ([(2048, 2050)] * 256, "absorbed"),
}


@pytest.mark.parametrize(("pieces", "form"), STEPS.values(), ids=STEPS)
def test_a_step_takes_no_more_memory_than_was_counted(wide, capsys, pieces, form):
    model, _ = wide
    pool = model.new_latents(LONG // PAGE)
    rows = sum(end - start for start, end in pieces)
    keys = max(end for _, end in pieces) if form == "mha" else 0
    counted = step_bytes(model.config, rows, 1, keys=keys)
    allocated, reserved = taken(lambda: model.forward(batch_of(pieces, "cuda"), pool, form))
    say(capsys, f"{rows} rows", allocated, reserved, counted)
    assert allocated <= counted
    assert reserved <= counted + (1 << 30), "pieces that lie so that others do not fit in"


def test_graphs_take_no_more_memory_than_was_counted(wide, capsys):
    model = DeviceModel.of(wide[0].config, wide[0].weights)
    pool = model.new_latents(64)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    model.capture(pool, (1, 2), 16)
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    counted = step_bytes(model.config, 32, 32, captured=True)
    at_most = [peak - there for peak, there in zip(peaks, before, strict=True)]
    kept = torch.cuda.memory_reserved() - before[1]
    say(capsys, f"graphs, which keep {kept / 1e9:.3f} GB", *at_most, counted)
    assert at_most[0] <= counted
    assert max(at_most[1], kept) <= counted + (1 << 30)


def test_a_worker_that_wants_more_than_its_plan_gives_pieces_back_and_then_fails_itself():
    torch.cuda.empty_cache()
    held, size = torch.cuda.memory_reserved(), 1 << 30
    plan = MemoryPlan(budget=held + 3 * size, weights=0, steps=0, pages=2, page=1)
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        memory = MemoryBound(plan, device, "decode")
        for count in (1, 2, 3):  # each needs what the one before has left in pieces
            torch.empty(count * size, dtype=torch.uint8, device=device)
        with pytest.raises(ConfigError, match="fewer --pages"), starting(memory):
            torch.empty(limit(plan) - held + size, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)

"""A mesh whose decode workers are 128 ranks each, fed by prefill ranks in processes of their own.

Chats over a small random model of 256 experts get the tokens of one process that holds them all:
through the hand-off from one kind of group to the other, and when an answer moves.
"""

import asyncio
import random

import meshes
import pytest
import torch
from checkpoints import random_checkpoint
from mesh_changes import moved_in_the_middle
from parallel_rig import WIDE
from test_mesh_migration import verified

from pdmesh.launch.topology import shipped_model
from pdmesh.model.reference import generate_reference
from pdmesh.model.weights import load_model

NEW_TOKENS = 8
MODELS = ["wide-ep128", pytest.param("shipped-ep32", marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=MODELS)
def served(request, tmp_path_factory):
    """A model, its folder, and as many ranks as it can have."""
    torch.set_num_threads(1)
    if request.param == "shipped-ep32":
        model = load_model(shipped_model(), torch.float32, torch.device("cpu"))
        return model, shipped_model(), 32
    folder = tmp_path_factory.mktemp("wide")
    return random_checkpoint(folder, **WIDE), folder, 128


@pytest.fixture(scope="module")
def mesh(served):
    _, folder, ranks = served
    flags = ["--model", str(folder), "--arithmetic", "exact", "--draft-tokens", "1"]
    flags += ["--prefill-ep", "2", "--decode", "2", "--decode-virtual-ranks", str(ranks)]
    with meshes.running_mesh(*flags) as running:
        running.workers = 4
        yield running


@pytest.fixture(scope="module")
def prompts(served):
    model, rng, found = served[0], random.Random(3), []
    for length in (1, 64, 65, 150, 20, 130):
        found.append([rng.randrange(20, model.config.vocab_size) for _ in range(length)])
    return found


async def test_chats_get_the_tokens_of_one_rank_and_every_rank_takes_part(served, mesh, prompts):
    model, _, ranks = served
    expected = [generate_reference(model, p, NEW_TOKENS, arithmetic="exact") for p in prompts]
    fields = {"max_tokens": NEW_TOKENS, "ignore_eos": True}
    async with meshes.chat_stub(mesh.address) as stub:
        for tenant in ("cold", "cold"):  # and then warm
            asked = [meshes.ask(stub, prompt, tenant=tenant, **fields) for prompt in prompts]
            assert [a.token_ids for a in await asyncio.gather(*asked)] == expected
    for status in await mesh.statuses():
        assert status.ranks.virtual == (status.role == "decode")
        assert status.ranks.size == (ranks if status.role == "decode" else 2)
        assert len(status.ranks.members) == status.ranks.size
        assert status.ranks.sent_bytes > 0
    drafted = [s.drafted for s in await mesh.statuses() if s.role == "decode"]
    assert sum(drafted) > 0
    assert await mesh.problems() == []


async def test_an_answer_that_moves_between_two_such_workers_goes_on_to_the_last_bit(
    served, mesh, prompts
):
    workers = ("decode-0", "decode-1")
    told = await moved_in_the_middle(
        mesh, prompts[3], workers, long=800, further=NEW_TOKENS, logprobs=1
    )
    assert told == generate_reference(served[0], prompts[3], len(told), arithmetic="exact")
    assert await mesh.problems() == []


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_answers_that_are_moved_about_are_those_that_are_left_alone(mesh):
    await verified(mesh, 4)
    assert await mesh.problems() == []

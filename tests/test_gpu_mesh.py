"""A mesh whose workers all compute on one GPU in FP8: answers, drafts, and nothing left behind."""

import asyncio

import meshes
import pytest
import torch
from device_cases import check_answer, conversations
from test_mesh_transports import transports_used

from pdmesh.launch.topology import shipped_model
from pdmesh.model.weights import load_model

pytestmark = pytest.mark.gpu
TOKENS = 24


@pytest.fixture(scope="module", params=["plain", "fp8"])
def mesh(request):
    arguments = ("--device", "cuda", "--prefill", "1", "--decode", "2")
    latents = ("--latents", request.param)
    with meshes.running_mesh(*arguments, *latents, topology=meshes.SMALL_STEPS) as running:
        yield running


async def test_answers_are_those_of_the_reference_but_for_near_ties(mesh):
    model = load_model(shipped_model())
    talks = [
        (whole[: len(whole) - count], whole[len(whole) - count :])
        for whole, count in conversations(model, shipped_model(), TOKENS)
    ]
    async with meshes.chat_stub(mesh.address) as stub:
        calls = [meshes.ask(stub, prompt, max_tokens=TOKENS) for prompt, _ in talks * 3]
        answers = await asyncio.gather(*calls)
    for answer, (prompt, expected) in zip(answers, talks * 3, strict=True):
        assert answer.finish in ("stop", "length")
        check_answer(model, prompt, answer.token_ids, expected)
    assert await mesh.problems() == []


async def test_a_chat_streams_and_drafts_are_accepted(mesh):
    async with meshes.chat_stub(mesh.address) as stub:
        answer = await meshes.ask(stub, "Hello! Who are you?", max_tokens=60)
    assert "pdmesh" in answer.text or "model" in answer.text, answer.text
    decoders = [status for status in await mesh.statuses() if status.role == "decode"]
    assert sum(status.accepted for status in decoders) > 0
    log = mesh.log()
    assert "captured a decode graph" in log
    assert "flash_mla" in log or "triton" in log


async def test_pages_go_from_device_to_device(mesh):
    async with meshes.chat_stub(mesh.address) as stub:
        answer = await meshes.ask(stub, list(range(100, 300)), max_tokens=4, ignore_eos=True)
    assert len(answer.token_ids) == 4
    assert transports_used(mesh) == {"cuda_ipc"}
    for status in await mesh.statuses():
        expected = ("cuda_ipc",) if status.role == "prefill" else ("cuda_ipc", "tcp")
        assert status.transports == expected


def test_the_pages_of_all_workers_fit_the_device(mesh):
    free, total = torch.cuda.mem_get_info()
    assert free > 0.02 * total

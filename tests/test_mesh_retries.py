"""In exact mode neither a cached prefix nor a retry after a worker's death changes a token.

Real processes, which stand still where a test kills one (staged.py). The mesh is shared by the
tests of this file; a process that a test kills is restarted.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import grpc
import meshes
import pytest
import staged
import torch
from mesh_faults import DECODE, busy, ready_again, restarted

from pdmesh.launch.topology import shipped_model
from pdmesh.model.reference import generate_reference
from pdmesh.model.weights import load_model

PAGE = 64
PROMPT = list(range(300, 400))
IN_THE_MIDDLE = ("Step.at", str(len(PROMPT) + 9))
"""Where the answers to prompts of this length stand still."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stage")


@pytest.fixture(scope="module")
def mesh(folder):
    with meshes.running_mesh(
        "--arithmetic",
        "exact",
        program=(str(Path(staged.__file__).absolute()),),
        variables={staged.VARIABLE: str(folder), staged.IDLE: "60", staged.SILENCE: "10"},
    ) as running:
        yield running


@pytest.fixture
def stage(folder):
    stage = staged.Stage(folder)
    yield stage
    stage.release()


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model(shipped_model(), torch.float32, torch.device("cpu"))


def reference(model, prompt, max_tokens):
    return generate_reference(model, prompt, max_tokens, arithmetic="exact")


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
async def test_a_prompt_sent_again_gives_the_same_tokens(mesh, model, length):
    """Compare GeeeekExplorer/nano-vllm#114: nothing may be left to compute after a full hit."""
    prompt = [700 + length + i for i in range(length)]
    longer = [*prompt, *range(900, 900 + PAGE)]
    want = reference(model, prompt, 6)
    async with meshes.chat_stub(mesh.address) as stub:
        first = await meshes.ask(stub, prompt, max_tokens=6, ignore_eos=True, logprobs=2)
        await meshes.ask(stub, longer, max_tokens=2, ignore_eos=True)
        for _ in range(2):
            again = await meshes.ask(stub, prompt, max_tokens=6, ignore_eos=True, logprobs=2)
            assert again.token_ids == first.token_ids == want
            assert again.usage.cached_tokens <= length - 1
            assert [e.logprob for e in again.logprobs] == [e.logprob for e in first.logprobs]
    assert len(first.logprobs) == 6


@pytest.mark.parametrize("repeat", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_killing_a_decode_worker_while_it_streams_costs_no_token(mesh, stage, model, repeat):
    prompts = [[1000 * repeat + 200 * k + i for i in range(len(PROMPT))] for k in range(3)]
    wants = [reference(model, prompt, 150) for prompt in prompts]
    stage.hold(DECODE, *IN_THE_MIDDLE)
    async with contextlib.AsyncExitStack() as stack:
        stub = await stack.enter_async_context(meshes.chat_stub(mesh.address))
        statuses = await stack.enter_async_context(mesh.watch())
        streams = [
            await stack.enter_async_context(
                meshes.asking(stub, prompt, max_tokens=150, ignore_eos=True)
            )
            for prompt in prompts
        ]
        for task, answer in streams:
            await meshes.first_token(task, answer)
        await stage.reached("Step.at")
        victim = await busy(statuses, *DECODE)
        old = mesh.pids()[victim]
        os.kill(old, signal.SIGKILL)
        stage.release()
        answers = await asyncio.gather(*(task for task, _ in streams))
    assert [answer.token_ids for answer in answers] == wants
    assert max(answer.timing.attempts for answer in answers) > 1, "one lost its worker"
    await recovered(mesh, victim, old, model)


async def test_killing_the_prefill_worker_costs_at_most_the_prompts_it_computes(mesh, stage, model):
    prompts = [[300 + (97 * k + i) % 2900 for i in range(1000)] for k in range(2)]
    wants = [reference(model, prompt, 2) for prompt in prompts]
    want = reference(model, PROMPT, 200)
    old = mesh.pids()["prefill-0"]
    stage.hold(DECODE, *IN_THE_MIDDLE)
    async with contextlib.AsyncExitStack() as stack:
        stub = await stack.enter_async_context(meshes.chat_stub(mesh.address))
        streaming, streamed = await stack.enter_async_context(
            meshes.asking(stub, PROMPT, max_tokens=200, ignore_eos=True)
        )
        (decode,) = await stage.reached("Step.at")
        stage.hold(["prefill-0"], "Step.at", "1")
        waiting = [
            await stack.enter_async_context(
                meshes.asking(stub, prompt, max_tokens=2, ignore_eos=True)
            )
            for prompt in prompts
        ]
        assert await stage.reached("Step.at", 2) == [decode, "prefill-0"]
        os.kill(old, signal.SIGKILL)
        assert not [answer.token_ids for _, answer in waiting if answer.started]
        assert not streaming.done()
        stage.release()
        assert (await streaming).token_ids == want
        assert streamed.timing.attempts == 1, "who is past prefill does not notice"
        ends = await asyncio.gather(*(task for task, _ in waiting), return_exceptions=True)
    for end, expected in zip(ends, wants, strict=True):
        if isinstance(end, grpc.aio.AioRpcError):
            assert end.code() is grpc.StatusCode.UNAVAILABLE, end.details()
        else:
            assert end.token_ids == expected
    await recovered(mesh, "prefill-0", old, model)


async def recovered(mesh, name, old, model):
    """Waits until a killed worker is back; fails unless all is as before."""
    await restarted(mesh, name, old)
    await ready_again(mesh)
    async with meshes.chat_stub(mesh.address) as stub:
        after = await meshes.ask(stub, PROMPT, max_tokens=30, ignore_eos=True)
    assert after.token_ids == reference(model, PROMPT, 30)
    assert await mesh.problems() == []

"""What a router believes about pages, in real processes: the cost depends on it, no token does."""

import asyncio
import random

import lying_index
import meshes
import pytest
import staged
from mesh_matrix import DECODE, PREFILL, staged_mesh

PAGE = 64
SHARED = 20 * PAGE + 2
"""Tokens of the prompt of a burst: two positions are computed by everybody."""
REQUESTS = 16

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def lies(tmp_path_factory):
    """The file whose presence makes the router's index lie."""
    return tmp_path_factory.mktemp("lies") / "on"


@pytest.fixture(scope="module")
def play(tmp_path_factory, lies):
    variables = {lying_index.VARIABLE: str(lies), staged.IDLE: "60"}
    with staged_mesh(tmp_path_factory.mktemp("index"), **variables) as play:
        yield play


def tokens(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(20, 400) for _ in range(length)]


async def computed(mesh):
    """Prompt tokens that each prefill worker has computed so far."""
    async with mesh.watch() as statuses:
        return {status.worker_id: status.tokens_computed for status in await statuses(*PREFILL)}


async def leases(mesh):
    async with mesh.watch() as statuses:
        return sum(status.leases for status in await statuses(*DECODE))


async def test_the_shared_pages_of_a_burst_are_computed_about_once(play):
    """llm-d/llm-d-router#1726: sixteen equal cold prompts, all sent before any page is there."""
    mesh, prompt = play.mesh, tokens(SHARED, 1)
    before = await computed(mesh)
    play.stage.hold(PREFILL, "Prefill.before")
    try:
        async with meshes.chat_stub(mesh.address) as stub:
            asked = [
                asyncio.ensure_future(meshes.ask(stub, prompt, max_tokens=4, ignore_eos=True))
                for _ in range(REQUESTS)
            ]
            async with asyncio.timeout(120):
                while await leases(mesh) < REQUESTS:
                    await asyncio.sleep(0.05)
            await play.stage.reached("Prefill.before")
            play.stage.let(PREFILL, "Prefill.before")
            answers = await asyncio.gather(*asked)
    finally:
        play.stage.release()
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    after = await computed(mesh)
    total = sum(after[name] - before[name] for name in after)
    assert SHARED <= total < 1.25 * SHARED
    assert await mesh.problems() == []


def seen(answer):
    """All that a client gets of an answer but times and counts: to the last bit."""
    return answer.token_ids, answer.finish, [entry.SerializeToString() for entry in answer.logprobs]


async def test_an_index_that_lies_at_random_changes_no_answer(play, lies):
    """Tokens and log-probabilities, with pulls from workers that lack what they are said to have,
    and prompts that are computed although somebody has them."""
    mesh = play.mesh
    bases = [tokens(3 * PAGE, seed) for seed in (10, 11, 12)]
    prompts = [[*bases[n % 3][: PAGE * (1 + n % 4)], *tokens(5 + 7 * n, 20 + n)] for n in range(9)]
    wanted = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2, "temperature": 1.0, "seed": 3}
    async with meshes.chat_stub(mesh.address) as stub:
        true = [seen(await meshes.ask(stub, p, tenant="truth", **wanted)) for p in prompts]
        lies.touch()
        try:
            for tenant in ("truth", "new", "new"):
                several = (meshes.ask(stub, p, tenant=tenant, **wanted) for p in prompts)
                told = [seen(answer) for answer in await asyncio.gather(*several)]
                assert told == true
            longer = [[*p, *answer[0]] for p, answer in zip(prompts, true, strict=True)]
            turns = [await meshes.ask(stub, p, tenant="new", **wanted) for p in longer]
        finally:
            lies.unlink()
        again = [await meshes.ask(stub, p, tenant="other", **wanted) for p in longer]
    assert list(map(seen, turns)) == list(map(seen, again))
    assert lies.with_suffix(".told").exists()
    assert await mesh.problems() == []

"""Answers do not depend on how their pages came to the worker that generates them."""

import random

import pytest
from worker_rig import PAGE, prompt_of, reference, rig

from pdmesh.kvtransfer import nixl

NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(nixl.missing() is not None, reason=str(nixl.missing()))
)
PROMPTS = (5, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 7)


def asked(number):
    """A prompt, how many of its pages are there before, and how to answer it."""
    rng = random.Random(number)
    length = rng.choice(PROMPTS)
    held = rng.randint(0, length // PAGE)
    prompt = prompt_of(length, number)
    sampling = {"logprobs": 2, "seed": number, "temperature": rng.choice((0.0, 0.0, 1.0))}
    return prompt, held, rng.randint(2, 12), sampling


async def answers(transport, arithmetic, numbers):
    """Tokens and log-probabilities of each case; the pages of a prompt are new or held before."""
    found = {}
    async with rig(transport=transport, arithmetic=arithmetic, prefills=2, pages=96) as mesh:
        for number in numbers:
            prompt, held, length, sampling = asked(number)
            if held:
                await mesh.ask([*prompt[: held * PAGE], 3], 2, prefill=1)
            answer = await mesh.ask(prompt, length, **sampling)
            found[number] = (list(answer.tokens), list(answer.logprobs))
            assert len(answer.tokens) == length
        assert mesh.problems() == []
    return found


@pytest.mark.parametrize("arithmetic", ["fast", "exact"])
@pytest.mark.parametrize("transport", ["tcp", "shm", "cuda_ipc", NIXL])
@pytest.mark.parametrize(
    "count",
    [10, pytest.param(500, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
)
async def test_an_answer_is_the_same_to_the_last_bit_over_every_transport(
    transport, arithmetic, count
):
    numbers = range(count)
    got = await answers(transport, arithmetic, numbers)
    want = await answers("loopback", arithmetic, numbers)
    for number in numbers:
        assert got[number] == want[number], f"hand-off {number}"
        prompt, _, length, sampling = asked(number)
        if arithmetic == "fast" and sampling["temperature"] == 0.0:
            assert got[number][0] == reference(prompt, length), f"hand-off {number}"

"""Random requests that move at random moments between two engines: every token and logit is right.

Each answer is compared with its run alone in one process.
"""

import asyncio
from collections import Counter

import pytest
import torch
from engine_cases import Ask, Engine, alone, asks, engines, prompts_of, watched
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from migration_rig import moving
from worker_rig import rig

BOTH = pytest.mark.parametrize("arithmetic", ["fast", "exact"])
ROUTES = st.lists(st.tuples(st.integers(1, 13), st.integers(0, 1)), max_size=4).map(sorted)
CASES = {
    "engine": engines(),
    "mix": asks(sharing=False),
    "routes": st.lists(ROUTES, min_size=5, max_size=5),
}
ALL = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
AT_LEAST_ONE = {
    "engine": Engine(8, 40, 3, 2, 8, 0),
    "mix": [Ask(0, 0, 30, 1, 2, 14, "shaped"), Ask(1, 0, 15, 2, 1, 12, "penalties")],
    "routes": [[(2, 1), (5, 0), (9, 1)], [(4, 0), (8, 1)], [], [], []],
}


async def serve(mesh, ask, prompt, route, number):
    answers = await moving(
        mesh,
        prompt,
        route,
        n=ask.n,
        worker=number % 2,
        request_id=f"r{number}",
        **{name: getattr(ask.sampling, name) for name in ask.sampling.__struct_fields__},
    )
    if ask.max_tokens == 1:
        for answer in range(ask.n):
            await mesh.release(answers[0].lease, decode=number % 2, answer=answer)
        return answers
    return await asyncio.gather(*(answer.run() for answer in answers))


def run(arithmetic, engine, mix, routes) -> Counter[str]:
    """Serves the mix and compares all; returns how many moves there were, by their end."""
    prompts = prompts_of(mix, arithmetic)
    expected = {
        (ask.seed, index): alone(prompt, ask, index, arithmetic)
        for ask, prompt in zip(mix, prompts, strict=True)
        for index in range(ask.n)
    }
    truth = {key: tokens for key, (tokens, _) in expected.items()}

    async def all_of_them():
        async with rig(**engine.options(arithmetic), decodes=2, truth=truth) as mesh:
            with watched() as (seen, _):
                work = zip(mix, prompts, routes, strict=False)
                done = await asyncio.gather(
                    *(serve(mesh, a, p, r, number) for number, (a, p, r) in enumerate(work))
                )
                await mesh.rest()
            return done, seen

    done, seen = asyncio.run(all_of_them())
    ends: Counter[str] = Counter()
    for ask, answers in zip(mix, done, strict=True):
        for answer in answers:
            ends.update(decision.split()[0] for decision in answer.decisions)
            tokens, logits = expected[ask.seed, answer.index]
            assert tuple(answer.tokens) == tokens, (ask, answer.index, answer.decisions)
            for position, row in enumerate(logits):
                found = seen[ask.seed, answer.index, position]
                assert any(torch.equal(row, other) for other in found), (ask, position)
    return ends


@BOTH
@example(**AT_LEAST_ONE)
@settings(ALL, max_examples=4)
@given(**CASES)
def test_random_moves_are_not_to_be_seen(arithmetic, engine, mix, routes):
    run(arithmetic, engine, mix, routes)


@BOTH
def test_the_named_case_does_move(arithmetic):
    assert run(arithmetic, **AT_LEAST_ONE)["committed"] >= 5


@pytest.mark.full
@BOTH
@settings(ALL, max_examples=500)
@given(**CASES)
def test_many_random_moves_are_not_to_be_seen(arithmetic, engine, mix, routes):
    run(arithmetic, engine, mix, routes)

"""Far more requests than the decode pools hold: all are served, in turn, with the right tokens.

Real processes; every decode worker has pages for about 1.3 of the long requests.
"""

import asyncio
import random
from dataclasses import dataclass

import meshes
import pytest
from checkpoints import VOCAB, random_checkpoint

from pdmesh.model.reference import generate_reference

PAGE = 16
LONG = 40
DECODE_PAGES = 8
"""1.3 times the six pages of a long request: up to 48 prompt tokens and 40 more."""
SAMPLE, ALL = 120, 1000
SLACK_S = 30.0
"""What calls between processes add on a busy machine."""


@dataclass(frozen=True)
class Case:
    """One client. It leaves after so many tokens; 0: when the first of all has its answer, and it
    waits in line; None: never."""

    prompt: int
    max_tokens: int
    leave_after: int | None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random-model")
    return folder, random_checkpoint(folder, num_hidden_layers=2)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(3)
    return [[rng.randrange(20, VOCAB) for _ in range(rng.randint(1, 48))] for _ in range(24)]


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    _, model = checkpoint
    return [generate_reference(model, prompt, LONG, arithmetic="exact") for prompt in prompts]


def cases(count: int, num_prompts: int) -> list[Case]:
    """Two thirds long, some short; every sixth client leaves, a fourth of these while it waits."""
    rng = random.Random(11)
    found = []
    for number in range(count):
        long = rng.random() < 0.67
        tokens = rng.randint(28, LONG) if long else rng.randint(1, 6)
        leave = rng.randint(1, tokens) if number % 6 == 5 else None
        found.append(Case(rng.randrange(num_prompts), tokens, 0 if number % 24 == 23 else leave))
    return found


def topology(workers: int, growth: int) -> str:
    return (
        f"[model]\narithmetic = 'exact'\npage_size = {PAGE}\n"
        "[prefill]\npages = 64\n"
        f"[decode]\nworkers = {workers}\npages = {DECODE_PAGES}\ngrowth_tokens = {growth}\n"
        "threads = 1\n"
    )


async def served(stub, prompt, case, first_is_done):
    """The answer, whole or as far as it came before its client left."""
    async with meshes.asking(
        stub,
        prompt,
        timeout=1200,
        leave_after=case.leave_after or None,
        max_tokens=case.max_tokens,
        ignore_eos=True,
    ) as (task, answer):
        if case.leave_after == 0:
            await first_is_done.wait()
        else:
            await task
            first_is_done.set()
    return answer


POOLS = {(1, 16): (SAMPLE,), (4, 0): (SAMPLE,), (1, 0): (), (2, 16): ()}
"""Decode workers and ``growth_tokens``: how many requests ``make test`` sends them."""


@pytest.mark.parametrize(
    ("workers", "growth", "count"),
    [
        pytest.param(*pool, count, marks=() if count in quick else pytest.mark.full)
        for pool, quick in POOLS.items()
        for count in (SAMPLE, ALL)
    ],
)
async def test_every_request_is_served_in_turn_from_pools_for_one(
    checkpoint, prompts, expected, workers, growth, count
):
    folder, _ = checkpoint
    chosen = cases(count, len(prompts))
    with meshes.running_mesh("--model", str(folder), topology=topology(workers, growth)) as mesh:
        mesh.workers = workers + 1
        async with meshes.chat_stub(mesh.address) as stub:
            first_is_done = asyncio.Event()
            answers = await asyncio.gather(
                *(served(stub, prompts[case.prompt], case, first_is_done) for case in chosen)
            )
        wrong = [
            (case, answer.token_ids, answer.finish)
            for case, answer in zip(chosen, answers, strict=True)
            if not right(case, answer, expected[case.prompt])
        ]
        assert not wrong, f"{len(wrong)} of {count}, first {wrong[0]}"
        # Nobody waits longer than all of them take together, from first token to last.
        decoding = sum(a.token_times[-1] - a.first_token_s for a in answers if a.token_times)
        prefilling = sum(a.timing.prefill_ms for a in answers if a.timing) / 1e3
        assert max(a.first_token_s for a in answers) <= decoding + prefilling + SLACK_S
        assert await mesh.problems() == []


def right(case: Case, answer: meshes.Answer, expected: list[int]) -> bool:
    if case.leave_after is None:
        return answer.token_ids == expected[: case.max_tokens] and answer.finish == "length"
    got = answer.token_ids
    return len(got) >= case.leave_after and got == expected[: len(got)]

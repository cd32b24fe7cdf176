"""Greedy tokens through the mesh equal those of one process that runs the model alone.

Real processes, real TCP: the router, one prefill worker and two decode workers of ``pdmesh up``.
In exact mode that holds whatever is cached; in fast mode for prompts that nothing is cached of: a
short rest behind a cached prefix is computed in the other form, which agrees within rounding.
"""

import asyncio
import functools
import random
from dataclasses import dataclass

import meshes
import pytest
import torch

from pdmesh.launch.topology import shipped_model
from pdmesh.model.reference import generate_reference
from pdmesh.model.weights import load_model
from pdmesh.wire.hashes import Arithmetic

PAGE = 64
NEW_TOKENS = 8
NUM_PROMPTS = 204
ROOMY = "[prefill]\npages = 1024\n"
"""Room for every page of every prompt and tenant of this file: nothing is evicted at prefill."""
SAMPLE = 32
"""Prompts of ``make test``: every boundary length, and some others; ``make test-full`` runs all."""
BOUNDARIES = 24
"""Of these, the boundary lengths: the first; one at a time in ``make test``."""


def lengths() -> list[int]:
    """Every length within 3 tokens of a boundary of pages 1 to 3, and others in between."""
    around = [k * PAGE + d for k in (1, 2, 3) for d in range(-3, 4)]
    chosen = [1, 2, 3, *around]
    rng = random.Random(5)
    while len(chosen) < NUM_PROMPTS:
        chosen.append(rng.choice([rng.randint(1, 3 * PAGE + 3), *around]))
    return chosen


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model(shipped_model(), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module", params=["sample", pytest.param("all", marks=pytest.mark.full)])
def prompts(model, request):
    """Half random ids, where choices are close; half repeating ones, where drafts are right."""
    rng = random.Random(7)
    vocab = model.config.vocab_size
    found = []
    chosen = lengths()[: SAMPLE if request.param == "sample" else None]
    for i, length in enumerate(chosen):
        if i % 2:
            found.append([rng.randrange(20, vocab) for _ in range(length)])
        else:
            base = [rng.randrange(20, vocab) for _ in range(11)]
            found.append([base[j % 11] for j in range(length)])
    return found


@dataclass(frozen=True)
class Mode:
    """One mesh: its arithmetic, with or without MTP, and the states of its caches to try."""

    arithmetic: Arithmetic
    mtp: bool
    states: tuple[str, ...]


MODES = {
    "exact": Mode("exact", True, ("cold", "warm")),
    "exact-no-mtp": Mode("exact", False, ("cold", "warm")),
    "fast": Mode("fast", True, ("cold",)),
    "fast-no-mtp": Mode("fast", False, ("cold",)),
}


LARGE = ("fast-no-mtp",)
"""The rest of a large set: its two choices are in the others of ``MODES``."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.full) if n in LARGE else n for n in MODES],
)
def mode(request):
    return MODES[request.param]


@pytest.fixture(scope="module")
def references(model, prompts):
    """What one process answers to the prompts, by arithmetic."""

    @functools.cache
    def answers(arithmetic):
        return [
            generate_reference(model, prompt, NEW_TOKENS, arithmetic=arithmetic)
            for prompt in prompts
        ]

    return answers


@pytest.fixture(scope="module")
def expected(references, mode):
    return references(mode.arithmetic)


@pytest.fixture(scope="module")
def mesh(mode):
    flags = ["--arithmetic", mode.arithmetic] + ([] if mode.mtp else ["--no-mtp"])
    with meshes.running_mesh(*flags, topology=ROOMY) as running:
        yield running


async def answers(stub, prompts, tenant, at_once):
    gate = asyncio.Semaphore(at_once)

    async def one(prompt):
        async with gate:
            return await meshes.ask(
                stub, prompt, tenant=tenant, max_tokens=NEW_TOKENS, ignore_eos=True
            )

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


@pytest.mark.parametrize("at_once", [1, 16], ids=["one-at-a-time", "sixteen-at-once"])
async def test_no_token_differs_from_the_single_process_reference(
    mesh, mode, prompts, expected, at_once
):
    if at_once == 1 and len(prompts) == SAMPLE:
        prompts, expected = prompts[:BOUNDARIES], expected[:BOUNDARIES]
    async with meshes.chat_stub(mesh.address) as stub:
        for state in mode.states:
            got = await answers(stub, prompts, f"tenant-{len(prompts)}-{at_once}", at_once)
            wrong = [
                (len(prompt), answer.token_ids, want)
                for prompt, answer, want in zip(prompts, got, expected, strict=True)
                if answer.token_ids != want
            ]
            assert not wrong, f"{state}: {len(wrong)} of {len(prompts)} differ, first {wrong[0]}"
            for prompt, answer in zip(prompts, got, strict=True):
                assert answer.usage.prompt_tokens == len(prompt)
                assert answer.usage.completion_tokens == NEW_TOKENS
                if state == "cold":
                    assert answer.usage.cached_tokens == 0
                else:
                    full = (len(prompt) - 1) // PAGE * PAGE
                    assert full <= answer.usage.cached_tokens <= len(prompt) - 1
                assert bool(answer.usage.drafted_tokens) == mode.mtp
    assert await mesh.problems() == []


@pytest.mark.usefixtures("prompts")
async def test_a_repeated_prompt_reports_its_full_pages_as_cached(mesh, mode):
    prompt = list(range(100, 100 + 2 * PAGE + 5))
    async with meshes.chat_stub(mesh.address) as stub:
        first = await meshes.ask(stub, prompt, max_tokens=4, ignore_eos=True)
        second = await meshes.ask(stub, prompt, max_tokens=4, ignore_eos=True)
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == 2 * PAGE
    if mode.arithmetic == "exact":
        assert second.token_ids == first.token_ids

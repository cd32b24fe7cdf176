"""Random mixes of requests for the two engines, and what each request gives alone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from hypothesis import strategies as st
from model_cases import equal
from worker_rig import MODEL, VOCAB, prompt_of, rig

from pdmesh.decode import runner as decode_runner
from pdmesh.decode.drafter import MtpDrafter
from pdmesh.decode.speculate import accept
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.reference import generate_reference
from pdmesh.model.sampler import sample
from pdmesh.model.tree import TokenTree
from pdmesh.prefill import runner as prefill_runner
from pdmesh.wire.sampling import SamplingParams

FAMILY = [prompt_of(150, seed) for seed in range(3)]
"""Prompts are made from leading parts of these, so that they share prefixes."""
KINDS: dict[str, dict] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "shaped": {
        "temperature": 1.0,
        "min_p": 0.02,
        "top_k": 40,
        "logit_bias": ((5, 3.0), (7, -100.0)),
        "bad_words": ((9, 11), (13,)),
        "logprobs": 2,
    },
}


@dataclass(frozen=True)
class Ask:
    """One request: ``shared`` tokens of a family's prompt, then ``own`` tokens of its own.

    One that ``waits`` begins when the one before it has ended; one that ``follows`` does too, and
    goes on with its talk: before its own tokens stand that one's prompt and first answer.
    """

    family: int
    shared: int
    own: int
    seed: int
    n: int
    max_tokens: int
    kind: str
    priority: int = 0
    waits: bool = False
    follows: bool = False

    @property
    def beginning(self) -> tuple[int, ...]:
        """The prompt of one that does not follow."""
        return (*FAMILY[self.family][: self.shared], *self.ending)

    @property
    def ending(self) -> tuple[int, ...]:
        return tuple(prompt_of(self.own, self.seed)) if self.own else ()

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, seed=self.seed, **KINDS[self.kind])


@dataclass(frozen=True)
class Engine:
    """How both workers are set up. Pages are scarce where ``growth_tokens`` is not 0."""

    page_size: int
    chunk_tokens: int
    drafts: int
    branches: int
    max_batch: int
    growth_tokens: int

    def options(self, arithmetic: str) -> dict:
        tokens = max(14 * self.page_size, 400) if self.growth_tokens else 4096
        return {
            "arithmetic": arithmetic,
            "transport": "loopback",
            "page_size": self.page_size,
            "chunk_tokens": self.chunk_tokens,
            "mtp": self.drafts >= 0,
            "drafts": max(0, self.drafts),
            "branches": self.branches,
            "max_batch": self.max_batch,
            "growth_tokens": self.growth_tokens,
            "pages": tokens // self.page_size,
            "drafter": TellingDrafts,
        }


def engines() -> st.SearchStrategy[Engine]:
    return st.builds(
        Engine,
        page_size=st.sampled_from([8, 16, 64]),
        chunk_tokens=st.sampled_from([40, 64, 200]),
        drafts=st.sampled_from([-1, 0, 1, 2, 3, 4, 4]),
        branches=st.sampled_from([1, 2, 3]),
        max_batch=st.sampled_from([1, 2, 8]),
        growth_tokens=st.sampled_from([0, 1, 16]),
    )


def asks(sharing: bool) -> st.SearchStrategy[list[Ask]]:
    """Mixes of requests; without ``sharing`` no two have a page in common but answers of one."""
    one = st.builds(
        Ask,
        family=st.integers(0, 2),
        shared=st.sampled_from([0, 15, 16, 17, 40, 64, 65, 130]) if sharing else st.just(0),
        own=st.integers(1, 60),
        seed=st.integers(0, 10_000),
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 14),
        kind=st.sampled_from(list(KINDS)),
        priority=st.sampled_from([0, 0, 1]),
        waits=st.booleans() if sharing else st.just(False),
        follows=st.booleans() if sharing else st.just(False),
    )
    return st.lists(one, min_size=1, max_size=5, unique_by=lambda ask: ask.seed)


# ---- alone ----------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def alone(
    prompt: tuple[int, ...], ask: Ask, index: int, arithmetic: str
) -> tuple[tuple[int, ...], tuple[torch.Tensor, ...]]:
    """Tokens of an answer and the logits that chose them, from one process without a batch."""
    rows: list[torch.Tensor] = []
    tokens = generate_reference(
        MODEL,
        prompt,
        ask.max_tokens,
        arithmetic=arithmetic,
        sampling=ask.sampling,
        index=index,
        on_logits=rows.append,
    )
    return tuple(tokens), tuple(row[0] for row in rows)


def prompts_of(mix: list[Ask], arithmetic: str) -> list[tuple[int, ...]]:
    """The prompt of each request; none follows one that follows."""
    prompts: list[tuple[int, ...]] = []
    for number, ask in enumerate(mix):
        if ask.follows and number and not mix[number - 1].follows:
            before = prompts[-1]
            said = alone(before, mix[number - 1], 0, arithmetic)[0]
            prompts.append((*before, *said, *ask.ending))
        else:
            prompts.append(ask.beginning)
    return prompts


@torch.inference_mode()
def latents_alone(tokens: tuple[int, ...], page_size: int, mtp: bool) -> torch.Tensor:
    """Pages [pages, layers, page_size, width] of a sequence computed at once, in absorbed form."""
    table = tuple(range(-(-len(tokens) // page_size)))
    latents = MODEL.new_latents(len(table), page_size)
    whole = SequenceSlice(table, 0, len(tokens), 0)
    hidden = MODEL(Batch.build([whole], [tokens], page_size), latents, "absorbed")
    if mtp and len(tokens) > 1:
        rest = SequenceSlice(table, 1, len(tokens), 1)
        batch = Batch.build([rest], [tokens[1:]], page_size)
        MODEL.mtp_forward(batch, hidden[:-1], latents, "absorbed")
    return latents


# ---- in the engines -------------------------------------------------------------------------


class TellingDrafts(MtpDrafter):
    """Drafts that are right at times: what a random model's MTP layer guesses never is.

    As seed and output position have it, the drafts of a step are true, true but for one, true on a
    branch that is not the first, or what the MTP layer says.
    """

    truth: dict[tuple[int, int], tuple[int, ...]]

    def propose(self, sequences, count):
        trees = super().propose(sequences, count)
        return [self._told(s.sampling, tree) for s, tree in zip(sequences, trees, strict=True)]

    def _told(self, state, tree):
        nodes = len(tree.tokens) - 1
        known = self.truth[state.params.seed, state.index][state.position :][:nodes]
        case = random.Random(1000 * state.params.seed + state.position).randrange(4)
        if len(known) < nodes or not nodes or case == 0:
            return tree
        wrong = [(token + 1) % VOCAB for token in known]
        root = tree.tokens[0]
        if case == 1:
            return TokenTree.chain((root, *known))
        if case == 2:
            return TokenTree.chain((root, *known[:1], *wrong[1:2], *known[2:]))
        if tree.is_chain or nodes < 2:
            return TokenTree.chain((root, *wrong[:1], *known[1:]))
        right = known[: nodes - 1]
        return TokenTree((root, wrong[0], *right), (-1, 0, 0, *range(2, nodes)))


Key = tuple[int, int, int]
"""Seed, answer and output position."""


@contextmanager
def watched():
    """Yields all logits that the engines choose from, and counts of what happened.

    Drafts that fail add other logits to a position.
    """
    seen: dict[Key, list[torch.Tensor]] = {}
    facts: Counter[str] = Counter()

    def sampling(logits, choices):
        for row, choice in zip(logits, choices, strict=True):
            key = choice.params.seed, choice.index, choice.position
            seen.setdefault(key, []).append(row.clone())
        return sample(logits, choices)

    def accepting(tree, *others):
        accepted = accept(tree, *others)
        facts["accepted"] += accepted.drafts_accepted
        facts["accepted on another branch"] += accepted.path != tuple(range(len(accepted.path)))
        return accepted

    before = prefill_runner.sample, decode_runner.sample, decode_runner.accept
    prefill_runner.sample = decode_runner.sample = sampling
    decode_runner.accept = accepting
    try:
        yield seen, facts
    finally:
        prefill_runner.sample, decode_runner.sample, decode_runner.accept = before


async def serve(mesh, ask: Ask, prompt, number: int, facts: Counter[str]) -> list[list[int]]:
    """The answers of one request, made as the router makes it."""
    name, n = f"r{number}", ask.n
    lease = await mesh.reserve(
        prompt, ask.max_tokens, n=n, wait_ms=60_000, request_id=name, priority=ask.priority
    )
    answers: list[list[int]] = []
    try:
        first = await mesh.compute(prompt, lease, ask.sampling, n=n, request_id=name)
        facts["tokens cached at prefill"] += first.cached_tokens
        facts["pages cached at decode"] += lease.cached_pages
        answers = [[token] for token in first.token_ids]
        if ask.max_tokens > 1:
            parts = await asyncio.gather(
                *(
                    mesh.read(prompt, lease, first, ask.sampling, answer=i, request_id=name)
                    for i in range(n)
                )
            )
            for answer, chunks in zip(answers, parts, strict=True):
                answer += [token for chunk in chunks for token in chunk.token_ids]
    finally:
        for i in range(n):
            await mesh.release(lease, answer=i)
    return answers


async def serve_all(mesh, mix: list[Ask], prompts, facts: Counter[str]) -> list[list[list[int]]]:
    """All at once, but for those that begin when the one before has ended."""
    tasks: list[asyncio.Task] = []

    async def one(number: int):
        ask = mix[number]
        if number and (ask.waits or ask.follows):
            await asyncio.wait([tasks[number - 1]])
        return await serve(mesh, ask, prompts[number], number, facts)

    tasks += [asyncio.ensure_future(one(number)) for number in range(len(mix))]
    return await asyncio.gather(*tasks)


def check_pages(mesh, tokens: tuple[int, ...]) -> int:
    """Compares what both workers keep of a sequence with its pages alone; how many these were."""
    options, found, pages = mesh.options, 0, None
    for side in (mesh.prefill, mesh.decode):
        for place, page_hash in enumerate(mesh.hashes(tokens)):
            page = side.kv._cache.page_of(page_hash)
            if page is None:
                continue
            if pages is None:
                pages = latents_alone(tokens, options.page_size, options.mtp)
                got = side.store.tensor[page]
                expected = pages[place][: got.shape[0]]
            if options.mtp and place == 0:  # the MTP layer's first slot stays empty
                expected, got = expected.clone(), got.clone()
                expected[-1, 0] = got[-1, 0] = 0.0
            assert equal(expected, got), (type(side).__name__, place)
            found += 1
    return found


def run_mix(arithmetic: str, engine: Engine, mix: list[Ask]) -> Counter[str]:
    """Serves a mix and compares every answer, token and logit with its run alone.

    In exact mode also every page that is cached in the end. Returns counts of what happened.
    """
    prompts = prompts_of(mix, arithmetic)
    expected = {
        (ask.seed, index): alone(prompt, ask, index, arithmetic)
        for ask, prompt in zip(mix, prompts, strict=True)
        for index in range(ask.n)
    }
    truth = {key: tokens for key, (tokens, _) in expected.items()}

    async def run():
        async with rig(**engine.options(arithmetic), truth=truth) as mesh:
            with watched() as (seen, facts):
                answers = await serve_all(mesh, mix, prompts, facts)
                await mesh.rest()
            facts["preempted"] = mesh.decode.worker.preempted
            if arithmetic == "exact":
                for ask, prompt in zip(mix, prompts, strict=True):
                    for index in range(ask.n):
                        tokens = (*prompt, *truth[ask.seed, index][:-1])
                        facts["pages compared"] += check_pages(mesh, tokens)
            return answers, seen, facts

    answers, seen, facts = asyncio.run(run())
    for ask, got in zip(mix, answers, strict=True):
        for index, answer in enumerate(got):
            tokens, logits = expected[ask.seed, index]
            assert tuple(answer) == tokens, (ask, index)
            for position, row in enumerate(logits):
                found = seen[ask.seed, index, position]
                assert any(torch.equal(row, other) for other in found), (ask, index, position)
    return facts

"""Random mixes of requests for the two engines, and what each request gives alone."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from hypothesis import strategies as st
from worker_rig import MODEL, VOCAB, prompt_of, rig, until

from pdmesh.decode import runner as decode_runner
from pdmesh.model.reference import generate_reference
from pdmesh.model.sampler import sample
from pdmesh.prefill import runner as prefill_runner
from pdmesh.wire.sampling import SamplingParams

FAMILY = [prompt_of(150, seed) for seed in range(3)]
"""Prompts are made from leading parts of these, so that they share prefixes."""


@dataclass(frozen=True)
class Ask:
    """One request: ``shared`` tokens of a family's prompt, then ``own`` tokens of its own."""

    family: int
    shared: int
    own: int
    seed: int
    n: int
    max_tokens: int
    kind: str
    delay: int

    @property
    def prompt(self) -> tuple[int, ...]:
        own = prompt_of(self.own, self.seed) if self.own else []
        return (*FAMILY[self.family][: self.shared], *own)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, seed=self.seed, **KINDS[self.kind])


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
class Engine:
    """How both workers are set up. Pages are scarce where ``growth_tokens`` is not 0."""

    page_size: int
    chunk_tokens: int
    drafts: int
    branches: int
    max_batch: int
    growth_tokens: int

    def options(self, arithmetic: str) -> dict:
        pages = 900 // self.page_size if self.growth_tokens else 4096 // self.page_size
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
            "pages": pages,
        }


def engines() -> st.SearchStrategy[Engine]:
    return st.builds(
        Engine,
        page_size=st.sampled_from([8, 16, 64]),
        chunk_tokens=st.sampled_from([40, 64, 200]),
        drafts=st.integers(-1, 4),
        branches=st.sampled_from([1, 1, 2, 3]),
        max_batch=st.sampled_from([1, 2, 8]),
        growth_tokens=st.sampled_from([0, 1, 16]),
    )


def asks(sharing: bool) -> st.SearchStrategy[list[Ask]]:
    """Mixes of requests; without ``sharing`` no two have a page in common but answers of one."""
    one = st.builds(
        Ask,
        family=st.integers(0, 2),
        shared=st.sampled_from([0, 15, 16, 17, 40, 64, 65, 130]) if sharing else st.just(0),
        own=st.integers(0 if sharing else 1, 90),
        seed=st.integers(0, 10_000),
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 24),
        kind=st.sampled_from(list(KINDS)),
        delay=st.integers(0, 3),
    )
    several = st.lists(one, min_size=1, max_size=6, unique_by=lambda ask: ask.seed)
    return several.map(lambda found: [ask for ask in found if ask.prompt] or [_SOME])


_SOME = Ask(0, 20, 0, 1, 1, 8, "greedy", 0)


@lru_cache(maxsize=4096)
def alone(ask: Ask, index: int, arithmetic: str) -> tuple[list[int], tuple[torch.Tensor, ...]]:
    """Tokens of an answer and the logits that chose them, from one process without a batch."""
    rows: list[torch.Tensor] = []
    tokens = generate_reference(
        MODEL,
        ask.prompt,
        ask.max_tokens,
        arithmetic=arithmetic,
        sampling=ask.sampling,
        index=index,
        on_logits=rows.append,
    )
    return tokens, tuple(row[0] for row in rows)


Key = tuple[int, int, int]
"""Seed, answer and output position."""


@contextmanager
def recorded_logits():
    """Yields all logits that the engines choose from; drafts that fail add others to a position."""
    seen: dict[Key, list[torch.Tensor]] = {}

    def recording(logits, choices):
        for row, choice in zip(logits, choices, strict=True):
            key = choice.params.seed, choice.index, choice.position
            seen.setdefault(key, []).append(row.clone())
        return sample(logits, choices)

    before = prefill_runner.sample, decode_runner.sample
    prefill_runner.sample = decode_runner.sample = recording
    try:
        yield seen
    finally:
        prefill_runner.sample, decode_runner.sample = before


async def serve(mesh, ask: Ask, number: int) -> list[list[int]]:
    """The answers of one request, made as the router makes it."""
    for _ in range(ask.delay * 5):
        await asyncio.sleep(0)
    name = f"r{number}"
    lease = await mesh.reserve(ask.prompt, ask.max_tokens, n=ask.n, wait_ms=60_000, request_id=name)
    answers: list[list[int]] = []
    try:
        first = await mesh.compute(ask.prompt, lease, ask.sampling, n=ask.n, request_id=name)
        answers = [[token] for token in first.token_ids]
        if ask.max_tokens > 1:
            parts = await asyncio.gather(
                *(
                    mesh.read(ask.prompt, lease, first, ask.sampling, answer=i, request_id=name)
                    for i in range(ask.n)
                )
            )
            for answer, chunks in zip(answers, parts, strict=True):
                answer += [token for chunk in chunks for token in chunk.token_ids]
    finally:
        for i in range(ask.n):
            await mesh.release(lease, answer=i)
    return answers


def run_mix(arithmetic: str, engine: Engine, mix: list[Ask]) -> dict[str, int]:
    """Serves a mix at once and compares every answer, token and logit with its run alone."""

    async def run():
        async with rig(**engine.options(arithmetic)) as mesh:
            with recorded_logits() as seen:
                answers = await asyncio.gather(
                    *(serve(mesh, ask, number) for number, ask in enumerate(mix))
                )
            worker = mesh.decode.worker
            await until(lambda: not worker.leases)
            facts = {"preempted": worker.preempted, "accepted": worker.accepted}
            return answers, seen, facts

    answers, seen, facts = asyncio.run(run())
    for ask, got in zip(mix, answers, strict=True):
        for index, answer in enumerate(got):
            tokens, logits = alone(ask, index, arithmetic)
            assert answer == tokens, (ask, index)
            for position, row in enumerate(logits):
                found = seen[ask.seed, index, position]
                assert any(torch.equal(row, other) for other in found), (ask, index, position)
    return facts


assert VOCAB > 13

"""Prompts whose prefix another worker holds: pulled, not computed, and to the last bit the same."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
import torch
from pull_rig import Way, exchange_of, until
from worker_rig import PAGE, prompt_of, rig

from pdmesh.kvtransfer.pull_loopback import ReadFaults
from pdmesh.wire.messages import PageSource
from pdmesh.wire.sampling import SamplingParams

TRANSPORTS = pytest.mark.parametrize("transport", ["loopback", "tcp"])


class Pulling:
    """A rig whose workers lend and fetch pages; sides are named p0, p1, d0, d1, ..."""

    def __init__(self, mesh, transport, **options):
        self.mesh = mesh
        self.ways: dict[str, Way] = {}
        self.sides = {f"p{i}": side for i, side in enumerate(mesh.prefills)}
        self.sides |= {f"d{i}": side for i, side in enumerate(mesh.decodes)}
        self.readers = {}
        self.exchanges = {}
        for name, side in self.sides.items():
            exchange, self.readers[name] = exchange_of(
                side.kv,
                side.store,
                mesh.format,
                name,
                lambda source: self.ways[source.instance],
                transport,
                **options,
            )
            self.exchanges[name] = exchange
            self.ways[name] = Way(exchange)
            if name.startswith("p"):
                side.worker.fetcher = exchange.fetcher
                exchange.lender.on_unpinned = exchange.fetcher.on_room = side.worker.pages_freed

    def source(self, name, pages):
        role = "prefill" if name.startswith("p") else "decode"
        return PageSource(instance=name, role=role, address="nowhere:1", pages=pages)

    def cached(self, name, prompt):
        return self.sides[name].kv.match(self.mesh.hashes(prompt))

    async def ask(self, prompt, owner, max_tokens=8, prefill=0, decode=0, **sampling):
        """One request with a hint that ``owner`` has what it has."""
        mesh, pages = self.mesh, self.cached(owner, prompt)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
        lease = await mesh.reserve(prompt, max_tokens, decode)
        try:
            first = await mesh.compute(
                prompt, lease, params, prefill, sources=(self.source(owner, pages),)
            )
            chunks = await mesh.read(prompt, lease, first, params, decode)
            return first, [first.token_ids[0], *(t for c in chunks for t in c.token_ids)], chunks
        finally:
            await mesh.release(lease, decode=decode)


@asynccontextmanager
async def pulling(transport="loopback", ttl_s=10.0, **options):
    async with rig(**options) as mesh:
        made = Pulling(mesh, transport, ttl_s=ttl_s)
        try:
            yield made
            await until(lambda: not any(e.lender.held for e in made.exchanges.values()))
        finally:
            for exchange in made.exchanges.values():
                await exchange.close()


async def next_turn(mesh, prompt, max_tokens, **sampling):
    """A chat's first turn; returns the prompt of its second."""
    answer = await mesh.ask(prompt, max_tokens, temperature=0.0, **sampling)
    return [*prompt, *answer.tokens, *prompt_of(9)]


@TRANSPORTS
@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
@pytest.mark.parametrize("page_size", [16, 64])
async def test_the_next_turn_of_a_chat_is_pulled_from_where_it_was_answered(
    transport, mtp, page_size
):
    """Prompt and answer are cached at decode; a prefill worker that knows neither pulls both."""
    options = {"mtp": mtp, "page_size": page_size, "arithmetic": "exact", "chunk_tokens": 128}
    prompt = prompt_of(2 * page_size + 5)
    async with pulling(transport, prefills=3, decodes=2, **options) as made:
        turn = await next_turn(made.mesh, prompt, page_size + 10)
        pages = made.cached("d0", turn)
        assert pages >= 3, "pages of the answer too"
        cold = await made.mesh.ask(turn, 6, prefill=2, decode=1, temperature=0.0, logprobs=3)
        first, tokens, chunks = await made.ask(turn, "d0", 6, prefill=1, logprobs=3)
        assert first.cached_tokens == pages * page_size
        assert first.computed_tokens == len(turn) - pages * page_size
        assert tokens == cold.tokens
        assert (*first.logprobs, *(p for c in chunks for p in c.logprobs)) == (*cold.logprobs,)
        assert made.exchanges["p1"].fetcher.pages == pages


@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
async def test_in_fast_arithmetic_pulled_and_computed_answers_agree_within_rounding(mtp):
    prompt = prompt_of(2 * PAGE + 5)
    async with pulling(prefills=3, decodes=2, mtp=mtp) as made:
        turn = await next_turn(made.mesh, prompt, PAGE + 10)
        cold = await made.mesh.ask(turn, 6, prefill=2, decode=1, temperature=0.0, logprobs=3)
        first, tokens, _ = await made.ask(turn, "d0", 6, prefill=1, logprobs=3)
        assert first.cached_tokens >= 3 * PAGE
        assert tokens == cold.tokens
        assert first.logprobs[0].logprob == pytest.approx(cold.logprobs[0].logprob, abs=1e-4)


async def test_pulled_pages_are_those_of_their_owner_bit_for_bit():
    prompt = prompt_of(3 * PAGE + 5)
    async with pulling(prefills=2, transport="tcp") as made:
        await made.mesh.ask(prompt, 2, temperature=0.0)
        await made.ask(prompt, "p0", 2, prefill=1)
        copies = []
        for name in ("p0", "p1"):
            side = made.sides[name]
            held = side.kv.reserve(made.mesh.hashes(prompt), 3, 3)
            copies.append(side.store.tensor[held.pages].nan_to_num(7.0))
            held.release()
        assert torch.equal(*copies)


async def test_ten_prompts_with_one_prefix_pull_it_once():
    prefix = prompt_of(3 * PAGE)
    async with pulling(prefills=2, decodes=10, arithmetic="exact") as made:
        await made.mesh.ask(prefix, 2, temperature=0.0)
        prompts = [[*prefix, *prompt_of(5, seed)] for seed in range(10)]
        asking = [made.ask(p, "p0", 4, prefill=1, decode=i) for i, p in enumerate(prompts)]
        answers = await asyncio.gather(*asking)
        assert made.ways["p0"].calls.count("lend") == 1
        assert all(first.cached_tokens == 3 * PAGE for first, _, _ in answers)
        for prompt, (_, tokens, _) in zip(prompts, answers, strict=True):
            assert tokens == (await made.mesh.ask(prompt, 4, temperature=0.0)).tokens


async def killed_before_the_loan(made):
    made.ways["d0"].lost = True


async def evicted_before_the_loan(made):
    made.sides["d0"].kv.clear()


async def killed_during_the_read(made):
    made.readers["p1"].faults = ReadFaults(lost_at=1)


async def killed_before_validation(made):
    async def die():
        made.ways["d0"].lost = True

    made.ways["d0"].before["validate"] = die


async def reused_during_the_read(made):
    """Its loan lapses under the read; its pages are given to others and overwritten."""
    side, lender = made.sides["d0"], made.exchanges["d0"].lender

    def before_page(page):
        if page == 1:
            lender._ttl_s = 0.0
            for loan in lender._loans.values():
                loan.ends = 0.0
            lender.expire()
            side.kv.clear()
            side.store.tensor.fill_(3.0)

    made.readers["p1"].faults = ReadFaults(before_page=before_page)


async def restarted_during_the_read(made):
    made.ways["d0"].after["lend"] = lambda loan: msgspec.structs.replace(loan, instance="before")


OWNERS = [
    killed_before_the_loan,
    evicted_before_the_loan,
    killed_during_the_read,
    killed_before_validation,
    reused_during_the_read,
    restarted_during_the_read,
]


@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
@pytest.mark.parametrize("fate", OWNERS, ids=lambda fate: fate.__name__)
async def test_the_answer_is_right_when_its_owner_is(fate, mtp):
    """A hit at another worker is no promise (compare LMCache/LMCache#1814)."""
    prompt = prompt_of(3 * PAGE + 5)
    async with pulling(prefills=2, decodes=2, arithmetic="exact", mtp=mtp, ttl_s=0.2) as made:
        cold = await made.mesh.ask(prompt, 6, temperature=0.0)
        pages = made.cached("d0", prompt)
        await fate(made)
        lease = await made.mesh.reserve(prompt, 6, decode=1)
        params = SamplingParams(max_tokens=6, temperature=0.0)
        sources = (made.source("d0", pages),)
        first = await made.mesh.compute(prompt, lease, params, 1, sources=sources)
        chunks = await made.mesh.read(prompt, lease, first, params, decode=1)
        await made.mesh.release(lease, decode=1)
        assert first.cached_tokens == 0
        assert first.computed_tokens == len(prompt)
        tokens = [first.token_ids[0], *(t for chunk in chunks for t in chunk.token_ids)]
        assert tokens == cold.tokens
        assert sum(made.exchanges["p1"].fetcher.failures.values()) == 1
        made.exchanges["d0"].lender.expire()


async def test_without_validation_pages_used_again_would_give_a_wrong_answer():
    """Shows that the test above can fail."""
    prompt = prompt_of(3 * PAGE + 5)
    async with pulling(prefills=2, decodes=2, arithmetic="exact") as made:
        cold = await made.mesh.ask(prompt, 6, temperature=0.0)
        pages = made.cached("d0", prompt)
        await reused_during_the_read(made)
        yes = made.ways["d0"].after
        yes["validate"] = lambda answer: msgspec.structs.replace(answer, valid=True)
        lease = await made.mesh.reserve(prompt, 6, decode=1)
        params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
        sources = (made.source("d0", pages),)
        first = await made.mesh.compute(prompt, lease, params, 1, sources=sources)
        await made.mesh.release(lease, decode=1)
        assert first.cached_tokens == 3 * PAGE
        assert first.token_ids[0] != cold.tokens[0]


async def test_a_caller_that_leaves_during_a_pull_leaves_nothing_behind():
    prompt = prompt_of(3 * PAGE + 5)
    async with pulling(prefills=2) as made:
        await made.mesh.ask(prompt, 2, temperature=0.0)
        begun, answered = asyncio.Event(), asyncio.Event()

        async def wait():
            begun.set()
            await answered.wait()

        made.ways["d0"].before["lend"] = wait
        lease = await made.mesh.reserve(prompt, 4)
        asking = asyncio.ensure_future(
            made.mesh.compute(prompt, lease, prefill=1, sources=(made.source("d0", 3),))
        )
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert made.mesh.prefills[1].worker.cancelled == 1
        answered.set()
        await made.mesh.release(lease)


async def test_the_time_of_a_pull_counts_as_waiting():
    prompt = prompt_of(3 * PAGE + 5)
    async with pulling(prefills=2) as made:
        await made.mesh.ask(prompt, 2, temperature=0.0)

        async def slow():
            made.mesh.prefills[1].skipped += 7.0

        made.ways["d0"].before["lend"] = slow
        first, _, _ = await made.ask(prompt, "d0", 2, prefill=1)
        assert first.cached_tokens == 3 * PAGE
        assert first.queue_ms >= 7000.0

"""Prompts that share steps, pages and prefixes on a prefill worker, and those out of time."""

import asyncio

import msgspec
import pytest
from worker_rig import PAGE, prompt_of, reference, rig, until

from pdmesh.wire.errors import Cancelled, DeadlineExceeded, InvalidRequest


def later(coroutine):
    return asyncio.ensure_future(coroutine)


async def held_step(mesh):
    """Begins a step and holds it there: what is asked for now waits for the next one."""
    gate = mesh.prefill.gate
    gate.hold()
    begun = len(gate.batches)
    ahead = later(mesh.ask(prompt_of(1, 99), 1))
    await until(lambda: len(gate.batches) > begun)
    return ahead


# ---- chunks that are no multiple of the page size ---------------------------------------------


SMALL = {"page_size": 16, "pages": 600, "max_batch": 64}


async def asked(mesh, warm, prompts, at_once):
    """(tokens, logprobs, pages sent or cached) of each prompt, after another filled the cache."""
    await mesh.ask(warm, 1)
    if at_once:
        ahead = await held_step(mesh)
        asking = [later(mesh.ask(p, 3, logprobs=1)) for p in prompts]
        await until(lambda: mesh.prefill.worker.queued == len(prompts))
        mesh.prefill.gate.let_go()
        await ahead
        answers = await asyncio.gather(*asking)
    else:
        answers = [await mesh.ask(p, 3, logprobs=1) for p in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        pages = answer.first.pushed_pages + answer.lease.cached_pages
        assert pages == answer.lease.num_pages == -(-len(prompt) // 16)
    return [(a.tokens, a.logprobs, a.first.cached_tokens) for a in answers]


@pytest.mark.parametrize(("shared", "arithmetic"), [(0, "fast"), (1, "exact"), (17, "fast")])
async def test_chunks_of_40_over_pages_of_16_give_what_single_chunks_give(shared, arithmetic):
    """sgl-project/sglang#5589: a chunk that ends inside a page. Every length of two chunks."""
    start = prompt_of(17)[:shared]
    prompts = [[*start, *prompt_of(length - shared, 3)] for length in range(39, 82)]
    warm = [*start, *prompt_of(30, 4)]
    results = []
    for chunk_tokens, at_once in [(40, True), (1000, False)]:
        async with rig(chunk_tokens=chunk_tokens, arithmetic=arithmetic, **SMALL) as mesh:
            results.append(await asked(mesh, warm, prompts, at_once))
            if at_once:
                assert max(mesh.prefill.gate.batches) >= 2
                most = max(facts.num_tokens for facts in mesh.prefill.facts)
                assert most <= chunk_tokens
    assert results[0] == results[1]
    assert {cached for _, _, cached in results[0]} == {shared // 16 * 16}


# ---- prompts at the edge of the pool ----------------------------------------------------------


async def test_a_prompt_just_above_the_pool_is_the_clients_error_and_the_next_is_right():
    """sgl-project/sglang#30233: no token comes of it, and nothing of it stays."""
    above, normal = prompt_of(8 * PAGE + 1), prompt_of(3 * PAGE)
    async with rig(pages=9) as mesh:
        lease = await mesh.reserve(above, 1)
        mesh.prefill.kv.num_pages = 8
        with pytest.raises(InvalidRequest, match="needs 9 pages, this worker has 8"):
            await mesh.compute(above, lease)
        mesh.prefill.kv.num_pages = 9
        assert mesh.prefill.gate.batches == []
        await mesh.release(lease)
        answer = await mesh.ask(normal, 4)
        assert answer.tokens == reference(normal, 4)
        assert answer.first.computed_tokens == len(normal)
    async with rig(pages=8) as mesh:
        with pytest.raises(InvalidRequest, match="8"):
            await mesh.ask(above, 1)
        assert (await mesh.ask(normal, 4)).tokens == reference(normal, 4)


async def test_a_request_aborted_while_its_pages_are_sent_ends_cancelled_and_leaks_nothing():
    prompt = prompt_of(3 * PAGE)
    async with rig(transport="loopback", stall_after=2, decodes=2) as mesh:
        lease = await mesh.reserve(prompt)
        first = await mesh.compute(prompt, lease)
        reading = later(mesh.read(prompt, lease, first))
        await asyncio.sleep(0)
        assert mesh.prefill.worker.finishing == 1, "its pages are on their way"
        await mesh.release(lease, "cancelled")
        with pytest.raises(Cancelled):
            await reading
        await mesh.rest()
        mesh.decodes[1].listener.faults = type(mesh.decodes[1].listener.faults)()
        assert (await mesh.ask(prompt, 4, decode=1)).tokens == reference(prompt, 4)


# ---- a cold prefix ----------------------------------------------------------------------------


@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
@pytest.mark.parametrize("chunk_tokens", [2 * PAGE, 1000])
async def test_a_cold_prefix_that_prompts_share_is_computed_once(chunk_tokens, mtp):
    prefix = prompt_of(3 * PAGE)
    prompts = [[*prefix, *prompt_of(20 + seed, seed)] for seed in range(4)]
    async with rig(chunk_tokens=chunk_tokens, mtp=mtp) as mesh:
        ahead = await held_step(mesh)
        asking = [later(mesh.ask(prompt, 4)) for prompt in prompts]
        await until(lambda: mesh.prefill.worker.queued == 4)
        mesh.prefill.gate.let_go()
        await ahead
        answers = await asyncio.gather(*asking)
        assert [answer.tokens for answer in answers] == [reference(p, 4) for p in prompts]
        own = sum(20 + seed for seed in range(4))
        again = 3 * mtp  # the last cached position, for its hidden state
        assert mesh.prefill.worker.tokens_computed == 1 + 3 * PAGE + own + again


async def test_prompts_that_wait_for_a_prefix_go_on_when_its_prompt_is_cancelled():
    prefix = prompt_of(3 * PAGE)
    first, second = [*prefix, 1, 2], [*prefix, 3]
    async with rig(chunk_tokens=PAGE, decodes=2) as mesh:
        gate = mesh.prefill.gate
        lease = await mesh.reserve(first)
        gate.hold()
        computing = later(mesh.compute(first, lease))
        await gate.step_begins()
        asking = later(mesh.ask(second, 4, decode=1))
        await until(lambda: mesh.prefill.worker.queued == 1)
        gate.let_one_through()
        await gate.step_begins()
        assert mesh.prefill.worker.queued == 1
        computing.cancel()
        gate.let_go()
        assert (await asking).tokens == reference(second, 4)
        await mesh.release(lease, "cancelled")


# ---- time -------------------------------------------------------------------------------------


async def test_a_prompt_past_its_deadline_is_not_computed():
    prompt = prompt_of(70)
    async with rig() as mesh:
        ahead = await held_step(mesh)
        lease = await mesh.reserve(prompt)
        computing = later(mesh.compute(prompt, lease))
        await until(lambda: mesh.prefill.worker.queued == 1)
        mesh.prefill.skipped = 60.0
        mesh.prefill.gate.let_go()
        with pytest.raises(DeadlineExceeded, match="before it could be computed"):
            await computing
        await ahead
        assert mesh.prefill.gate.batches == [1]
        assert mesh.prefill.worker.cancelled == 0
        await mesh.release(lease)
        assert (await mesh.ask(prompt, 4)).tokens == reference(prompt, 4)


async def test_a_prompt_whose_deadline_comes_between_its_steps_is_dropped():
    prompt = prompt_of(5 * PAGE)
    async with rig(chunk_tokens=PAGE) as mesh:
        lease = await mesh.reserve(prompt)
        mesh.prefill.gate.hold()
        computing = later(mesh.compute(prompt, lease))
        await mesh.prefill.gate.step_begins()
        mesh.prefill.skipped = 60.0
        mesh.prefill.gate.let_go()
        with pytest.raises(DeadlineExceeded, match="while it was computed"):
            await computing
        assert mesh.prefill.gate.batches == [1]
        await mesh.release(lease)


async def test_a_deadline_comes_for_a_prompt_without_pages_though_nothing_else_happens():
    first, second = prompt_of(3 * PAGE), prompt_of(3 * PAGE, 1)
    async with rig(transport="loopback", stall_after=1, pages=5, decodes=2) as mesh:
        lease = await mesh.reserve(first)
        await mesh.compute(first, lease)
        other = await mesh.reserve(second, decode=1)
        request = mesh.prefill_request(second, other)
        request = msgspec.structs.replace(request, deadline_ms=20)
        with pytest.raises(DeadlineExceeded, match="before it could be computed"):
            await mesh.prefill.worker.prefill(request)
        await mesh.release(lease)
        await mesh.release(other, decode=1)


async def test_time_waited_elsewhere_and_priority_decide_who_goes_first():
    async with rig(chunk_tokens=PAGE, decodes=3) as mesh:
        ahead = await held_step(mesh)
        order = []

        async def compute(name, decode, **fields):
            prompt = prompt_of(PAGE, decode)
            lease = await mesh.reserve(prompt, decode=decode)
            await mesh.compute(prompt, lease, **fields)
            order.append(name)
            await mesh.release(lease, decode=decode)

        mesh.prefill.worker._scheduler.join_tokens = 1
        mesh.prefill.worker._scheduler.chunk_tokens = 2 * PAGE
        asking = [later(compute("plain", 0))]
        await until(lambda: mesh.prefill.worker.queued == 1)
        asking.append(later(compute("high", 1, priority=1)))
        await until(lambda: mesh.prefill.worker.queued == 2)
        asking.append(later(compute("waited", 2, waited_ms=25_000)))
        await until(lambda: mesh.prefill.worker.queued == 3)
        mesh.prefill.gate.let_go()
        await asyncio.gather(ahead, *asking)
        assert order == ["waited", "high", "plain"]


# ---- figures ----------------------------------------------------------------------------------


async def test_the_figures_of_the_steps_add_up_to_the_prompts():
    prompts = [prompt_of(3 * PAGE + 9), prompt_of(70)]
    async with rig(chunk_tokens=2 * PAGE, mtp=False) as mesh:
        for prompt in (*prompts, prompts[0]):
            await mesh.ask(prompt, 1)
        facts = mesh.prefill.facts
        assert sum(f.num_tokens for f in facts) == mesh.prefill.worker.tokens_computed
        assert sum(f.cached_tokens for f in facts) == 3 * PAGE
        assert [len(f.queue_s) for f in facts] == [1, 0, 1, 1]
        assert all(f.duration_s > 0 and f.num_prompts == 1 for f in facts)
        assert all(0 <= wait < 10 for f in facts for wait in f.queue_s)

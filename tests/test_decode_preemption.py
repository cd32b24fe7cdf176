"""More work than pages: promises that grow, sequences that give way, and waits that end."""

import asyncio
import random

import pytest
import torch
from worker_rig import PAGE, prompt_of, reference, rig, until

from pdmesh.decode.park import ParkingLot
from pdmesh.kvcache.store import LatentStore
from pdmesh.wire.errors import Cancelled, Preempted
from pdmesh.wire.sampling import SamplingParams

LONG = 60
SMALL = {"page_size": 16, "growth_tokens": 16}


async def ask(mesh, prompt, max_tokens, **fields):
    """One answer of a request that waits for room as long as it takes."""
    params = SamplingParams(max_tokens=max_tokens)
    lease = await mesh.reserve(prompt, max_tokens, wait_ms=300_000, deadline_ms=300_000, **fields)
    try:
        first = await mesh.compute(prompt, lease, params)
        chunks = await mesh.read(prompt, lease, first, params)
        positions = [c.position for c in chunks]
        lengths = [len(c.token_ids) for c in chunks]
        assert positions == [1 + sum(lengths[:i]) for i in range(len(chunks))]
        return [first.token_ids[0], *(t for c in chunks for t in c.token_ids)]
    finally:
        await mesh.release(lease)


async def storm(mesh, seed):
    """Long and short requests, some of them cancelled at some moment: (what came, what must)."""
    choose = random.Random(seed)
    work = [(prompt_of(30 + i, i), LONG) for i in range(8)]
    work += [(prompt_of(10 + i, i), 6) for i in range(4)]
    tasks = [asyncio.ensure_future(ask(mesh, p, n)) for p, n in work]
    for task in choose.sample(tasks[:8], 3):
        tokens = choose.randrange(150)
        await until(lambda t=task, n=tokens: mesh.decode.worker.tokens_generated >= n or t.done())
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [
        (got, reference(p, n))
        for (p, n), got in zip(work, results, strict=True)
        if not isinstance(got, asyncio.CancelledError)
    ]


@pytest.mark.parametrize("growth", [0, 16], ids=["all promised", "promised as it grows"])
async def test_a_pool_of_1_3_requests_serves_all_with_the_tokens_of_a_large_one(growth):
    """Compare sgl-project/sglang#6857."""
    pages = int(1.3 * (38 + LONG) / 16) + 1
    async with rig(pages=pages, page_size=16, growth_tokens=growth, drafts=2) as mesh:
        results = await storm(mesh, growth)
        assert len(results) >= 9
        for got, want in results:
            assert got == want
        assert (mesh.decode.worker.preempted > 0) == (growth > 0)
        assert mesh.decode.worker.parked == 0
        assert mesh.decode.worker.parked_bytes == 0


@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
async def test_the_later_one_gives_way_and_goes_on_bit_for_bit(mtp):
    async with rig(pages=10, mtp=mtp, **SMALL) as mesh:
        earlier = asyncio.ensure_future(ask(mesh, prompt_of(20), 100))
        await until(lambda: mesh.decode.worker.running == 1)
        later = asyncio.ensure_future(ask(mesh, prompt_of(21), 100))
        assert await earlier == reference(prompt_of(20), 100)
        assert await later == reference(prompt_of(21), 100)
        assert mesh.decode.worker.preempted >= 1


async def test_the_higher_priority_never_gives_way(caplog):
    caplog.set_level("INFO")
    async with rig(pages=10, **SMALL) as mesh:
        low = asyncio.ensure_future(ask(mesh, prompt_of(20), 100, request_id="low"))
        await until(lambda: mesh.decode.worker.running == 1)
        high = asyncio.ensure_future(ask(mesh, prompt_of(21), 100, priority=9, request_id="high"))
        assert await high == reference(prompt_of(21), 100)
        assert await low == reference(prompt_of(20), 100)
    for name in ("preempted", "resumed"):
        fields = [r.fields for r in caplog.records if r.message == name]
        assert len(fields) >= 1
        assert mesh.decode.worker.preempted >= len(fields)


async def test_without_memory_to_park_in_the_stream_says_so_and_can_go_on_elsewhere():
    prompts = prompt_of(20), prompt_of(21)
    async with rig(pages=10, park_bytes=0, decodes=2, **SMALL) as mesh:
        params = SamplingParams(max_tokens=100)
        lease = await mesh.reserve(prompts[0], 100)
        first = await mesh.compute(prompts[0], lease, params)
        mesh.decode.gate.hold()
        earlier = asyncio.ensure_future(mesh.read(prompts[0], lease, first, params))
        await mesh.decode.gate.step_begins()
        later = await mesh.reserve(prompts[1], 100)
        token = await mesh.compute(prompts[1], later, params)
        tokens = [token.token_ids[0]]
        request = mesh.stream_request(prompts[1], later, token, params)

        async def read():
            async for chunk in mesh.decode.worker.stream(request):
                tokens.extend(chunk.token_ids)

        reading = asyncio.ensure_future(read())
        await until(lambda: mesh.decode.worker.queued + mesh.decode.worker.running == 2)
        mesh.decode.gate.let_go()
        with pytest.raises(Preempted):
            await reading
        await mesh.release(later)
        assert sum(len(c.token_ids) for c in await earlier) == 99
        await mesh.release(lease)
        want = reference(prompts[1], 100)
        assert 1 < len(tokens) < 100
        assert tokens == want[: len(tokens)]
        assert mesh.decode.worker.cancelled == 0
        longer = [*prompts[1], *tokens]
        left = 100 - len(tokens)
        lease = await mesh.reserve(longer, left, decode=1)
        rest = SamplingParams(max_tokens=left)
        first = await mesh.compute(longer, lease, rest, output_offset=len(tokens))
        await mesh.release(lease, decode=1)
        assert first.token_ids[0] == want[len(tokens)]


@pytest.mark.parametrize("how", ["cut", "released", "deadline"])
async def test_a_sequence_that_is_ended_while_its_pages_are_set_aside_leaves_nothing(how):
    async with rig(pages=10, **SMALL) as mesh:
        worker, params = mesh.decode.worker, SamplingParams(max_tokens=100)
        earlier = asyncio.ensure_future(ask(mesh, prompt_of(20), 100))
        await until(lambda: worker.running == 1)
        prompt = prompt_of(21)
        lease = await mesh.reserve(prompt, 100)
        first = await mesh.compute(prompt, lease, params)
        later = asyncio.ensure_future(mesh.read(prompt, lease, first, params))
        await until(lambda: worker.parked == 1)
        mesh.decode.gate.hold()
        assert worker.parked_bytes > 0
        if how == "cut":
            later.cancel()
        elif how == "released":
            releasing = asyncio.ensure_future(mesh.release(lease, "cancelled"))
        else:
            entry = worker._leases.find(lease.lease_id)
            worker._leases._expire(entry, "the deadline of the request has passed")
        mesh.decode.gate.let_go()
        with pytest.raises((Cancelled, asyncio.CancelledError)):
            await later
        if how == "released":
            await releasing
        assert await earlier == reference(prompt_of(20), 100)
        await mesh.rest()
        assert (worker.parked, worker.parked_bytes, worker.cancelled) == (0, 0, 1)


async def test_answers_of_one_prompt_give_way_one_by_one():
    """What they share is kept once, and each goes on from its own pages."""
    prompt = prompt_of(37)
    async with rig(pages=11, **SMALL) as mesh:
        params = SamplingParams(max_tokens=90)
        lease = await mesh.reserve(prompt, 90, n=3)
        first = await mesh.compute(prompt, lease, params, n=3)

        async def read(answer):
            chunks = await mesh.read(prompt, lease, first, params, answer=answer)
            await mesh.release(lease, answer=answer)
            return [first.token_ids[answer], *(t for c in chunks for t in c.token_ids)]

        answers = await asyncio.gather(*(read(i) for i in range(3)))
        assert answers == [reference(prompt, 90)] * 3
        assert mesh.decode.worker.preempted >= 1


async def test_a_stalled_sequence_leaves_its_place_in_the_batch_to_who_holds_the_pages():
    """The place and the pages are two things to wait for; a circle of both must not form."""
    async with rig(pages=10, max_batch=1, **SMALL) as mesh:
        low = asyncio.ensure_future(ask(mesh, prompt_of(20), 100))
        await until(lambda: mesh.decode.worker.running == 1)
        high = asyncio.ensure_future(ask(mesh, prompt_of(21), 100, priority=9))
        assert await high == reference(prompt_of(21), 100)
        assert await low == reference(prompt_of(20), 100)


async def test_nobody_gives_way_to_a_draft():
    """Pages for drafts are taken where they are promised, and nowhere else."""
    prompts = [prompt_of(14, i) for i in range(5)]
    async with rig(pages=10, page_size=16, growth_tokens=2, drafts=4) as mesh:
        answers = await asyncio.gather(*(ask(mesh, p, 17) for p in prompts))
        assert answers == [reference(p, 17) for p in prompts]
        assert mesh.decode.worker.preempted == 0


@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
async def test_pages_at_a_boundary_hold_whatever_the_drafts_come_to(drafts):
    """Compare vllm-project/vllm#16370: lengths just before a page's end, drafts beyond it."""
    lengths = [32 + rest for rest in (12, 13, 14, 15)]
    prompts = [prompt_of(length, length) for length in lengths]
    want = [reference(p, 24) for p in prompts]
    truth = {tuple(p[:PAGE]): w for p, w in zip(prompts, want, strict=True)}
    for known in ({}, truth):
        async with rig(pages=20, page_size=16, drafts=drafts, truth=known) as mesh:
            answers = await asyncio.gather(*(ask(mesh, p, 24) for p in prompts))
            assert answers == want
            owned = len(mesh.decode.kv.owned_hashes())
            assert owned <= sum((length + 24) // 16 for length in lengths)
            again = [[*p, *w[:-1]] for p, w in zip(prompts, want, strict=True)]
            for turn in again:  # on pages that decode has filled
                assert await ask(mesh, turn, 6) == reference(turn, 6)


def test_a_page_that_two_share_is_parked_once_and_stays_until_both_are_gone():
    store = LatentStore(4, 2, 4, 6, torch.float32)
    store.tensor.copy_(torch.randn(store.tensor.shape))
    store.tensor[2, 0, 0] = float("nan")
    before = store.tensor.clone()
    lot = ParkingLot(store, 3 * store.page_bytes)
    one = lot.claim([0, 1], [(0, 1)])
    two = lot.claim([0, 2], [(0, 1)])
    assert lot.claim([3], []) is None
    lot.fill([one, two])
    assert lot.used_bytes == 3 * store.page_bytes
    lot.drop(one)
    store.tensor.zero_()
    lot.restore(two, 0, [3, 1])
    assert store.tensor[3].equal(before[0])
    assert store.tensor[1].view(torch.int32).equal(before[2].view(torch.int32))
    lot.drop(two)
    assert lot.used_bytes == 0


async def test_a_sequence_does_not_keep_the_pages_of_one_that_computed_the_same_and_left():
    """Both computed the pages of one prompt; the longer one fits the pool when it is alone."""
    prompt, lengths = prompt_of(46), (6, 60)
    async with rig(pages=8, prefills=2, **SMALL) as mesh:
        leases = [await mesh.reserve(prompt, n) for n in lengths]
        assert [lease.cached_pages for lease in leases] == [0, 0]
        mesh.decode.gate.hold()
        reading = []
        for number, (lease, length) in enumerate(zip(leases, lengths, strict=True)):
            params = SamplingParams(max_tokens=length)
            first = await mesh.compute(prompt, lease, params, number)
            reading.append(asyncio.ensure_future(mesh.read(prompt, lease, first, params)))
            await until(lambda: mesh.decode.kv.match(mesh.hashes(prompt)) == 2)
        await until(lambda: mesh.decode.worker.queued + mesh.decode.worker.running == 2)
        mesh.decode.gate.let_go()
        for lease, length, chunks in zip(leases, lengths, reading, strict=True):
            async with asyncio.timeout(60):
                tokens = [t for chunk in await chunks for t in chunk.token_ids]
            assert tokens == reference(prompt, length)[1:]
            await mesh.release(lease)

"""Leases: answers that share a prompt, and requests that wait for room."""

import asyncio
import itertools

import pytest
from worker_rig import PAGE, prompt_of, reference, rig, until

from pdmesh.model.reference import generate_reference
from pdmesh.wire.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LeaseGone,
    Overloaded,
    TransferFailed,
)
from pdmesh.wire.messages import ReleaseRequest
from pdmesh.wire.sampling import SamplingParams

SEEDED = {"temperature": 0.8, "seed": 11}


async def ask_n(mesh, prompt, n, max_tokens=8, **sampling):
    """The tokens of n answers, as the router asks for them."""
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    lease = await mesh.reserve(prompt, max_tokens, n=n, wait_ms=20_000)
    first = await mesh.compute(prompt, lease, params, n=n)

    async def read(answer):
        tokens = [first.token_ids[answer]]
        if max_tokens > 1:
            for chunk in await mesh.read(prompt, lease, first, params, answer=answer):
                tokens += chunk.token_ids
        await mesh.release(lease, answer=answer)
        return tokens

    return await asyncio.gather(*(read(answer) for answer in range(n)))


def alone(mesh, prompt, max_tokens, answer, **sampling):
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return generate_reference(
        mesh.options.model, prompt, max_tokens, mtp=False, sampling=params, index=answer
    )


# ---- several answers ----------------------------------------------------------------------


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, 2 * PAGE + 5])
async def test_each_of_four_seeded_answers_is_the_one_it_would_be_alone(length):
    """Compare sgl-project/sglang#30723: one transfer, four answers."""
    prompt = prompt_of(length)
    async with rig() as mesh:
        answers = await ask_n(mesh, prompt, 4, 70, **SEEDED)
        assert answers == [alone(mesh, prompt, 70, i, **SEEDED) for i in range(4)]
        assert len({tuple(a) for a in answers}) == 4
        assert mesh.decode.worker.cancelled == 0


async def test_answers_of_one_token_need_no_stream():
    prompt = prompt_of(PAGE + 3)
    async with rig() as mesh:
        answers = await ask_n(mesh, prompt, 4, 1, **SEEDED)
        assert [len(a) for a in answers] == [1] * 4


async def test_twenty_requests_of_three_answers_at_once():
    prompts = [prompt_of(30 + 7 * i, i) for i in range(20)]
    async with rig(pages=40, max_batch=16) as mesh:
        results = await asyncio.gather(*(ask_n(mesh, p, 3, 5, **SEEDED) for p in prompts))
        for prompt, answers in list(zip(prompts, results, strict=True))[::4]:
            assert answers == [alone(mesh, prompt, 5, i, **SEEDED) for i in range(3)]


async def test_every_lease_id_is_its_own_and_a_retry_gets_new_ones():
    prompt = prompt_of(PAGE)
    async with rig() as mesh:
        leases = [await mesh.reserve(prompt, n=3) for _ in range(3)]
        ids = [i for lease in leases for i in (lease.lease_id, *lease.forks)]
        assert len(set(ids)) == 9
        for lease, answer in itertools.product(leases, range(3)):
            await mesh.release(lease, answer=answer)


async def test_the_prompts_full_pages_are_held_once_and_the_partial_one_by_each():
    prompt = prompt_of(3 * PAGE + 5)
    async with rig(pages=8) as mesh:
        lease = await mesh.reserve(prompt, 8, n=4)  # 3 shared, 4 partial ones
        pool = mesh.decode.kv.status()
        assert (pool.used, pool.reserved, pool.free) == (4, 3, 1)
        with pytest.raises(InvalidRequest, match="needs 9 pages"):
            await mesh.reserve(prompt, 8, n=6)
        await mesh.release(lease, answer=2)
        assert mesh.decode.kv.status().reserved == 2
        first = await mesh.compute(prompt, lease, SamplingParams(max_tokens=8), n=4)
        for answer in (0, 1, 3):
            chunks = await mesh.read(prompt, lease, first, answer=answer)
            assert sum(len(c.token_ids) for c in chunks) == 7
        with pytest.raises(LeaseGone):
            await mesh.read(prompt, lease, first, answer=2)


@pytest.mark.parametrize("gone", [(0,), (0, 1), (1, 2), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("when", ["reserved", "arriving", "arrived"])
async def test_answers_that_leave_do_not_hurt_the_others(gone, when):
    prompt = prompt_of(2 * PAGE + 7)
    async with rig(transport="loopback") as mesh:
        params = SamplingParams(max_tokens=8)
        lease = await mesh.reserve(prompt, n=3)

        async def leave():
            for answer in gone:
                await mesh.release(lease, "cancelled", answer=answer)
                assert mesh.decode.kv.check_integrity() == []

        if when == "reserved":
            await leave()
        mesh.prefill.gate.hold()
        computing = asyncio.ensure_future(mesh.compute(prompt, lease, params, n=3))
        await until(lambda: mesh.prefill.gate.batches or computing.done())
        if when == "arriving":
            await leave()
            assert mesh.decode.kv.num_reservations == (len(gone) < 3)
        if len(gone) == 3 and when != "arrived":
            await until(lambda: computing.done() or mesh.prefill.worker._work)
            mesh.prefill.gate.let_go()
            with pytest.raises(TransferFailed):
                await computing
            return
        mesh.prefill.gate.let_go()
        first = await computing
        if when == "arrived":
            await leave()
        for answer in sorted({0, 1, 2} - set(gone)):
            chunks = await mesh.read(prompt, lease, first, params, answer=answer)
            tokens = [first.token_ids[answer], *(t for c in chunks for t in c.token_ids)]
            assert tokens == reference(prompt, 8)


async def test_the_pages_of_a_group_stay_in_quarantine_until_its_writer_is_gone():
    prompt = prompt_of(2 * PAGE)
    async with rig(transport="loopback", one_sided=True, stall_after=2) as mesh:
        lease = await mesh.reserve(prompt, n=2)
        await mesh.compute(prompt, lease, n=2)
        await mesh.release(lease, "cancelled", answer=0)
        assert mesh.decode.kv.status().quarantined == 0
        await mesh.release(lease, "cancelled", answer=1)
        assert mesh.decode.kv.status().quarantined == 2
        mesh.decode.listener.resume()
        await mesh.rest()
        assert mesh.decode.kv.status().free == mesh.decode.kv.num_pages


async def test_a_fin_with_too_few_first_tokens_is_a_failed_transfer():
    prompt = prompt_of(PAGE)
    async with rig(mtp=False) as mesh:
        lease = await mesh.reserve(prompt, n=2)
        await mesh.arrive(lease, (5,), b"")
        fake = type("First", (), {"token_ids": (5, 5)})()
        with pytest.raises(TransferFailed, match="1 first tokens came for 2 answers"):
            await mesh.read(prompt, lease, fake)
        await mesh.release(lease, answer=1)


async def test_the_partial_page_is_copied_bit_for_bit():
    prompt = prompt_of(PAGE + 9)
    async with rig() as mesh:
        lease = await mesh.reserve(prompt, n=2)
        first = await mesh.compute(prompt, lease, n=2)
        mesh.decode.gate.hold()
        reading = asyncio.ensure_future(mesh.read(prompt, lease, first))
        await mesh.decode.gate.step_begins()
        entries = [mesh.decode.worker._leases.find(i) for i in (lease.lease_id, *lease.forks)]
        one, two = (entry.reservation.page_table for entry in entries)
        assert one[0] == two[0]
        assert one[1] != two[1]
        latents = mesh.decode.store.tensor
        written = latents[one[1]][:, :9]
        assert written.equal(latents[two[1]][:, :9])
        assert not written.isnan().any()
        mesh.decode.gate.let_go()
        await reading
        await mesh.release(lease, answer=1)


# ---- waiting for room ---------------------------------------------------------------------


async def test_who_waits_gets_room_in_order_and_nobody_overtakes():
    async with rig(pages=8) as mesh:
        held = await mesh.reserve(prompt_of(5 * PAGE), PAGE)
        order = []

        async def wait(name, pages, **fields):
            lease = await mesh.reserve(prompt_of(pages * PAGE), 1, wait_ms=20_000, **fields)
            order.append(name)
            await asyncio.sleep(0)
            await mesh.release(lease)

        tasks = [asyncio.ensure_future(wait("large", 6))]
        await until(lambda: mesh.decode.worker.queued == 1)
        tasks.append(asyncio.ensure_future(wait("small", 1)))
        tasks.append(asyncio.ensure_future(wait("urgent", 7, priority=1)))
        tasks.append(asyncio.ensure_future(wait("older", 7, waited_ms=5_000)))
        await until(lambda: mesh.decode.worker.queued == 4)
        with pytest.raises(Overloaded):  # there is room for it, but others came first
            await mesh.reserve(prompt_of(5), 1)
        assert not order
        await mesh.release(held)
        await asyncio.gather(*tasks)
        assert order == ["urgent", "older", "large", "small"]


async def test_waiting_ends_with_the_time_the_deadline_or_the_caller():
    async with rig(pages=2) as mesh:
        held = await mesh.reserve(prompt_of(PAGE), 1)
        big = prompt_of(PAGE)
        with pytest.raises(Overloaded):
            await mesh.reserve(big, 1, wait_ms=20)
        with pytest.raises(DeadlineExceeded):
            await mesh.reserve(big, 1, wait_ms=5_000, deadline_ms=20)
        cut = asyncio.ensure_future(mesh.reserve(big, 1, wait_ms=20_000))
        await until(lambda: mesh.decode.worker.queued == 1)
        behind = asyncio.ensure_future(mesh.reserve(prompt_of(9), 1, wait_ms=20_000))
        await until(lambda: mesh.decode.worker.queued == 2)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        await mesh.release(held)
        await mesh.release(await behind)
        with pytest.raises(InvalidRequest):
            await mesh.reserve(prompt_of(2 * PAGE), 1, wait_ms=20_000)


async def test_a_caller_that_is_cut_as_it_gets_room_leaves_nothing_behind():
    async with rig(pages=2) as mesh:
        held = await mesh.reserve(prompt_of(PAGE), 1)
        cut = asyncio.ensure_future(mesh.reserve(prompt_of(5), 1, n=2, wait_ms=20_000))
        await until(lambda: mesh.decode.worker.queued == 1)
        mesh.decode.worker._leases.free(mesh.decode.worker._leases.find(held.lease_id))
        assert mesh.decode.worker.leases == 2  # granted, and its caller does not know yet
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        assert mesh.decode.worker.leases == 0


async def test_a_reservation_can_be_withdrawn_while_it_waits():
    async with rig(pages=2) as mesh:
        held = await mesh.reserve(prompt_of(PAGE), 1)
        waits = asyncio.ensure_future(
            mesh.reserve(prompt_of(PAGE), 1, wait_ms=20_000, ticket="mine")
        )
        await until(lambda: mesh.decode.worker.queued == 1)
        behind = asyncio.ensure_future(mesh.reserve(prompt_of(9), 1, wait_ms=20_000, ticket="b"))
        await until(lambda: mesh.decode.worker.queued == 2)
        await mesh.decode.worker.release(ReleaseRequest(lease_id="mine", reason="cancelled"))
        with pytest.raises(Cancelled, match="withdrawn"):
            await waits
        assert mesh.decode.worker.queued == 1
        await mesh.release(held)
        await mesh.release(await behind)


async def test_a_reservation_withdrawn_as_it_gets_room_is_answered_with_its_lease():
    async with rig(pages=2) as mesh:
        held = await mesh.reserve(prompt_of(PAGE), 1)
        waits = asyncio.ensure_future(mesh.reserve(prompt_of(5), 1, wait_ms=20_000, ticket="mine"))
        await until(lambda: mesh.decode.worker.queued == 1)
        mesh.decode.worker._leases.free(mesh.decode.worker._leases.find(held.lease_id))
        await mesh.decode.worker.release(ReleaseRequest(lease_id="mine", reason="cancelled"))
        await mesh.release(await waits)
        assert mesh.decode.worker.leases == 0


async def test_the_line_is_bounded():
    async with rig(pages=1, max_waiting=2) as mesh:
        held = await mesh.reserve(prompt_of(5), 1)
        waiting = [
            asyncio.ensure_future(mesh.reserve(prompt_of(5), 1, wait_ms=20_000)) for _ in range(2)
        ]
        await until(lambda: mesh.decode.worker.queued == 2)
        with pytest.raises(Overloaded, match="2 requests wait"):
            await mesh.reserve(prompt_of(5), 1, wait_ms=20_000)
        await mesh.release(held)
        for task in waiting:
            await mesh.release(await task)


async def test_a_deadline_counts_from_receipt_also_for_who_had_to_wait():
    async with rig(pages=1) as mesh:
        held = await mesh.reserve(prompt_of(5), 1)
        waiting = asyncio.ensure_future(mesh.reserve(prompt_of(5), 2, wait_ms=20_000))
        await until(lambda: mesh.decode.worker.queued == 1)
        received = asyncio.get_running_loop().time()
        await mesh.release(held)
        lease = await waiting
        entry = mesh.decode.worker._leases.find(lease.lease_id)
        assert entry.timers["deadline"].when() <= received + 60.0
        fake = type("First", (), {"token_ids": (1,)})()
        params = SamplingParams(max_tokens=2)
        reading = asyncio.ensure_future(mesh.read(prompt_of(5), lease, fake, params))
        await until(lambda: entry.streaming)
        entry.timers["deadline"]._run()  # it passes
        with pytest.raises((Cancelled, TransferFailed)):
            await reading

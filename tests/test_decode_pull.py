"""Reservations for prompts whose prefix another worker holds."""

import asyncio

import msgspec
import pytest
from test_prefill_pull import pulling
from worker_rig import PAGE, prompt_of

from pdmesh.decode.pulling import PullingReserve
from pdmesh.kvtransfer.pull_loopback import ReadFaults
from pdmesh.wire.errors import Cancelled, DeadlineExceeded
from pdmesh.wire.messages import ReleaseRequest, ReserveRequest
from pdmesh.wire.sampling import SamplingParams


def pulled_reserve(made, decode=1, **options):
    """``reserve`` and ``release`` of a decode worker as its process serves them."""
    worker = made.mesh.decodes[decode].worker
    return PullingReserve(worker, made.exchanges[f"d{decode}"].fetcher, **options)


def reservation(made, prompt, owner="d0", **fields):
    return ReserveRequest(
        request_id="r",
        attempt=1,
        num_prompt_tokens=len(prompt),
        hashes=made.mesh.hashes(prompt),
        max_tokens=6,
        sources=(made.source(owner, made.cached(owner, prompt)),),
        **({"deadline_ms": 60_000} | fields),
    )


async def answer(made, prompt, lease, decode=1):
    params = SamplingParams(max_tokens=6, temperature=0.0)
    first = await made.mesh.compute(prompt, lease, params)
    chunks = await made.mesh.read(prompt, lease, first, params, decode=decode)
    await made.mesh.release(lease, decode=decode)
    return first, [first.token_ids[0], *(t for chunk in chunks for t in chunk.token_ids)]


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
async def test_a_lease_counts_pulled_pages_as_cached(transport, page_size, mtp):
    options = {"page_size": page_size, "mtp": mtp, "arithmetic": "exact", "chunk_tokens": 128}
    prompt = prompt_of(3 * page_size + 5)
    async with pulling(transport, decodes=2, **options) as made:
        cold = await made.mesh.ask(prompt, 6, temperature=0.0)
        lease = await pulled_reserve(made).reserve(reservation(made, prompt))
        assert lease.cached_pages == 3
        first, tokens = await answer(made, prompt, lease)
        assert first.pushed_pages == 1
        assert tokens == cold.tokens
        assert made.exchanges["d1"].fetcher.pages == 3


async def dies(made):
    made.ways["d0"].lost = True


async def loses_the_connection(made):
    made.readers["d1"].faults = ReadFaults(lost_at=2)


async def forgets(made):
    made.sides["d0"].kv.clear()


@pytest.mark.parametrize("fate", [dies, loses_the_connection, forgets], ids=lambda f: f.__name__)
async def test_an_owner_that_fails_means_pages_that_are_sent(fate):
    prompt = prompt_of(3 * PAGE + 5)
    async with pulling(decodes=2, arithmetic="exact") as made:
        cold = await made.mesh.ask(prompt, 6, temperature=0.0)
        request = reservation(made, prompt)
        await fate(made)
        lease = await pulled_reserve(made).reserve(request)
        assert lease.cached_pages == 0
        first, tokens = await answer(made, prompt, lease)
        assert first.pushed_pages == 4
        assert tokens == cold.tokens
        made.exchanges["d0"].lender.close()


async def begun_pull(made, request, reserve):
    """A reservation whose pull has begun and hears nothing."""
    begun = asyncio.Event()

    async def wait():
        begun.set()
        await asyncio.Event().wait()

    made.ways["d0"].before["lend"] = wait
    reserving = asyncio.ensure_future(reserve.reserve(request))
    await begun.wait()
    return reserving


async def test_a_reservation_is_withdrawn_by_its_ticket_while_pages_are_pulled():
    prompt = prompt_of(3 * PAGE + 5)
    async with pulling(decodes=2) as made:
        await made.mesh.ask(prompt, 2, temperature=0.0)
        reserve = pulled_reserve(made)
        request = reservation(made, prompt, ticket="ticket", wait_ms=5_000)
        reserving = await begun_pull(made, request, reserve)
        await reserve.release(ReleaseRequest(lease_id="ticket", reason="cancelled"))
        with pytest.raises(Cancelled, match="withdrawn while pages were pulled"):
            await reserving
        assert not reserve._pulling
        assert not made.mesh.decodes[1].kv.num_reservations


async def test_a_caller_that_leaves_ends_the_pull():
    prompt = prompt_of(3 * PAGE + 5)
    async with pulling(decodes=2) as made:
        await made.mesh.ask(prompt, 2, temperature=0.0)
        reserving = await begun_pull(made, reservation(made, prompt), pulled_reserve(made))
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving
        assert made.exchanges["d1"].fetcher.failures["cancelled"] == 1


class Asked:
    """A worker that notes what it is asked."""

    async def reserve(self, request):
        self.request = request

    async def release(self, request):
        pass


async def test_the_time_of_a_pull_is_taken_from_what_the_reservation_has():
    prompt = prompt_of(3 * PAGE + 5)
    async with pulling(decodes=2) as made:
        await made.mesh.ask(prompt, 2, temperature=0.0)
        now, asked = [0.0], Asked()

        async def slow():
            now[0] += 1.5

        made.ways["d0"].before["lend"] = slow
        reserve = PullingReserve(asked, made.exchanges["d1"].fetcher, clock=lambda: now[0])
        request = reservation(made, prompt, wait_ms=1_000, waited_ms=20)
        await reserve.reserve(request)
        assert asked.request == msgspec.structs.replace(
            request, waited_ms=1_520, wait_ms=0, deadline_ms=58_500
        )
        made.sides["d1"].kv.clear()
        with pytest.raises(DeadlineExceeded):
            await reserve.reserve(reservation(made, prompt, deadline_ms=1_000))


async def test_room_that_a_loan_held_goes_to_the_next_in_line():
    prompt = prompt_of(3 * PAGE + 5)
    async with pulling(decodes=2, pages=8) as made:
        await made.mesh.ask(prompt, 2, temperature=0.0)
        exchange, worker = made.exchanges["d0"], made.mesh.decode.worker
        exchange.lender.on_unpinned = worker.pages_freed
        hold = asyncio.Event()
        made.ways["d0"].before["validate"] = hold.wait
        pulling_now = asyncio.ensure_future(pulled_reserve(made).reserve(reservation(made, prompt)))
        await asyncio.wait({pulling_now}, timeout=0.0)
        while not exchange.lender.held:
            await asyncio.sleep(0)
        waiting = asyncio.ensure_future(
            made.mesh.reserve(prompt_of(6 * PAGE), max_tokens=8, wait_ms=20_000)
        )
        await asyncio.wait({waiting}, timeout=0.05)
        assert not waiting.done()
        hold.set()
        lease = await waiting
        await made.mesh.release(lease)
        await made.mesh.release(await pulling_now, decode=1)

"""Pages of a prompt that failed on its way: what arrived whole is there for the next attempt."""

from __future__ import annotations

import asyncio

import pytest
import torch
from worker_rig import PAGE, prompt_of, reference, rig, until

from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.wire.errors import InternalError, TransferFailed


async def push_pages_and_lose_the_connection(mesh, prompt, lease, count, torn=False):
    """Pushes ``count`` pages of the prompt as prefill has them (and a part of one more), and is
    lost."""
    side = mesh.prefill
    held = side.kv.reserve(mesh.hashes(prompt), len(prompt) // PAGE, len(prompt) // PAGE)
    sender = side.worker._sender
    transfer = await asyncio.to_thread(sender.open, lease)
    first, last = lease.cached_pages, lease.cached_pages + count
    transfer.push_pages(first, count, held.page_table[first:last], side.store)
    if torn:
        transfer.push(last, 0, side.store.read(held.page_table[last], 0))
    receiver, wanted = mesh.decode.receiver, transfer.num_writes
    await until(lambda: receiver._arrivals[lease.lease_id].state.num_arrived == wanted)
    transfer._link.close("the network broke")
    await until(lambda: receiver.phase(lease.lease_id) is not Phase.FILLING)
    with pytest.raises(TransferFailed):
        await receiver.wait(lease.lease_id, 5.0)
    held.release()


async def prefilled(mesh, prompt):
    """Has prefill compute the prompt, for nobody."""
    lease = await mesh.reserve(prompt)
    await mesh.compute(prompt, lease)
    await mesh.decode.receiver.wait(lease.lease_id, 30.0)
    await mesh.release(lease)
    mesh.decode.kv.clear()


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
async def test_a_retry_after_a_lost_connection_sends_only_the_rest(torn):
    prompt = prompt_of(4 * PAGE + 3)
    async with rig(transport="tcp") as mesh:
        await prefilled(mesh, prompt)
        lease = await mesh.reserve(prompt)
        assert lease.cached_pages == 0
        await push_pages_and_lose_the_connection(mesh, prompt, lease, 2, torn)
        await mesh.release(lease, "the transfer failed")
        answer = await mesh.ask(prompt, 8)
        assert answer.lease.cached_pages == 2
        assert answer.first.pushed_pages == 3
        assert answer.tokens == reference(prompt, 8)


async def test_the_pages_that_are_kept_hold_what_was_sent():
    prompt = prompt_of(4 * PAGE + 3)
    async with rig(transport="tcp") as mesh:
        await prefilled(mesh, prompt)
        lease = await mesh.reserve(prompt)
        await push_pages_and_lose_the_connection(mesh, prompt, lease, 3)
        await mesh.release(lease, "the transfer failed")
        hashes = mesh.hashes(prompt)
        sides = [mesh.prefill, mesh.decode]
        held = [side.kv.reserve(hashes[:3], 3, 3) for side in sides]
        assert [one.matched for one in held] == [3, 3]
        sent, kept = (
            side.store.tensor[list(one.page_table)].view(torch.int32)
            for side, one in zip(sides, held, strict=True)
        )
        assert torch.equal(sent, kept)
        for one in held:
            one.release()


async def test_nothing_is_kept_of_a_prompt_whose_first_page_is_torn():
    prompt = prompt_of(4 * PAGE + 3)
    async with rig(transport="tcp") as mesh:
        await prefilled(mesh, prompt)
        lease = await mesh.reserve(prompt)
        await push_pages_and_lose_the_connection(mesh, prompt, lease, 0, torn=True)
        await mesh.release(lease, "the transfer failed")
        assert mesh.decode.kv.match(mesh.hashes(prompt)) == 0


async def test_pages_are_never_kept_while_a_write_may_still_land():
    prompt = prompt_of(4 * PAGE)
    async with rig(transport="loopback", one_sided=True, stall_after=2) as mesh:
        lease = await mesh.reserve(prompt)
        await mesh.compute(prompt, lease)
        receiver, kv = mesh.decode.receiver, mesh.decode.kv
        with pytest.raises(InternalError, match="not free"):
            receiver.salvage(lease.lease_id)
        await mesh.release(lease, "cancelled")
        assert kv.match(mesh.hashes(prompt)) == 0
        assert kv.status().quarantined == 4
        mesh.decode.listener.resume()
        await mesh.rest()
        assert kv.match(mesh.hashes(prompt)) == 0


async def test_pages_that_were_taken_over_and_found_wrong_are_not_kept():
    prompt = prompt_of(2 * PAGE + 5)
    async with rig() as mesh:
        lease = await mesh.reserve(prompt)
        await mesh.arrive(lease, 5, hidden=b"1234")
        first = type("First", (), {"token_ids": (5,)})()
        with pytest.raises(TransferFailed):
            await mesh.read(prompt, lease, first)
        assert mesh.decode.kv.match(mesh.hashes(prompt)) == 0

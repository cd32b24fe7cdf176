"""What a draining worker hands back, and what it finishes."""

import asyncio

import pytest
from worker_rig import PAGE, prompt_of, reference, rig, until

from pdmesh.wire.errors import Draining

WHY = Draining("worker is draining")


async def test_a_prefill_worker_hands_back_what_is_queued_and_finishes_what_is_begun():
    async with rig() as mesh:
        mesh.prefill.gate.hold()
        prompts = [prompt_of(70, seed) for seed in range(3)]
        leases = [await mesh.reserve(prompt) for prompt in prompts]
        begun = asyncio.ensure_future(mesh.compute(prompts[0], leases[0]))
        await mesh.prefill.gate.step_begins()
        queued = [
            asyncio.ensure_future(mesh.compute(prompt, lease))
            for prompt, lease in zip(prompts[1:], leases[1:], strict=True)
        ]
        worker = mesh.prefill.worker
        await until(lambda: worker.queued == 2)
        worker.hand_back(WHY)
        worker.hand_back(WHY)  # as often as it likes
        for one in queued:
            with pytest.raises(Draining, match="worker is draining"):
                await one
        assert worker.unfinished > 0
        mesh.prefill.gate.let_go()
        assert (await begun).token_ids[0] == reference(prompts[0], 1)[0]
        for lease in leases:
            await mesh.release(lease)
        await until(lambda: worker.unfinished == 0)
        assert worker.cancelled == 0  # no caller left


async def test_a_decode_worker_hands_back_reservations_that_wait_and_keeps_its_leases():
    async with rig(pages=6) as mesh:
        prompt = prompt_of(3 * PAGE)
        lease = await mesh.reserve(prompt, 8)
        waiting = asyncio.ensure_future(mesh.reserve(prompt_of(3 * PAGE, 1), 8, wait_ms=20_000))
        worker = mesh.decode.worker
        await until(lambda: worker.queued == 1)
        worker.hand_back(WHY)
        with pytest.raises(Draining, match="worker is draining"):
            await waiting
        assert (worker.leases, worker.queued) == (1, 0)
        first = await mesh.compute(prompt, lease)
        chunks = await mesh.read(prompt, lease, first)
        told = [*first.token_ids, *(token for chunk in chunks for token in chunk.token_ids)]
        assert told == reference(prompt, 8)
        await mesh.release(lease)

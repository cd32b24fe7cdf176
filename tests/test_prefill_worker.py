"""The prefill worker with a real model, real pages and real transfers: chunks, cancels, faults."""

import asyncio
import threading

import msgspec
import pytest
from worker_rig import MODEL, PAGE, VOCAB, Options, Rig, prompt_of, reference, rig, until

from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.model.reference import generate_reference
from pdmesh.wire.errors import (
    Incompatible,
    InternalError,
    InvalidRequest,
    LeaseGone,
    Overloaded,
    TransferFailed,
)
from pdmesh.wire.sampling import SamplingParams


def later(coroutine):
    return asyncio.ensure_future(coroutine)


def exactly(prompt, max_tokens, **options):
    """The tokens of one process running the model alone."""
    return generate_reference(MODEL, prompt, max_tokens, **options)


# ---- what is computed ---------------------------------------------------------------------


@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
@pytest.mark.parametrize("chunk_tokens", [PAGE, 3 * PAGE, 1000])
async def test_the_answer_does_not_depend_on_how_a_prompt_was_cut(chunk_tokens, mtp):
    prompts = [prompt_of(n) for n in (5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1)]
    async with rig(chunk_tokens=chunk_tokens, mtp=mtp) as mesh:
        for prompt in prompts:
            answer = await mesh.ask(prompt, 12)
            assert answer.tokens == reference(prompt, 12)
        assert len(mesh.prefill.gate.batches) >= 3 * 5 * PAGE // (chunk_tokens + PAGE)


async def test_pages_are_bitwise_the_same_on_both_sides_and_however_cut():
    """The MTP layer too: its inputs are carried over the cuts. Slot 0 of a sequence stays empty."""
    prompt = prompt_of(3 * PAGE + 7)
    copies = []
    for chunk_tokens in (PAGE, 1000):
        async with rig(chunk_tokens=chunk_tokens) as mesh:
            await mesh.ask(prompt, 2)
            for side in (mesh.prefill, mesh.decode):
                held = side.kv.reserve(mesh.hashes(prompt), 4, 4)
                assert held.matched == 3
                copies.append(side.store.tensor[held.pages].clone())
                held.release()
    for copy in copies:
        copy[0, -1, 0] = 0.0
        assert not copy.isnan().any()
        assert (copy == copies[0]).all()


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
@pytest.mark.parametrize("arithmetic", ["exact", "fast"])
async def test_a_prompt_sent_again_is_recomputed_by_one_or_two_positions(length, mtp, arithmetic):
    """Compare GeeeekExplorer/nano-vllm#114. The decode worker is new each time.

    In fast arithmetic the few positions behind a cached prefix are computed in the other form.
    """
    prompt = prompt_of(length)
    longer = [*prompt, *prompt_of(PAGE, 1)]
    async with rig(mtp=mtp, decodes=4, arithmetic=arithmetic) as mesh:
        first = await mesh.ask(prompt, 4, logprobs=2)
        await mesh.ask(longer, 2, decode=1)
        pages = mesh.prefill.kv.reserve(mesh.hashes(prompt), length // PAGE, length // PAGE)
        before = mesh.prefill.store.tensor[pages.pages].clone()
        for decode in (2, 3):
            computed = mesh.prefill.worker.tokens_computed
            again = await mesh.ask(prompt, 4, decode=decode, logprobs=2)
            assert again.tokens == first.tokens == exactly(prompt, 4, arithmetic=arithmetic)
            if arithmetic == "exact":
                assert again.logprobs == first.logprobs
            for one, other in zip(again.logprobs, first.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            cached = min(length // PAGE * PAGE, length - 1)
            assert again.first.cached_tokens == cached
            assert again.first.computed_tokens == length - cached
            extra = int(mtp and cached > 0 and length % PAGE > 0)
            assert mesh.prefill.worker.tokens_computed - computed == length - cached + extra
        after = mesh.prefill.store.tensor[pages.pages]
        assert (before.nan_to_num(7) == after.nan_to_num(7)).all(), "shared pages are not written"
        pages.release()


async def test_prompts_share_steps_and_wait_for_pages_in_order():
    prompts = [prompt_of(PAGE), *(prompt_of(3 * PAGE, seed) for seed in range(5))]
    async with rig(pages=8, chunk_tokens=4 * PAGE, decodes=6) as mesh:
        mesh.prefill.gate.hold()
        asking = [later(mesh.ask(prompts[0], 3, decode=0))]
        await mesh.prefill.gate.step_begins()
        asking += [later(mesh.ask(p, 3, decode=i)) for i, p in enumerate(prompts) if i]
        await until(lambda: mesh.prefill.worker.queued == 5)
        mesh.prefill.gate.let_go()
        answers = await asyncio.gather(*asking)
        assert [a.tokens for a in answers] == [reference(p, 3) for p in prompts]
        assert max(mesh.prefill.gate.batches) == 2
        assert mesh.prefill.evicted, "the pool is too small for all of them"


# ---- refusals -----------------------------------------------------------------------------


async def test_bad_requests_are_refused_before_they_touch_anything():
    prompt = prompt_of(70)
    async with rig(pages=8) as mesh:
        lease = await mesh.reserve(prompt)
        request = mesh.prefill_request(prompt, lease)
        changed = msgspec.structs.replace
        bad_format = changed(lease.page_format, latent_width=1)
        for wrong, error, word in [
            (changed(request, token_ids=()), InvalidRequest, "no tokens"),
            (changed(request, token_ids=tuple([1] * 1024)), InvalidRequest, "context"),
            (changed(request, token_ids=tuple([1] * 9 * PAGE)), InvalidRequest, "has 8"),
            (changed(request, token_ids=(*prompt[:-1], VOCAB)), InvalidRequest, "token_ids"),
            (changed(request, token_ids=tuple(prompt[:10])), InvalidRequest, "for 2 pages"),
            (changed(request, output_offset=-1), InvalidRequest, "output_offset"),
            (changed(request, sampling=SamplingParams(top_p=0.0)), InvalidRequest, "top_p"),
            (changed(request, lease=changed(lease, cached_pages=3)), InvalidRequest, "3 of them"),
            (changed(request, lease=changed(lease, page_format=bad_format)), Incompatible, "width"),
        ]:
            with pytest.raises(error, match=word):
                await mesh.prefill.worker.prefill(wrong)
        first = await mesh.prefill.worker.prefill(request)
        assert len(await mesh.read(prompt, lease, first)) >= 1


async def test_a_second_prefill_of_a_lease_is_refused_and_the_first_goes_on():
    prompt = prompt_of(70)
    async with rig() as mesh:
        lease = await mesh.reserve(prompt)
        mesh.prefill.gate.hold()
        computing = later(mesh.compute(prompt, lease))
        await mesh.prefill.gate.step_begins()
        with pytest.raises(LeaseGone):
            await mesh.compute(prompt, lease)
        mesh.prefill.gate.let_go()
        first = await computing
        with pytest.raises(LeaseGone):
            await mesh.compute(prompt, lease)
        assert first.token_ids[0] == reference(prompt, 1)[0]
        assert len(await mesh.read(prompt, lease, first)) >= 1


async def test_a_full_queue_refuses_and_leaves_nothing_behind():
    async with rig(max_queue=1) as mesh:
        mesh.prefill.gate.hold()
        leases = [await mesh.reserve(prompt_of(70, seed)) for seed in range(3)]
        running = later(mesh.compute(prompt_of(70, 0), leases[0]))
        await mesh.prefill.gate.step_begins()
        queued = later(mesh.compute(prompt_of(70, 1), leases[1]))
        await until(lambda: mesh.prefill.worker.queued == 1)
        with pytest.raises(Overloaded):
            await mesh.compute(prompt_of(70, 2), leases[2])
        mesh.prefill.gate.let_go()
        await asyncio.gather(running, queued)
        for lease in leases:
            await mesh.release(lease)
        assert mesh.prefill.worker.cancelled == 0


# ---- cancellation -------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "loopback"])
@pytest.mark.parametrize("when", ["opening", "queued", "first chunk", "last chunk"])
async def test_a_cancelled_prompt_is_gone_and_counted_once(when, transport):
    other, prompt = prompt_of(2 * PAGE), prompt_of(2 * PAGE, 1)
    async with rig(chunk_tokens=PAGE, transport=transport) as mesh:
        worker, gate = mesh.prefill.worker, mesh.prefill.gate
        lease = await mesh.reserve(prompt)
        gate.hold()
        opened = threading.Event()
        if when == "opening":
            really = worker._sender.open
            entered = threading.Event()

            def slowly(lease):
                entered.set()
                assert opened.wait(30)
                return really(lease)

            worker._sender.open = slowly
            computing = later(mesh.compute(prompt, lease))
            await asyncio.to_thread(entered.wait, 30)
        elif when == "queued":
            other_lease = await mesh.reserve(other)
            ahead = later(mesh.compute(other, other_lease))
            await gate.step_begins()
            computing = later(mesh.compute(prompt, lease))
            await until(lambda: worker.queued == 1)
        else:
            computing = later(mesh.compute(prompt, lease))
            await gate.step_begins()
            if when == "last chunk":
                gate.let_one_through()
                await gate.step_begins()
        computing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await computing
        opened.set()
        gate.let_go()
        if when == "opening":  # the writer that came too late gives up by itself
            await until(lambda: mesh.decode.receiver.phase(lease.lease_id) is Phase.FREE)
        await mesh.release(lease, "cancelled")
        if when == "queued":
            first = await ahead
            assert len(await mesh.read(other, other_lease, first)) >= 1
        await mesh.rest()
        assert worker._sender.num_transfers == 0
        assert worker.cancelled == 1
        assert (await mesh.ask(prompt, 5)).tokens == reference(prompt, 5)


@pytest.mark.parametrize("one_sided", [False, True])
async def test_a_request_released_between_first_token_and_fin_frees_both_sides(one_sided):
    """The network holds the pages back; the pages are freed when no push of them is under way."""
    prompt = prompt_of(3 * PAGE)
    options = {"transport": "loopback", "one_sided": one_sided, "stall_after": 3}
    async with rig(**options) as mesh:
        lease = await mesh.reserve(prompt)
        await mesh.compute(prompt, lease)
        assert mesh.prefill.worker.finishing == 1
        assert mesh.prefill.kv.status().used == 3, "a push still reads them"
        await mesh.release(lease, "cancelled")
        if one_sided:
            assert mesh.prefill.kv.status().used == 3
            mesh.decode.listener.resume()
        await mesh.rest()
        assert mesh.decode.worker.cancelled == 1


async def test_pages_of_a_cancelled_prompt_stay_while_a_push_reads_them():
    prompt = prompt_of(3 * PAGE)
    options = {"transport": "loopback", "one_sided": True, "stall_after": 1}
    async with rig(chunk_tokens=PAGE, **options) as mesh:
        lease = await mesh.reserve(prompt)
        mesh.prefill.gate.hold()
        computing = later(mesh.compute(prompt, lease))
        mesh.prefill.gate.let_one_through()
        await mesh.prefill.gate.step_begins()
        await mesh.prefill.gate.step_begins()
        computing.cancel()
        await asyncio.wait({computing})
        mesh.prefill.gate.let_go()
        await until(lambda: mesh.prefill.worker.running == 0)
        assert mesh.prefill.kv.status().used == 3
        mesh.decode.listener.resume()
        await until(lambda: mesh.prefill.worker.finishing == 0)
        assert mesh.prefill.kv.status().used == 0
        await mesh.release(lease)


async def test_a_lease_that_is_released_stops_the_prompt_at_the_next_step():
    prompt = prompt_of(5 * PAGE)
    async with rig(chunk_tokens=PAGE) as mesh:
        lease = await mesh.reserve(prompt)
        mesh.prefill.gate.hold()
        computing = later(mesh.compute(prompt, lease))
        await mesh.prefill.gate.step_begins()
        await mesh.release(lease)
        await mesh.told_of_failure()
        mesh.prefill.gate.let_go()
        with pytest.raises(TransferFailed, match="cannot be delivered"):
            await computing
        assert len(mesh.prefill.gate.batches) == 1
        assert mesh.prefill.worker.cancelled == 0


async def test_a_slow_receiver_delays_no_other_prompt():
    slow, quick = prompt_of(3 * PAGE), prompt_of(3 * PAGE, 1)
    async with rig(transport="loopback", decodes=2, stall_after=1) as mesh:
        lease = await mesh.reserve(slow)
        await mesh.compute(slow, lease)
        mesh.decodes[1].listener.faults = type(mesh.decodes[1].listener.faults)()
        assert (await mesh.ask(quick, 4, decode=1)).tokens == reference(quick, 4)
        assert mesh.prefill.worker.finishing == 1
        await mesh.release(lease)


async def test_an_acknowledgement_that_never_comes_holds_pages_until_the_deadline_only():
    """A prompt whose last step ends after its deadline is answered all the same."""
    prompt = prompt_of(PAGE)
    async with rig(transport="loopback", stall_after=0) as mesh:
        lease = await mesh.reserve(prompt)
        mesh.prefill.gate.hold()
        computing = later(mesh.compute(prompt, lease))
        await mesh.prefill.gate.step_begins()
        mesh.prefill.skipped = 60.0
        mesh.prefill.gate.let_go()
        await computing
        await until(lambda: mesh.prefill.worker.finishing == 0)
        assert mesh.prefill.kv.status().used == 0
        await mesh.release(lease)


# ---- faults -------------------------------------------------------------------------------


async def test_a_prompt_whose_step_fails_ends_with_an_error_and_the_worker_goes_on():
    prompt = prompt_of(70)
    async with rig(chunk_tokens=PAGE) as mesh:
        mesh.prefill.gate.failure = RuntimeError("no more memory")
        with pytest.raises(InternalError, match="no more memory"):
            await mesh.ask(prompt, 5)
        assert (await mesh.ask(prompt, 5)).tokens == reference(prompt, 5)
        assert mesh.prefill.worker.cancelled == 0
        assert [facts.failed_prompts for facts in mesh.prefill.facts] == [1, 0, 0]


async def together(mesh, prompts, **fields):
    """Asks several, so that they share the first step; errors are returned."""
    gate = mesh.prefill.gate
    gate.hold()
    ahead = later(mesh.ask(prompt_of(1, 99), 1))
    await gate.step_begins()
    asking = [later(mesh.ask(prompt, 5, **fields)) for prompt in prompts]
    await until(lambda: mesh.prefill.worker.queued == len(prompts))
    gate.let_go()
    await ahead
    return await asyncio.gather(*asking, return_exceptions=True)


async def test_a_prompt_that_fails_alone_takes_no_other_of_its_step_with_it():
    prompts = [prompt_of(length, 5) for length in (70, 80, 90)]
    async with rig(chunk_tokens=1000) as mesh:
        mesh.prefill.gate.poison = tuple(prompts[1][:8])
        answers = await together(mesh, prompts)
        assert isinstance(answers[1], InternalError)
        for place in (0, 2):
            assert answers[place].tokens == reference(prompts[place], 5)
        assert mesh.prefill.gate.batches == [1, 3, 1, 1, 1]
        assert mesh.prefill.facts[-1].failed_prompts == 1
        assert mesh.prefill.facts[-1].num_prompts == 2


async def test_a_step_that_fails_once_costs_no_prompt():
    prompts = [prompt_of(length, 6) for length in (70, 80)]
    async with rig(chunk_tokens=1000) as mesh:
        really, failures = mesh.prefill.gate.step, [RuntimeError("once")]

        def step(rows):
            if len(rows) == 2 and failures:
                raise failures.pop()
            return really(rows)

        mesh.prefill.gate.step = step
        answers = await together(mesh, prompts)
        assert [answer.tokens for answer in answers] == [reference(p, 5) for p in prompts]
        assert not failures


async def test_pages_that_a_failed_step_has_pushed_are_not_pushed_again():
    """A fault of one prompt's transfer in the middle of a step; the other's first layer is out."""
    good, bad = prompt_of(2 * PAGE + 5, 1), prompt_of(2 * PAGE + 5, 2)
    async with rig(chunk_tokens=1000, decodes=2) as mesh:
        worker = mesh.prefill.worker
        really = worker._sender.open

        def opened(lease):
            transfer = really(lease)
            push = transfer.push_layer

            def faulty(store, first, layer, page_ids):
                if layer == 1 and first <= 1 < first + len(page_ids):
                    push(store, first, layer, page_ids[: 1 - first])
                    raise RuntimeError("a broken link")
                push(store, first, layer, page_ids)

            if lease.lease_id == broken.lease_id:
                transfer.push_layer = faulty
            return transfer

        broken = await mesh.reserve(bad, decode=1)
        worker._sender.open = opened
        mesh.prefill.gate.hold()
        ahead = later(mesh.ask(prompt_of(1, 99), 1))
        await mesh.prefill.gate.step_begins()
        asking = [later(mesh.ask(good, 5)), later(mesh.compute(bad, broken))]
        await until(lambda: worker.queued == 2)
        mesh.prefill.gate.let_go()
        await ahead
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert answers[0].tokens == reference(good, 5)
        assert isinstance(answers[1], InternalError)
        await mesh.release(broken, decode=1)


async def test_a_failed_step_whose_caller_has_left_is_no_loose_error():
    async with rig() as mesh:
        mesh.prefill.gate.hold()
        mesh.prefill.gate.failure = RuntimeError("no more memory")
        lease = await mesh.reserve(prompt_of(70))
        computing = later(mesh.compute(prompt_of(70), lease))
        await mesh.prefill.gate.step_begins()
        computing.cancel()
        await asyncio.wait({computing})
        mesh.prefill.gate.let_go()
        await mesh.release(lease)
        await mesh.rest()
        assert mesh.prefill.worker.cancelled == 1


async def test_a_decode_worker_that_is_gone_is_a_failed_transfer():
    prompt = prompt_of(70)
    async with rig() as mesh:
        lease = await mesh.reserve(prompt)
        mesh.decode.receiver.close()
        with pytest.raises(TransferFailed):
            await mesh.compute(prompt, lease)
        await mesh.release(lease)


async def test_a_fault_in_an_ending_ends_the_loop():
    mesh = Rig(Options())
    worker = mesh.prefill.worker

    def wrong(_):
        raise AssertionError("the books are wrong")

    worker._forget = wrong
    asking = later(mesh.ask(prompt_of(20), 1))
    with pytest.raises(AssertionError, match="books"):
        await mesh.loops[0]
    await asking
    await mesh.close()


async def test_closing_ends_within_its_grace_with_work_under_way():
    mesh = Rig(Options(transport="loopback", stall_after=0))
    lease = await mesh.reserve(prompt_of(70))
    await mesh.compute(prompt_of(70), lease)
    assert mesh.prefill.worker.finishing == 1
    await mesh.prefill.worker.close(grace=0.01)
    await until(lambda: mesh.prefill.worker.finishing == 0)
    assert mesh.prefill.kv.status().used == 0
    await mesh.release(lease)
    await mesh.close()

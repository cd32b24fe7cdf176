"""Prefill and decode workers together: tokens, pages, cancellations and faults on the decode side.

Everything is real but the processes: the model is small and random.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from worker_rig import PAGE, VOCAB, Answer, Options, Rig, prompt_of, reference, rig, until

from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.registry.store import end_task
from pdmesh.wire.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    LeaseGone,
    Overloaded,
    TransferFailed,
)
from pdmesh.wire.messages import ReleaseRequest
from pdmesh.wire.sampling import SamplingParams

LENGTHS = [k * PAGE + d for k in (1, 2, 3) for d in (-1, 0, 1)]


# ---- tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "loopback"])
@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
async def test_tokens_equal_the_reference_whatever_each_side_has_cached(mtp, transport):
    """Pages sent are the prompt's minus those held (compare vllm-project/vllm#50558)."""
    async with rig(mtp=mtp, transport=transport, prefills=2, decodes=2, pages=400) as mesh:
        for length in LENGTHS if transport == "tcp" else LENGTHS[3:6]:
            full = length // PAGE
            for held in sorted({0, 1, full} & set(range(full + 1))):
                for warm_prefill in (False, True):
                    prompt = prompt_of(length, 10 * held + warm_prefill)
                    if held:
                        start = [*prompt[: held * PAGE], 3]
                        await mesh.ask(start, 2, prefill=int(not warm_prefill))
                    elif warm_prefill:
                        await mesh.ask(prompt, 2, decode=1)
                    await check_case(mesh, prompt, held)


async def check_case(mesh, prompt, held):
    pages = -(-len(prompt) // PAGE)
    want = reference(prompt, 6)
    for cached in (held, len(prompt) // PAGE):  # the second time the prompt itself is held
        answer = await mesh.ask(prompt, 6, logprobs=1)
        case = (len(prompt), held, cached)
        assert answer.tokens == want, case
        assert answer.finish == "length"
        assert answer.lease.cached_pages == cached, case
        assert answer.first.pushed_pages == pages - cached, case
        assert answer.first.cached_tokens <= len(prompt) - 1
        assert len(answer.logprobs) == len(want), "one for every token, the first included"


@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
async def test_pages_filled_while_decoding_are_right_for_those_who_share_them(mtp):
    """The second turn of a chat stands on pages whose MTP slots the first turn's decode wrote."""
    prompt = prompt_of(PAGE - 9)
    async with rig(mtp=mtp) as mesh:
        first = await mesh.ask(prompt, 2 * PAGE)
        turn = [*prompt, *first.tokens, 5, 6, 7]
        second = await mesh.ask(turn, 12)
        assert second.lease.cached_pages == (len(turn) - 4) // PAGE == 2
        assert second.tokens == reference(turn, 12)
        pages = mesh.decode.kv
        held = pages.reserve(mesh.hashes(turn), 3, 3)
        latents = mesh.decode.store.tensor[held.pages[:2]].clone()
        held.release()
    async with rig(mtp=mtp) as mesh:  # the same pages, computed by prefill alone
        await mesh.ask(turn, 2)
        held = mesh.decode.kv.reserve(mesh.hashes(turn), 3, 3)
        fresh = mesh.decode.store.tensor[held.pages[:2]].clone()
        held.release()
    latents[0, -1, 0] = fresh[0, -1, 0] = 0.0  # slot 0 of the MTP layer stays as it was
    assert not latents.isnan().any()
    assert (latents - fresh).abs().max() < 1e-4


@pytest.mark.parametrize("wanted", [1, 2, 3])
async def test_exactly_max_tokens_come(wanted):
    """Compare NVIDIA/TensorRT-LLM#16691: the token of prefill counts."""
    prompt = prompt_of(PAGE)
    async with rig() as mesh:
        answer = await mesh.ask(prompt, wanted)
        assert answer.tokens == reference(prompt, wanted)
        assert answer.finish == (None if wanted == 1 else "length")
        assert [c.position for c in answer.chunks][:1] == [1][: wanted - 1]


async def test_the_context_may_be_filled_to_its_last_position():
    prompt = prompt_of(1019)
    async with rig(chunk_tokens=256) as mesh:
        assert (await mesh.ask(prompt, 5)).tokens == reference(prompt, 5)
        assert len((await mesh.ask(prompt_of(1023), 1)).tokens) == 1
        with pytest.raises(InvalidRequest, match="context"):
            await mesh.reserve(prompt, 6)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 5, "top_p": 0.9}])
async def test_a_sequence_is_the_same_alone_and_among_others_with_mtp_and_without(params):
    prompts = [prompt_of(40 + 13 * i, i) for i in range(8)]
    lengths = [4 + 5 * i for i in range(8)]

    async def ask(mesh, i):
        if i >= 4:  # the later half joins once the first ones are decoding
            await until(lambda: mesh.decode.worker.tokens_generated > 3 * (i - 3))
        return await mesh.ask(prompts[i], lengths[i], logprobs=2, **params)

    results = []
    truth = {tuple(p[:PAGE]): reference(p, n) for p, n in zip(prompts, lengths, strict=True)}
    for options in ({"mtp": True, "truth": truth}, {"mtp": True, "max_batch": 3}, {"mtp": False}):
        async with rig(**options) as mesh:
            answers = await asyncio.gather(*(ask(mesh, i) for i in range(8)))
            results.append(answers)
            assert max(mesh.decode.gate.batches) <= options.get("max_batch", 8)
            assert max(mesh.decode.gate.batches) >= 2
    async with rig(mtp=False) as mesh:
        results.append(
            [
                await mesh.ask(p, n, logprobs=2, **params)
                for p, n in zip(prompts, lengths, strict=True)
            ]
        )
    for answers in results[:-1]:
        for one, other in zip(answers, results[-1], strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == other.logprobs
    if not params:
        assert [a.tokens for a in results[0]] == list(truth.values())


async def test_a_stop_token_inside_an_accepted_run_ends_the_answer_there():
    prompt = prompt_of(70)
    want = reference(prompt, 40)
    async with rig(truth={tuple(prompt[:PAGE]): want}) as mesh:
        whole = await mesh.ask(prompt, 40)
        assert whole.tokens == want
        runs = [c for c in whole.chunks if len(c.token_ids) == 2]
        assert len(runs) >= 5
        assert whole.chunks[-1].accepted == len(runs)
        for run in runs:
            for at in range(2):
                place = run.position + at
                stop = want[place]
                answer = await mesh.ask(prompt, 40, stop_token_ids=(stop,))
                end = want.index(stop, 1)  # prefill's token is not decode's to judge
                assert answer.tokens == want[:end]
                assert (answer.finish, answer.chunks[-1].stop_token) == ("stop", stop)
        eos = want[3]
        assert (await mesh.ask(prompt, 40, eos=[eos])).tokens == want[: want.index(eos, 1)]
        assert (await mesh.ask(prompt, 40, eos=[eos], ignore_eos=True)).tokens == want


async def test_seeded_choices_go_on_where_an_attempt_broke_off():
    prompt, params = prompt_of(30), {"temperature": 1.0, "seed": 9}
    async with rig() as mesh:
        whole = await mesh.ask(prompt, 12, **params)
        longer = [*prompt, *whole.tokens[:5]]
        sampling = SamplingParams(max_tokens=7, **params)
        lease = await mesh.reserve(longer, 7)
        first = await mesh.compute(longer, lease, sampling, output_offset=5)
        chunks = await mesh.read(longer, lease, first, sampling, output_offset=5)
        assert [first.token_ids[0], *(t for c in chunks for t in c.token_ids)] == whole.tokens[5:]
        assert chunks[0].position == 6


async def test_a_reader_that_was_away_gets_the_steps_that_it_missed_at_once():
    prompt = prompt_of(70)
    truth = {tuple(prompt[:PAGE]): reference(prompt, 40)}
    async with rig(arithmetic="exact", truth=truth) as mesh:
        read_along = await mesh.ask(prompt, 40, logprobs=1)
        sampling = SamplingParams(max_tokens=40, logprobs=1)
        lease = await mesh.reserve(prompt, 40)
        first = await mesh.compute(prompt, lease, sampling)
        stream = mesh.decode.worker.stream(mesh.stream_request(prompt, lease, first, sampling))
        chunks = [await anext(stream)]
        await until(lambda: not mesh.decode.worker.running)
        chunks += [chunk async for chunk in stream]
        assert len(chunks) == 2
        late = Answer(first, lease, chunks)
        assert late.tokens == read_along.tokens
        assert late.logprobs == read_along.logprobs
        assert late.finish == read_along.finish
        assert late.chunks[1].position == 1 + len(chunks[0].token_ids)
        last = read_along.chunks[-1]
        assert (chunks[1].drafted, chunks[1].accepted) == (last.drafted, last.accepted)
        await mesh.release(lease)
        await mesh.rest()


# ---- refusals -----------------------------------------------------------------------------


async def test_full_is_not_the_same_as_never_fits():
    async with rig(pages=8) as mesh:
        lease = await mesh.reserve(prompt_of(5 * PAGE), PAGE)
        with pytest.raises(Overloaded):
            await mesh.reserve(prompt_of(2 * PAGE), PAGE)
        with pytest.raises(InvalidRequest, match="needs 9 pages"):
            await mesh.reserve(prompt_of(8 * PAGE), 1)
        await mesh.release(lease)
        await mesh.release(await mesh.reserve(prompt_of(2 * PAGE), PAGE))


async def test_a_request_that_differs_from_its_reservation_is_refused_and_hurts_nobody():
    prompt = prompt_of(70)
    async with rig() as mesh:
        lease = await mesh.reserve(prompt)
        first = await mesh.compute(prompt, lease)
        other = [(prompt[0] + 1) % VOCAB, *prompt[1:]]
        good = SamplingParams(max_tokens=8)
        for tokens, sampling, fields, word in [
            (prompt[:-1], good, {}, "differs"),
            (other, good, {}, "hashes"),
            (prompt, SamplingParams(max_tokens=9), {}, "exceeds"),
            (prompt, SamplingParams(max_tokens=1), {}, "used up"),
            (prompt, good, {"output_offset": -1}, "output_offset"),
            ([*prompt[:-1], VOCAB], good, {}, "token_ids"),
        ]:
            with pytest.raises(InvalidRequest, match=word):
                await mesh.read(tokens, lease, first, sampling, **fields)
        chunks = await mesh.read(prompt, lease, first, good)
        assert [first.token_ids[0], *(t for c in chunks for t in c.token_ids)] == reference(
            prompt, 8
        )
        with pytest.raises(LeaseGone):
            await mesh.read(prompt, lease, first, good)
        assert mesh.decode.worker.cancelled == 0


async def test_two_reservations_of_one_request_are_two_leases():
    prompt = prompt_of(70)
    async with rig() as mesh:
        one, two = await mesh.reserve(prompt), await mesh.reserve(prompt)
        assert one.lease_id != two.lease_id
        await mesh.release(one)
        first = await mesh.compute(prompt, two)
        chunks = await mesh.read(prompt, two, first)
        assert len(chunks) >= 1
        for lease in (one, two, two):
            await mesh.release(lease)
        assert mesh.decode.worker.cancelled == 0


async def test_a_second_stream_of_a_lease_is_refused_and_the_first_goes_on():
    prompt = prompt_of(70)
    async with rig() as mesh:
        lease = await mesh.reserve(prompt)
        first = await mesh.compute(prompt, lease)
        mesh.decode.gate.hold()
        reading = asyncio.ensure_future(mesh.read(prompt, lease, first))
        await mesh.decode.gate.step_begins()
        with pytest.raises(InvalidRequest, match="already"):
            await mesh.read(prompt, lease, first)
        mesh.decode.gate.let_go()
        assert sum(len(c.token_ids) for c in await reading) == 7


# ---- cancellation -------------------------------------------------------------------------


async def started(mesh, prompt, max_tokens=40):
    """A request whose stream is being read: (lease, first token, the reading task)."""
    sampling = SamplingParams(max_tokens=max_tokens)
    lease = await mesh.reserve(prompt, max_tokens)
    first = await mesh.compute(prompt, lease, sampling)
    return lease, first, asyncio.ensure_future(mesh.read(prompt, lease, first, sampling))


@pytest.mark.parametrize(
    "how", ["stream cut", "released", "cut, then released", "released, then cut"]
)
@pytest.mark.parametrize("when", ["arriving", "waiting", "in a step", "between steps"])
async def test_a_cancelled_request_is_gone_and_counted_once(when, how):
    """Also where it waits for a place in the batch, behind one that goes on unhurt."""
    other, prompt = prompt_of(50), prompt_of(2 * PAGE)
    async with rig(max_batch=1, transport="loopback", chunk_tokens=PAGE) as mesh:
        gate = mesh.decode.gate
        if when == "waiting":
            gate.hold()
            lease2, first2, second = await started(mesh, other)
            await gate.step_begins()
        if when == "arriving":
            lease = await mesh.reserve(prompt, 40)
            mesh.prefill.gate.hold()
            computing = asyncio.ensure_future(mesh.compute(prompt, lease))
            await mesh.prefill.gate.step_begins()
            fake = type("First", (), {"token_ids": (1,)})()
            reading = asyncio.ensure_future(mesh.read(prompt, lease, fake))
            await asyncio.sleep(0)
        else:
            if when == "in a step":
                gate.hold()
            lease, _, reading = await started(mesh, prompt)
            if when == "waiting":
                await until(lambda: mesh.decode.worker.queued == 1)
            else:
                await gate.step_begins()
        releasing = []
        for act in how.split(", then "):
            if "cut" in act:
                reading.cancel()
                await asyncio.wait({reading})
            else:
                request = ReleaseRequest(lease_id=lease.lease_id, reason="cancelled")
                releasing.append(asyncio.ensure_future(mesh.decode.worker.release(request)))
                await asyncio.sleep(0)
        if when == "waiting":  # its pages need no place in the batch to be freed
            gate.let_go()
            await asyncio.gather(*releasing)
            chunks = await second
            assert [first2.token_ids[0], *(t for c in chunks for t in c.token_ids)] == reference(
                other, 40
            )
            await mesh.release(lease2)
        gate.let_go()
        if when == "arriving":
            await mesh.told_of_failure()
        mesh.prefill.gate.let_go()
        await asyncio.gather(*releasing)
        with pytest.raises((Cancelled, asyncio.CancelledError)):
            await reading
        if when == "arriving":
            with pytest.raises(TransferFailed):
                await computing
        await mesh.rest()
        assert mesh.decode.worker.cancelled == 1
        await mesh.release(lease)
        assert mesh.decode.worker.cancelled == 1
        assert (await mesh.ask(prompt, 5)).tokens == reference(prompt, 5)


async def test_a_waiting_request_that_is_cancelled_frees_its_pages_at_the_next_step():
    async with rig(max_batch=1) as mesh:
        mesh.decode.gate.hold()
        _, _, running = await started(mesh, prompt_of(50))
        await mesh.decode.gate.step_begins()
        lease, _, waiting = await started(mesh, prompt_of(80))
        await until(lambda: mesh.decode.worker.queued == 1)
        waiting.cancel()
        releasing = asyncio.ensure_future(mesh.release(lease))
        await asyncio.sleep(0)
        mesh.decode.gate.let_one_through()
        await releasing
        assert mesh.decode.worker.leases == 1
        assert mesh.decode.worker.running == 1
        mesh.decode.gate.let_go()
        assert len(await running) > 1


async def test_cancelling_one_request_leaves_another_with_a_longer_name_alone():
    async with rig() as mesh:
        mesh.decode.gate.hold()
        mesh.prefill.gate.hold()
        prompt = prompt_of(90)
        leases = [await mesh.reserve(prompt, request_id=name) for name in ("req-1", "req-10")]
        asking = [
            asyncio.ensure_future(mesh.compute(prompt, lease, request_id=name))
            for lease, name in zip(leases, ("req-1", "req-10"), strict=True)
        ]
        await mesh.prefill.gate.step_begins()
        asking[0].cancel()
        await mesh.release(leases[0], "cancelled")
        await mesh.release(leases[0], "cancelled")
        mesh.prefill.gate.let_go()
        mesh.decode.gate.let_go()
        first = await asking[1]
        chunks = await mesh.read(prompt, leases[1], first)
        assert [first.token_ids[0], *(t for c in chunks for t in c.token_ids)] == reference(
            prompt, 8
        )
        assert (mesh.prefill.worker.cancelled, mesh.decode.worker.cancelled) == (1, 1)


# ---- time ---------------------------------------------------------------------------------


def idle_after(mesh, seconds):
    """How long a lease of the decode worker may stay without a writer from now on."""
    leases = mesh.decode.worker._leases
    leases._limits = replace(leases._limits, lease_idle_s=seconds)


async def test_a_lease_that_nobody_uses_expires_and_one_that_is_written_does_not(monkeypatch):
    monkeypatch.setattr("pdmesh.decode.leases.COLLECT_S", 0.02)
    prompt = prompt_of(70)
    async with rig(lease_idle_s=0.2) as mesh:
        forgotten = await mesh.reserve(prompt)
        await until(lambda: mesh.decode.worker.leases == 0)
        with suppress(TransferFailed):  # or it is told of that after its last step
            await mesh.compute(prompt, forgotten)
        mesh.prefill.gate.hold()
        idle_after(mesh, 60.0)
        written = await mesh.reserve(prompt)
        computing = asyncio.ensure_future(mesh.compute(prompt, written))
        await mesh.prefill.gate.step_begins()
        await until(lambda: mesh.decode.receiver.phase(written.lease_id) is Phase.FILLING)
        idle_after(mesh, 0.2)
        await asyncio.sleep(0.7)  # several idle periods
        assert mesh.decode.worker.leases == 1
        mesh.prefill.gate.let_go()
        await computing
        await until(lambda: mesh.decode.worker.leases == 0)  # arrived, and no router came
        assert mesh.decode.worker.cancelled == 2


async def test_pages_that_have_arrived_and_that_nobody_reads_do_not_wait_out_the_idle_time(
    monkeypatch,
):
    monkeypatch.setattr("pdmesh.decode.leases.COLLECT_S", 0.02)
    prompt = prompt_of(70)
    async with rig(lease_idle_s=60) as mesh:
        unread = await mesh.reserve(prompt)
        await asyncio.sleep(0.1)  # nothing has come yet: the prompt may wait in a queue
        assert mesh.decode.worker.leases == 1
        await mesh.compute(prompt, unread)
        await until(lambda: mesh.decode.worker.leases == 0)  # its router has died
        assert mesh.decode.worker.cancelled == 1
        read = await mesh.reserve(prompt)
        first = type("First", (), {"token_ids": tuple(reference(prompt, 1))})()
        reading = asyncio.ensure_future(mesh.read(prompt, read, first))
        await until(lambda: mesh.decode.worker._leases.find(read.lease_id).streaming)
        await mesh.compute(prompt, read)
        assert sum(len(chunk.token_ids) for chunk in await reading) > 1


@pytest.mark.parametrize("when", ["reserved", "arriving", "in a step"])
async def test_a_deadline_ends_a_lease_in_any_state(when):
    prompt = prompt_of(70)
    async with rig() as mesh:
        mesh.decode.gate.hold()
        sampling = SamplingParams(max_tokens=40)
        deadline_ms = {"reserved": 0, "arriving": 400}.get(when, 60_000)
        lease = await mesh.reserve(prompt, 40, deadline_ms=deadline_ms)
        if when == "reserved":
            await until(lambda: mesh.decode.worker.leases == 0)
        elif when == "arriving":
            fake = type("First", (), {"token_ids": (1,)})()
            with pytest.raises((Cancelled, TransferFailed)):
                await mesh.read(prompt, lease, fake, sampling)
        else:
            first = await mesh.compute(prompt, lease, sampling)
            reading = asyncio.ensure_future(mesh.read(prompt, lease, first, sampling))
            await mesh.decode.gate.step_begins()
            mesh.decode.worker._leases.find(lease.lease_id).timers["deadline"]._run()  # it passes
            with pytest.raises(Cancelled, match="deadline"):
                await reading
            assert mesh.decode.worker.leases == 1, "the step still uses the pages"
            mesh.decode.gate.let_go()
        await mesh.rest()
        await mesh.release(lease)
        assert mesh.decode.worker.cancelled == 1


# ---- faults -------------------------------------------------------------------------------


async def test_a_sequence_that_a_step_fails_for_ends_alone():
    prompts = [prompt_of(40 + 20 * i, i) for i in range(3)]
    async with rig() as mesh:
        gate = mesh.decode.gate
        gate.hold()
        gate.poison = prompts[1]
        asking = [asyncio.ensure_future(mesh.ask(p, 30)) for p in prompts]
        await until(lambda: mesh.decode.worker.queued + mesh.decode.worker.running == 3)
        gate.let_go()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(results[1], InternalError)
        assert "poison" in str(results[1])
        for i in (0, 2):
            assert results[i].tokens == reference(prompts[i], 30)
        assert max(gate.batches) > 1
        await mesh.rest()
        assert mesh.decode.worker.cancelled == 0
        gate.poison = None
        assert (await mesh.ask(prompts[1], 30)).tokens == reference(prompts[1], 30)


async def test_a_step_that_fails_once_is_done_again_without_a_token_lost():
    prompts = [prompt_of(40 + 20 * i, i) for i in range(2)]
    async with rig() as mesh:
        mesh.decode.gate.hold()
        mesh.decode.gate.failure = RuntimeError("no more memory")
        asking = [asyncio.ensure_future(mesh.ask(p, 30)) for p in prompts]
        await mesh.decode.gate.step_begins()
        mesh.decode.gate.let_go()
        for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
            assert answer.tokens == reference(prompt, 30)


async def test_what_a_step_was_is_told():
    prompt = prompt_of(40)
    async with rig() as mesh:
        facts = []
        mesh.decode.worker.observe = facts.append
        answer = await mesh.ask(prompt, 20)
        assert len(facts) == len(answer.chunks)
        assert sum(f.num_tokens for f in facts) == 19
        assert [f.num_sequences for f in facts] == [1] * len(facts)
        assert sum(f.drafted for f in facts) == answer.chunks[-1].drafted > 0
        assert sum(f.accepted for f in facts) == answer.chunks[-1].accepted
        assert all(0 < f.model_s <= f.duration_s for f in facts)
        assert [f.pages_used for f in facts[:-1]] == [1] * (len(facts) - 1)
        worker = mesh.decode.worker
        assert (worker.drafted, worker.accepted) == (
            facts and answer.chunks[-1].drafted,
            answer.chunks[-1].accepted,
        )


@pytest.mark.parametrize("transport", ["tcp", "loopback"])
async def test_a_prefill_worker_that_dies_is_a_failed_transfer_at_the_stream(transport):
    prompt = prompt_of(3 * PAGE)
    async with rig(transport=transport) as mesh:
        lease = await mesh.reserve(prompt)
        mesh.prefill.gate.hold()
        computing = asyncio.ensure_future(mesh.compute(prompt, lease))
        await mesh.prefill.gate.step_begins()
        fake = type("First", (), {"token_ids": (1,)})()
        reading = asyncio.ensure_future(mesh.read(prompt, lease, fake))
        receiver = mesh.decode.receiver
        await until(lambda: receiver.phase(lease.lease_id) is not Phase.RESERVED)
        mesh.prefill.worker._sender.close()  # what the other side sees of a killed process
        with pytest.raises(TransferFailed, match="lost"):
            await reading
        await mesh.release(lease)
        await mesh.told_of_failure()
        mesh.prefill.gate.let_go()
        with pytest.raises(TransferFailed):
            await computing
        await mesh.rest()
        assert mesh.decode.worker.cancelled == 0


async def test_a_first_token_or_hidden_state_that_does_not_fit_is_a_failed_transfer():
    prompt = prompt_of(70)
    async with rig() as mesh:
        lease = await mesh.reserve(prompt)
        first = await mesh.compute(prompt, lease)
        wrong = type("First", (), {"token_ids": ((first.token_ids[0] + 1) % VOCAB,)})()
        with pytest.raises(TransferFailed, match="first token"):
            await mesh.read(prompt, lease, wrong)
        lease = await mesh.reserve(prompt)
        await mesh.arrive(lease, first.token_ids[0], hidden=b"1234")
        with pytest.raises(TransferFailed, match="4 bytes"):
            await mesh.read(prompt, lease, first)


async def test_pages_stay_in_quarantine_while_a_one_sided_write_can_still_land():
    prompt = prompt_of(2 * PAGE)
    async with rig(transport="loopback", one_sided=True, stall_after=2) as mesh:
        lease = await mesh.reserve(prompt)
        await mesh.compute(prompt, lease)
        await mesh.release(lease, "cancelled")
        assert mesh.decode.kv.status().quarantined == 2
        mesh.decode.listener.resume()
        await mesh.rest()
        assert mesh.decode.kv.status().free == mesh.decode.kv.num_pages


async def test_a_fault_of_the_worker_itself_ends_its_loop():
    """The process ends then, and is restarted; hanging would be worse."""
    mesh = Rig(Options())

    def wrong(*_):
        raise AssertionError("the books are wrong")

    mesh.decode.worker._stepping._apply = wrong
    asking = asyncio.ensure_future(mesh.ask(prompt_of(20), 5))
    with pytest.raises(AssertionError, match="books"):
        await mesh.loops[-1]
    await end_task(asking)  # its release waits for a loop that is gone
    await mesh.close()

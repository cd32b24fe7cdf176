"""Several answers to one request: one prompt, and streams that end and free their pages alone."""

import asyncio

import grpc
import pytest
import router_fakes as fakes

from pdmesh.router.fanout import merged
from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import (
    InternalError,
    LeaseGone,
    Preempted,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from pdmesh.wire.messages import PrefillRequest, ReserveRequest, StreamRequest

TOKENIZER = load_tokenizer(fakes.MODEL_PATH)
EOS = TOKENIZER.ids.eos[0]
TEXTS = [
    "Once upon a time a crow sang to the sea.",
    "The sea sang back to the crow: who are you?",
    "Two crows 🐦 and a whale met at noon one day.",
]
STORIES = [TOKENIZER.encode(text) for text in TEXTS]
LENGTH = min(len(story) for story in STORIES)


def tell(mesh, answers=STORIES, **changes):
    """Makes all workers give these answers, by sample index."""
    for worker in mesh.workers:
        worker.answers = answers
    for worker in mesh.decode:
        for name, value in changes.items():
            setattr(worker, name, value)


def check(answer, length=LENGTH, n=3):
    """The answers are the stories, each complete and ended once; the last message has the sum."""
    for i in range(n):
        one = answer.of(i)
        assert one.ids == STORIES[i][:length]
        assert one.text == TOKENIZER.decode(STORIES[i][:length])
        assert [r.finish_reason for r in one.responses if r.finish_reason] == ["length"]
        assert one.last.finish_reason == "length"
    assert [r.HasField("usage") for r in answer.responses].count(True) == 1
    assert answer.last.HasField("usage")
    assert answer.last.HasField("timing")
    assert answer.usage.completion_tokens == n * length


def streams_of(mesh):
    """What the decode worker was asked to stream, by sample index: they come in any order."""
    asked = mesh.decode[0].seen(StreamRequest)
    return sorted(asked, key=lambda request: request.sample_index)


def leases_of(mesh):
    return [r.lease_id for w in mesh.decode for r in w.released]


@pytest.mark.parametrize("chunk", [1, 3])
async def test_each_answer_comes_with_its_index_and_the_prompt_is_computed_once(tmp_path, chunk):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, chunk=chunk)
        mesh.prefill[0].cached_tokens = 2
        answer = await mesh.chat(max_tokens=LENGTH, n=3, seed=8)
        check(answer)
        (reserve,) = mesh.decode[0].seen(ReserveRequest)
        (prefill,) = mesh.prefill[0].seen(PrefillRequest)
        streams = streams_of(mesh)
        assert (reserve.n, prefill.n, prefill.sample_index) == (3, 3, 0)
        assert [s.sample_index for s in streams] == [0, 1, 2]
        assert [s.first_token for s in streams] == [story[0] for story in STORIES]
        assert len({s.lease_id for s in streams}) == 3
        assert {s.sampling.seed for s in streams} == {8}
        assert prefill.eos_token_ids == TOKENIZER.ids.eos
        await mesh.at_rest()
        assert sorted(leases_of(mesh)) == sorted(s.lease_id for s in streams)
        usage, timing = answer.usage, answer.last.timing
        assert usage.prompt_tokens == len(prefill.token_ids)
        assert (usage.cached_tokens, usage.seed) == (2, 8)
        assert (timing.attempts, timing.queue_ms, timing.prefill_ms) == (1, 1.0, 2.0)
        value = mesh.router.metrics.value
        assert mesh.outcome("length") == 1
        assert value("pdmesh_prompt_tokens_total") == usage.prompt_tokens
        assert value("pdmesh_generation_tokens_total") == 3 * LENGTH
        assert value("pdmesh_time_to_first_token_seconds_count") == 1
        assert value("pdmesh_inter_token_latency_seconds_count") == 3 * (LENGTH - 1)
        assert value("pdmesh_request_params_n_sum") == 3


async def test_answers_of_one_token_open_no_stream_and_give_their_leases_back(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh)
        answer = await mesh.chat(max_tokens=1, n=3)
        check(answer, length=1)
        assert mesh.decode[0].seen(StreamRequest) == []
        await mesh.at_rest()
        assert len(set(leases_of(mesh))) == 3


async def test_each_answer_has_its_own_end(tmp_path):
    crow, sea = TOKENIZER.encode(" a crow")[-1], STORIES[1]
    answers = [[EOS], STORIES[0], [*sea[:4], crow, 9], sea]
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, answers)
        answer = await mesh.chat(max_tokens=6, n=4, stop_token_ids=[crow], stop=["time"])
        reasons = {r.index: r.finish_reason for r in answer.responses if r.finish_reason}
        assert reasons == {0: "stop", 1: "stop", 2: "stop", 3: "length"}
        assert answer.of(0).ids == []
        assert answer.of(1).text == "Once upon a "
        assert answer.of(2).ids == sea[:4]
        assert answer.of(3).ids == sea[:6]
        total = sum(len(answer.of(i).ids) for i in range(4))
        assert answer.usage.completion_tokens == total
        assert [s.sample_index for s in streams_of(mesh)] == [1, 2, 3]
        await mesh.at_rest()
        assert mesh.outcome("length") == 1


async def test_an_answer_that_ends_early_gives_its_lease_back_while_others_go_on(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, [STORIES[0], [EOS]])
        worker = mesh.decode[0]
        reached = worker.wait_in("Token")
        chat = asyncio.create_task(mesh.chat(max_tokens=LENGTH, n=2))
        async with asyncio.timeout(60):
            await reached.wait()
            while not worker.released or mesh.router.view.in_flight(worker.instance) == 2:
                await asyncio.sleep(0.005)
        assert len(worker.leases) == 1
        assert mesh.router.view.in_flight(worker.instance) == 1
        worker.hold["Token"].set()
        await chat
        await mesh.at_rest()


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("n", [1, 2])
async def test_there_is_one_logprob_entry_for_each_token_of_each_answer(
    tmp_path, count, max_tokens, n
):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, chunk=2, stale=True)
        answer = await mesh.chat(max_tokens=max_tokens, logprobs=count, n=n)
        for i in range(n):
            one = answer.of(i)
            entries = [e for r in one.responses for e in r.logprobs]
            assert [e.logprob for e in entries] == [-float(t) for t in STORIES[i][:max_tokens]]
            assert all(len(e.top_token_ids) == len(e.top_logprobs) == count for e in entries)


async def test_greedy_answers_are_equal(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, [STORIES[0]] * 2)
        answer = await mesh.chat(max_tokens=5, n=2, temperature=0)
        assert answer.of(0).ids == answer.of(1).ids == STORIES[0][:5]


async def test_many_requests_for_several_answers_at_once_leave_nothing(tmp_path):
    async with fakes.mesh(tmp_path, prefill=2, decode=2) as mesh:
        tell(mesh, chunk=2)
        for answer in await asyncio.gather(*(mesh.chat(max_tokens=LENGTH, n=3) for _ in range(20))):
            check(answer)
        await mesh.at_rest()
        assert len(leases_of(mesh)) == len(set(leases_of(mesh))) == 60


# ---- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("position", [1, 4, LENGTH - 1])
@pytest.mark.parametrize("error", [LeaseGone("x"), TransferFailed("x"), Preempted("x")])
async def test_an_answer_that_fails_goes_on_alone(tmp_path, index, position, error):
    async with fakes.mesh(tmp_path, decode=2, poll_interval=60) as mesh:
        tell(mesh)
        for worker in mesh.decode:
            worker.fail_answer = {index: (position, error)}
        first, second = mesh.decode
        mesh.router.view.add(second.instance, "decode", 20, 0)
        chat = asyncio.create_task(mesh.chat(max_tokens=LENGTH, n=3, seed=4))
        async with asyncio.timeout(60):
            while index in first.fail_answer:
                await asyncio.sleep(0)
        second.fail_answer = {}
        answer = await chat
        mesh.router.view.add(second.instance, "decode", -20, 0)
        check(answer)
        assert answer.last.timing.attempts == 2
        (alone,) = [r for w in mesh.decode for r in w.seen(ReserveRequest) if r.attempt == 2]
        (prefill,) = [r for r in mesh.prefill[0].seen(PrefillRequest) if r.attempt == 2]
        assert (alone.n, prefill.n, prefill.sample_index) == (1, 1, index)
        assert prefill.output_offset == position
        assert list(prefill.token_ids[-position:]) == STORIES[index][:position]
        assert prefill.sampling.max_tokens == LENGTH - position
        await mesh.at_rest()


@pytest.mark.parametrize("position", [1, 3, LENGTH - 1])
async def test_a_killed_decode_worker_is_replaced_for_every_answer(tmp_path, position):
    async with fakes.mesh(tmp_path, decode=2, poll_interval=60) as mesh:
        tell(mesh)
        first, second = mesh.decode
        mesh.router.view.add(second.instance, "decode", 20, 0)
        first.die_at = position
        answer = await mesh.chat(max_tokens=LENGTH, n=3)
        mesh.router.view.add(second.instance, "decode", -20, 0)
        check(answer)
        again = second.seen(ReserveRequest)
        assert all(r.n == 1 for r in again)
        assert len({r.request_id for r in again}) == len(again)
        first.leases.clear()  # it is dead
        await mesh.at_rest()


@pytest.mark.parametrize("method", ["Reserve", "Prefill"])
@pytest.mark.parametrize("error", [TransferFailed("x"), WorkerLost("x"), LeaseGone("x")])
async def test_a_failure_before_the_first_tokens_is_retried_for_all_answers(
    tmp_path, method, error
):
    async with fakes.mesh(tmp_path, prefill=2, decode=2) as mesh:
        tell(mesh)
        asked, errors = mesh.prefill if method == "Prefill" else mesh.decode, [error]
        for worker in asked:
            worker.fail[method] = errors
        answer = await mesh.chat(max_tokens=LENGTH, n=3)
        check(answer)
        requests = [r for w in asked for r in w.seen((ReserveRequest, PrefillRequest))]
        assert [r.n for r in requests] == [3, 3]
        assert sorted(r.attempt for r in requests) == [1, 2]
        await mesh.at_rest()


@pytest.mark.parametrize("fault", ["forks", "most_tokens"])
async def test_a_worker_that_gives_fewer_answers_than_asked_for_is_passed_over(tmp_path, fault):
    async with fakes.mesh(tmp_path, prefill=2, decode=2, poll_interval=60) as mesh:
        tell(mesh)
        workers = mesh.decode if fault == "forks" else mesh.prefill
        setattr(workers[0], fault, 1)
        for _ in range(4):
            check(await mesh.chat(max_tokens=LENGTH, n=3))
        await mesh.at_rest()


async def test_an_answer_that_cannot_go_on_ends_the_request_and_frees_the_others(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, [[300] * 2] * 3)
        mesh.decode[0].fail_answer = {1: (4, Unavailable("shutting down"))}
        request = fakes.ask(max_tokens=3000, n=3)
        error = await mesh.error(request)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "last failure, at decode-0: shutting down" in error.details()
        await mesh.at_rest()
        assert mesh.decode[0].streamed < 9000
        mesh.decode[0].fail_answer = {2: (4, InternalError("a bug"))}
        assert (await mesh.error(request)).code() is grpc.StatusCode.INTERNAL
        await mesh.at_rest()


async def test_an_answer_given_up_again_and_again_still_ends(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, preempt_at=[2, 3, 5, 6, 7])
        answer = await mesh.chat(max_tokens=LENGTH)
        check(answer, n=1)
        value = mesh.router.metrics.value
        assert value("pdmesh_num_preemptions_total") == 5
        assert value("pdmesh_failed_attempts_total", role="decode") == 0
        assert answer.last.timing.attempts == 6
        waited = [r.waited_ms for r in mesh.decode[0].seen(ReserveRequest)]
        assert waited == sorted(waited)
        assert mesh.registry.lost == []
        await mesh.at_rest()


async def test_min_tokens_counts_the_whole_answer_after_a_failover_too(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, preempt_at=[4])
        await mesh.chat(max_tokens=6, min_tokens=5)
        sent = [r.sampling for r in mesh.prefill[0].seen(PrefillRequest)]
        assert [(s.max_tokens, s.min_tokens) for s in sent] == [(6, 5), (2, 5)]
        for sampling in sent:
            sampling.validate(TOKENIZER.vocab_size)


# ---- leaving --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["Reserve", "Prefill", "Stream", "Token", "Release"])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_leaving_at_any_stage_frees_every_lease(tmp_path, stage, how):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh)
        worker = mesh.prefill[0] if stage == "Prefill" else mesh.decode[0]
        reached = worker.wait_in(stage)
        times = [0.5, 3.0, 30.0] if how == "deadline" else [60.0]
        while not reached.is_set():  # the first that is long enough
            asked = fakes.ask(max_tokens=LENGTH, n=3)
            call = mesh.stub.StreamChat(asked, timeout=times.pop(0))
            if how == "cancel":
                async with asyncio.timeout(60):
                    await reached.wait()
                call.cancel()
            await call.code()
        if stage in ("Reserve", "Release"):
            worker.hold[stage].set()
        await mesh.at_rest()
        if stage != "Reserve":
            reserved = mesh.decode[0].seen(ReserveRequest)
            assert len(set(leases_of(mesh))) == 3 * len(reserved) > 0


async def test_cancelling_after_any_number_of_messages_frees_every_lease(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh)
        for count in range(1, 3 * LENGTH, 4):
            call = mesh.stub.StreamChat(fakes.ask(max_tokens=LENGTH, n=3), timeout=60)
            for _ in range(count):
                await call.read()
            call.cancel()
            await mesh.at_rest()
        assert len(leases_of(mesh)) == len(set(leases_of(mesh)))


async def test_cancelling_while_one_answer_goes_on_alone_frees_every_lease(tmp_path):
    async with fakes.mesh(tmp_path, decode=2) as mesh:
        tell(mesh)
        for worker in mesh.decode:
            worker.fail_answer = {1: (2, LeaseGone("x"))}
        reached = mesh.prefill[0].reached.setdefault("Prefill", asyncio.Event())
        call = mesh.stub.StreamChat(fakes.ask(max_tokens=3000, n=3), timeout=60)
        async with asyncio.timeout(60):
            await call.read()
            reached.clear()
            mesh.prefill[0].hold["Prefill"] = asyncio.Event()
            await reached.wait()
        call.cancel()
        await mesh.at_rest()


async def test_a_client_that_does_not_read_stops_all_its_answers(tmp_path):
    async with fakes.mesh(tmp_path, decode=1, max_context=fakes.HUGE) as mesh:
        worker = mesh.decode[0]
        worker.chunk = 64
        sampling = chat_pb2.Sampling(max_tokens=900_000, logprobs=20, n=3)
        call = mesh.stub.StreamChat(chat_pb2.ChatRequest(prompt_token_ids=[5], sampling=sampling))
        await call.read()
        async with asyncio.timeout(60):
            before = -1
            while worker.streamed != before:
                before = worker.streamed
                await asyncio.sleep(0.5)
        assert worker.streamed < 300_000
        call.cancel()
        await mesh.at_rest()


# ---- the merging itself ---------------------------------------------------------------------


async def numbers(count, closed, error=None):
    try:
        for i in range(count):
            yield i
            await asyncio.sleep(0)
        if error is not None:
            raise error
    finally:
        closed.append(count)


async def test_merged_streams_keep_their_own_order():
    closed = []
    got = [item async for item in merged([numbers(n, closed) for n in (5, 0, 3)])]
    assert sorted(got) == [0, 0, 1, 1, 2, 2, 3, 4]
    assert sorted(closed) == [0, 3, 5]


async def test_the_first_error_ends_the_other_streams():
    closed = []
    streams = [numbers(10**9, closed), numbers(3, closed, ValueError("three"))]
    with pytest.raises(ValueError, match="three"):
        async for _ in merged(streams):
            pass
    assert sorted(closed) == [3, 10**9]


async def test_a_reader_that_stops_stops_the_streams():
    made = []

    async def source(name):
        while True:
            made.append(name)
            yield name

    stream = merged([source("a"), source("b")])
    await anext(stream)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(made) <= 6
    await stream.aclose()

"""A request's way through the router, over fake workers."""

import asyncio
import math

import pytest
import router_fakes as fakes

from pdmesh.router.prompt import PromptHashes
from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire import chat_pb2
from pdmesh.wire.hashes import page_hashes, root_hash
from pdmesh.wire.messages import PrefillRequest, ReserveRequest, StreamRequest

TOKENIZER = load_tokenizer(fakes.MODEL_PATH)
EOS = TOKENIZER.ids.eos[0]
STORY = TOKENIZER.encode("Once upon a time a crow 🐦 sang to the sea, and the sea sang back to it.")


def tell(mesh, ids, **changes):
    """Makes all workers answer with these ids."""
    for worker in mesh.workers:
        worker.answer = list(ids)
    for worker in mesh.decode:
        for name, value in changes.items():
            setattr(worker, name, value)


async def test_an_answer_is_the_first_token_from_prefill_and_the_rest_from_decode(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, STORY)
        mesh.prefill[0].cached_tokens = 2
        answer = await mesh.chat(max_tokens=len(STORY), seed=5)
        assert answer.ids == STORY
        assert answer.text == TOKENIZER.decode(STORY)
        assert answer.reason == "length"
        usage = answer.usage
        assert (usage.completion_tokens, usage.cached_tokens, usage.seed) == (len(STORY), 2, 5)
        assert (usage.drafted_tokens, usage.accepted_tokens) == (
            2 * (len(STORY) - 1),
            len(STORY) - 1,
        )
        timing = answer.last.timing
        assert (timing.prefill_worker, timing.decode_worker) == ("prefill-0", "decode-0")
        assert (timing.queue_ms, timing.prefill_ms, timing.transfer_ms) == (1.0, 2.0, 3.0)
        assert timing.attempts == 1
        assert timing.ttft_ms > 0
        assert timing.router_ms > 0
        assert sum(r.finish_reason != "" for r in answer.responses) == 1
        await mesh.at_rest()
        assert mesh.decode[0].released[0].reason == "finished"


async def test_workers_get_what_they_need_to_serve_the_request(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        prompt = list(range(100, 230))
        request = chat_pb2.ChatRequest(
            prompt_token_ids=prompt,
            tenant="t1",
            request_id="req-1",
            sampling=chat_pb2.Sampling(
                max_tokens=4, temperature=0.5, top_k=7, top_p=0.9, seed=11, stop=["zz"]
            ),
        )
        answer = await mesh.chat(request)
        assert answer.usage.prompt_tokens == 130
        (reserve,) = mesh.decode[0].seen(ReserveRequest)
        root = root_hash(b"k" * 32, fakes.FORMAT.fingerprint(), "t1")
        assert list(reserve.hashes) == page_hashes(b"k" * 32, root, prompt, 64)
        assert (reserve.num_prompt_tokens, reserve.max_tokens) == (130, 4)
        (prefill,) = mesh.prefill[0].seen(PrefillRequest)
        assert prefill.token_ids == tuple(prompt)
        assert prefill.lease.lease_id == mesh.decode[0].released[0].lease_id
        assert (prefill.sampling.temperature, prefill.sampling.seed) == (0.5, 11)
        (stream,) = mesh.decode[0].seen(StreamRequest)
        assert stream.sampling == prefill.sampling
        assert (stream.eos_token_ids, stream.tenant) == (TOKENIZER.ids.eos, "t1")
        assert {r.request_id for r in (reserve, prefill, stream)} == {"req-1"}


async def test_one_token_needs_no_decode_stream(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, STORY)
        answer = await mesh.chat(max_tokens=1, ignore_eos=True)
        assert (answer.ids, answer.reason) == (STORY[:1], "length")
        assert answer.usage.completion_tokens == 1
        assert mesh.decode[0].seen(StreamRequest) == []
        await mesh.at_rest()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("chunk", [1, 2, 4])
async def test_exactly_max_tokens_are_delivered(tmp_path, max_tokens, chunk):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, STORY, chunk=chunk)
        answer = await mesh.chat(max_tokens=max_tokens, ignore_eos=True)
        assert answer.ids == STORY[:max_tokens]
        assert answer.usage.completion_tokens == max_tokens
        assert answer.reason == "length"


async def test_an_end_of_text_as_first_token_gives_an_empty_answer(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, [EOS])
        answer = await mesh.chat(max_tokens=9)
        assert (answer.ids, answer.text, answer.reason) == ([], "", "stop")
        assert len(answer.responses) == 1
        assert answer.usage.completion_tokens == 0
        assert mesh.decode[0].seen(StreamRequest) == []
        await mesh.at_rest()


async def test_an_ignored_end_of_text_is_a_token_like_others(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, [EOS])
        answer = await mesh.chat(max_tokens=3, ignore_eos=True)
        assert (answer.ids, answer.reason) == ([EOS] * 3, "length")
        assert mesh.decode[0].seen(StreamRequest)[0].eos_token_ids == ()


async def test_a_stop_token_ends_the_answer_as_first_token_too(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, [400, 401, 402, 403])
        answer = await mesh.chat(max_tokens=9, stop_token_ids=[402])
        assert (answer.ids, answer.reason) == ([400, 401], "stop")
        answer = await mesh.chat(max_tokens=9, stop_token_ids=[400])
        assert (answer.ids, answer.reason) == ([], "stop")


async def test_an_end_of_text_at_decode_is_not_part_of_the_answer(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, STORY, eos_at=4, chunk=3)
        answer = await mesh.chat(max_tokens=50)
        assert (answer.ids, answer.reason) == (STORY[:4], "stop")


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
@pytest.mark.parametrize("stop", ["sang", "a crow", "🐦 s", "O", "time a crow 🐦 sang to the"])
async def test_a_stop_string_ends_the_stream_and_the_usage(tmp_path, chunk, stop):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, STORY, chunk=chunk)
        answer = await mesh.chat(max_tokens=1000, stop=[stop, "never there"])
        text = TOKENIZER.decode(STORY)
        assert answer.text == text[: text.index(stop)]
        assert answer.reason == "stop"
        used = answer.usage.completion_tokens
        assert stop in TOKENIZER.decode(STORY[:used])
        assert stop not in TOKENIZER.decode(STORY[: used - 1])
        assert answer.ids == STORY[:used]
        await mesh.at_rest()


async def test_text_held_back_for_a_stop_string_is_released_at_the_end(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, STORY)
        answer = await mesh.chat(max_tokens=len(STORY), stop=["back to it. The end"])
        assert answer.text == TOKENIZER.decode(STORY)
        assert answer.last.text == "back to it."


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
async def test_no_delta_holds_a_broken_character(tmp_path, chunk):
    family = "👩\u200d👩\u200d👧 안녕 e\u0301"
    ids = [TOKENIZER.plain.token_to_id(c) for c in _byte_names(family)]
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, ids, chunk=chunk)
        answer = await mesh.chat(max_tokens=len(ids))
        assert answer.text == family
        assert not any("\ufffd" in r.text for r in answer.responses)
        cut = await mesh.chat(max_tokens=3)
        assert [r.text for r in cut.responses if r.text] == ["\ufffd"]
        assert cut.last.text == "\ufffd"


def _byte_names(text):
    by_byte = {TOKENIZER.token_bytes(t): TOKENIZER.plain.id_to_token(t) for t in range(4096)}
    return [by_byte[bytes([b])] for b in text.encode()]


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_there_is_one_logprob_entry_for_each_token(tmp_path, count, max_tokens):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, STORY, chunk=2, stale=True)
        answer = await mesh.chat(max_tokens=max_tokens, logprobs=count)
        entries = [e for r in answer.responses for e in r.logprobs]
        assert [e.logprob for e in entries] == [-float(t) for t in answer.ids]
        assert all(len(e.top_token_ids) == len(e.top_logprobs) == count for e in entries)
        plain = await mesh.chat(max_tokens=max_tokens)
        assert not any(r.logprobs for r in plain.responses)


async def test_repeated_and_stale_chunks_change_nothing(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, STORY, chunk=3, stale=True)
        assert (await mesh.chat(max_tokens=len(STORY))).ids == STORY


async def test_a_seed_is_drawn_and_reported_when_none_is_given(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        seeds = [(await mesh.chat(max_tokens=2)).usage.seed for _ in range(3)]
        assert len(set(seeds)) == 3
        sent = [r.sampling.seed for r in mesh.prefill[0].seen(PrefillRequest)]
        assert sent == seeds


async def test_max_tokens_defaults_to_the_rest_of_the_context(tmp_path):
    async with fakes.mesh(tmp_path, decode=1, max_context=50, default_max_tokens=30) as mesh:
        short = await mesh.chat(chat_pb2.ChatRequest(prompt_token_ids=[5] * 10))
        assert short.usage.completion_tokens == 30
        long = await mesh.chat(chat_pb2.ChatRequest(prompt_token_ids=[5] * 49))
        assert (long.usage.completion_tokens, long.reason) == (1, "length")


async def test_requests_go_to_the_workers_that_own_their_prefix(tmp_path):
    async with fakes.mesh(tmp_path, prefill=3, decode=3) as mesh:
        prompt = list(range(200, 400))
        root = root_hash(b"k" * 32, fakes.FORMAT.fingerprint())
        owned = set(page_hashes(b"k" * 32, root, prompt, 64))
        mesh.registry.owned = {"prefill-1": owned, "decode-2": owned}
        request = chat_pb2.ChatRequest(
            prompt_token_ids=prompt, sampling=chat_pb2.Sampling(max_tokens=2)
        )
        for _ in range(4):
            timing = (await mesh.chat(request)).last.timing
            assert (timing.prefill_worker, timing.decode_worker) == ("prefill-1", "decode-2")


async def test_concurrent_requests_spread_over_equal_workers_before_any_poll(tmp_path):
    async with fakes.mesh(tmp_path, prefill=2, decode=2, poll_interval=60) as mesh:
        for worker in mesh.prefill:
            worker.wait_in("Prefill")
        chats = asyncio.gather(*(mesh.chat(max_tokens=9) for _ in range(16)))
        async with asyncio.timeout(60):
            while sum(len(w.requests) for w in mesh.prefill) < 16:
                await asyncio.sleep(0.01)
        for worker in mesh.prefill:
            worker.hold["Prefill"].set()
        await chats
        assert [len(w.seen(PrefillRequest)) for w in mesh.prefill] == [8, 8]
        assert [len(w.seen(ReserveRequest)) for w in mesh.decode] == [8, 8]
        await mesh.at_rest()


async def test_many_requests_at_once_are_all_served_and_leave_nothing(tmp_path):
    async with fakes.mesh(tmp_path, prefill=2, decode=2) as mesh:
        tell(mesh, STORY, chunk=2)
        answers = await asyncio.gather(*(mesh.chat(max_tokens=20) for _ in range(64)))
        assert all(answer.ids == STORY[:20] for answer in answers)
        await mesh.at_rest()
        assert mesh.outcome("length") == 64


async def test_load_that_others_put_on_a_worker_is_seen_by_polling(tmp_path):
    async with fakes.mesh(tmp_path, prefill=2, decode=1) as mesh:
        mesh.prefill[0].queued = 5
        seen = mesh.prefill[0].polls
        async with asyncio.timeout(60):
            while mesh.prefill[0].polls < seen + 2:
                await asyncio.sleep(0.01)
        for _ in range(5):
            assert (await mesh.chat(max_tokens=2)).last.timing.prefill_worker == "prefill-1"


async def test_our_own_requests_in_a_polled_load_are_not_counted_twice(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        worker, view = mesh.prefill[0], mesh.router.view
        reached = worker.wait_in("Prefill")
        chat = asyncio.create_task(mesh.chat(max_tokens=2))
        await reached.wait()
        worker.queued = 3  # ours and two of another router
        seen = worker.polls
        async with asyncio.timeout(60):
            while worker.polls < seen + 2:
                await asyncio.sleep(0.01)
        (candidate,) = view.snapshot(PromptHashes(b"k" * 32, "", [1])).prefill
        assert (candidate.own_requests, candidate.other_requests) == (1, 2)
        worker.hold["Prefill"].set()
        await chat


async def test_a_draining_worker_gets_no_new_requests(tmp_path):
    async with fakes.mesh(tmp_path) as mesh:
        mesh.decode[0].state = "draining"
        async with asyncio.timeout(60):
            while len(mesh.router.view.ready("decode")) == 2:
                await asyncio.sleep(0.01)
        for _ in range(5):
            assert (await mesh.chat(max_tokens=2)).last.timing.decode_worker == "decode-1"


async def test_metrics_tell_what_happened(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh, STORY)
        answer = await mesh.chat(max_tokens=5)
        value = mesh.router.metrics.value
        assert value("pdmesh_time_to_first_token_seconds_count") == 1
        assert value("pdmesh_inter_token_latency_seconds_count") == 4
        assert math.isclose(value("pdmesh_prompt_tokens_total"), answer.usage.prompt_tokens)
        assert value("pdmesh_generation_tokens_total") == 5
        assert value("pdmesh_drafted_tokens_total") == 8
        assert value("pdmesh_accepted_tokens_total") == 4
        assert mesh.outcome("length") == 1
        assert mesh.bookings() == 0


async def test_a_router_whose_index_is_behind_asks_the_store(tmp_path):
    long = "word " * 300
    async with fakes.mesh(tmp_path, prefill=3) as mesh:
        mesh.registry.stored = {"prefill-1": 2}
        await mesh.chat(fakes.ask("other " * 300, max_tokens=2))
        assert mesh.registry.lookups == 0, "its own index is whole"
        mesh.registry.warm = False
        for _ in range(3):
            answer = await mesh.chat(fakes.ask(long, max_tokens=2))
            assert answer.last.timing.prefill_worker == "prefill-1"
        assert mesh.registry.lookups == 3

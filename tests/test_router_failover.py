"""Workers fail in every way; the client gets the right answer once, or one clear error."""

import asyncio

import grpc
import msgspec
import pytest
import router_fakes as fakes

from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    LeaseGone,
    Overloaded,
    TooLarge,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from pdmesh.wire.messages import PrefillRequest, ReserveRequest, StreamRequest

TOKENIZER = load_tokenizer(fakes.MODEL_PATH)
STORY = TOKENIZER.encode("Once upon a time a crow 🐦 sang to the sea, and the sea sang back to it.")
BIRDS = TOKENIZER.encode("A crow 🐦 and 鴉 sang “ça” to 👩‍👧.")
FIRST = ("decode-0", "prefill-0")
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def tell(mesh, **changes):
    for worker in mesh.workers:
        worker.answer = STORY
    for worker in mesh.decode:
        for name, value in changes.items():
            setattr(worker, name, value)


def prefer(mesh, *names, load=20):
    """Routes to these workers first: the others look busy, until ``settle``."""
    for worker in mesh.workers:
        if worker.worker_id not in names:
            mesh.router.view.add(worker.instance, worker.role, load, 1000 * load)


async def settle(mesh, *names):
    """Takes the made-up load away and waits for rest."""
    prefer(mesh, *names, load=-20)
    await mesh.at_rest()


def two_of_each(tmp_path, **config):
    return fakes.mesh(tmp_path, prefill=2, decode=2, poll_interval=60, **config)


async def check_whole_answer(mesh, attempts, **sampling):
    answer = await mesh.chat(max_tokens=len(STORY), seed=3, **sampling)
    assert answer.ids == STORY
    assert answer.text == TOKENIZER.decode(STORY)
    assert answer.last.timing.attempts == attempts
    assert answer.usage.completion_tokens == len(STORY)
    return answer


@pytest.mark.parametrize("position", [1, 2, 7, len(STORY) - 2])
@pytest.mark.parametrize("chunk", [1, 3])
async def test_a_decode_worker_killed_while_streaming_is_replaced(tmp_path, position, chunk):
    async with two_of_each(tmp_path) as mesh:
        tell(mesh, chunk=chunk)
        prefer(mesh, *FIRST)
        mesh.decode[0].die_at = position
        answer = await check_whole_answer(mesh, attempts=2)
        assert answer.last.timing.decode_worker == "decode-1"
        assert mesh.registry.lost == [mesh.decode[0].instance]
        (again,) = mesh.decode[1].seen(StreamRequest)
        kept = len(again.token_ids) - answer.usage.prompt_tokens
        assert kept >= 1
        assert list(again.token_ids[-kept:]) == STORY[:kept]
        assert again.output_offset == kept
        assert again.sampling.max_tokens == len(STORY) - kept
        assert again.sampling.seed == 3
        assert again.attempt == 2
        prefill = mesh.prefill[0].seen(PrefillRequest)[-1]
        assert (prefill.token_ids, prefill.output_offset) == (again.token_ids, kept)
        mesh.decode[0].leases.clear()  # it is dead
        await settle(mesh, *FIRST)


async def test_usage_counts_drafts_of_all_attempts_and_cached_tokens_of_the_prompt_only(tmp_path):
    async with two_of_each(tmp_path) as mesh:
        tell(mesh)
        prefer(mesh, *FIRST)
        mesh.decode[0].end_at = 5
        mesh.prefill[0].cached_tokens = 4000
        answer = await check_whole_answer(mesh, attempts=2)
        assert answer.usage.cached_tokens == answer.usage.prompt_tokens
        assert answer.usage.drafted_tokens == 2 * (4 + len(STORY) - 6)
        assert answer.usage.accepted_tokens == 4 + len(STORY) - 6


@pytest.mark.parametrize("error", [TransferFailed("x"), LeaseGone("x"), WorkerLost("x")])
@pytest.mark.parametrize("method", ["Prefill", "Stream"])
async def test_a_failure_that_another_worker_may_not_have_is_retried(tmp_path, method, error):
    async with two_of_each(tmp_path) as mesh:
        tell(mesh)
        prefer(mesh, *FIRST)
        guilty = mesh.prefill[0] if method == "Prefill" else mesh.decode[0]
        guilty.fail[method] = [error]
        answer = await check_whole_answer(mesh, attempts=2)
        timing = answer.last.timing
        if isinstance(error, WorkerLost):
            assert mesh.registry.lost == [guilty.instance]
        else:
            assert mesh.registry.lost == []
            assert (timing.prefill_worker, timing.decode_worker) == ("prefill-1", "decode-1")
        await settle(mesh, *FIRST)


async def test_the_only_pair_is_tried_again_after_a_failed_transfer(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh)
        mesh.prefill[0].fail["Prefill"] = [TransferFailed("connection broken")]
        await check_whole_answer(mesh, attempts=2)
        await mesh.at_rest()


async def test_a_stream_that_ends_early_or_skips_tokens_is_continued_elsewhere(tmp_path):
    for fault in ({"end_at": 6}, {"gap_at": 6}):
        async with two_of_each(tmp_path) as mesh:
            tell(mesh)
            prefer(mesh, *FIRST)
            for name, value in fault.items():
                setattr(mesh.decode[0], name, value)
            await check_whole_answer(mesh, attempts=2)
            await settle(mesh, *FIRST)


async def test_an_id_outside_the_vocabulary_never_reaches_the_client(tmp_path):
    async with two_of_each(tmp_path) as mesh:
        tell(mesh)
        prefer(mesh, *FIRST)
        mesh.decode[0].answer = [*STORY[:4], 70_000]
        await check_whole_answer(mesh, attempts=2)


async def test_a_stop_string_across_a_failover_is_found(tmp_path):
    async with two_of_each(tmp_path) as mesh:
        tell(mesh)
        text = TOKENIZER.decode(STORY)
        stop = "a crow 🐦 sang"
        prefer(mesh, *FIRST)
        crow = next(n for n in range(len(STORY)) if "crow" in TOKENIZER.decode(STORY[:n]))
        mesh.decode[0].end_at = crow + 1
        answer = await mesh.chat(max_tokens=500, stop=[stop])
        assert answer.text == text[: text.index(stop)]
        assert answer.last.timing.attempts == 2


def cuts_inside_characters(ids):
    """Numbers of leading tokens that end between the bytes of a character."""
    return [n for n in range(2, len(ids)) if TOKENIZER.decode(ids[:n]).endswith("\ufffd")]


def test_the_sentence_for_cut_characters_has_many():
    assert len(cuts_inside_characters(BIRDS)) >= 6


@pytest.mark.parametrize("fault", ["die_at", "end_at"])
@pytest.mark.parametrize("chunk", [1, 3])
async def test_a_failover_between_the_bytes_of_a_character_leaves_it_whole(tmp_path, fault, chunk):
    text = TOKENIZER.decode(BIRDS)
    assert "\ufffd" not in text
    for cut in cuts_inside_characters(BIRDS):
        async with two_of_each(tmp_path) as mesh:
            tell(mesh, chunk=chunk)
            for worker in mesh.workers:
                worker.answer = BIRDS
            prefer(mesh, *FIRST)
            setattr(mesh.decode[0], fault, cut)
            answer = await mesh.chat(max_tokens=len(BIRDS))
            assert answer.last.timing.attempts == 2
            assert answer.ids == BIRDS
            assert answer.text == text
            assert not [r.text for r in answer.responses if "\ufffd" in r.text]
            if chunk == 1 and fault == "end_at":  # a killed worker's last chunks may be lost
                (again,) = mesh.decode[1].seen(StreamRequest)
                kept = BIRDS[: again.output_offset]
                assert len(kept) == cut
                assert TOKENIZER.decode(kept).endswith("\ufffd"), "the cut is inside a character"


async def test_a_full_decode_worker_is_passed_over(tmp_path):
    async with two_of_each(tmp_path) as mesh:
        tell(mesh)
        prefer(mesh, *FIRST)
        mesh.decode[0].fail["Reserve"] = [Overloaded("no pages")]
        answer = await check_whole_answer(mesh, attempts=2)
        assert answer.last.timing.decode_worker == "decode-1"
        assert mesh.registry.lost == []


async def test_when_all_decode_workers_are_full_the_client_is_told_when_to_retry(tmp_path):
    async with fakes.mesh(tmp_path, decode=5) as mesh:
        for worker in mesh.decode:
            worker.fail["Reserve"] = [Overloaded("no pages"), Overloaded("the queue is full")]
        error = await mesh.error(fakes.ask())
        assert error.code() is EXHAUSTED
        assert error.details() == "all room is taken: 5 decode workers are full; retry later"
        assert int(dict(error.trailing_metadata())["retry-after-ms"]) > 0
        assert [[r.wait_ms > 0 for r in w.seen(ReserveRequest)] for w in mesh.decode] == [
            [False, True]
        ] * 5
        assert mesh.outcome("overloaded") == 1
        assert mesh.prefill[0].requests == []
        await mesh.chat(max_tokens=2)
        await mesh.at_rest()


async def test_a_full_prefill_worker_is_passed_over_and_its_lease_released(tmp_path):
    async with two_of_each(tmp_path) as mesh:
        tell(mesh)
        prefer(mesh, *FIRST)
        mesh.prefill[0].fail["Prefill"] = [Overloaded("queue is full")]
        answer = await check_whole_answer(mesh, attempts=2)
        assert answer.last.timing.prefill_worker == "prefill-1"
        await settle(mesh, *FIRST)


async def test_after_three_broken_attempts_the_client_gets_one_sentence(tmp_path):
    async with fakes.mesh(tmp_path, prefill=2, decode=2) as mesh:
        for worker in mesh.prefill:
            worker.fail["Prefill"] = [TransferFailed("the wire is cut")] * 9
        error = await mesh.error(fakes.ask())
        assert error.code() is UNAVAILABLE
        assert error.details().startswith("gave up after 3 attempts; last failure, at prefill-")
        assert error.details().endswith(": the wire is cut")
        await mesh.at_rest()
        assert mesh.outcome("unavailable") == 1


async def test_when_no_worker_is_left_the_last_failure_is_told(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        tell(mesh)
        mesh.decode[0].fail["Stream"] = [Unavailable("shutting down")]
        error = await mesh.error(fakes.ask())
        assert error.code() is UNAVAILABLE
        assert error.details() == (
            "no decode worker is left to try: 1 failed this request; "
            "last failure, at decode-0: shutting down"
        )
        await mesh.at_rest()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_a_worker_of_a_role_the_error_names_it(tmp_path, role):
    count = {"prefill": 1, "decode": 1, role: 0}
    async with fakes.mesh(tmp_path, **count) as mesh:
        error = await mesh.error(fakes.ask())
        assert error.code() is UNAVAILABLE
        assert error.details() == f"no {role} worker is ready"


async def test_a_dead_prefill_worker_is_passed_over(tmp_path):
    async with two_of_each(tmp_path) as mesh:
        tell(mesh)
        prefer(mesh, *FIRST)
        await mesh.prefill[0].die()
        answer = await check_whole_answer(mesh, attempts=2)
        assert answer.last.timing.prefill_worker == "prefill-1"
        await settle(mesh, *FIRST)


async def test_a_worker_killed_during_prefill_is_replaced(tmp_path):
    async with two_of_each(tmp_path) as mesh:
        tell(mesh)
        prefer(mesh, *FIRST)
        reached = mesh.prefill[0].wait_in("Prefill")
        chat = asyncio.create_task(check_whole_answer(mesh, attempts=2))
        await reached.wait()
        await mesh.prefill[0].die()
        await chat
        await settle(mesh, *FIRST)


async def test_another_process_at_a_workers_address_is_not_taken_for_it(tmp_path):
    async with two_of_each(tmp_path) as mesh:
        tell(mesh)
        prefer(mesh, *FIRST)
        stranger = mesh.decode[0]
        old = stranger.instance
        stranger.instance = "0123456789abcdef"
        answer = await check_whole_answer(mesh, attempts=2)
        assert answer.last.timing.decode_worker == "decode-1"
        assert mesh.registry.lost == [old]
        assert stranger.leases == set()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("too long for this worker"), grpc.StatusCode.INVALID_ARGUMENT),
        (TooLarge("over 64 MiB"), EXHAUSTED),
        (InternalError("a bug"), grpc.StatusCode.INTERNAL),
        (ValueError("a bug"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_an_error_that_every_worker_would_have_is_not_retried(tmp_path, error, status):
    async with fakes.mesh(tmp_path) as mesh:
        mesh.prefill[0].fail["Prefill"] = [error]
        answer = await mesh.error(fakes.ask())
        assert answer.code() is status
        assert str(error) in answer.details()
        assert len(mesh.prefill[0].requests) == 1
        await mesh.at_rest()


async def test_a_lease_that_a_worker_ended_is_not_a_cancelled_client(tmp_path):
    async with two_of_each(tmp_path) as mesh:
        tell(mesh)
        prefer(mesh, *FIRST)
        mesh.decode[0].fail["Stream"] = [Cancelled("deadline passed")]
        await check_whole_answer(mesh, attempts=2)


async def test_workers_of_another_model_or_protocol_are_left_out(tmp_path):
    async with fakes.mesh(tmp_path) as mesh:
        replace = msgspec.structs.replace
        records = mesh.registry.records
        mesh.registry.records = [
            replace(r, model="other") if r.role == "prefill" else replace(r, protocol=99)
            for r in records
        ]
        assert (await mesh.error(fakes.ask())).details() == "no prefill worker is ready"
        mesh.registry.records[0] = records[0]
        assert (await mesh.error(fakes.ask())).details() == "no decode worker is ready"


async def test_a_worker_that_stops_answering_polls_is_not_routed_to_until_it_answers(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        view, worker = mesh.router.view, mesh.decode[0]
        await worker.die()
        async with asyncio.timeout(60):
            while view.ready("decode"):
                await asyncio.sleep(0.01)
        assert (await mesh.error(fakes.ask())).details() == "no decode worker is ready"
        mesh.registry.records[1] = await worker.start()
        async with asyncio.timeout(60):
            while not view.ready("decode"):
                await asyncio.sleep(0.01)

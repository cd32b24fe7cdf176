"""A running answer moves to another decode worker; whatever fails, the client sees it once."""

import asyncio

import grpc
import pytest
import router_fakes as fakes
from router_moving import REFUSALS, SOURCE_PLANS, STORY, TARGET_PLANS, TOKENIZER, moving_mesh

from pdmesh.router.handoff import OFFER_TRIES
from pdmesh.wire.errors import InvalidRequest, LeaseGone, Overloaded, Unavailable
from pdmesh.wire.handoff import ContinueRequest, DecideRequest, MigrateRequest
from pdmesh.wire.messages import PrefillRequest, ReleaseRequest, StreamRequest

TEXT = TOKENIZER.decode(STORY)
MOVES = {"commit", "twice", "stale chunks", "never offered", "die at commit"}
"""Plans of a source with which the answer moves."""
STAYS = {"abort", "abort with lease", "abort, then commit", "gap", "other attempt"} | {
    "tail of another attempt"
}
"""Plans with which it goes on where it is; with the others it fails over, or is over."""


async def finished(answer):
    async with asyncio.timeout(60):
        return await answer


def check_whole(answer, ids=STORY):
    assert answer.ids == ids
    assert answer.text == TOKENIZER.decode(ids)


async def test_an_answer_moves_and_the_client_sees_every_token_once(tmp_path):
    async with moving_mesh(tmp_path) as moving:
        answer = await moving.start()
        begun, done = await moving.move()
        assert (begun.state, begun.source, begun.target) == ("moving", "decode-0", "decode-1")
        assert (done.state, done.reason) == ("moved", "")
        assert done.pause_ms > 0
        got = await finished(answer)
        check_whole(got)
        assert got.last.timing.decode_worker == "decode-1"
        assert (got.last.timing.attempts, got.last.timing.migrations) == (1, 1)
        await moving.at_rest()
        source, target = moving.decode
        (asked,) = source.seen(MigrateRequest)
        assert (asked.handoff, asked.target.instance) == (1, target.instance)
        assert asked.acknowledged == 6
        (decided,) = source.seen(DecideRequest)
        assert decided.committed
        (went_on,) = target.seen(ContinueRequest)
        assert (went_on.attempt, went_on.position) == (2, 9)
        assert [r.reason for r in source.released] == ["moved"]
        assert [r.reason for r in target.released] == ["finished"]
        assert len(moving.mesh.prefill[0].seen(PrefillRequest)) == 1
        assert not target.seen(StreamRequest)
        assert moving.value("moved") == 1
        value = moving.mesh.router.metrics.value
        assert value("pdmesh_migration_pause_seconds_count") == 1
        assert value("pdmesh_failed_attempts_total", role="decode") == 0


async def test_the_booking_moves_with_the_answer(tmp_path):
    async with moving_mesh(tmp_path) as moving:
        source, target = moving.decode
        target.pause_at = 12
        answer = await moving.start()
        moving.forget_load()
        view = moving.mesh.router.view
        assert (view.in_flight(source.instance), view.in_flight(target.instance)) == (1, 0)
        await moving.move()
        assert (view.in_flight(source.instance), view.in_flight(target.instance)) == (0, 1)
        (there,) = await moving.answers()
        assert (there.worker_id, there.phase, there.migrations) == ("decode-1", "running", 1)
        target.go.set()
        check_whole(await finished(answer))
        await moving.at_rest()


async def test_there_and_back_again(tmp_path):
    async with moving_mesh(tmp_path) as moving:
        source, target = moving.decode
        target.pause_at = 12
        answer = await moving.start()
        assert [r.state for r in await moving.move()] == ["moving", "moved"]
        async with asyncio.timeout(60):
            await target.paused.acquire()
        source.go.set()
        assert [r.state for r in await moving.move(target="decode-0")] == ["moving", "moved"]
        got = await finished(answer)
        check_whole(got)
        assert got.last.timing.migrations == 2
        assert got.last.timing.decode_worker == "decode-0"
        assert target.seen(MigrateRequest)[0].handoff == 2
        assert source.seen(ContinueRequest)[0].attempt == 3
        await moving.at_rest()


async def test_log_probabilities_of_the_tail_are_those_of_its_tokens(tmp_path):
    async with moving_mesh(tmp_path) as moving:
        moving.decode[1].welcomes = ["repeat"]
        answer = await moving.start(logprobs=2)
        await moving.move()
        got = await finished(answer)
        check_whole(got)
        entries = [entry for r in got.responses for entry in r.logprobs]
        assert [entry.logprob for entry in entries] == [-float(t) for t in STORY]
        await moving.at_rest()


async def test_both_answers_of_a_request_move_one_after_the_other(tmp_path):
    other = STORY[::-1]
    async with moving_mesh(tmp_path) as moving:
        for worker in moving.mesh.workers:
            worker.answers = [STORY, other]
        answer = await moving.start(2)
        reports = await moving.move()
        assert [(r.index, r.state) for r in reports] == [
            (0, "moving"),
            (0, "moved"),
            (1, "moving"),
            (1, "moved"),
        ]
        got = await finished(answer)
        check_whole(got.of(0))
        assert got.of(1).ids == other
        assert got.last.timing.migrations == 2
        assert got.usage.completion_tokens == 2 * len(STORY)
        await moving.at_rest()


async def test_one_answer_of_two_moves_and_the_other_stays(tmp_path):
    async with moving_mesh(tmp_path) as moving:
        answer = await moving.start(2)
        await moving.move(index=1)
        assert [a.worker_id for a in await moving.answers() if a.index == 0] == ["decode-0"]
        moving.decode[0].go.set()
        got = await finished(answer)
        check_whole(got.of(0))
        check_whole(got.of(1))
        assert got.last.timing.decode_worker == "decode-0"
        await moving.at_rest()


async def test_drafts_are_counted_on_and_not_twice(tmp_path):
    async with moving_mesh(tmp_path) as moving:
        answer = await moving.start()
        await moving.move()
        got = await finished(answer)
        assert (got.usage.drafted_tokens, got.usage.accepted_tokens) == (
            2 * len(STORY),
            len(STORY),
        )


@pytest.mark.parametrize("unsent", [0, 1, 5])
@pytest.mark.parametrize("more", [0, 1, 4])
async def test_the_tail_may_be_empty_or_hold_what_was_sent_already(tmp_path, unsent, more):
    async with moving_mesh(tmp_path) as moving:
        moving.decode[0].unsent, moving.decode[0].more = unsent, more
        answer = await moving.start()
        assert [r.state for r in await moving.move()] == ["moving", "moved"]
        check_whole(await finished(answer))
        await moving.at_rest()


async def test_a_stop_string_in_the_tail_ends_the_answer_before_the_target_begins(tmp_path):
    cut = next(n for n in range(len(STORY)) if "crow" in TOKENIZER.decode(STORY[:n]))
    async with moving_mesh(tmp_path, pause_at=cut - 1) as moving:
        moving.decode[0].more, moving.decode[0].unsent = 0, 6
        answer = await moving.start(stop=["crow"])
        reports = await moving.move()
        assert [r.state for r in reports] == ["moving", "ended"]
        got = await finished(answer)
        assert got.text == TEXT[: TEXT.index("crow")]
        assert got.reason == "stop"
        await moving.at_rest()
        assert not moving.decode[1].seen(ContinueRequest)
        assert moving.value("ended") == 1


async def test_a_stop_string_across_the_handoff_is_found(tmp_path):
    cut = next(n for n in range(len(STORY)) if "crow" in TOKENIZER.decode(STORY[:n]))
    stop = "a crow 🐦 sang"
    async with moving_mesh(tmp_path, pause_at=cut) as moving:
        moving.decode[0].more = moving.decode[0].unsent = 0
        answer = await moving.start(stop=[stop])
        assert [r.state for r in await moving.move()] == ["moving", "moved"]
        assert (await finished(answer)).text == TEXT[: TEXT.index(stop)]
        await moving.at_rest()


async def test_an_answer_whose_tail_holds_its_last_token_ends_there(tmp_path):
    async with moving_mesh(tmp_path, pause_at=len(STORY) - 3) as moving:
        moving.decode[0].unsent = 9
        answer = await moving.start()
        assert [r.state for r in await moving.move()] == ["moving", "ended"]
        check_whole(await finished(answer))
        await moving.at_rest()


@pytest.mark.parametrize("plan", SOURCE_PLANS)
async def test_whatever_a_source_does_the_client_sees_the_answer_once(tmp_path, plan):
    async with moving_mesh(tmp_path) as moving:
        moving.decode[0].plans = [plan]
        answer = await moving.start()
        if plan == "finish instead":
            moving.decode[0].unsent = 0
        report = (await moving.move())[-1]
        moving.decode[0].go.set()
        got = await finished(answer)
        if plan == "finish instead":
            assert report.state == "ended"
            assert got.ids == STORY[: len(got.ids)]
        else:
            assert report.state == ("moved" if plan in MOVES else "failed"), report
            assert (report.reason == "") == (plan in MOVES)
            check_whole(got)
            stayed = got.last.timing.decode_worker == "decode-0"
            assert stayed == (plan in STAYS)
            assert got.last.timing.attempts == (1 if plan in MOVES | STAYS else 2)
        await moving.at_rest()


@pytest.mark.parametrize("welcome", TARGET_PLANS)
async def test_whatever_a_target_does_the_client_sees_the_answer_once(tmp_path, welcome):
    async with moving_mesh(tmp_path, decode=3, max_attempts=2) as moving:
        for target in moving.decode[1:]:
            target.welcomes = [welcome]
        answer = await moving.start()
        report = (await moving.move())[-1]
        moving.decode[0].go.set()
        got = await finished(answer)
        check_whole(got)
        moved = welcome in ("commit", "repeat")
        assert report.state == ("moved" if moved else "failed")
        assert got.last.timing.attempts == (1 if moved else 2)
        failed = moving.mesh.router.metrics.value("pdmesh_failed_attempts_total", role="decode")
        assert failed == 0, "not taken over is no failed attempt"
        await moving.at_rest()


@pytest.mark.parametrize("welcome", sorted(REFUSALS))
async def test_an_answer_not_taken_over_does_not_use_up_its_attempts(tmp_path, welcome):
    async with moving_mesh(tmp_path, max_attempts=1) as moving:
        moving.decode[1].welcomes = [welcome]
        answer = await moving.start()
        assert (await moving.move())[-1].state == "failed"
        moving.decode[0].go.set()
        check_whole(await finished(answer))
        await moving.at_rest()


@pytest.mark.parametrize("error", [Overloaded("x"), Unavailable("x"), LeaseGone("x")])
async def test_a_source_that_refuses_the_offer_goes_on(tmp_path, error):
    async with moving_mesh(tmp_path) as moving:
        moving.decode[0].fail["Migrate"] = [error]
        answer = await moving.start()
        report = (await moving.move())[-1]
        assert (report.state, report.reason) == ("failed", "x")
        assert [r.state for r in await moving.move()] == ["moving", "moved"]
        got = await finished(answer)
        check_whole(got)
        assert got.last.timing.migrations == 1
        assert [r.handoff for r in moving.decode[0].seen(MigrateRequest)] == [1, 2]
        await moving.at_rest()


async def test_an_offer_that_is_not_answered_is_made_again_and_then_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("pdmesh.router.clients.MIGRATE_TIMEOUT", 1.0)
    async with moving_mesh(tmp_path) as moving:
        source = moving.decode[0]
        reached = source.wait_in("Migrate")
        answer = await moving.start()
        report = (await moving.move())[-1]
        assert reached.is_set()
        assert report.state == "failed"
        assert [r.handoff for r in source.seen(MigrateRequest)] == [1] * OFFER_TRIES
        source.hold["Migrate"].set()
        source.go.set()
        check_whole(await finished(answer))
        await moving.at_rest()
        assert source.seen(DecideRequest)[0].committed is False


async def test_a_handoff_that_is_never_ready_is_aborted(tmp_path, monkeypatch):
    monkeypatch.setattr("pdmesh.router.handoff.HANDOFF_S", 0.1)
    async with moving_mesh(tmp_path) as moving:
        source = moving.decode[0]
        source.asleep = asyncio.Event()
        source.asleep.set()
        answer = await moving.start()
        source.asleep = asyncio.Event()
        report = (await moving.move())[-1]
        assert report.state == "failed"
        assert "not ready within" in report.reason
        source.asleep.set()
        source.go.set()  # its question comes late, and is answered with the decision that stands
        check_whole(await finished(answer))
        await moving.at_rest()
        assert all(not d.committed for d in source.seen(DecideRequest))


async def test_a_decision_that_does_not_arrive_is_said_again(tmp_path):
    async with moving_mesh(tmp_path) as moving:
        moving.decode[0].fail["Decide"] = [Unavailable("x"), Unavailable("x")]
        answer = await moving.start()
        assert (await moving.move())[-1].state == "moved"
        check_whole(await finished(answer))
        await moving.at_rest()
        assert [d.committed for d in moving.decode[0].seen(DecideRequest)] == [True] * 3


POINTS = ["asked", "committed", "active"]


async def cancelled_at(moving, point):
    """A request whose client leaves at a point of the handoff."""
    source, target = moving.decode
    reached = {
        "asked": lambda: source.wait_in("Migrate"),
        "committed": lambda: target.wait_in("Continue"),
        "active": lambda: None,
    }[point]()
    if point == "active":
        target.pause_at = 10
    call = moving.mesh.stub.StreamChat(fakes.ask(request_id="r", max_tokens=len(STORY)), timeout=30)
    reading = asyncio.create_task(read(call))
    async with asyncio.timeout(60):
        await source.paused.acquire()
        while [a.phase for a in await moving.answers()] != ["running"]:
            await asyncio.sleep(0.002)
        moving_on = asyncio.create_task(moving.move())
        await (target.paused.acquire() if reached is None else reached.wait())
        while point == "active" and [a.phase for a in await moving.answers()] != ["running"]:
            await asyncio.sleep(0.002)
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    for worker in (source, target):
        for held in worker.hold.values():
            held.set()
    async with asyncio.timeout(60):
        reports = await moving_on
    return reports[-1]


async def read(call):
    return [response async for response in call]


@pytest.mark.parametrize("point", POINTS)
async def test_a_client_that_leaves_during_a_handoff_leaves_nothing_behind(tmp_path, point):
    async with moving_mesh(tmp_path) as moving:
        report = await cancelled_at(moving, point)
        assert report.state == ("moved" if point == "active" else "ended")
        await moving.at_rest()
        assert moving.mesh.outcome("cancelled") == 1
        released = [r for w in moving.decode for r in w.released]
        assert all(isinstance(r, ReleaseRequest) for r in released)
        assert "cancelled" in {r.reason for r in released}


async def test_what_cannot_be_moved_is_refused_by_name(tmp_path):
    async with moving_mesh(tmp_path, decode=3) as moving:
        with pytest.raises(InvalidRequest, match="request 'r' is not being generated here"):
            await moving.move()
        other = moving.decode[2]
        at = next(
            n
            for n, record in enumerate(moving.mesh.registry.records)
            if record.instance == other.instance
        )
        moving.mesh.registry.records[at] = fakes.msgspec.structs.replace(
            other.record(),
            page_format=fakes.msgspec.structs.replace(fakes.FORMAT, weights="w1"),
        )
        answer = await moving.start()
        with pytest.raises(InvalidRequest, match="answer 3 of request 'r' is not being generated"):
            await moving.move(index=3)
        with pytest.raises(InvalidRequest, match="no decode worker 'decode-9' is ready; ready: "):
            await moving.move(target="decode-9")
        with pytest.raises(InvalidRequest, match="the answer is at decode-0 already"):
            await moving.move(target="decode-0")
        with pytest.raises(InvalidRequest, match="decode-2 cannot take it from decode-0: .*w1"):
            await moving.move(target="decode-2")
        moving.mesh.registry.lost.append(moving.decode[1].instance)
        report = (await moving.move())[-1]
        assert report.state == "failed"
        assert "no decode worker can take the answer over" in report.reason
        moving.decode[0].go.set()
        check_whole(await finished(answer))
        await moving.at_rest()


async def test_an_answer_that_moves_is_not_asked_to_move_twice(tmp_path):
    async with moving_mesh(tmp_path, decode=3) as moving:
        reached = moving.decode[0].wait_in("Migrate")
        answer = await moving.start()
        first = asyncio.create_task(moving.move())
        async with asyncio.timeout(60):
            await reached.wait()
        report = (await moving.move())[-1]
        assert (report.state, report.target) == ("failed", "")
        assert "the answer is moving" in report.reason
        moving.decode[0].hold["Migrate"].set()
        assert (await first)[-1].state == "moved"
        check_whole(await finished(answer))
        await moving.at_rest()


async def test_the_internal_address_is_left_in_a_file(tmp_path):
    path = tmp_path / "admin"
    async with moving_mesh(tmp_path, admin_file=path) as moving:
        assert path.read_text().strip() == moving.mesh.router.admin_address
        assert moving.mesh.router.admin_address != moving.mesh.router.address
        assert list(tmp_path.glob("admin.*")) == []


async def test_an_unknown_method_or_message_of_the_internal_service_is_an_error(tmp_path):
    async with (
        moving_mesh(tmp_path) as moving,
        grpc.aio.insecure_channel(moving.mesh.router.admin_address) as channel,
    ):
        call = channel.unary_stream("/pdmesh.internal.router/MigrateAnswer")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call(b"\xc1"):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

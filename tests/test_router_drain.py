"""Workers that drain are emptied; workers that fall silent are left; nobody notices."""

import asyncio
import logging
import random

import pytest
import router_fakes as fakes
from router_moving import STORY, TOKENIZER, moving_mesh

from pdmesh.router.moves import MOST_MOVES, retry_after
from pdmesh.router.policy import Avoid, Candidate, RequestFacts, choose_target
from pdmesh.wire.errors import Draining, Overloaded, Unavailable
from pdmesh.wire.handoff import ContinueRequest, MigrateRequest
from pdmesh.wire.messages import PrefillRequest, ReserveRequest, StreamRequest

SOON = 0.02
"""Poll interval of the router where a test waits for polls."""
SILENCE_S = 2.0
"""Where a test waits for it; whoever lives has half of it to say so, on a busy machine too."""


async def whole(answer):
    async with asyncio.timeout(60):
        got = await answer
    assert got.ids == STORY
    assert got.text == TOKENIZER.decode(STORY)
    return got


def say_draining(moving, how):
    if how == "status":
        moving.decode[0].state = "draining"
    else:
        moving.mesh.registry.drained.add("decode-0")


# ---- draining -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["status", "registry"])
async def test_every_answer_of_a_worker_that_drains_moves_away(tmp_path, how):
    async with moving_mesh(tmp_path, decode=3, poll_interval=SOON) as moving:
        answers = [await moving.start(request_id=f"r-{n}") for n in range(5)]
        moving.forget_load()
        source = moving.decode[0]
        source.wait_in("Migrate")
        say_draining(moving, how)
        async with asyncio.timeout(60):
            while len(source.seen(MigrateRequest)) < MOST_MOVES:
                await asyncio.sleep(SOON)
            polls = source.polls
            while source.polls < polls + 3:
                await asyncio.sleep(SOON)
        assert len(source.seen(MigrateRequest)) == MOST_MOVES, "so many at once"
        source.hold["Migrate"].set()
        for answer in answers:
            got = await whole(answer)
            assert got.last.timing.migrations == 1
            assert got.last.timing.attempts == 1
            assert got.last.timing.decode_worker != "decode-0"
        await moving.at_rest()
        assert source.most_open <= MOST_MOVES
        assert len(source.seen(MigrateRequest)) == 5
        assert moving.value("moved") == 5
        assert not source.leases


async def test_a_worker_that_drains_gets_nothing_new(tmp_path):
    async with moving_mesh(tmp_path, poll_interval=SOON, pause_at=None) as moving:
        say_draining(moving, "status")
        async with asyncio.timeout(60):
            while len(moving.mesh.router.view.ready("decode")) > 1:
                await asyncio.sleep(SOON)
        moving.forget_load()
        got = await moving.mesh.chat(max_tokens=len(STORY))
        assert got.last.timing.decode_worker == "decode-1"
        assert not moving.decode[0].seen(ReserveRequest)


async def test_an_answer_that_waits_for_its_prompt_moves_when_it_streams(tmp_path):
    async with moving_mesh(tmp_path, poll_interval=SOON) as moving:
        prefill = moving.mesh.prefill[0]
        reached = prefill.wait_in("Prefill")
        answer = asyncio.create_task(moving.mesh.chat(max_tokens=len(STORY)))
        async with asyncio.timeout(60):
            await reached.wait()
        say_draining(moving, "status")
        polls = moving.decode[0].polls
        async with asyncio.timeout(60):
            while moving.decode[0].polls < polls + 3:
                await asyncio.sleep(SOON)
        assert not moving.decode[0].seen(MigrateRequest)
        prefill.hold["Prefill"].set()
        got = await whole(answer)
        assert got.last.timing.migrations == 1
        await moving.at_rest()


async def test_after_a_refusal_another_target_is_tried(tmp_path):
    async with moving_mesh(tmp_path, decode=3, poll_interval=SOON) as moving:
        moving.decode[0].plans = ["abort"]
        answer = await moving.start()
        moving.forget_load()
        say_draining(moving, "status")
        got = await whole(answer)
        assert got.last.timing.migrations == 1
        first, second = moving.decode[0].seen(MigrateRequest)
        assert first.target.instance != second.target.instance
        assert (first.handoff, second.handoff) == (1, 2)
        await moving.at_rest()


async def test_the_only_target_is_tried_again(tmp_path):
    async with moving_mesh(tmp_path, poll_interval=SOON) as moving:
        moving.decode[0].plans = ["abort", "abort with lease"]
        answer = await moving.start()
        moving.forget_load()
        say_draining(moving, "status")
        got = await whole(answer)
        assert got.last.timing.migrations == 1
        assert len(moving.decode[0].seen(MigrateRequest)) == 3
        await moving.at_rest()


async def test_without_a_target_an_answer_ends_where_it_is(tmp_path, caplog):
    caplog.set_level(logging.INFO, "pdmesh")
    async with moving_mesh(tmp_path, decode=1, poll_interval=SOON) as moving:
        answer = await moving.start()
        say_draining(moving, "status")
        polls = moving.decode[0].polls
        async with asyncio.timeout(60):
            while moving.decode[0].polls < polls + 10:
                await asyncio.sleep(SOON)
        moving.decode[0].go.set()
        got = await whole(answer)
        assert got.last.timing.migrations == 0
        await moving.at_rest()
    said = [r for r in caplog.records if r.getMessage() == "migration_failed"]
    assert len(said) == 1, "said once, not at every poll"
    assert "no decode worker can take the answer over" in said[0].fields["reason"]


async def test_a_target_that_disappears_is_given_up(tmp_path):
    async with moving_mesh(tmp_path, decode=3, poll_interval=SOON) as moving:
        source = moving.decode[0]
        source.asleep = asyncio.Event()
        source.asleep.set()
        answer = await moving.start()
        source.asleep = asyncio.Event()
        moves = asyncio.create_task(moving.move(target="decode-1"))
        async with asyncio.timeout(60):
            while not source.seen(MigrateRequest):
                await asyncio.sleep(SOON)
        moving.mesh.registry.lost.append(moving.decode[1].instance)
        assert (await moves)[-1].reason == "decode-1 is gone"
        source.asleep.set()
        source.go.set()
        await whole(answer)
        moving.decode[1].leases.clear()
        await moving.at_rest()


async def test_moves_are_logged_with_their_pause_or_reason(tmp_path, caplog):
    caplog.set_level(logging.INFO, "pdmesh")
    async with moving_mesh(tmp_path) as moving:
        moving.decode[0].plans = ["abort"]
        answer = await moving.start()
        await moving.move()
        await moving.move()
        await whole(answer)
    names = ("migrating", "migrated", "migration_failed")
    lines = [(r.getMessage(), r.fields) for r in caplog.records if r.getMessage() in names]
    assert [name for name, _ in lines] == ["migrating", "migration_failed", "migrating", "migrated"]
    for _, fields in lines:
        assert (fields["request"], fields["source"], fields["target"]) == (
            "r",
            "decode-0",
            "decode-1",
        )
    assert lines[1][1]["reason"] == "the target is full"
    assert float(lines[3][1]["pause_ms"]) > 0


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_worker_that_refuses_because_it_drains_has_not_failed(tmp_path, role):
    async with fakes.mesh(tmp_path, prefill=2, decode=2, poll_interval=60, max_attempts=1) as mesh:
        workers = getattr(mesh, role)
        for worker in mesh.workers:
            worker.answer = STORY
        method = "Reserve" if role == "decode" else "Prefill"
        workers[0].fail[method] = [Draining(f"{role}-0 is draining")]
        mesh.router.view.add(workers[1].instance, role, 20, 20_000)
        got = await mesh.chat(max_tokens=len(STORY))
        assert got.ids == STORY
        assert getattr(got.last.timing, f"{role}_worker") == f"{role}-1"
        assert mesh.router.metrics.value("pdmesh_failed_attempts_total", role=role) == 0
        assert mesh.registry.lost == []
        mesh.router.view.add(workers[1].instance, role, -20, -20_000)
        await mesh.at_rest()


def test_a_move_that_failed_is_tried_at_once_and_then_less_and_less_often():
    waits = [retry_after(n) for n in range(1, 30)]
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert waits[-1] == waits[-2] <= 2.0


# ---- the choice of a target ---------------------------------------------------------------------


def record(name, **changes):
    worker = fakes.FakeDecode(name, "decode", instance=name)
    return fakes.msgspec.structs.replace(worker.record(), **changes)


def choose(*candidates, source=None, avoid=(), prompt=640, left=64):
    facts = RequestFacts(prompt, left, Avoid(lost=frozenset(avoid)))
    return choose_target(facts, source or record("source"), candidates, random.Random(0)).worker_id


def test_the_target_that_owns_the_pages_is_the_best_until_it_is_much_busier():
    a, b = record("a"), record("b")
    assert choose(Candidate(a), Candidate(b, owned_pages=10)) == "b"
    assert choose(Candidate(a), Candidate(b, owned_pages=10, own_requests=9)) == "a"


def test_a_target_is_another_worker_of_the_same_format_with_room():
    other = fakes.msgspec.structs.replace(fakes.FORMAT, weights="w1")
    small = record("small", capacity_pages=10)
    short = record("short", max_context=700)
    wrong = record("wrong", page_format=other)
    source, full, good = record("source"), record("full"), record("good")
    for unfit in (source, small, short, wrong):
        with pytest.raises(Unavailable, match="no decode worker can take the answer over"):
            choose(Candidate(unfit))
    with pytest.raises(Unavailable, match="none is left"):
        choose(Candidate(good), avoid=["good"])
    with pytest.raises(Overloaded, match="no other decode worker has 11 pages free"):
        choose(Candidate(full, free_pages=10))
    unfit = [Candidate(r) for r in (source, small, short, wrong)]
    assert choose(*unfit, Candidate(full, free_pages=10), Candidate(good, free_pages=11)) == "good"


# ---- silence ------------------------------------------------------------------------------------


async def test_a_worker_that_falls_silent_is_left_and_harmless_when_it_wakes(tmp_path):
    async with moving_mesh(tmp_path, silence_s=SILENCE_S) as moving:
        source, target = moving.decode
        answer = await moving.start()
        moving.forget_load()
        source.asleep = asyncio.Event()
        source.go.set()
        got = await whole(answer)
        assert got.last.timing.attempts == 2
        assert got.last.timing.decode_worker == "decode-1"
        view = moving.mesh.router.view
        assert view.in_flight(source.instance) == 0
        assert moving.mesh.registry.lost == [source.instance]
        (again,) = target.seen(StreamRequest)
        assert again.attempt == 2
        source.asleep.set()  # it wakes, with the release waiting
        await moving.at_rest()


async def test_a_worker_that_is_slow_but_answers_is_not_left(tmp_path):
    async with moving_mesh(tmp_path, silence_s=SILENCE_S) as moving:
        answer = await moving.start()
        polls = moving.decode[0].polls
        async with asyncio.timeout(60):
            while moving.decode[0].polls < polls + 2:
                await asyncio.sleep(0.01)
        moving.decode[0].go.set()
        got = await whole(answer)
        assert got.last.timing.attempts == 1
        await moving.at_rest()


@pytest.mark.parametrize("sleeper", [0, 1])
async def test_a_worker_that_falls_silent_in_a_handoff_is_left(tmp_path, sleeper):
    async with moving_mesh(tmp_path, decode=3, silence_s=SILENCE_S) as moving:
        source, target = moving.decode[:2]
        reached = target.wait_in("Continue") if sleeper else source.wait_in("Migrate")
        answer = await moving.start()
        moving.forget_load()
        moves = asyncio.create_task(moving.move(target="decode-1"))
        async with asyncio.timeout(60):
            await reached.wait()
        moving.decode[sleeper].asleep = asyncio.Event()
        source.go.set()  # the answer may come back to it
        got = await whole(answer)
        assert got.last.timing.attempts == 2
        assert (await moves)[-1].state == "failed"
        moving.decode[sleeper].asleep.set()
        for worker in (source, target):
            for held in worker.hold.values():
                held.set()
        await moving.at_rest()


# ---- sources of pages ---------------------------------------------------------------------------


async def test_workers_with_more_pages_of_the_prompt_are_named_best_first(tmp_path):
    async with fakes.mesh(tmp_path, prefill=2, decode=3, poll_interval=60) as mesh:
        text = "word " * 600
        await mesh.chat(fakes.ask(text, max_tokens=2))
        hashes = [r for w in mesh.decode for r in w.seen(ReserveRequest)][0].hashes
        assert len(hashes) >= 6
        owned = {"prefill-1": 3, "decode-0": 2, "decode-1": 5, "decode-2": 4, "prefill-0": 1}
        for name, pages in owned.items():
            mesh.registry.owned[name] = set(hashes[:pages])
        for worker in (mesh.prefill[1], mesh.decode[1], mesh.decode[2]):
            mesh.router.view.add(worker.instance, worker.role, 50, 50_000)
        for worker in mesh.workers:
            worker.requests.clear()
        await mesh.chat(fakes.ask(text, max_tokens=2))
        (reserve,) = mesh.decode[0].seen(ReserveRequest)
        (prefill,) = mesh.prefill[0].seen(PrefillRequest)
        assert [(s.instance, s.pages) for s in reserve.sources] == [
            (mesh.decode[1].instance, 5),
            (mesh.decode[2].instance, 4),
            (mesh.prefill[1].instance, 3),
        ]
        assert [(s.instance, s.pages) for s in prefill.sources] == [
            (mesh.decode[1].instance, 5),
            (mesh.decode[2].instance, 4),
            (mesh.prefill[1].instance, 3),
        ]
        (best, *_) = reserve.sources
        assert (best.role, best.address) == ("decode", mesh.decode[1].address)


async def test_a_worker_that_drains_still_lends_and_one_of_another_format_never(tmp_path):
    async with fakes.mesh(tmp_path, decode=3, poll_interval=60) as mesh:
        text = "word " * 600
        await mesh.chat(fakes.ask(text, max_tokens=2))
        hashes = [r for w in mesh.decode for r in w.seen(ReserveRequest)][0].hashes
        mesh.registry.owned = {"decode-1": set(hashes), "decode-2": set(hashes)}
        mesh.registry.drained.add("decode-1")
        other = fakes.msgspec.structs.replace(fakes.FORMAT, weights="w1")
        mesh.registry.records = [
            fakes.msgspec.structs.replace(r, page_format=other) if r.worker_id == "decode-2" else r
            for r in mesh.registry.records
        ]
        mesh.decode[0].requests.clear()
        await mesh.chat(fakes.ask(text, max_tokens=2))
        (reserve,) = mesh.decode[0].seen(ReserveRequest)
        assert [s.instance for s in reserve.sources] == [mesh.decode[1].instance]


async def test_a_failover_names_who_has_the_pages_of_prompt_and_answer(tmp_path):
    async with moving_mesh(tmp_path, decode=3, pause_at=80) as moving:
        long = (STORY * 6)[:120]
        for worker in moving.mesh.workers:
            worker.answer = long
        moving.decode[0].plans = ["end when asked"]
        answer = await moving.start(max_tokens=len(long))
        keeper = moving.decode[2]

        moving.mesh.registry.owned_prefixes = lambda hashes: {keeper.worker_id: len(hashes)}
        moving.prefer(1, load=200)
        await moving.move()
        async with asyncio.timeout(60):
            got = await answer
        assert got.ids == long
        (again,) = moving.decode[1].seen(ReserveRequest)
        (first,) = moving.decode[0].seen(ReserveRequest)
        assert (len(first.hashes), len(again.hashes)) == (0, 1), "a page of the answer's tokens"
        assert [(s.instance, s.pages) for s in again.sources] == [
            (keeper.instance, len(again.hashes))
        ]
        assert not moving.decode[1].seen(ContinueRequest)
        await moving.at_rest()

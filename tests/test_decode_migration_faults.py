"""Handoffs that go wrong, or are asked for twice: no token lost, no page kept."""

import asyncio

import pytest
from migration_rig import moving
from worker_rig import prompt_of, reference, rig, until

from pdmesh.kvtransfer.faults import Faults
from pdmesh.kvtransfer.protocol import migration_gateway as g
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.wire.errors import InvalidRequest, LeaseGone, WorkerLost
from pdmesh.wire.handoff import (
    AbortAsked,
    Adoption,
    AdoptRequest,
    CommitAsked,
    ContinueRequest,
    DecideRequest,
    MigrateRequest,
    RoundRequest,
)
from pdmesh.wire.messages import Empty, Lease, ReleaseRequest

OPTIONS = {"decodes": 2, "transport": "loopback", "page_size": 16}


async def one(mesh, points=((5, 1),), length=40, max_tokens=30, **fields):
    """An answer that is being read: (it, the reading task)."""
    (answer,) = await moving(mesh, prompt_of(length), points, max_tokens=max_tokens, **fields)
    return answer, asyncio.ensure_future(answer.run())


def right(answer):
    return answer.tokens == reference(answer.prompt, answer.sampling.max_tokens)


async def frozen(mesh, **fields):
    """An answer that stands still at its source; the target is ready, and nobody has decided."""
    answer, running = await one(mesh, **fields)
    answer.decide = False
    await until(lambda: answer.asked)
    assert isinstance(answer.asked[0], CommitAsked)
    return answer, running


def migrate(answer, handoff, target=1, **fields):
    lease_id, generation = answer.leases[answer.state.owner]
    return MigrateRequest(
        **{
            "lease_id": lease_id,
            "generation": generation,
            "handoff": handoff,
            "target": answer.mesh.record(target),
            "acknowledged": 0,
            **fields,
        }
    )


# ---- the target ---------------------------------------------------------------------------


async def test_a_full_target_is_an_abort_and_the_answer_goes_on():
    async with rig(**OPTIONS) as mesh:
        held = await mesh.reserve(prompt_of(900), 100, decode=1)
        answer, running = await one(mesh)
        await running
        assert right(answer)
        assert "no pages are free" in answer.decisions[0]
        assert answer.frozen_at == []
        await mesh.release(held, decode=1)


async def test_one_that_waits_for_room_at_the_target_goes_before_an_answer_that_comes():
    async with rig(**OPTIONS) as mesh:
        held = await mesh.reserve(prompt_of(700), 100, decode=1)
        wait = mesh.reserve(prompt_of(900), 100, decode=1, priority=1, wait_ms=20_000)
        waiting = asyncio.ensure_future(wait)
        await until(lambda: mesh.decodes[1].worker.queued)
        answer, running = await one(mesh)
        await running
        assert right(answer)
        assert "no pages are free" in answer.decisions[0]
        await mesh.release(held, decode=1)
        await mesh.release(await waiting, decode=1)


@pytest.mark.parametrize("method", ["Checksums", "Adopt", "AdoptRound", "Capsule"])
async def test_a_target_that_does_not_answer_is_an_abort_at_any_time(method):
    async with rig(**OPTIONS) as mesh:

        async def fail(name, *_):
            if name == method:
                raise WorkerLost("it is gone")

        mesh.on_call = fail
        answer, running = await one(mesh)
        await running
        assert right(answer)
        assert answer.decisions == ["aborted: it is gone"]
        mesh.on_call = None
        again, running = await one(mesh, request_id="again")
        await running
        assert right(again)
        assert again.decisions == ["committed to decode1"]


@pytest.mark.parametrize("transport", ["tcp", "loopback"])
@pytest.mark.parametrize("when", ["AdoptRound", "Capsule"])
async def test_a_target_that_dies_in_a_round_leaves_the_answer_where_it_is(when, transport):
    async with rig(**{**OPTIONS, "transport": transport}) as mesh:

        async def close(name, *_):
            if name == when:
                mesh.decodes[1].receiver.close()

        mesh.on_call = close
        answer, running = await one(mesh)
        await running
        assert right(answer)
        assert len(answer.decisions) == 1
        assert answer.decisions[0].startswith("aborted")


async def test_a_target_of_other_pages_is_refused_with_both_named():
    async with rig(**OPTIONS) as mesh:
        mesh.decodes[1].worker.adoptions._limits = mesh.decodes[1].worker._limits.__class__(
            **{
                **vars(mesh.decodes[1].worker._limits),
                "page_format": mesh.format.__class__(
                    **{n: getattr(mesh.format, n) for n in mesh.format.__struct_fields__}
                    | {"weights": "others"}
                ),
            }
        )
        answer, running = await one(mesh)
        await running
        assert right(answer)
        assert "decode1 (here) and decode (there) differ: weights" in answer.decisions[0]


async def test_a_target_that_nobody_continues_gives_its_pages_back(monkeypatch):
    monkeypatch.setattr("pdmesh.decode.adoption.IDLE_S", 2.0)
    async with rig(**OPTIONS) as mesh:
        answer, running = await frozen(mesh)
        await until(lambda: mesh.decodes[1].worker.leases == 0)
        answer.decide = True
        item = answer.asked[0]
        assert isinstance(item, CommitAsked)
        request = ContinueRequest(
            lease_id=item.lease_id, generation=item.generation, attempt=2, position=1
        )
        with pytest.raises(LeaseGone):
            await anext(mesh.decodes[1].worker.continue_(request))
        await answer.feed(g.AbortAsked(1))
        await running
        assert right(answer)


@pytest.mark.parametrize("off", [-1, 1])
async def test_a_target_goes_on_from_its_own_position_only(off):
    async with rig(**OPTIONS) as mesh:
        answer, running = await frozen(mesh)
        item = answer.asked[0]
        request = ContinueRequest(
            lease_id=item.lease_id,
            generation=item.generation,
            attempt=2,
            position=len(answer.tokens) + off,
        )
        with pytest.raises(LeaseGone, match="cannot go on from position"):
            await anext(mesh.decodes[1].worker.continue_(request))
        await until(lambda: mesh.decodes[1].worker.leases == 0)
        answer.decide = True
        await answer.feed(g.AbortAsked(1))
        await running
        assert right(answer)


def round_of(worker):
    (adopted,) = worker.adoptions._by_lease.values()
    return adopted.rounds[0][1].lease_id


async def test_pages_of_a_stalled_round_stay_in_quarantine_until_it_has_drained():
    async with rig(**OPTIONS, one_sided=True, prefills=1) as mesh:
        mesh.decodes[1].listener.faults = Faults(stall_after=1)
        answer, running = await one(mesh, length=70)
        await until(lambda: mesh.decodes[1].worker.leases)
        await until(lambda: ("AdoptRound", "decode1") in mesh.calls)
        target = mesh.decodes[1].worker
        await until(lambda: target.adoptions._by_lease)
        lease_id = next(iter(target.adoptions._by_lease))
        await until(lambda: mesh.decodes[0].worker._sender.num_transfers)
        await until(lambda: mesh.decodes[1].receiver.phase(round_of(target)) is Phase.FILLING)
        await target.release(ReleaseRequest(lease_id=lease_id, reason="cancelled"))
        assert mesh.decodes[1].kv.status().quarantined > 0
        mesh.decodes[1].listener.resume()
        await running
        assert right(answer)


# ---- the router ---------------------------------------------------------------------------


async def test_an_answer_that_was_aborted_while_it_stood_still_goes_on_here():
    async with rig(**OPTIONS) as mesh:
        answer, running = await frozen(mesh)
        stood = len(answer.tokens)
        answer.decide = True
        await answer.feed(g.AbortAsked(1))
        await running
        assert right(answer)
        assert stood < len(answer.tokens)
        assert mesh.decode.worker.migrations.moved_out == 0


async def test_a_question_is_asked_again_until_it_is_answered(monkeypatch):
    monkeypatch.setattr("pdmesh.decode.migration.REMIND_S", 0.01)
    async with rig(**OPTIONS) as mesh:
        answer, running = await frozen(mesh)
        await until(lambda: len(answer.asked) > 2)
        assert {item.handoff for item in answer.asked} == {1}
        assert all(item.tail.position == len(answer.tokens) for item in answer.asked[1:])
        answer.decide = True
        await running
        assert right(answer)
        assert answer.decisions == ["committed to decode1"]


async def test_asking_and_deciding_twice_change_nothing():
    async with rig(**OPTIONS) as mesh:
        answer, running = await frozen(mesh)
        source = mesh.decodes[0].worker.migrations
        await source.migrate(migrate(answer, 1))
        lease_id = answer.leases["decode"][0]
        for handoff in (0, 7):  # of no handoff that was asked for
            for committed in (True, False):
                await source.decide(
                    DecideRequest(lease_id=lease_id, handoff=handoff, committed=committed)
                )
        await source.migrate(migrate(answer, 2))  # while the first is open
        await until(lambda: len(answer.asked) > 1)
        assert answer.asked[1] == AbortAsked(handoff=2, reason="it is not to move now")
        answer.decide = True
        await answer.take(answer.asked[0])
        await source.decide(DecideRequest(lease_id=lease_id, handoff=1, committed=True))
        with pytest.raises(LeaseGone):
            await source.migrate(migrate(answer, 3, lease_id=lease_id))
        await running
        assert right(answer)
        assert answer.state.committed == {1}


async def test_a_stream_that_is_cut_while_the_answer_stands_still_frees_both_sides():
    async with rig(**OPTIONS) as mesh:
        answer, running = await frozen(mesh)
        running.cancel()
        await asyncio.wait({running})
        item = answer.asked[0]
        await until(lambda: mesh.decode.worker.leases == 0)
        request = ReleaseRequest(lease_id=item.lease_id, reason="cancelled")
        await mesh.call("decode1", "Release", request, Empty)
        await mesh.rest()
        assert mesh.decode.worker.cancelled == 1


@pytest.mark.parametrize("method", ["Checksums", "Adopt", "AdoptRound", "Capsule"])
async def test_a_stream_that_is_cut_on_the_way_frees_both_sides(method):
    async with rig(**OPTIONS) as mesh:
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def hold(name, *_):
            if name == method:
                reached.set()
                await go_on.wait()

        mesh.on_call = hold
        answer, running = await one(mesh, length=70)
        await reached.wait()
        running.cancel()
        await asyncio.sleep(0.01)
        mesh.decode.gate.let_go()
        go_on.set()
        await asyncio.wait({running})
        await mesh.rest()
        assert answer.decisions == []


async def test_an_answer_that_ends_while_its_pages_are_copied_just_ends():
    async with rig(**OPTIONS) as mesh:
        go_on = asyncio.Event()

        async def hold(name, *_):
            if name == "AdoptRound":
                await go_on.wait()

        mesh.on_call = hold
        (answer,) = await moving(mesh, prompt_of(40), max_tokens=12)
        mesh.decode.gate.hold()
        running = asyncio.ensure_future(answer.run())
        await mesh.decode.gate.step_begins()
        await answer.move(1)
        mesh.decode.gate.let_go()
        await running
        assert right(answer)
        assert answer.finish == "length"
        go_on.set()
        await mesh.rest()
        assert mesh.decodes[1].worker.adoptions.moved_in == 0


async def test_what_cannot_move_is_refused_and_goes_on():
    async with rig(**OPTIONS) as mesh:
        prompt = prompt_of(40)
        (answer,) = await moving(mesh, prompt, max_tokens=12)
        source = mesh.decode.worker.migrations
        with pytest.raises(InvalidRequest, match="not being streamed"):
            await source.migrate(migrate(answer, 1))
        with pytest.raises(LeaseGone):
            await source.migrate(migrate(answer, 1, lease_id="another"))
        with pytest.raises(LeaseGone):
            await source.migrate(migrate(answer, 1, generation=2))
        mesh.decode.gate.hold()
        running = asyncio.ensure_future(answer.run())
        await mesh.decode.gate.step_begins()
        with pytest.raises(InvalidRequest, match="worker that it is at"):
            await source.migrate(migrate(answer, 1, target=0))
        mesh.decode.gate.let_go()
        await running
        assert right(answer)


async def test_no_more_answers_move_at_once_than_are_allowed():
    async with rig(**OPTIONS, pages=200) as mesh:
        go_on, most = asyncio.Event(), []

        async def hold(name, *_):
            if name == "Adopt":
                most.append(name)
                await go_on.wait()

        mesh.on_call = hold
        answers = []
        mesh.decode.gate.hold()
        for i in range(4):
            (answer,) = await moving(mesh, prompt_of(40, i), max_tokens=40, request_id=f"r{i}")
            answers.append((answer, asyncio.ensure_future(answer.run())))
        await until(lambda: all(answer.sequence for answer, _ in answers))
        for answer, _ in answers:
            await answer.move(1)
        await until(lambda: len(most) == 2)
        await asyncio.sleep(0.02)
        assert len(most) == 2
        go_on.set()
        mesh.decode.gate.let_go()
        await asyncio.gather(*(running for _, running in answers))
        assert all(right(answer) for answer, _ in answers)
        assert mesh.decode.worker.migrations.moved_out == 4


async def test_an_answer_on_its_way_gives_no_pages_up_and_one_set_aside_does_not_move():
    async with rig(**OPTIONS, pages=10, growth_tokens=16) as mesh:
        worker = mesh.decode.worker
        high, running = await one(mesh, [], length=20, max_tokens=100, request_id="high")
        await until(lambda: worker.running == 1)
        (low,) = await moving(mesh, prompt_of(21), max_tokens=100, request_id="low")
        go_on = asyncio.Event()

        async def hold(name, *_):
            if name == "Adopt":
                await go_on.wait()

        mesh.on_call = hold
        mesh.decode.gate.hold()
        reading = asyncio.ensure_future(low.run())
        await until(lambda: low.sequence)
        await low.move(1)
        mesh.decode.gate.let_go()
        await until(lambda: high.finish or len(low.tokens) > 60 or worker.running == 0)
        assert worker.preempted == 0
        go_on.set()
        await asyncio.gather(running, reading)
        assert right(high)
        assert right(low)
        assert low.decisions == ["committed to decode1"]


async def test_an_answer_whose_pages_are_set_aside_is_asked_to_move_later():
    async with rig(**OPTIONS, pages=10, growth_tokens=16) as mesh:
        worker = mesh.decode.worker
        high, running = await one(mesh, [], length=20, max_tokens=100, request_id="high")
        await until(lambda: worker.running == 1)
        low, reading = await one(mesh, [], length=21, max_tokens=100, request_id="low")
        await until(lambda: worker.parked == 1)
        aside = next(a for a in (high, low) if a.sequence and worker._paging.is_aside(a.sequence))
        mesh.decode.gate.hold()
        if worker.parked:
            with pytest.raises(InvalidRequest, match="set aside"):
                await worker.migrations.migrate(migrate(aside, 1))
        mesh.decode.gate.let_go()
        await asyncio.gather(running, reading)
        assert right(high)
        assert right(low)


async def test_pages_that_a_transfer_reads_are_given_back_when_it_has_ended():
    async with rig(**OPTIONS) as mesh:
        leases, lease = mesh.decode.worker._leases, await mesh.reserve(prompt_of(40))
        entry = leases.find(lease.lease_id)
        leases.hold(entry)
        releasing = asyncio.ensure_future(mesh.release(lease))
        await asyncio.sleep(0.01)
        assert not releasing.done()
        assert mesh.decode.kv.num_reservations == 1
        leases.let_go(entry)
        await releasing
        assert mesh.decode.kv.num_reservations == 0


# ---- calls of the target, one by one ------------------------------------------------------


def adopt_request(mesh, **fields):
    return AdoptRequest(
        **{
            "handoff_id": "h/1",
            "source": "elsewhere",
            "request_id": "r",
            "page_format": mesh.format,
            "hashes": (),
            "num_tokens": 40,
            "max_tokens": 20,
            "deadline_ms": 60_000,
            **fields,
        }
    )


async def test_an_adoption_is_one_however_often_it_is_asked_for():
    async with rig(**OPTIONS) as mesh:
        first = await mesh.call("decode1", "Adopt", adopt_request(mesh), Adoption)
        again = await mesh.call("decode1", "Adopt", adopt_request(mesh), Adoption)
        assert first == again
        assert mesh.decodes[1].worker.leases == 1
        assert mesh.decodes[1].kv.status().reserved == 4
        request = RoundRequest(lease_id=first.lease_id, index=0, first_page=0, num_pages=2)
        lease = await mesh.call("decode1", "AdoptRound", request, Lease)
        assert lease == await mesh.call("decode1", "AdoptRound", request, Lease)
        assert (lease.cached_pages, lease.num_pages) == (0, 2)
        for wrong in (
            RoundRequest(lease_id=first.lease_id, index=0, first_page=0, num_pages=1),
            RoundRequest(lease_id=first.lease_id, index=1, first_page=3, num_pages=1),
            RoundRequest(lease_id=first.lease_id, index=1, first_page=2, num_pages=3),
            RoundRequest(lease_id=first.lease_id, index=2, first_page=2, num_pages=1),
        ):
            with pytest.raises(InvalidRequest):
                await mesh.call("decode1", "AdoptRound", wrong, Lease)
        release = ReleaseRequest(lease_id=first.lease_id, reason="aborted")
        for _ in range(2):
            await mesh.call("decode1", "Release", release, Empty)
        with pytest.raises(LeaseGone, match="over at the target"):
            await mesh.call("decode1", "Adopt", adopt_request(mesh), Adoption)
        with pytest.raises(LeaseGone):
            await mesh.call("decode1", "AdoptRound", request, Lease)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"num_tokens": 0}, "has tokens"),
        ({"max_tokens": 0}, "may get more"),
        ({"num_tokens": 1000, "max_tokens": 25}, "context of 1024"),
        ({"hashes": (b"x" * 16,) * 3}, "3 page hashes for 40 tokens"),
    ],
)
async def test_an_adoption_that_makes_no_sense_is_refused(fields, word):
    async with rig(**OPTIONS) as mesh:
        with pytest.raises(InvalidRequest, match=word):
            await mesh.call("decode1", "Adopt", adopt_request(mesh, **fields), Adoption)


async def test_a_deadline_ends_an_adoption():
    async with rig(**OPTIONS) as mesh:
        request = adopt_request(mesh, deadline_ms=10)
        await mesh.call("decode1", "Adopt", request, Adoption)
        await until(lambda: mesh.decodes[1].worker.leases == 0)

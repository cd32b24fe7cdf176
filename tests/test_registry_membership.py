"""The router's local state: pure, with the time handed in."""

import pytest

from pdmesh.registry.membership import EventsMissing, Membership
from pdmesh.registry.store import Member, Roster
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import WorkerRecord

FORMAT = PageFormat("tiny", "w", "float32", 64, 7, 1, 576)


def member(worker_id: str, epoch: int, instance: str = "a") -> Member:
    record = WorkerRecord(
        worker_id=worker_id,
        instance=instance,
        role="decode",
        address="127.0.0.1:1",
        page_format=FORMAT,
        model="tiny",
        vocab_size=16,
        max_context=64,
        capacity_pages=8,
    )
    return Member(record, epoch, "ready")


def roster(*members: Member, inc: bytes = b"x", seq: int = 1, epoch: int = 10) -> Roster:
    return Roster(inc, seq, epoch, {m.record.worker_id: (m.epoch, m.state) for m in members})


def publish(worker_id: str, epoch: int, *pages: bytes, op: bytes = b"publish"):
    return {
        b"op": op,
        b"worker": worker_id.encode(),
        b"epoch": str(epoch).encode(),
        b"count": str(len(pages)).encode(),
        b"hashes": b"".join(pages),
    }


def names(view: Membership) -> list[str]:
    return [worker.worker_id for worker in view.workers()]


@pytest.fixture
def view():
    state = Membership(grace_s=10.0, lost_s=15.0)
    one = member("decode-0", 5)
    state.replace(roster(one), [(one, {b"p" * 16})])
    return state


def test_a_worker_without_a_lease_is_dropped_at_once(view):
    view.check(roster(), now=0.0)
    assert names(view) == []


@pytest.mark.parametrize("epoch", [0, 10])
def test_after_an_outage_a_worker_has_time_to_register_again(view, epoch):
    view.outage_over(now=100.0)
    view.replace(roster(inc=b"y", seq=0, epoch=epoch), [])
    view.check(roster(inc=b"y", seq=0, epoch=epoch), now=109.0)
    assert names(view) == ["decode-0"]
    view.check(roster(inc=b"y", seq=0, epoch=epoch), now=110.0)
    assert names(view) == []


def test_a_worker_that_registered_again_is_no_longer_on_probation(view):
    view.outage_over(now=100.0)
    again = member("decode-0", 20)
    view.replace(roster(again, inc=b"y", epoch=20), [(again, set())])
    view.check(roster(again, inc=b"y", epoch=20), now=999.0)
    assert names(view) == ["decode-0"]
    assert view.owned_prefix("decode-0", [b"p" * 16]) == 0


def test_events_apply_once_and_in_order(view):
    page = b"q" * 16
    view.apply(2, publish("decode-0", 5, page))
    view.apply(3, publish("decode-0", 5, page, op=b"evict"))
    view.apply(2, publish("decode-0", 5, page))
    assert view.owned_prefix("decode-0", [page]) == 0
    with pytest.raises(EventsMissing):
        view.apply(5, publish("decode-0", 5, page))


def test_events_of_another_epoch_are_dropped(view):
    page = b"q" * 16
    view.apply(2, publish("decode-0", 4, page))
    view.apply(3, {b"op": b"leave", b"worker": b"decode-0", b"epoch": b"4"})
    assert view.owned_prefix("decode-0", [page]) == 0
    assert names(view) == ["decode-0"]


@pytest.mark.parametrize(
    "other",
    [
        roster(member("decode-0", 5), inc=b"y"),
        roster(member("decode-0", 5), seq=0),
        roster(member("decode-0", 6)),
        roster(member("decode-0", 5), member("decode-1", 7)),
    ],
    ids=["other data", "fewer events", "newer epoch", "unknown worker"],
)
def test_a_roster_that_the_events_do_not_explain_asks_for_a_snapshot(view, other):
    with pytest.raises(EventsMissing):
        view.check(other, now=0.0)


def test_a_worker_that_joined_after_the_roster_was_read_stays(view):
    late = member("decode-1", 11)
    view.replace(roster(member("decode-0", 5)), [(member("decode-0", 5), set()), (late, set())])
    view.check(roster(member("decode-0", 5), epoch=10), now=0.0)
    assert names(view) == ["decode-0", "decode-1"]


def test_a_lost_instance_is_forgotten_with_its_record(view):
    view.mark_lost("a", now=0.0)
    assert names(view) == []
    new = member("decode-0", 6, instance="b")
    view.replace(roster(new), [(new, set())])
    assert names(view) == ["decode-0"]
    assert view._lost == {}


def test_a_worker_that_drains_is_not_routed_to_but_known(view):
    said = {b"op": b"state", b"worker": b"decode-0", b"epoch": b"5", b"state": b"draining"}
    assert view.draining() == []
    view.apply(2, said)
    assert names(view) == []
    assert [record.worker_id for record in view.draining()] == ["decode-0"]
    view.mark_lost("a", now=0.0)
    assert view.draining() == []

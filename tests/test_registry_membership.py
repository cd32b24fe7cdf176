"""The router's local state: pure, with the time handed in."""

import pytest

from pdmesh.registry.feed import EventsMissing
from pdmesh.registry.membership import Membership
from pdmesh.registry.roster import Listed, Member, Roster
from pdmesh.wire.codec import encode
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import WorkerRecord

FORMAT = PageFormat("tiny", "w", "float32", 64, 7, 1, 576)


def member(worker_id: str, epoch: int, instance: str = "a", slot: int = 0) -> Member:
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
    return Member(record, epoch, "ready", slot)


def roster(*members: Member, inc: bytes = b"x", seq: int = 1, epoch: int = 10) -> Roster:
    listed = {m.record.worker_id: Listed(m.epoch, m.state, m.slot) for m in members}
    return Roster(inc, seq, epoch, listed)


def said(op: bytes, epoch: int, state: bytes = b"ready", worker_id: bytes = b"decode-0"):
    return {
        b"op": op,
        b"worker": worker_id,
        b"epoch": str(epoch).encode(),
        b"state": state,
        b"slot": b"4",
        b"record": encode(member(worker_id.decode(), epoch).record),
    }


def names(view: Membership) -> list[str]:
    return [worker.worker_id for worker in view.workers()]


@pytest.fixture
def view():
    state = Membership(grace_s=10.0, lost_s=15.0)
    one = member("decode-0", 5)
    state.replace(roster(one), [one])
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
    view.replace(roster(again, inc=b"y", epoch=20), [again])
    view.check(roster(again, inc=b"y", epoch=20), now=999.0)
    assert names(view) == ["decode-0"]


def test_events_apply_once_and_in_order(view):
    view.apply(2, said(b"state", 5, b"draining"))
    view.apply(3, said(b"state", 5, b"ready"))
    view.apply(2, said(b"state", 5, b"draining"))
    assert names(view) == ["decode-0"]
    with pytest.raises(EventsMissing):
        view.apply(5, said(b"state", 5))


def test_events_of_another_epoch_are_dropped(view):
    view.apply(2, said(b"state", 4, b"draining"))
    view.apply(3, said(b"leave", 4))
    assert names(view) == ["decode-0"]


def test_the_records_that_count_are_those_of_the_slot_and_epoch_of_a_registered_worker(view):
    assert view.owners() == {0: ("decode-0", 5)}
    view.apply(2, said(b"join", 9))
    assert view.owners() == {4: ("decode-0", 9)}
    view.apply(3, said(b"leave", 9))
    assert view.owners() == {}


def test_a_slot_that_changed_hands_belongs_to_the_later_epoch(view):
    later = member("decode-1", 8, instance="b")
    view.outage_over(now=0.0)
    view.replace(roster(later), [later])
    assert view.owners() == {0: ("decode-1", 8)}


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
    view.replace(roster(member("decode-0", 5)), [member("decode-0", 5), late])
    view.check(roster(member("decode-0", 5), epoch=10), now=0.0)
    assert names(view) == ["decode-0", "decode-1"]


def test_a_lost_instance_is_forgotten_with_its_record(view):
    view.mark_lost("a", now=0.0)
    assert names(view) == []
    new = member("decode-0", 6, instance="b")
    view.replace(roster(new), [new])
    assert names(view) == ["decode-0"]
    assert view._lost == {}


def test_a_worker_that_drains_is_not_routed_to_but_known(view):
    assert view.draining() == []
    view.apply(2, said(b"state", 5, b"draining"))
    assert names(view) == []
    assert [record.worker_id for record in view.draining()] == ["decode-0"]
    view.mark_lost("a", now=0.0)
    assert view.draining() == []

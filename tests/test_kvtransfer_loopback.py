"""Transfers over the loopback transport, with and without faults, in a chosen order."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtransfer_rig import FORMAT, PATIENCE, SENTINEL, Rig, fin_of

from pdmesh.kvcache.manager import KvManager, Reservation
from pdmesh.kvtransfer.faults import Faults
from pdmesh.kvtransfer.loopback import LoopbackDialer, LoopbackListener
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.kvtransfer.sender import Transfer
from pdmesh.wire.errors import Incompatible, InternalError, LeaseGone, TransferFailed
from pdmesh.wire.hashes import PageFormat


def manual(faults: Faults | None = None, one_sided: bool = False) -> tuple[Rig, LoopbackListener]:
    """A rig in which nothing arrives until the test delivers it."""
    listener = LoopbackListener(FORMAT, faults, one_sided=one_sided, manual=True)
    return Rig(listener), listener


def settle(rig: Rig, listener: LoopbackListener) -> None:
    listener.run_until_idle()
    rig.close()
    assert rig.problems() == []
    assert rig.sender.num_transfers == 0
    assert rig.receiver._writers == set()


@pytest.mark.parametrize("one_sided", [False, True])
def test_pages_arrive_whole_and_fin_is_handed_over(one_sided):
    rig = Rig(LoopbackListener(FORMAT, one_sided=one_sided))
    lease = rig.lease(pages=(3, 1, 5), cached=2)
    transfer = rig.sender.open(lease)
    rig.push_all(transfer)
    rig.finish(transfer, token=11)
    fin = rig.wait()
    assert (fin.first_tokens, fin.num_writes, fin.last_hidden) == ((11,), 6, b"hidden")
    assert rig.arrived(lease, (3, 1, 5))
    assert rig.receiver.phase("a") is Phase.INSTALLED
    assert rig.receiver.cancel("a")
    assert rig.receiver.phase("a") is None
    rig.close()
    assert rig.problems() == []


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_prompt_that_decode_has_cached_needs_no_page_and_still_concludes(one_sided):
    rig = Rig(LoopbackListener(FORMAT, one_sided=one_sided))
    transfer = rig.sender.open(rig.lease(pages=(), cached=4))
    rig.finish(transfer)
    assert rig.wait().num_writes == 0
    rig.close()


def test_the_callbacks_tell_of_arrival_and_of_failure():
    rig = Rig(LoopbackListener(FORMAT))
    arrived, failed = threading.Event(), threading.Event()
    rig.receiver.on_arrival = lambda lease_id, fin: arrived.set()
    rig.receiver.on_failure = lambda lease_id, reason: failed.set()
    transfer = rig.sender.open(rig.lease(pages=()))
    rig.finish(transfer)
    assert arrived.wait(PATIENCE)
    assert rig.receiver.collect("a").first_tokens == (7,)
    rig.sender.open(rig.lease("b", pages=(2,))).abort("no more")
    assert failed.wait(PATIENCE)
    rig.close()


def test_an_abort_by_the_sender_fails_the_waiter_with_its_reason():
    rig = Rig(LoopbackListener(FORMAT))
    transfer = rig.sender.open(rig.lease())
    rig.push(transfer, 0, 0)
    transfer.abort("the prompt was cancelled")
    transfer.abort("twice")
    with pytest.raises(TransferFailed, match="the prompt was cancelled"):
        rig.wait()
    with pytest.raises(TransferFailed):
        rig.finish(transfer)
    assert rig.receiver.cancel("a")
    rig.close()
    assert rig.problems() == []


def test_a_corrupted_page_is_not_installed_and_both_sides_learn_of_it():
    rig, listener = manual(Faults(corrupt=frozenset({3})))
    transfer = rig.sender.open(rig.lease())
    rig.push_all(transfer)
    transfer.start_finish(fin_of(transfer))
    listener.run_until_idle()
    with pytest.raises(TransferFailed, match="checksum of page 2, layer 0 is wrong"):
        rig.wait()
    assert "checksum" in (transfer.failure or "")
    assert rig.target.tensor[5].count_nonzero() == 0, "the corrupted page was written"
    settle(rig, listener)


def test_a_write_of_an_old_generation_is_dropped():
    rig, listener = manual()
    old = rig.sender.open(rig.lease(pages=(1, 2, 3)))
    rig.push(old, 0, 0)
    new_lease = rig.lease(pages=(1, 2, 3), generation=2)
    new = rig.sender.open(new_lease)
    rig.push_all(new)
    new.start_finish(fin_of(new))
    listener.run_until_idle()
    assert rig.wait().generation == 2
    assert rig.arrived(new_lease, (1, 2, 3))
    assert old.settled
    assert old.failure is not None
    settle(rig, listener)


def test_a_sender_of_an_old_generation_is_refused():
    rig, listener = manual()
    rig.lease(generation=2)
    transfer = rig.sender.open(rig.lease_message("a", 0, 3, generation=1))
    listener.run_until_idle()
    assert "generation 1 is not the current 2" in (transfer.failure or "")
    assert rig.receiver.phase("a") is Phase.RESERVED
    settle(rig, listener)


def test_a_lease_that_nobody_expects_is_refused():
    rig, listener = manual()
    transfer = rig.sender.open(rig.lease_message("unknown", 0, 1))
    listener.run_until_idle()
    with pytest.raises(TransferFailed, match="no such lease"):
        transfer.finish(fin_of(transfer))
    settle(rig, listener)


def test_a_second_writer_is_refused_and_the_first_goes_on():
    rig, listener = manual()
    lease = rig.lease()
    first = rig.sender.open(lease)
    listener.run_until_idle()
    other = Rig(LoopbackListener(FORMAT))
    second = other.sender.open(lease)
    listener.run_until_idle()
    assert "has had its writer" in (second.failure or "")
    rig.push_all(first)
    first.start_finish(fin_of(first))
    listener.run_until_idle()
    assert rig.wait().num_writes == 6
    other.close()
    settle(rig, listener)


def test_a_repeated_opening_changes_nothing():
    rig, listener = manual(Faults(duplicate=frozenset({0})))
    transfer = rig.sender.open(rig.lease())
    rig.push_all(transfer)
    transfer.start_finish(fin_of(transfer))
    listener.run_until_idle()
    assert rig.wait().num_writes == 6
    settle(rig, listener)


def test_a_transfer_refused_before_it_is_opened_is_never_opened():
    rig, listener = manual()
    lease = rig.lease()
    rig.sender.refuse("a", 1, "the request was cancelled")
    with pytest.raises(LeaseGone, match="aborted"):
        rig.sender.open(lease)
    settle(rig, listener)


def test_the_same_lease_is_not_opened_twice():
    rig, listener = manual()
    lease = rig.lease()
    transfer = rig.sender.open(lease)
    with pytest.raises(LeaseGone, match="writer already"):
        rig.sender.open(lease)
    transfer.start_abort("done")
    settle(rig, listener)


def test_pushing_twice_or_out_of_place_is_an_error():
    rig, listener = manual()
    transfer = rig.sender.open(rig.lease(cached=1))
    rig.push(transfer, 1, 0)
    with pytest.raises(InternalError, match="before"):
        rig.push(transfer, 1, 0)
    with pytest.raises(InternalError, match="page 0"):
        rig.push(transfer, 0, 0)
    with pytest.raises(InternalError, match="12 bytes"):
        transfer.push(1, 1, memoryview(bytes(12)))
    with pytest.raises(InternalError, match="FIN of lease b"):
        transfer.start_finish(fin_of(rig.sender.open(rig.lease("b", pages=(7,)))))
    rig.sender.close()
    settle(rig, listener)


def test_a_page_of_one_lease_is_not_promised_to_another():
    rig, listener = manual()
    rig.lease("a", pages=(1, 2))
    with pytest.raises(InternalError, match="page 2 is promised to lease a"):
        rig.lease("b", pages=(2, 3))
    with pytest.raises(InternalError, match="outside"):
        rig.lease("b", pages=(8,))
    with pytest.raises(InternalError):
        rig.lease("b", pages=(4, 4))
    with pytest.raises(InternalError, match="generation 1 after 1"):
        rig.lease("a", pages=(1, 2))
    rig.receiver.cancel("a")
    rig.lease("b", pages=(2, 3))
    settle(rig, listener)


def test_a_waiter_of_a_cancelled_lease_is_told():
    rig, listener = manual()
    rig.lease()
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            rig.wait()
        except (TransferFailed, LeaseGone) as error:
            outcome.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    rig.receiver.cancel("a")
    waiter.join(PATIENCE)
    assert len(outcome) == 1
    settle(rig, listener)


async def test_a_wait_that_times_out_leaves_the_lease_and_a_later_wait_succeeds():
    rig, listener = manual()
    transfer = rig.sender.open(rig.lease())
    with pytest.raises(TransferFailed, match="0 of 6 writes arrived within 0.01 s"):
        await rig.receiver.wait("a", 0.01)
    rig.push_all(transfer)
    transfer.start_finish(fin_of(transfer))
    listener.run_until_idle()
    assert (await rig.receiver.wait("a", PATIENCE)).first_tokens == (7,)
    settle(rig, listener)


async def test_a_wait_for_an_unknown_lease_says_so():
    rig, listener = manual()
    with pytest.raises(LeaseGone, match="not expected"):
        await rig.receiver.wait("zz", 1.0)
    settle(rig, listener)


def test_a_format_that_differs_is_refused_naming_both_sides():
    rig, listener = manual()
    other = PageFormat("tiny", "weights", "bfloat16", 4, 2, 0, 3)
    lease = rig.lease()
    with pytest.raises(Incompatible, match=r"dtype is 'float32' here and 'bfloat16' there"):
        LoopbackDialer().dial(lease.transports[0][1], other, rig.sender)
    sender = Rig(LoopbackListener(other), page_format=other)
    with pytest.raises(Incompatible, match="'bfloat16' here and 'float32' there"):
        sender.sender.open(lease)
    sender.close()
    settle(rig, listener)


def test_a_lease_without_a_transport_in_common_is_refused():
    rig, listener = manual()
    rig.addresses = (("rdma", "x:1"),)
    with pytest.raises(Incompatible, match="offers rdma, prefill has loopback, shm, tcp"):
        rig.sender.open(rig.lease())
    settle(rig, listener)


def test_a_lost_connection_fails_both_sides_and_the_next_transfer_connects_again():
    rig, listener = manual()
    transfer = rig.sender.open(rig.lease())
    rig.push(transfer, 0, 0)
    listener.run_until_idle()
    listener.disconnect("the cable was pulled")
    listener.run_until_idle()
    with pytest.raises(TransferFailed, match=r"1 of 6 writes: the cable was pulled"):
        rig.wait()
    with pytest.raises(TransferFailed, match="the cable was pulled"):
        transfer.finish(fin_of(transfer))
    again = rig.lease(generation=2)
    second = rig.sender.open(again)
    rig.push_all(second)
    second.start_finish(fin_of(second))
    listener.run_until_idle()
    assert rig.wait().generation == 2
    assert rig.arrived(again, (3, 1, 5))
    settle(rig, listener)


def test_a_one_sided_write_after_a_cancel_lands_in_quarantine_and_nowhere_else():
    rig, listener = manual(Faults(stall_after=2), one_sided=True)
    drained: list[str] = []
    rig.receiver.on_drained = drained.append
    transfer = rig.sender.open(rig.lease(pages=(3, 1)))
    rig.push_all(transfer)
    listener.run_until_idle()
    assert not rig.receiver.cancel("a"), "writes are under way"
    with pytest.raises(InternalError, match="promised to lease a"):
        rig.lease("b", pages=(1,))
    before = rig.target.tensor.clone()
    listener.run_until_idle()
    assert transfer.failure is not None
    assert not transfer.settled
    assert drained == []
    listener.resume()
    listener.run_until_idle()
    assert not bool((rig.target.tensor == before).all()), "the stalled writes never landed"
    assert drained == ["a"]
    assert transfer.settled
    rig.lease("b", pages=(1,))
    settle(rig, listener)


def test_a_lost_connection_ends_a_one_sided_quarantine():
    rig, listener = manual(Faults(stall_after=1), one_sided=True)
    drained: list[str] = []
    rig.receiver.on_drained = drained.append
    transfer = rig.sender.open(rig.lease())
    rig.push_all(transfer)
    listener.run_until_idle()
    assert not rig.receiver.cancel("a")
    listener.disconnect()
    listener.run_until_idle()
    assert drained == ["a"]
    before = rig.target.tensor.clone()
    listener.resume()
    listener.run_until_idle()
    assert bool((rig.target.tensor == before).all()), "a write landed after the fence"
    settle(rig, listener)


def test_a_sender_that_has_drained_says_so_again_when_it_is_asked():
    rig, listener = manual(Faults(drop=frozenset({0, 1})), one_sided=True)
    drained: list[str] = []
    rig.receiver.on_drained = drained.append
    transfer = rig.sender.open(rig.lease())
    transfer.abort("abort and drained are lost")
    listener.run_until_idle()
    assert not rig.receiver.cancel("a")
    listener.run_until_idle()
    assert drained == ["a"]
    assert rig.receiver.phase("a") is None


def test_a_new_generation_waits_for_the_old_writer_to_drain():
    rig, listener = manual(Faults(stall_after=1), one_sided=True)
    transfer = rig.sender.open(rig.lease())
    rig.push_all(transfer)
    with pytest.raises(InternalError, match="has not drained"):
        rig.lease(generation=2)
    with pytest.raises(TransferFailed):
        rig.wait()
    listener.resume()
    listener.run_until_idle()
    rig.lease(generation=2)
    settle(rig, listener)


def test_aborting_a_stalled_one_sided_transfer_costs_the_connection_after_the_grace():
    listener = LoopbackListener(FORMAT, Faults(stall_after=0), one_sided=True)
    rig = Rig(listener)
    transfer = rig.sender.open(rig.lease())
    rig.push_all(transfer)
    transfer.abort("too slow", grace=0.01)
    assert transfer.settled
    with pytest.raises(TransferFailed):
        rig.wait()
    assert rig.receiver.cancel("a")
    rig.close()
    assert rig.problems() == []


NUMBERS = st.integers(0, 18)
SOME = st.frozensets(NUMBERS, min_size=1, max_size=3)
REORDERED = {
    "duplicate": st.frozensets(NUMBERS, max_size=4),
    "delay": st.dictionaries(NUMBERS, st.integers(1, 6), max_size=5),
}
FAULTS = {
    "reordered": st.builds(Faults, **REORDERED),
    "corrupted": st.builds(Faults, corrupt=SOME, **REORDERED),
    "lossy": st.builds(Faults, drop=SOME, **REORDERED),
    "stalled": st.builds(Faults, stall_after=st.integers(0, 15), **REORDERED),
    "cut": st.builds(Faults, disconnect_after=st.integers(0, 15), **REORDERED),
}


@dataclass
class Ongoing:
    """One transfer of the random schedule, from reservation to the reuse of its pages."""

    reservation: Reservation
    transfer: Transfer
    pages: list[int]
    todo: list[tuple[int, int]]
    finished: bool = False
    over: bool = False


class Schedule:
    """Transfers on a faulty network, run by a list of small numbers; reuses pages at once.

    A page that is given back is filled with a sentinel by the next holder. If any write lands
    after that, the sentinel is damaged.
    """

    def __init__(self, faults: Faults, one_sided: bool) -> None:
        self.rig, self.listener = manual(faults, one_sided)
        self.manager = KvManager(8, 4, lambda _: None, lambda _: None)
        self.quarantines: dict[str, int] = {}
        self.rig.receiver.on_drained = self.drained
        self.ongoing: dict[str, Ongoing] = {}
        self.reused: list[int] = []
        self.holders: list[Reservation] = []
        self.installed = 0
        self.started = 0

    def drained(self, lease_id: str) -> None:
        self.manager.end_quarantine(self.quarantines.pop(lease_id))

    def begin(self) -> None:
        self.check()
        self.end_reuse()
        reservation = self.manager.reserve([], 2, 2)
        if reservation is None:
            return
        self.started += 1
        lease_id = f"lease-{self.started}"
        pages = reservation.grow(2)
        self.rig.target.tensor[pages] = 0
        lease = self.rig.lease(lease_id, pages, generation=self.started)
        try:
            transfer = self.rig.sender.open(lease)
        except TransferFailed:
            self.give_back(lease_id, reservation)
            return
        todo = [(page, layer) for layer in range(2) for page in range(2)]
        self.ongoing[lease_id] = Ongoing(reservation, transfer, pages, todo)

    def act(self, number: int) -> None:
        kind, index = number % 8, number // 8
        if kind < 2:
            self.listener.deliver()
        elif kind == 2:
            self.begin()
        elif self.ongoing:
            lease_id = sorted(self.ongoing)[index % len(self.ongoing)]
            one = self.ongoing[lease_id]
            if kind < 6:
                self.advance(one)
            elif kind == 6:
                self.end(lease_id)
            elif index % 3 == 0:
                one.transfer.start_abort("cancelled")
            elif index % 3 == 1:
                self.listener.resume()
            else:
                self.listener.deliver()
        self.collect()
        self.check()

    def advance(self, one: Ongoing) -> None:
        if one.todo:
            page, layer = one.todo.pop(0)
            self.rig.push(one.transfer, page, layer)
        elif not one.finished:
            one.finished = True
            one.transfer.start_finish(fin_of(one.transfer))

    def collect(self) -> None:
        """Installs what has arrived: it must be whole."""
        for lease_id, one in self.ongoing.items():
            if not one.over and self.rig.receiver.phase(lease_id) is Phase.COMPLETE:
                self.rig.receiver.collect(lease_id)
                assert self.rig.arrived(one.transfer.lease, one.pages), "a wrong page was installed"
                one.over = True
                self.installed += 1

    def end(self, lease_id: str) -> None:
        one = self.ongoing.pop(lease_id)
        one.transfer.start_abort("the owner let go")
        self.give_back(lease_id, one.reservation)

    def give_back(self, lease_id: str, reservation: Reservation) -> None:
        if not self.rig.receiver.cancel(lease_id):
            self.quarantines[lease_id] = reservation.quarantine(reservation.pages)
        reservation.release()

    def reuse(self) -> None:
        """Another sequence takes every free page for itself."""
        status = self.manager.status()
        if not status.free:
            return
        other = self.manager.reserve([], 0, status.free)
        assert other is not None
        pages = other.grow(status.free)
        self.rig.target.tensor[pages] = SENTINEL
        self.reused += pages
        self.holders.append(other)

    def check(self) -> None:
        assert self.manager.check_integrity() == []
        assert self.rig.problems() == []
        taken = self.rig.target.tensor[self.reused]
        assert bool((taken == SENTINEL).all()), "a write landed in a page that was given back"
        self.reuse()

    def end_reuse(self) -> None:
        for holder in self.holders:
            holder.release()
        self.holders, self.reused = [], []

    def complete(self) -> None:
        """Sends all there is to send before the owners let go."""
        for one in self.ongoing.values():
            while one.todo or not one.finished:
                self.advance(one)
        self.listener.resume()
        self.listener.run_until_idle()
        self.collect()
        self.check()

    def finish(self) -> None:
        """The owners let go, the stall ends, and all must come to rest."""
        for lease_id in sorted(self.ongoing):
            self.end(lease_id)
            self.check()
        self.listener.resume()
        while self.listener.deliver():
            self.check()
        self.rig.close()
        self.listener.run_until_idle()
        assert self.quarantines == {}, "a quarantine never ended"
        assert self.rig.sender.num_transfers == 0
        self.check()
        self.end_reuse()
        assert self.manager.status().free == 8, "pages were lost"


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("kind", FAULTS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    data=st.data(),
    actions=st.lists(st.integers(0, 63), min_size=10, max_size=120),
    patient=st.booleans(),
)
def test_whatever_the_network_does_pages_are_right_or_absent_and_none_is_lost(
    one_sided, kind, data, actions, patient
):
    schedule = Schedule(data.draw(FAULTS[kind]), one_sided)
    for number in [2, *actions]:
        schedule.act(number)
    if patient:
        schedule.complete()
    schedule.finish()


@pytest.mark.parametrize("one_sided", [False, True])
def test_the_random_schedules_do_install_pages_when_nothing_goes_wrong(one_sided):
    schedule = Schedule(Faults(), one_sided)
    for number in [2, 3, 3, 3, 3, 3, *[0] * 12]:
        schedule.act(number)
    assert schedule.installed == 1
    schedule.finish()


async def test_a_wait_that_is_cancelled_as_the_pages_arrive_is_cancelled():
    for turns in range(8):
        rig, listener = manual()
        transfer = rig.sender.open(rig.lease())
        rig.push_all(transfer)
        transfer.start_finish(fin_of(transfer))
        waiting = asyncio.ensure_future(rig.receiver.wait("a", PATIENCE))
        await asyncio.sleep(0)
        listener.run_until_idle()
        for _ in range(turns):
            await asyncio.sleep(0)
        over = waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled() or over, f"{turns} turns of the loop later it goes on"
        settle(rig, listener)

"""Transfers through a device's memory: announced when they are there, and fenced by their end.

The device is shared memory (``cuda_ipc_rig``); what a GPU adds is in test_cuda_ipc_gpu.py.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from child_path import python_path
from cuda_ipc_rig import CudaIpcRig, FakeDevice, Ready, cuda_ipc_rig, device_store
from kvtransfer_rig import FORMAT, PATIENCE, fin_of
from test_kvtransfer_shm import wait_phase

from pdmesh.kvtransfer.cuda_ipc import CudaIpcDialer, CudaIpcListener
from pdmesh.kvtransfer.cuda_ipc_link import CudaIpcLink
from pdmesh.kvtransfer.protocol import sender as protocol
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.kvtransfer.tcp import TcpDialer, TcpListener
from pdmesh.kvtransfer.transport import Abort, Drained, FinMessage, Open
from pdmesh.wire.codec import encode
from pdmesh.wire.errors import ConfigError, TransferFailed

ROOT = Path(__file__).resolve().parent.parent


def until(condition, why):
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError(why)


def arrived(rig, lease_id="a"):
    return rig.receiver._arrivals[lease_id].state.num_arrived


def test_pages_arrive_whole_from_a_store_and_from_the_host():
    with cuda_ipc_rig() as rig:
        lease = rig.lease(pages=(3, 1, 5, 0), cached=1)
        transfer = rig.sender.open(lease)
        transfer.push_pages(1, 2, [1, 2])
        transfer.push_layer(rig.source, 3, 0, [3])
        transfer.push(3, 1, rig.source.tensor[3, 1].clone())
        rig.push(transfer, 4, 0)
        rig.push(transfer, 4, 1)
        rig.finish(transfer, token=11)
        assert (rig.wait().first_tokens, rig.wait().num_writes) == ((11,), 8)
        assert rig.arrived(lease, (3, 1, 5, 0))
        assert bool((rig.target.tensor[[2, 4, 6, 7]] == 0).all()), "other pages are as they were"
        assert rig.receiver.cancel("a")


def test_no_pages_at_all_still_conclude():
    with cuda_ipc_rig() as rig:
        rig.finish(rig.sender.open(rig.lease(pages=(), cached=2)))
        assert rig.wait().num_writes == 0


def test_nothing_is_announced_before_it_is_there_also_when_later_copies_end_first():
    with cuda_ipc_rig() as rig:
        rig.device.held = True
        lease = rig.lease(pages=(3, 1))
        transfer = rig.sender.open(lease)
        transfer.push_pages(0, 1, [0])
        rig.device.wait_queued(2)  # pages, and the units of which checksums are made
        transfer.push_pages(1, 1, [1])
        rig.device.wait_queued(4)
        rig.device.finish(2)
        rig.device.finish(2)
        assert torch.equal(rig.target.tensor[1], rig.source.tensor[1]), "the second is there"
        rig.device.finish(1)
        assert arrived(rig) == 0
        assert transfer._state.in_flight == 4
        rig.device.finish()
        until(lambda: arrived(rig) == 4, "it was never announced")
        rig.device.let_go()
        rig.finish(transfer)
        assert rig.arrived(lease, (3, 1))


@pytest.mark.parametrize("seed", range(8))
def test_transfers_whose_copies_end_in_any_order_arrive_whole(seed):
    rng = random.Random(seed)
    with cuda_ipc_rig(check_every=rng.choice((1, 3, 64))) as rig:
        rig.device.held = True
        places = rng.sample(range(8), 8)
        leases = [rig.lease(str(i), pages=places[2 * i : 2 * i + 2]) for i in range(4)]
        transfers = [rig.sender.open(lease) for lease in leases]
        blocks = [(t, layer) for t in transfers for layer in (0, 1)]
        for transfer, layer in rng.sample(blocks, len(blocks)):
            transfer.push_layer(rig.source, 0, layer, [0, 1])
            if rng.random() < 0.5:
                rig.device.finish_all(rng)
        for transfer in transfers:
            transfer.start_finish(fin_of(transfer))
        stop = threading.Event()

        def finishing():
            while not stop.wait(0.001):
                rig.device.finish_all(rng)

        thread = threading.Thread(target=finishing)
        thread.start()
        for i, lease in enumerate(leases):
            assert rig.wait(str(i)).num_writes == 4
            assert rig.arrived(lease, places[2 * i : 2 * i + 2])
        stop.set()
        thread.join()
        until(lambda: all(t.phase is protocol.Phase.DONE for t in transfers), "not acknowledged")


def test_copies_begin_only_when_their_pages_are_computed():
    with cuda_ipc_rig() as rig:
        rig.device.held = True
        rig.source.ready = Ready()
        transfer = rig.sender.open(rig.lease(pages=(3,)))
        transfer.push_pages(0, 1, [0])
        rig.device.wait_queued(2)
        assert all(work.after == (rig.source.ready,) for work in rig.device.works())
        with pytest.raises(AssertionError, match="begun before its pages are computed"):
            rig.device.finish()
        rig.source.ready.happened = True
        rig.device.let_go()
        rig.finish(transfer)


def test_another_lease_is_opened_while_copies_wait():
    with cuda_ipc_rig() as rig:
        rig.device.held = True
        first = rig.sender.open(rig.lease("a", pages=(3,)))
        first.push_pages(0, 1, [0])
        first.start_finish(fin_of(first))
        rig.device.wait_queued(2)
        second = rig.sender.open(rig.lease("b", pages=(4,)))
        assert second.failure is None, "its places are known"
        assert rig.receiver.phase("b") is Phase.FILLING
        assert rig.receiver.phase("a") is Phase.FILLING, "its FIN waits for its pages"
        rig.device.let_go()
        second.push_pages(0, 1, [1])
        rig.finish(second)
        until(lambda: first.phase is protocol.Phase.DONE, "not acknowledged")


@pytest.mark.parametrize("said", ["before", "after"])
def test_an_end_does_not_wait_for_pages_of_the_next_prompt_that_are_still_computed(
    said, monkeypatch
):
    """Whether it is said before those pages are pushed or behind them."""
    with cuda_ipc_rig() as rig:
        rig.device.held, staging = True, rig.device.staging
        first = rig.sender.open(rig.lease("a", pages=(3,)))
        second = rig.sender.open(rig.lease("b", pages=(4,)))
        busy, gate = threading.Event(), threading.Event()

        def stands(size):
            busy.set()
            assert gate.wait(PATIENCE)
            return staging(size)

        monkeypatch.setattr(rig.device, "staging", stands)
        first.push_layer(rig.source, 0, 0, [0])
        assert busy.wait(PATIENCE)
        # All of this comes to the thread that copies at once, when it is through with that.
        first.push_layer(rig.source, 0, 1, [0])
        if said == "before":
            first.start_finish(fin_of(first))
        rig.source.ready = later = Ready()
        second.push_layer(rig.source, 0, 0, [1])
        if said == "after":
            first.start_finish(fin_of(first))
        gate.set()
        rig.device.wait_queued(6)
        for work in [work for work in rig.device.works() if later not in work.after]:
            rig.device.finish(rig.device.queued.index(work))
        until(lambda: first.phase is protocol.Phase.DONE, "it waited for the other's pages")
        assert arrived(rig, "b") == 0
        later.happened = True
        rig.device.let_go()
        second.push_layer(rig.source, 0, 1, [1])
        rig.finish(second)


def test_the_log_says_at_its_finest_what_each_part_of_a_hand_off_waited_for(caplog):
    with cuda_ipc_rig() as rig, caplog.at_level(logging.DEBUG, "pdmesh.kvtransfer"):
        transfer = rig.sender.open(rig.lease("a", pages=(3, 1)))
        transfer.push_layer(rig.source, 0, 0, [0, 1])
        until(lambda: arrived(rig) == 2, "it was never announced")
        transfer.push_layer(rig.source, 0, 1, [0, 1])
        rig.finish(transfer)
        until(lambda: len(told(caplog, "pages_announced")) == 2, "it was never told of")
        until(lambda: any(one["ends"] for one in told(caplog, "pages_compared")), "nor of its end")
    assert [one["layer"] for one in told(caplog, "pages_announced")] == [0, 1]
    compared = told(caplog, "pages_compared")
    assert sum(one["writes"] for one in compared) == 2
    assert sum(one["units"] for one in compared) == 4
    assert [one["ends"] for one in compared if one["ends"]] == ["a"]
    assert len(told(caplog, "device_settled")) == 1
    spent = {"turn_ms", "mark_ms", "told_ms", "ms", "ran_ms"}
    names = ("pages_announced", "pages_compared", "device_settled")
    times = [one[name] for what in names for one in told(caplog, what) for name in spent & set(one)]
    assert len(times) == 2 * 3 + len(compared) * 2 + 1
    assert min(map(float, times)) >= 0


def told(caplog, what):
    """The fields of each such event, in order."""
    return [one.fields for one in caplog.records if one.getMessage() == what]


# ---- no page is used again under a write -----------------------------------------------------


def test_a_cancelled_lease_keeps_its_pages_until_the_senders_copies_have_ended():
    with cuda_ipc_rig() as rig:
        rig.device.held = True
        transfer = rig.sender.open(rig.lease(pages=(3,)))
        transfer.push_pages(0, 1, [0])
        rig.device.wait_queued(2)
        assert not rig.receiver.cancel("a"), "a copy is under way"
        until(lambda: transfer.failure, "the sender never heard of it")
        assert rig.receiver.phase("a") is Phase.QUARANTINED
        assert not rig.drained.is_set()
        assert not transfer.settled, "its own pages are read by the device"
        rig.device.let_go()
        assert rig.drained.wait(PATIENCE)
        rig.target.tensor.fill_(5.0)
        with pytest.raises(TransferFailed, match="refused"):
            transfer.finish(fin_of(transfer))
        assert not rig.device.queued
        assert bool((rig.target.tensor == 5.0).all()), "a write landed after DRAINED"


def test_a_sender_that_aborts_waits_for_its_copies_and_takes_back_those_not_begun():
    with cuda_ipc_rig() as rig:
        rig.device.held = True
        transfer = rig.sender.open(rig.lease(pages=(3, 1)))
        transfer.push_pages(0, 1, [0])
        rig.device.wait_queued(2)
        transfer.start_abort("cancelled")
        transfer.push_pages(1, 1, [1])
        assert not transfer.settled
        assert len(rig.device.works()) == 2, "nothing is copied after an abort"
        rig.device.let_go()
        until(lambda: transfer.settled, "the abort never ended")
        wait_phase(rig, Phase.FREE)
        assert bool((rig.target.tensor[1] == 0).all())


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_connection_that_is_closed_in_a_copy_ends_after_it(side):
    with cuda_ipc_rig() as rig:
        rig.device.held = True
        transfer = rig.sender.open(rig.lease(pages=(3,)))
        (mine,) = rig.sender._links.values()
        (theirs,) = rig.receiver._writers
        transfer.push_pages(0, 1, [0])
        rig.device.wait_queued(2)
        if side == "receiver":
            assert not rig.receiver.cancel("a")
            theirs.close("fenced")
        else:
            mine.close("cut")
        until(lambda: mine.closed, "the other side never heard of it")
        assert not rig.drained.wait(0.1)
        assert rig.receiver.phase("a") in (Phase.FILLING, Phase.QUARANTINED)
        assert rig.device.opened, "mapped while there is a copy"
        assert not transfer.settled
        rig.device.let_go()
        if side == "receiver":
            assert rig.drained.wait(PATIENCE)
        else:
            with pytest.raises(TransferFailed, match="connection was lost"):
                rig.wait()
        mine.join(PATIENCE)
        assert rig.device.opened == Counter()
        assert transfer.settled
        rig.target.tensor.fill_(5.0)
        assert not rig.device.queued


def test_a_device_that_refuses_a_copy_ends_the_connection_and_frees_the_pages():
    with cuda_ipc_rig() as rig:
        transfer = rig.sender.open(rig.lease(pages=(3,)))
        rig.device.fails.add("copy")
        transfer.push_pages(0, 1, [0])
        with pytest.raises(TransferFailed, match="connection was lost"):
            rig.wait()
        assert rig.receiver.phase("a") is Phase.FREE
        rig.device.fails.clear()
        again = rig.sender.open(rig.lease("b", pages=(3,)))
        again.push_pages(0, 1, [0])
        rig.finish(again)


def test_copies_queued_before_a_refused_one_are_waited_for():
    with cuda_ipc_rig() as rig:
        rig.device.held = True
        transfer = rig.sender.open(rig.lease(pages=(3, 1)))
        add = rig.device.add

        def then_fail(work):
            add(work)
            rig.device.fails.add("copy")

        rig.device.add = then_fail
        transfer.push_pages(0, 2, [0, 1])
        (link,) = rig.receiver._writers
        until(lambda: link.closed, "the failure was never noticed")
        assert len(rig.device.works()) == 1
        assert not rig.receiver.cancel("a")
        assert not rig.drained.wait(0.1)
        rig.device.let_go()
        assert rig.drained.wait(PATIENCE)


CHILD = """
import sys, threading
from cuda_ipc_rig import FakeDevice, device_store
from pdmesh.kvtransfer.cuda_ipc import CudaIpcDialer
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.wire.codec import decode
from pdmesh.wire.messages import Lease
lease, what = decode(bytes.fromhex(sys.argv[1]), Lease), sys.argv[2]
device, store = FakeDevice(), device_store(2, 2, 4, 3)
store.tensor.fill_(1.0)
sender = TransferSender(lease.page_format, [CudaIpcDialer(device)], store)
transfer = sender.open(lease)
transfer.push_layer(store, 0, 0, [0])
with transfer._changed:
    transfer._changed.wait_for(lambda: transfer._state.in_flight == 0)
if what == "lost":
    device.fails.add("wait")
    transfer.push_layer(store, 0, 1, [0])
    (link,) = sender._links.values()
    link.join()
    assert transfer.settled and device.opened
elif what == "copying":
    device.held = True
    transfer.push_layer(store, 0, 1, [0])
    device.wait_queued(2)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def child_sender(rig, what):
    """A process that has pushed a layer of its first page, and then copies on, or has failed."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, encode(rig.lease(pages=(4, 5))).hex(), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path("tests")},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        yield child
    finally:
        child.kill()
        child.wait(PATIENCE)
        child.stdin.close()
        child.stdout.close()


@pytest.mark.parametrize("what", ["idle", "copying"])
def test_a_killed_sender_frees_its_pages_when_its_process_is_gone(what):
    with cuda_ipc_rig() as rig, child_sender(rig, what) as child:
        assert bool((rig.target.tensor[4, 0] == 1.0).all()), "written by the other process"
        child.send_signal(signal.SIGKILL)
        with pytest.raises(TransferFailed, match="connection was lost after 1 of 4 writes"):
            rig.wait()
        assert rig.receiver.phase("a") is Phase.FREE


def test_a_sender_whose_device_failed_keeps_the_pages_until_its_process_is_gone():
    """Its stream has ended, and nobody knows what its device still does."""
    with cuda_ipc_rig() as rig, child_sender(rig, "lost") as child:
        (link,) = rig.receiver._writers
        until(lambda: link.closed, "the end of the stream was never noticed")
        assert not rig.receiver.cancel("a")
        assert not rig.drained.wait(0.2)
        assert rig.receiver.phase("a") is Phase.QUARANTINED
        child.send_signal(signal.SIGKILL)
        assert rig.drained.wait(PATIENCE)


def test_a_stopped_sender_keeps_its_pages_through_reminder_and_fence():
    later = []
    rigged = cuda_ipc_rig(call_later=lambda seconds, call: later.append(call))
    with rigged as rig, child_sender(rig, "idle") as child:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert not rig.receiver.cancel("a")
        for call in later:
            call()
        assert not rig.drained.wait(0.2)
        child.send_signal(signal.SIGCONT)
        assert rig.drained.wait(PATIENCE), "it runs again, and lets go"


RECEIVER = """
import sys
from cuda_ipc_rig import FakeDevice, device_store
from kvtransfer_rig import FORMAT
from pdmesh.kvtransfer.cuda_ipc import CudaIpcListener
from pdmesh.kvtransfer.receiver import TransferReceiver
receiver = TransferReceiver(device_store(8, 2, 4, 3), [CudaIpcListener(FORMAT, FakeDevice())])
receiver.start()
receiver.expect("a", 1, (1, 2), 0, 2)
print(receiver.addresses[0][1], flush=True)
sys.stdin.read()
"""


@contextmanager
def child_receiver():
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", RECEIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path("tests")},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child, child.stdout.readline().decode().strip()
    finally:
        child.kill()
        child.wait(PATIENCE)
        child.stdin.close()
        child.stdout.close()


def test_a_dead_receivers_pool_is_copied_to_until_the_copies_end_and_then_unmapped():
    with cuda_ipc_rig() as rig, child_receiver() as (child, address):
        rig.addresses = (("cuda_ipc", address),)
        rig.device.held = True
        transfer = rig.sender.open(rig.lease_message("a", 0, 2))
        (link,) = rig.sender._links.values()
        transfer.push_pages(0, 1, [0])
        rig.device.wait_queued(2)
        child.kill()
        child.wait(PATIENCE)
        until(lambda: link.closed, "the end of the receiver was never noticed")
        assert rig.device.opened, "the memory is there for as long as it is mapped"
        assert not transfer.settled
        rig.device.let_go()
        with pytest.raises(TransferFailed, match="connection to the receiver was lost"):
            transfer.finish(fin_of(transfer))
        link.join(PATIENCE)
        assert rig.device.opened == Counter()
        assert not CudaIpcDialer(rig.device).reaches(address)


def test_a_receiver_that_comes_again_is_mapped_again():
    with cuda_ipc_rig() as rig:
        for _ in range(2):
            with child_receiver() as (_, address):
                rig.addresses = (("cuda_ipc", address),)
                transfer = rig.sender.open(rig.lease_message("a", 0, 2))
                transfer.push_pages(0, 2, [0, 1])
                rig.finish(transfer)
            rig.sender._tombstones.clear()
            until(lambda: not rig.sender._links, "the connection outlived the receiver")
        assert rig.device.opens == 2


# ---- which transport -------------------------------------------------------------------------


def test_two_connections_to_a_pool_share_its_mapping_and_each_lets_go_of_its_own():
    with cuda_ipc_rig() as rig:
        other = TransferSender(FORMAT, [CudaIpcDialer(rig.device)], rig.source)
        one, two = rig.sender.open(rig.lease("a", (3,))), other.open(rig.lease("b", (4,)))
        assert list(rig.device.opened.values()) == [2]
        (link,) = other._links.values()
        two.push_pages(0, 1, [1])
        rig.finish(two)
        other.close()
        link.join(PATIENCE)
        assert list(rig.device.opened.values()) == [1]
        one.push_pages(0, 1, [0])
        rig.finish(one)


def left_out(caplog):
    """Reasons in the log for transports that were left out."""
    found = [record for record in caplog.records if record.getMessage() == "transport_left_out"]
    return [record.fields["reason"] for record in found]


def tcp_too(rig):
    """The target offered over TCP besides."""
    receiver = TransferReceiver(
        rig.target, [CudaIpcListener(FORMAT, FakeDevice("GPU-1")), TcpListener(FORMAT)]
    )
    receiver.start()
    rig.addresses = receiver.addresses
    return receiver


def test_devices_that_cannot_map_each_other_use_the_next_transport_and_say_so_once(caplog):
    device = FakeDevice("GPU-0")
    with cuda_ipc_rig(device=device, dialers=[CudaIpcDialer(device), TcpDialer()]) as rig:
        receiver = tcp_too(rig)
        with caplog.at_level(logging.WARNING):
            for number in range(3):
                receiver.expect(str(number), 1, (number,), 0, 2)
                transfer = rig.sender.open(rig.lease_message(str(number), 0, 1))
                assert transfer.transport == "tcp"
                transfer.push_pages(0, 1, [0])
                rig.finish(transfer)
        assert left_out(caplog) == [
            "cuda_ipc cannot map the pages of the decode worker of this host:"
            " GPU-0 cannot reach the memory of GPU-1"
        ]
        receiver.close()


def test_devices_that_reach_each_other_map_each_other():
    device, other = FakeDevice("GPU-0", reaches=("GPU-1",)), FakeDevice("GPU-1")
    with cuda_ipc_rig(device=device, other=other) as rig:
        transfer = rig.sender.open(rig.lease(pages=(3,)))
        transfer.push_pages(0, 1, [0])
        rig.finish(transfer)
        assert torch.equal(rig.target.tensor[3], rig.source.tensor[0])


@pytest.mark.parametrize("call", ["open", "lane"])
def test_without_another_transport_the_reason_is_the_error(call):
    with cuda_ipc_rig() as rig:
        rig.device.fails.add(call)
        for _ in range(2):
            with pytest.raises(TransferFailed, match=f"cuda_ipc cannot .*: {call} failed"):
                rig.sender.open(rig.lease_message("a", 0, 1))
        assert rig.device.opened == Counter()


def test_a_handle_of_a_pool_that_is_gone_is_refused(monkeypatch):
    with child_receiver() as (child, address):
        device = FakeDevice()
        real = FakeDevice.open

        def late(self, pool):
            child.kill()
            child.wait(PATIENCE)
            return real(self, pool)

        monkeypatch.setattr(FakeDevice, "open", late)
        sender = TransferSender(FORMAT, [CudaIpcDialer(device)], device_store(2, 2, 4, 3))
        with pytest.raises(TransferFailed, match="invalid resource handle"):
            sender.connect((("cuda_ipc", address),))
        assert device.opened == Counter()
        sender.close()


def test_a_sender_that_cannot_be_watched_is_refused(monkeypatch, caplog):
    monkeypatch.setattr("pdmesh.kvtransfer.cuda_ipc.peer_pid", lambda sock: 0)
    with cuda_ipc_rig() as rig:
        for _ in range(2):
            with pytest.raises(TransferFailed, match="in a PID namespace that it cannot see"):
                rig.sender.open(rig.lease_message("a", 0, 1))
        assert rig.device.opens == 0
    assert len(left_out(caplog)) == 1


def test_pages_that_cannot_be_exported_are_not_offered():
    device = FakeDevice()
    device.fails.add("export")
    with pytest.raises(ConfigError, match="cuda_ipc cannot offer the pages: export failed"):
        CudaIpcRig(device=device)


# ---- checks, and what a stream does not do ---------------------------------------------------


@pytest.mark.parametrize(("every", "page"), [(1, 0), (64, 2)])
def test_a_byte_that_changes_on_the_device_fails_the_transfer(every, page, monkeypatch):
    real = CudaIpcLink._send

    def send(link, frames):
        rig.target.tensor[(3, 1, 5)[page], 1, 0, 0] += 1
        real(link, frames)

    with cuda_ipc_rig(check_every=every) as rig:
        transfer = rig.sender.open(rig.lease())
        monkeypatch.setattr(CudaIpcLink, "_send", send)
        transfer.push_pages(0, 3, [0, 1, 2])
        with pytest.raises(TransferFailed, match=f"checksum of page {page}, layer 1 is wrong"):
            transfer.finish(fin_of(transfer))
        wait_phase(rig, Phase.FREE)


@pytest.mark.parametrize("what", ["opening", "fin", "drained"])
def test_a_repeated_control_message_changes_nothing(what):
    with cuda_ipc_rig() as rig:
        lease = rig.lease(pages=(3, 1))
        transfer = rig.sender.open(lease)
        (link,) = rig.sender._links.values()
        if what == "opening":
            link.send(Open("a", 1))
        transfer.push_pages(0, 2, [0, 1])
        rig.finish(transfer)
        link.send(FinMessage(fin_of(transfer)) if what == "fin" else Drained("a", 1))
        again = rig.sender.open(rig.lease("b", (5,)))
        again.push_pages(0, 1, [2])
        rig.finish(again)
        assert rig.arrived(lease, (3, 1))
        assert rig.wait("a").num_writes == 4


@pytest.mark.parametrize("kind", [FinMessage, Abort, Drained])
def test_a_lost_control_message_ends_in_failure_and_free_pages(kind, monkeypatch):
    real, lost = CudaIpcLink.send, []

    def send(link, message):
        if isinstance(message, kind) and not lost:
            lost.append(message)
        else:
            real(link, message)

    monkeypatch.setattr(CudaIpcLink, "send", send)
    calls = []
    with cuda_ipc_rig(call_later=lambda seconds, call: calls.append(call)) as rig:
        transfer = rig.sender.open(rig.lease(pages=(3, 1)))
        transfer.push_pages(0, 1, [0])
        if kind is FinMessage:
            transfer.push_pages(1, 1, [1])
            with pytest.raises(TransferFailed, match="no acknowledgement"):
                transfer.finish(fin_of(transfer), timeout=0.05)
        else:
            transfer.abort("cancelled")
        assert lost
        if not rig.receiver.cancel("a"):
            for call in calls:
                call()
            assert rig.drained.wait(PATIENCE)
        assert rig.receiver.phase("a") is None

"""Transfers through shared memory: one copy, and pages that nobody takes from under a writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from child_path import python_path
from kvtransfer_rig import FORMAT, PATIENCE, Rig, fin_of, wide_format

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.checks import checked_units
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.shm import ShmDialer, ShmListener
from pdmesh.kvtransfer.shm_link import ShmLink
from pdmesh.kvtransfer.tcp import TcpListener
from pdmesh.kvtransfer.transport import Abort, Destination, Drained, FinMessage, Open, Write
from pdmesh.wire.codec import encode
from pdmesh.wire.errors import ConfigError, Incompatible, TransferFailed

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def shm_rig(page_format=FORMAT, check_every=1, **options):
    drained = threading.Event()
    rig = Rig(
        ShmListener(page_format, check_every),
        page_format,
        on_drained=lambda lease_id: drained.set(),
        **options,
    )
    rig.drained = drained
    try:
        yield rig
    finally:
        rig.end()


def wait_phase(rig: Rig, phase: Phase | None, lease_id: str = "a") -> None:
    pause, end = threading.Event(), time.monotonic() + PATIENCE
    while rig.receiver.phase(lease_id) is not phase:
        assert time.monotonic() < end, f"the lease stays {rig.receiver.phase(lease_id)}"
        pause.wait(0.005)


@pytest.fixture
def held(monkeypatch):
    """Copies that wait, after the first unit of a block, until they are let go."""

    class Held:
        begun, let_go = threading.Event(), threading.Event()

    real = ShmLink._put

    def put(link, write, place):
        part = replace(write, pieces=tuple(p[: len(p) // write.layers] for p in write.pieces[:1]))
        real(link, replace(part, pages=1, layers=1), place)
        Held.begun.set()
        assert Held.let_go.wait(PATIENCE)
        return real(link, write, place)

    monkeypatch.setattr(ShmLink, "_put", put)
    yield Held
    Held.let_go.set()


def test_pages_arrive_whole_through_shared_memory():
    with shm_rig() as rig:
        lease = rig.lease(pages=(3, 1, 5), cached=1)
        transfer = rig.sender.open(lease)
        rig.push_all(transfer)
        rig.finish(transfer, token=11)
        assert (rig.wait().first_tokens, rig.wait().num_writes) == ((11,), 6)
        assert rig.arrived(lease, (3, 1, 5))
        assert rig.receiver.cancel("a")


def test_no_pages_at_all_still_conclude():
    with shm_rig() as rig:
        rig.finish(rig.sender.open(rig.lease(pages=(), cached=2)))
        assert rig.wait().num_writes == 0


def test_a_cancelled_lease_keeps_its_pages_until_the_sender_has_drained(held):
    with shm_rig() as rig:
        transfer = rig.sender.open(rig.lease(pages=(3,)))
        transfer.push_pages(0, 1, [0])
        assert held.begun.wait(PATIENCE)
        assert not rig.receiver.cancel("a"), "the sender is in the middle of a copy"
        assert rig.receiver.phase("a") is Phase.QUARANTINED
        assert not rig.drained.is_set()
        held.let_go.set()
        assert rig.drained.wait(PATIENCE)
        rig.target.tensor.fill_(5.0)
        with pytest.raises(TransferFailed, match="refused"):
            transfer.finish(fin_of(transfer))
        assert bool((rig.target.tensor == 5.0).all()), "a write landed after DRAINED"


def test_a_sender_that_closes_in_a_copy_ends_the_connection_after_it(held):
    with shm_rig() as rig:
        transfer = rig.sender.open(rig.lease(pages=(3,)))
        (link,) = rig.sender._links.values()
        transfer.push_pages(0, 1, [0])
        assert held.begun.wait(PATIENCE)
        with link._copying:
            closer = threading.Thread(target=link.close, args=("cut",))
            closer.start()
            closer.join(0.2)
            assert closer.is_alive(), "the connection ends while a copy is under way"
            assert rig.receiver.phase("a") is Phase.FILLING
        held.let_go.set()
        closer.join(PATIENCE)
        with pytest.raises(TransferFailed, match="connection was lost"):
            rig.wait()
        rig.target.tensor.fill_(5.0)
        assert transfer.settled or not link.join()
        assert bool((rig.target.tensor == 5.0).all())


def test_a_receiver_that_closes_waits_for_the_senders_end(held):
    with shm_rig() as rig:
        transfer = rig.sender.open(rig.lease(pages=(3,)))
        transfer.push_pages(0, 1, [0])
        assert held.begun.wait(PATIENCE)
        assert not rig.receiver.cancel("a")
        (theirs,) = rig.receiver._writers
        (mine,) = rig.sender._links.values()
        with mine._copying:
            theirs.close("fenced")
            assert not rig.drained.wait(0.2), "a fence of this side stops no copy of the other"
        held.let_go.set()
        assert rig.drained.wait(PATIENCE)


CHILD = """
import sys, threading, torch
from kvtransfer_rig import FORMAT
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.wire.codec import decode
from pdmesh.wire.messages import Lease
lease = decode(bytes.fromhex(sys.argv[1]), Lease)
transfer = TransferSender(FORMAT).open(lease)
transfer.push(0, 0, torch.ones(4, 3))
with transfer._changed:
    transfer._changed.wait_for(lambda: transfer._state.in_flight == 0)
print("pushed", flush=True)
sys.stdin.read()
"""


@contextmanager
def child_sender(rig: Rig):
    """A process that has pushed one layer of the first page and then waits."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, encode(rig.lease(pages=(4, 5))).hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path("tests")},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"pushed\n"
        yield child
    finally:
        child.kill()
        child.wait(PATIENCE)
        child.stdin.close()
        child.stdout.close()


def test_a_killed_sender_frees_its_pages_by_the_end_of_its_connection():
    with shm_rig() as rig, child_sender(rig) as child:
        assert bool((rig.target.tensor[4, 0] == 1.0).all()), "written by the other process"
        child.send_signal(signal.SIGKILL)
        with pytest.raises(TransferFailed, match="connection was lost after 1 of 4 writes"):
            rig.wait()
        assert rig.receiver.phase("a") is Phase.FREE


def test_a_stopped_sender_keeps_its_pages_in_quarantine_through_reminder_and_fence():
    later = []

    def call_later(seconds, call):
        later.append((seconds, call))

    with shm_rig(call_later=call_later) as rig, child_sender(rig) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert not rig.receiver.cancel("a")
        assert [seconds for seconds, _ in later] == [2.0, 4.0]
        for _, call in later:
            call()
        assert not rig.drained.wait(0.2)
        assert rig.receiver.phase("a") is Phase.QUARANTINED
        child.send_signal(signal.SIGCONT)
        assert rig.drained.wait(PATIENCE), "it runs again, and lets go"


def test_a_stopped_sender_that_is_killed_frees_its_pages():
    with shm_rig() as rig, child_sender(rig) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert not rig.receiver.cancel("a")
        child.send_signal(signal.SIGKILL)
        assert rig.drained.wait(PATIENCE)


def test_nothing_with_a_name_is_left_by_a_killed_receiver():
    before = set(os.listdir("/dev/shm"))
    script = """
import sys, torch
from kvtransfer_rig import FORMAT
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.shm import ShmListener
store = LatentStore(8, 2, 4, 3, torch.float32, shared=True)
receiver = TransferReceiver(store, [ShmListener(FORMAT)])
receiver.start()
receiver.expect("a", 1, (1, 2), 0, 2)
print(receiver.addresses[0][1], flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path("tests")},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with shm_rig() as rig:
        address = child.stdout.readline().decode().strip()
        rig.addresses = (("shm", address),)
        transfer = rig.sender.open(rig.lease_message("a", 0, 2))
        transfer.push_pages(0, 1, [0])
        child.kill()
        child.wait(PATIENCE)
        with pytest.raises(TransferFailed, match="connection to the receiver was lost"):
            transfer.finish(fin_of(transfer))
        assert not ShmDialer().reaches(address)
    child.stdin.close()
    child.stdout.close()
    assert set(os.listdir("/dev/shm")) == before


def test_a_byte_that_changes_under_way_fails_the_transfer(monkeypatch):
    real = ShmLink._put

    def put(link, write, place):
        crcs = real(link, write, place)
        link.pool[place.page_ids[0] * 2 * FORMAT.page_layer_bytes + 7] ^= 1
        return crcs

    monkeypatch.setattr(ShmLink, "_put", put)
    with shm_rig() as rig:
        transfer = rig.sender.open(rig.lease())
        transfer.push_pages(0, 3, [0, 1, 2])
        with pytest.raises(TransferFailed, match="checksum of page 0, layer 0 is wrong"):
            transfer.finish(fin_of(transfer))
        with pytest.raises(TransferFailed, match="checksum"):
            rig.wait()
        wait_phase(rig, Phase.FREE)


def test_a_sample_of_the_units_and_all_of_the_last_page_carry_checksums():
    place = Destination(10, tuple(range(7)), 61)
    block = Write("a", 1, 12, 5, pages=5, layers=50)
    chosen = list(checked_units(block, place, 64))
    numbers = [(2 + page) * 61 + 5 + layer for page, layer in chosen]
    early = [n for n in numbers if n < 6 * 61]
    assert early == [n for n in range(2 * 61, 6 * 61) if n % 64 == 0 and 5 <= n % 61 < 55]
    assert [n for n in numbers if n >= 6 * 61] == list(range(6 * 61 + 5, 6 * 61 + 55))
    assert len(list(checked_units(block, place, 1))) == 250


def test_a_sampled_check_sees_a_change_in_the_last_page(monkeypatch):
    real = ShmLink._put

    def put(link, write, place):
        crcs = real(link, write, place)
        link.pool[(place.page_ids[-1] * 2 + 1) * FORMAT.page_layer_bytes] ^= 1
        return crcs

    monkeypatch.setattr(ShmLink, "_put", put)
    with shm_rig(check_every=64) as rig:
        transfer = rig.sender.open(rig.lease())
        transfer.push_pages(0, 3, [0, 1, 2])
        with pytest.raises(TransferFailed, match="checksum of page 2, layer 1 is wrong"):
            transfer.finish(fin_of(transfer))
        wait_phase(rig, Phase.FREE)


@pytest.mark.parametrize("what", ["opening", "fin", "drained"])
def test_a_repeated_control_message_changes_nothing(what):
    with shm_rig() as rig:
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
    """A stream loses none; were one lost, deadlines, reminders and a fence still end it all."""
    real, lost = ShmLink.send, []

    def send(link, message):
        if isinstance(message, kind) and not lost:
            lost.append(message)
        else:
            real(link, message)

    monkeypatch.setattr(ShmLink, "send", send)
    calls = []
    with shm_rig(call_later=lambda seconds, call: calls.append(call)) as rig:
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


def test_the_connection_is_cut_after_half_of_the_layers():
    with shm_rig() as rig:
        transfer = rig.sender.open(rig.lease(pages=(3, 1)))
        rig.push(transfer, 0, 0)
        rig.push(transfer, 0, 1)
        rig.push(transfer, 1, 0)
        (link,) = rig.sender._links.values()
        with transfer._changed:
            assert transfer._changed.wait_for(lambda: not transfer._state.in_flight, PATIENCE)
        link.close("cut")
        with pytest.raises(TransferFailed, match="connection was lost after 3 of 4 writes"):
            rig.wait()
        assert rig.receiver.salvage("a") == 1
        assert torch.equal(rig.target.tensor[3], rig.source.tensor[0])


def test_another_host_or_user_is_not_reached():
    with shm_rig() as rig:
        ((_, address),) = rig.addresses
        boot, user, token = address.split(":")
        dialer = ShmDialer()
        assert dialer.reaches(address)
        assert not dialer.reaches(f"{boot[::-1]}:{user}:{token}")
        assert not dialer.reaches(f"{boot}:{int(user) + 1}:{token}")
        assert not dialer.reaches(f"{boot}:{user}:{token[::-1]}")


def test_memory_that_cannot_be_mapped_leaves_the_transfer_to_the_next_transport(monkeypatch):
    def refused(fds, size):
        raise TransferFailed("no memory to map it")

    monkeypatch.setattr("pdmesh.kvtransfer.shm._mapped", refused)
    rig = Rig(ShmListener(FORMAT))
    receiver = TransferReceiver(rig.target, [ShmListener(FORMAT), TcpListener(FORMAT)])
    receiver.start()
    try:
        receiver.expect("a", 1, (3,), 0, 2)
        rig.addresses = receiver.addresses
        transfer = rig.sender.open(rig.lease_message("a", 0, 1))
        transfer.push_pages(0, 1, [0])
        rig.finish(transfer)
        assert [name for name, _ in rig.sender._links] == ["tcp"]
    finally:
        rig.close()
        receiver.close()


def test_another_page_format_is_refused_at_the_handshake_naming_both():
    with shm_rig() as rig:
        ((_, address),) = rig.addresses
        with pytest.raises(Incompatible, match="latent_width is 3 here and 8 there"):
            ShmDialer().dial(address, wide_format(8), rig.sender)


def test_pages_that_are_not_shared_are_not_offered():
    store = LatentStore(8, 2, 4, 3, torch.float32)
    receiver = TransferReceiver(store, [ShmListener(FORMAT)])
    with pytest.raises(ConfigError, match="not in shared memory"):
        receiver.start()
    receiver.close()


def test_an_opening_without_an_answer_fails_the_transfer(monkeypatch):
    monkeypatch.setattr("pdmesh.kvtransfer.transfer.GRANT_SECONDS", 0.05)
    with shm_rig() as rig:
        lease = rig.lease()
        monkeypatch.setattr(ShmLink, "_deliver", lambda link, message: None)
        transfer = rig.sender.open(lease)
        assert transfer.failure == "no answer to the opening"
        transfer.push_pages(0, 1, [0])
        with pytest.raises(TransferFailed):
            rig.wait()
        wait_phase(rig, Phase.FREE)

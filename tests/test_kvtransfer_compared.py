"""Receivers of pages on a device: notices are compared together, and believed when they agree.

Over CUDA IPC and NVSHMEM, whose devices are shared memory here (``cuda_ipc_rig``, ``nvshmem_rig``).
"""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext

import pytest
from cuda_ipc_rig import cuda_ipc_rig
from kvtransfer_rig import PATIENCE, fin_of
from nvshmem_rig import nvshmem_rig
from test_kvtransfer_cuda_ipc import arrived, until
from test_kvtransfer_shm import wait_phase

from pdmesh.kvtransfer import compared_link, nvshmem_link
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.wire.errors import TransferFailed


@pytest.fixture(params=[cuda_ipc_rig, nvshmem_rig], ids=["cuda_ipc", "nvshmem"])
def new_rig(request):
    return request.param


class Held:
    """Reads of the device: how many units each asked for; none ends before ``gate`` is open."""

    def __init__(self, rig, monkeypatch):
        self.reads, self.busy, self.gate = [], threading.Event(), threading.Event()
        read_units = rig.target.read_units

        def reading(units):
            self.reads.append(len(units))
            self.busy.set()
            assert self.gate.wait(PATIENCE)
            return read_units(units)

        monkeypatch.setattr(rig.target, "read_units", reading)


@pytest.mark.parametrize("then", ["stays", "closes"])
def test_notices_that_came_meanwhile_are_compared_by_one_read_of_the_device(
    new_rig, then, monkeypatch
):
    """And what came before the end of the stream counts, though it is compared after it."""
    with new_rig(check_every=1) as rig:
        held = Held(rig, monkeypatch)
        lease = rig.lease(pages=(3, 1, 5))
        transfer = rig.sender.open(lease)
        transfer.push_pages(0, 1, [0])
        assert held.busy.wait(PATIENCE)
        transfer.push_pages(1, 1, [1])
        transfer.push_layer(rig.source, 2, 1, [2])
        transfer.push_layer(rig.source, 2, 0, [2])
        transfer.start_finish(fin_of(transfer))
        (link,) = rig.receiver._writers
        until(lambda: link._came.qsize() == 4, "the notices and the FIN did not come")
        assert arrived(rig) == 0
        if then == "closes":
            rig.sender.close()
            until(lambda: link.closed, "the end of the stream was not seen")
        held.gate.set()
        assert rig.wait().num_writes == 6
        assert held.reads == [2, 4]
        assert rig.arrived(lease, (3, 1, 5))
        assert rig.receiver.cancel("a")


def test_no_more_is_read_of_the_device_at_a_time_than_is_bounded(new_rig, monkeypatch):
    with new_rig(check_every=1) as rig:
        size = rig.target.page_layer_bytes
        monkeypatch.setattr(compared_link, "COMPARED_BYTES", 3 * size)
        held = Held(rig, monkeypatch)
        transfer = rig.sender.open(rig.lease(pages=(3, 1, 5, 0)))
        transfer.push_pages(0, 1, [0])
        assert held.busy.wait(PATIENCE)
        for page in (1, 2, 3):
            transfer.push_pages(page, 1, [page])
        (link,) = rig.receiver._writers
        until(lambda: link._came.qsize() == 3, "the notices did not come")
        held.gate.set()
        rig.finish(transfer)
        assert held.reads == [2, 4, 2]


def test_notices_are_read_beside_what_the_device_computes(new_rig, monkeypatch):
    with new_rig() as rig:
        inside, seen, read_units = threading.local(), [], rig.target.read_units

        class Aside(nullcontext):
            def __enter__(self):
                inside.now = True

            def __exit__(self, *_):
                inside.now = False

        def reading(units):
            seen.append((inside.now, threading.current_thread().name.startswith("kv-compare-")))
            return read_units(units)

        monkeypatch.setattr(rig.device, "aside", Aside)
        monkeypatch.setattr(rig.target, "read_units", reading)
        transfer = rig.sender.open(rig.lease(pages=(3,)))
        transfer.push_pages(0, 1, [0])
        rig.finish(transfer)
        assert seen == [(True, True)]


def test_a_device_that_cannot_be_read_ends_the_connection_and_frees_the_pages(new_rig, monkeypatch):
    with new_rig() as rig:
        transfer = rig.sender.open(rig.lease(pages=(3,)))

        def fails(units):
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(rig.target, "read_units", fails)
        transfer.push_pages(0, 1, [0])
        with pytest.raises(TransferFailed):
            transfer.finish(fin_of(transfer))
        wait_phase(rig, Phase.FREE)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_unit_that_differs_is_told_and_the_blocks_compared_with_it_are_not(
    new_rig, wrong, monkeypatch
):
    with new_rig(check_every=1) as rig:
        held = Held(rig, monkeypatch)
        good, bad = (rig.sender.open(rig.lease(name, pages)) for name, pages in LEASES)
        good.push_pages(0, 1, [0])
        assert held.busy.wait(PATIENCE)
        bad.push_pages(0, 3, [1, 2, 3])
        good.push_pages(1, 1, [4])
        (link,) = rig.receiver._writers
        until(lambda: link._came.qsize() == 2, "the notices did not come")
        rig.target.tensor[dict(LEASES)["bad"][wrong], 1, 0, 0] += 1
        held.gate.set()
        with pytest.raises(TransferFailed, match=f"checksum of page {wrong}, layer 1 is wrong"):
            bad.finish(fin_of(bad))
        rig.finish(good)
        assert rig.wait("good").num_writes == 4
        assert held.reads[:2] == [2, 8]
        wait_phase(rig, Phase.FREE, "bad")


LEASES = (("good", (3, 1)), ("bad", (5, 0, 2)))


@pytest.mark.parametrize("seed", range(4))
def test_random_hand_offs_arrive_whole(new_rig, seed):
    rng = random.Random(seed)
    with new_rig(check_every=rng.choice((1, 3, 64))) as rig:
        pages = rng.sample(range(8), 8)
        chosen = {"a": pages[:3], "b": pages[3:5], "c": pages[5:]}
        leases = {name: rig.lease(name, some) for name, some in chosen.items()}
        transfers = {name: rig.sender.open(lease) for name, lease in leases.items()}
        work = [(name, layer) for name in chosen for layer in range(2)]
        for name, layer in rng.sample(work, len(work)):
            sources = list(range(len(chosen[name])))
            transfers[name].push_layer(rig.source, 0, layer, sources)
        for name in rng.sample(list(chosen), 3):
            rig.finish(transfers[name])
            assert rig.arrived(leases[name], chosen[name])


def test_places_are_told_when_the_receivers_device_is_through_with_them(new_rig):
    with new_rig() as rig:
        rig.device.gate.clear()
        lease, opened = rig.lease(pages=(3,)), []
        opener = threading.Thread(target=lambda: opened.append(rig.sender.open(lease)))
        opener.start()
        rig.wait_opened()
        (link,) = rig.sender._links.values()
        assert link._places == {}
        rig.device.gate.set()
        opener.join(PATIENCE)
        assert rig.device.settled == 1
        opened[0].push_pages(0, 1, [0])
        rig.finish(opened[0])


# ---- NVSHMEM: a notice may come before its pieces ---------------------------------------------


def held_hand_off(rig):
    """A transfer, its link at the receiver: pages are put and told of, and have not landed yet."""
    rig.device.held = True
    transfer = rig.sender.open(rig.lease(pages=(3, 1)))
    (link,) = rig.receiver._writers
    transfer.push_pages(0, 2, [0, 1])
    assert rig.device.asked.acquire(timeout=PATIENCE)
    return transfer, link


@pytest.mark.parametrize("then", ["stays", "closes"])
def test_nothing_is_read_or_announced_before_its_pieces_have_landed(then, monkeypatch):
    with nvshmem_rig() as rig:
        held = Held(rig, monkeypatch)
        held.gate.set()
        transfer, link = held_hand_off(rig)
        transfer.start_finish(fin_of(transfer))
        until(lambda: link._came.qsize() == 1, "the FIN did not come")
        assert held.reads == []
        assert arrived(rig) == 0
        if then == "closes":
            rig.sender.close()
            until(lambda: link.closed, "the end of the stream was not seen")
        rig.device.let_go()
        assert rig.wait().num_writes == 4
        assert held.reads == [4]
        assert rig.receiver.cancel("a")


def test_pieces_that_never_land_end_the_connection(monkeypatch):
    monkeypatch.setattr(nvshmem_link, "_LANDED_SECONDS", 0.05)
    with nvshmem_rig() as rig:
        transfer, link = held_hand_off(rig)
        with pytest.raises(TransferFailed):
            transfer.finish(fin_of(transfer), timeout=PATIENCE)
        assert link._reason == "the pieces of a write did not land"
        wait_phase(rig, Phase.FREE)


def test_a_receiver_that_closes_does_not_wait_for_pieces_to_land(monkeypatch):
    monkeypatch.setattr(nvshmem_link, "_LANDED_SECONDS", 2 * PATIENCE)
    with nvshmem_rig() as rig:
        _, link = held_hand_off(rig)
        link.close("the receiver is closing")
        wait_phase(rig, Phase.FREE)
        assert arrived(rig) == 0

"""What ends a transfer early, and that nothing lands after it: fences, timers, credits, salvage."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from cuda_ipc_rig import cuda_ipc_rig
from kvtransfer_rig import FORMAT, PATIENCE, Proxy, Rig, fin_of, wide_format

from pdmesh.kvtransfer.alarms import Alarms
from pdmesh.kvtransfer.faults import Faults
from pdmesh.kvtransfer.frames import MAX_BLOCK_BYTES
from pdmesh.kvtransfer.loopback import LoopbackDialer, LoopbackListener
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.kvtransfer.shm import ShmListener
from pdmesh.kvtransfer.tcp import TcpListener
from pdmesh.wire.errors import InternalError, TransferFailed

PAGE = FORMAT.page_layer_bytes * FORMAT.num_layers


@contextmanager
def rig_of(listener, page_format=FORMAT, proxy=None, **options):
    if proxy is not None:
        options["route"] = proxy.route
    rig = Rig(listener, page_format, **options)
    try:
        yield rig
    finally:
        rig.close()
        if proxy is not None:
            proxy.close()
        assert rig.problems() == []


@pytest.fixture(params=["tcp", "shm", "cuda_ipc", "loopback"])
def anywhere(request):
    if request.param == "cuda_ipc":
        return lambda page_format=FORMAT: cuda_ipc_rig(page_format=page_format)
    make = {"tcp": TcpListener, "shm": ShmListener, "loopback": LoopbackListener}[request.param]
    return lambda page_format=FORMAT: rig_of(make(page_format), page_format)


@pytest.mark.parametrize("width", [3, MAX_BLOCK_BYTES // 4 // 4 // 2 + 1])
def test_whole_pages_arrive_in_blocks_of_bounded_size(anywhere, width):
    """Two layers of the wider format do not fit one block."""
    fmt = FORMAT if width == 3 else wide_format(width)
    with anywhere(fmt) as rig:
        lease = rig.lease(pages=(3, 1, 5), cached=1)
        transfer = rig.sender.open(lease)
        transfer.push_pages(1, 3, [1, 2, 3])
        assert transfer.num_writes == 6
        rig.finish(transfer)
        assert rig.arrived(lease, (3, 1, 5))


def test_layers_of_several_pages_arrive_between_whole_pages_and_single_units(anywhere):
    with anywhere() as rig:
        lease = rig.lease(pages=(3, 1, 5, 0, 2))
        transfer = rig.sender.open(lease)
        transfer.push_layer(rig.source, 0, 1, [0, 1, 2])
        transfer.push_layer(rig.source, 0, 0, [0, 1, 2])
        transfer.push_pages(3, 1, [3])
        rig.push(transfer, 4, 1)
        rig.push(transfer, 4, 0)
        rig.finish(transfer)
        assert rig.arrived(lease, (3, 1, 5, 0, 2))


def test_pages_are_pushed_from_a_store_and_as_many_as_said(anywhere):
    with anywhere() as rig:
        transfer = rig.sender.open(rig.lease(pages=(1, 2)))
        with pytest.raises(InternalError, match="2 pages to push, 1 page ids"):
            transfer.push_pages(0, 2, [0])
        with pytest.raises(InternalError, match="page 1 is not among"):
            transfer.push_pages(1, 2, [0, 1])
        transfer.push_pages(0, 2, [4, 5])
        with pytest.raises(InternalError, match="pushed before"):
            transfer.push_pages(1, 1, [5])
        rig.finish(transfer)
        assert torch.equal(rig.target.tensor[[1, 2]], rig.source.tensor[[4, 5]])


def test_no_byte_lands_after_a_cancel_in_the_middle_of_a_block():
    """The proxy lets half of the block through; the lease ends; then comes the rest."""
    fmt = wide_format(1 << 14)
    half = fmt.page_layer_bytes
    passed = threading.Event()

    def change(offset: int, data: bytearray) -> bytearray:
        if offset > half and not passed.is_set():
            passed.set()
            proxy.open_gate.clear()
            proxy.open_gate.wait()
        return data

    proxy = Proxy(change)
    with rig_of(TcpListener(fmt), fmt, proxy) as rig:
        transfer = rig.sender.open(rig.lease(pages=(2, 3)))
        transfer.push_pages(0, 2, [0, 1])
        assert passed.wait(PATIENCE)
        assert rig.receiver.cancel("a"), "the fence of this transport is immediate"
        rig.target.tensor.fill_(5.0)
        proxy.release()
        with pytest.raises(TransferFailed):
            rig.finish(transfer)
        assert bool((rig.target.tensor == 5.0).all())
        rig.lease("b", (6,))
        after = rig.sender.open(rig.lease_message("b", 0, 1))
        after.push_pages(0, 1, [4])
        rig.finish(after)
        assert torch.equal(rig.target.tensor[6], rig.source.tensor[4]), "the stream is in step"


def test_a_cancel_waits_for_the_bytes_that_are_just_landing():
    with rig_of(TcpListener(FORMAT)) as rig:
        rig.sender.open(rig.lease(pages=(2,)))
        rig.wait_opened()
        arrival = rig.receiver._arrivals["a"]
        inside, leave, safe = threading.Event(), threading.Event(), threading.Event()

        def receive(view: memoryview) -> int:
            inside.set()
            assert leave.wait(PATIENCE)
            view[:] = b"\x01" * len(view)
            return len(view)

        view = rig.target.views([2], 0, 1)[0]
        landing = threading.Thread(target=arrival.fill, args=(receive, view))
        landing.start()
        assert inside.wait(PATIENCE)
        canceller = threading.Thread(target=lambda: rig.receiver.cancel("a") and safe.set())
        canceller.start()
        assert not safe.wait(0.2), "called safe while bytes were landing"
        leave.set()
        assert safe.wait(PATIENCE)
        landing.join()
        canceller.join()
        assert arrival.fill(receive, view) is None


def test_a_repeated_block_does_not_touch_pages_that_have_arrived():
    listener = LoopbackListener(FORMAT, Faults(duplicate=frozenset({1})), manual=True)
    with rig_of(listener, dialers=[LoopbackDialer()]) as rig:
        lease = rig.lease(pages=(3, 1))
        transfer = rig.sender.open(lease)
        transfer.push_pages(0, 2, [0, 1])
        transfer.start_finish(fin_of(transfer))
        listener.run_until_idle()
        assert rig.arrived(lease, (3, 1))
        assert rig.receiver.dropped >= 1


def test_a_receiver_that_takes_nothing_bounds_what_is_under_way():
    fmt = wide_format(1 << 12)
    page = fmt.page_layer_bytes * fmt.num_layers
    listener = TcpListener(fmt, window_bytes=page)
    with rig_of(listener, fmt) as rig:
        lease = rig.lease(pages=tuple(range(8)))
        transfer = rig.sender.open(lease)
        (link,) = rig.sender._links.values()
        rig.wait_opened()
        most = []
        real = link._take_batch

        def take_batch():
            batch = real()
            most.append(link._uncredited)
            return batch

        link._take_batch = take_batch
        gate = rig.receiver._arrivals["a"]._gate
        with gate:
            for number in range(8):
                transfer.push_pages(number, 1, [number])
            with link._changed:
                assert link._changed.wait_for(lambda: link._uncredited >= page, PATIENCE)
                assert not link._changed.wait_for(lambda: link._uncredited > 2 * page, 0.2)
                assert link._queued_bytes >= 6 * page, "the rest waits at the sender"
        rig.finish(transfer)
        assert max(most) <= 2 * page
        assert rig.arrived(lease, range(8))


def one_sided(**options):
    calls = []
    listener = LoopbackListener(FORMAT, one_sided=True, manual=True)
    rig = Rig(
        listener,
        dialers=[LoopbackDialer()],
        call_later=lambda seconds, call: calls.append((seconds, call)),
        **options,
    )
    return rig, listener, calls


def test_a_quarantine_is_reminded_then_fenced_and_never_freed_by_time():
    drained = []
    rig, listener, calls = one_sided(on_drained=drained.append)
    transfer = rig.sender.open(rig.lease(pages=(3,)))
    transfer.push_pages(0, 1, [0])
    assert not rig.receiver.cancel("a")
    (remind_s, remind), (fence_s, fence) = calls
    assert (remind_s, fence_s) == (2.0, 4.0)
    remind()
    assert rig.receiver.phase("a") is Phase.QUARANTINED
    fence()
    assert rig.receiver.phase("a") is Phase.QUARANTINED, "only the closed connection frees"
    assert drained == []
    listener.run_until_idle()
    assert drained == ["a"]
    assert rig.receiver.phase("a") is None
    assert transfer.failure is not None
    rig.close()
    listener.run_until_idle()
    assert rig.problems() == []


def test_timers_of_a_quarantine_that_is_over_do_nothing():
    rig, listener, calls = one_sided()
    transfer = rig.sender.open(rig.lease(pages=(3,)))
    assert not rig.receiver.cancel("a")
    listener.run_until_idle()
    assert rig.receiver.phase("a") is None
    other = rig.sender.open(rig.lease("b", (3,)))
    for _, call in calls:
        call()
    other.push_pages(0, 1, [0])
    other.start_finish(fin_of(other))
    listener.run_until_idle()
    assert rig.receiver.phase("b") is Phase.COMPLETE, "the connection was left alone"
    assert transfer.settled
    rig.close()
    listener.run_until_idle()


def test_alarms_ring_in_order_and_not_after_close():
    now, rung, third = [0.0], [], threading.Event()
    alarms = Alarms(lambda: now[0])
    with alarms._changed:
        alarms.call_later(2.0, lambda: rung.append(2))
        alarms.call_later(1.0, lambda: rung.append(1))
        alarms.call_later(3.0, third.set)
        now[0] = 3.0
    assert third.wait(PATIENCE)
    assert rung == [1, 2]
    alarms.call_later(1e6, lambda: rung.append(3))
    alarms.close()
    alarms.call_later(0.0, lambda: rung.append(4))
    assert rung == [1, 2]


def test_leading_complete_pages_of_a_failed_lease_are_salvaged_once_nothing_can_land():
    rig, listener, _ = one_sided()
    transfer = rig.sender.open(rig.lease(pages=(3, 1, 5)))
    transfer.push_pages(0, 1, [0])
    rig.push(transfer, 1, 0)
    transfer.push_pages(2, 1, [2])
    while rig.receiver._arrivals["a"].state.num_arrived < 5:
        assert listener.deliver()
    transfer.start_abort("the prompt was cancelled")
    while rig.receiver.phase("a") is Phase.FILLING:
        assert listener.deliver()
    with pytest.raises(InternalError, match="quarantined, not free"):
        rig.receiver.salvage("a")
    listener.run_until_idle()
    assert rig.receiver.salvage("a") == 1
    assert torch.equal(rig.target.tensor[3], rig.source.tensor[0])
    assert rig.receiver.cancel("a")
    assert rig.receiver.salvage("a") == 1
    assert rig.receiver.salvage("nobody") == 0
    rig.close()
    listener.run_until_idle()


def test_nothing_is_salvaged_of_a_lease_in_which_a_checksum_was_wrong():
    listener = LoopbackListener(FORMAT, Faults(corrupt=frozenset({2})), manual=True)
    rig = Rig(listener)
    transfer = rig.sender.open(rig.lease(pages=(3, 1)))
    transfer.push_pages(0, 1, [0], rig.source)
    transfer.push_pages(1, 1, [1], rig.source)
    listener.run_until_idle()
    assert rig.receiver._arrivals["a"].state.complete_pages == 1
    assert rig.receiver.salvage("a") == 0
    assert rig.receiver.cancel("a")
    assert rig.receiver.salvage("a") == 0
    rig.close()

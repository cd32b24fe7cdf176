"""Runs of pages, blocks of layers and sampled units, held against what they stand for."""

from __future__ import annotations

import random
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cuda_ipc_rig import Ready, cuda_ipc_rig
from kvtransfer_rig import PATIENCE, wide_format
from test_kvtransfer_cuda_ipc import until

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer import blocks, transfer
from pdmesh.kvtransfer.blocks import freed, joined, parted
from pdmesh.kvtransfer.checks import checked_units
from pdmesh.kvtransfer.device_memory import copies, runs
from pdmesh.kvtransfer.frames import HEADER_BYTES, Credit, Kind, read_header
from pdmesh.kvtransfer.nvshmem_link import NvshmemLink
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.kvtransfer.protocol.units import block_bits
from pdmesh.kvtransfer.stream_link import SocketStream
from pdmesh.kvtransfer.transport import Abort, Destination, Drained, Open, Write
from pdmesh.wire.errors import InternalError

# ---- runs ------------------------------------------------------------------------------------


def pairs_of(found):
    return [
        (run.target + i * run.target_step, run.source + i * run.source_step)
        for run in found
        for i in range(run.length)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_pair_is_in_one_run(seed):
    rng = random.Random(seed)
    room = rng.choice((20, 60, 400))
    sources, targets = (tuple(rng.sample(range(room), rng.randint(1, 20))) for _ in range(2))
    least = min(len(sources), len(targets))
    sources, targets = sources[:least], targets[:least]
    found = runs(targets, sources)
    assert sorted(pairs_of(found)) == sorted(zip(targets, sources, strict=True))
    assert all(run.target_step > 0 and run.source_step > 0 for run in found)


@pytest.mark.parametrize(
    ("targets", "sources", "least"),
    [
        (range(5, 105), range(100), 1),
        (range(0, 200, 2), range(0, 500, 5), 1),
        (range(104, 4, -1), range(99, -1, -1), 1),
        (range(99, -1, -1), range(100), 100),
        ([*range(50), *range(70, 120)], range(100), 2),
        ([7], [9], 1),
        ([], [], 0),
    ],
)
def test_pages_in_steps_are_one_run(targets, sources, least):
    assert len(runs(tuple(targets), tuple(sources))) == least


@pytest.mark.parametrize("seed", range(20))
def test_copies_put_every_row_where_it_belongs(seed):
    rng = random.Random(seed)
    size, pitch = rng.choice(((3, 8), (8, 8), (1, 8)))
    ids = range(12)
    if rng.random() < 0.5:
        targets, sources = rng.sample(ids, 6), rng.sample(ids, 6)
    else:
        targets, sources = list(range(2, 8)), list(range(0, 12, 2))
    source = bytes(rng.randrange(1, 256) for _ in range(12 * pitch))
    target, wanted = bytearray(12 * pitch), bytearray(12 * pitch)
    for to, at in zip(targets, sources, strict=True):
        wanted[to * pitch : to * pitch + size] = source[at * pitch : at * pitch + size]
    for one in copies(0, 0, size, pitch, targets, sources):
        for row in range(one.rows):
            to, at = one.target + row * one.target_pitch, one.source + row * one.source_pitch
            target[to : to + one.size] = source[at : at + one.size]
    assert target == wanted


# ---- units -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_the_bits_of_a_block_are_those_of_its_units(seed):
    rng = random.Random(seed)
    num_layers = rng.choice((1, 2, 5, 61))
    page, pages, layers = rng.randrange(9), rng.randint(1, 9), rng.randint(1, num_layers)
    layer = rng.randint(0, num_layers - layers)
    bits = 0
    for p in range(page, page + pages):
        for unit in range(layer, layer + layers):
            bits |= 1 << p * num_layers + unit
    assert block_bits(num_layers, page, layer, pages, layers) == bits


@pytest.mark.parametrize("seed", range(60))
def test_the_checked_units_are_one_in_so_many_of_the_lease_and_all_of_its_last_page(seed):
    rng = random.Random(seed)
    num_layers, every = rng.choice((1, 2, 5, 61, 64)), rng.choice((1, 2, 3, 7, 64, 100))
    total = rng.randint(1, 300)
    first, stride = rng.randrange(5), rng.choice((1, 3))
    place = Destination(first, tuple(range(total)), num_layers, stride)
    at = rng.randrange(total)
    pages, layers = rng.randint(1, total - at), rng.randint(1, num_layers)
    layer = rng.randint(0, num_layers - layers)
    write = Write("a", 1, first + at * stride, layer, pages=pages, layers=layers)
    wanted = [
        (page, unit)
        for page in range(pages)
        for unit in range(layers)
        if ((at + page) * num_layers + layer + unit) % every == 0 or at + page == total - 1
    ]
    assert list(checked_units(write, place, every)) == wanted


# ---- blocks ----------------------------------------------------------------------------------


def write_of(store, layer, pages=(2, 0), lease="a", page=4, layers=1):
    held = replace(store.device_pages(pages, layer, layers), ready=(Ready(),))
    return Write(lease, 1, page, layer, pages=len(pages), layers=layers, device=held)


def test_layers_that_follow_each_other_are_one_block_that_waits_for_all_of_them():
    store = LatentStore(4, 6, 2, 3, torch.float32)
    parts = [write_of(store, 1), write_of(store, 2, layers=2), write_of(store, 4)]
    (one,) = joined(parts)
    assert (one.page, one.layer, one.pages, one.layers) == (4, 1, 2, 4)
    assert (one.device.layer, one.device.layers) == (1, 4)
    assert one.nbytes == sum(part.nbytes for part in parts)
    assert one.device.ready == tuple(part.device.ready[0] for part in parts)


def test_a_block_has_no_more_units_than_a_notice_can_name(monkeypatch):
    monkeypatch.setattr(blocks, "MOST_UNITS", 4)
    store = LatentStore(4, 6, 2, 3, torch.float32)
    found = joined([write_of(store, layer) for layer in range(5)])
    assert [(one.layer, one.layers) for one in found] == [(0, 2), (2, 2), (4, 1)]


@pytest.mark.parametrize(
    "between",
    [
        lambda store: write_of(store, 2, lease="b"),
        lambda store: write_of(store, 3),
        lambda store: write_of(store, 2, pages=(2, 1)),
        lambda store: write_of(store, 2, page=5),
        lambda store: write_of(LatentStore(4, 6, 2, 3, torch.float32), 2),
        lambda store: Write("a", 1, 4, 2, (memoryview(b"x"),) * 2, pages=2),
        lambda store: Open("a", 1),
        lambda store: Credit(1),
    ],
)
def test_what_does_not_go_on_stays_as_it_is_and_in_its_place(between):
    store = LatentStore(4, 6, 2, 3, torch.float32)
    first, other = write_of(store, 1), between(store)
    assert joined([first, other]) == [first, other]
    assert joined([other, first]) == [other, first]


def test_a_batch_is_cut_before_what_waits_for_something_else():
    store = LatentStore(4, 6, 2, 3, torch.float32)
    early, late = Ready(), Ready()

    def after(ready, layer, lease="a"):
        write = write_of(store, layer, lease=lease)
        return replace(write, device=replace(write.device, ready=ready))

    # Prompts of one step wait for the same event; what waits for none goes with what is before it.
    step = [after((early,), 4), after((early,), 4, "b"), Open("c", 1), after((), 5)]
    later = [after((late,), 0, "c"), Credit(1)]
    both = [after((late, early), 1, "c")]
    messages = step + later + both
    assert parted(messages) == [step, later, both]
    assert parted([Credit(1), Open("a", 1), *later]) == [[Credit(1), Open("a", 1)], later]
    assert parted([]) == []


def test_what_is_said_of_a_transfer_waits_for_its_own_writes_alone():
    store = LatentStore(4, 6, 2, 3, torch.float32)
    mine, other = write_of(store, 1), write_of(store, 0, lease="b")
    again = Drained(mine.lease_id, mine.generation + 1)
    end, before = Drained(mine.lease_id, mine.generation), Abort("b", other.generation, "no")
    assert freed([before, other, end, again]) == ([before, end, again], [other])
    assert freed([mine, other, end, before]) == ([], [mine, other, end, before])
    assert freed([end, mine]) == ([end], [mine])
    assert freed([]) == ([], [])


def test_pages_outside_of_the_store_are_not_handed_to_a_device():
    store = LatentStore(4, 6, 2, 3, torch.float32)
    for pages, layer, layers in (((0, 4), 0, 1), ((-1, 0), 0, 1), ((0,), 5, 2), ((0,), 6, 1)):
        with pytest.raises(InternalError, match="outside of the store"):
            store.device_pages(pages, layer, layers)


def test_units_are_taken_in_their_order_whether_or_not_they_touch():
    store = LatentStore(4, 6, 2, 3, torch.float32)
    store.tensor.copy_(torch.randn(store.tensor.shape))
    plain = {(page, layer): store.read(page, layer) for page in range(4) for layer in range(6)}
    store._bytes = None  # as if on a device
    for units in ([(1, 2)], [(1, 4), (1, 5), (2, 0)], [(3, 1), (0, 2), (3, 0)]):
        assert store.read_units(units) == [plain[unit] for unit in units]
    assert store.read_units([]) == []


def test_a_push_of_pages_in_a_row_is_one_copy_and_layers_that_wait_become_one_message():
    with cuda_ipc_rig(page_format=wide_format(3), check_every=64) as rig:
        rig.device.held = True
        rig.source.ready = Ready(happened=True)
        lease = rig.lease(pages=(2, 3, 4))
        push = rig.sender.open(lease)
        (mine,) = rig.sender._links.values()
        posted, post = [], mine._post
        mine._post = lambda batch: (posted.append(list(batch)), post(batch))
        with mine._changed:  # both layers are there before the link takes any
            push.push_layer(rig.source, 0, 0, [1, 2, 3])
            push.push_layer(rig.source, 0, 1, [1, 2, 3])
        rig.device.wait_queued(2)
        assert [len(batch) for batch in posted] == [2]
        (block, units) = rig.device.works()
        assert [(one.rows, one.size) for one in block.copies] == [(1, 3 * rig.source.page_bytes)]
        assert sum(one.size * one.rows for one in units.copies) == 3 * rig.source.page_layer_bytes
        rig.device.let_go()
        rig.finish(push)
        assert torch.equal(rig.target.tensor[2:5], rig.source.tensor[1:4])


@pytest.mark.parametrize("which", ["sender", "receiver"])
def test_an_abort_under_the_copies_of_several_layers_waits_for_all_of_them(which):
    """Their writes are one message then; as many have to be accounted for as were begun."""
    with cuda_ipc_rig(page_format=wide_format(3)) as rig:
        rig.device.held = True
        transfer = rig.sender.open(rig.lease(pages=(2, 3)))
        (mine,) = rig.sender._links.values()
        with mine._changed:
            for layer in (0, 1):
                transfer.push_layer(rig.source, 0, layer, [4])
        rig.device.wait_queued(2)
        if which == "sender":
            transfer.start_abort("cancelled")
        else:
            assert not rig.receiver.cancel("a"), "copies are under way"
            until(lambda: transfer.failure, "the sender never heard of it")
        transfer.push_layer(rig.source, 1, 0, [6])
        assert rig.receiver.phase("a") in (Phase.FILLING, Phase.QUARANTINED)
        assert not transfer.settled
        assert len(rig.device.works()) == 2
        rig.device.let_go()
        until(lambda: transfer.settled, "the abort never ended")
        until(lambda: rig.receiver.phase("a") in (Phase.FREE, None), "its pages stay")
        assert not mine.closed, "what was begun was never accounted for"


def test_a_layer_of_pages_in_steps_is_one_copy_of_rows():
    with cuda_ipc_rig() as rig:
        rig.device.held = True
        lease = rig.lease(pages=(7, 5, 3))
        push = rig.sender.open(lease)
        push.push_layer(rig.source, 0, 1, [6, 3, 0])
        rig.device.wait_queued(2)
        (copied,) = rig.device.works()[0].copies
        page = rig.source.page_bytes
        assert (copied.rows, copied.target_pitch, copied.source_pitch) == (3, 2 * page, 3 * page)
        rig.device.let_go()
        push.push_layer(rig.source, 0, 0, [6, 3, 0])
        rig.finish(push)
        for here, there in zip((6, 3, 0), (7, 5, 3), strict=True):
            assert torch.equal(rig.target.tensor[there], rig.source.tensor[here])


def test_a_block_between_devices_is_bounded_by_its_copies_alone(monkeypatch):
    with cuda_ipc_rig() as rig:
        page = rig.source.page_bytes
        monkeypatch.setattr(transfer, "MAX_BLOCK_BYTES", page)
        made, ids = rig.sender.open(rig.lease(pages=(0, 1, 2, 3, 4))), [5, 6, 7]
        sizes = []
        (mine,) = rig.sender._links.values()
        send = mine.send
        mine.send = lambda message: (
            sizes.append(message.pages) if isinstance(message, Write) else None,
            send(message),
        )
        made.push_pages(0, 3, ids)
        assert sizes == [3]
        monkeypatch.setattr(transfer, "MAX_DEVICE_BLOCK_BYTES", page)
        made.push_pages(3, 2, ids[:2])
        assert sizes == [3, 1, 1]
        rig.finish(made)
        assert torch.equal(rig.target.tensor[:5], rig.source.tensor[[5, 6, 7, 5, 6]])


def test_nvshmem_puts_pages_in_a_row_at_once_and_its_signals_count_them_all():
    store, puts = LatentStore(8, 2, 4, 3, torch.float32), []
    sockets = socket.socketpair()
    link = NvshmemLink(sockets[0], None, store.page_layer_bytes, "peer")
    link.pool, link.signal, link.rank = 1 << 40, 77, 1
    waited = []
    link.stream = SimpleNamespace(cuda_stream=5, wait_event=waited.append)
    link._bindings = SimpleNamespace(putmem_signal_on_stream=lambda *put: puts.append(put))
    place, page = Destination(10, (0, 1, 2, 6), 2), store.page_bytes
    base = store.tensor.data_ptr()
    whole = write_of(store, 0, pages=(3, 4, 5, 1), page=10, layers=2)
    link._put_block(whole, place)
    rest = (77, 3, 10, 1, 5)
    assert puts == [
        ((1 << 40) + 6 * page, base + 1 * page, page, 77, 1, *rest[2:]),
        (1 << 40, base + 3 * page, 3 * page, *rest),
    ]
    puts.clear()
    one_layer = write_of(store, 1, pages=(3, 4, 5), page=10)
    link._put_block(one_layer, place)
    unit = store.page_layer_bytes
    assert [put[0] for put in puts] == [(1 << 40) + page_id * page + unit for page_id in range(3)]
    assert [put[2:5] for put in puts] == [(unit, 77, 1)] * 3
    assert waited == [*whole.device.ready, *one_layer.device.ready]
    for end in sockets:
        end.close()


def test_nvshmem_says_an_end_before_it_waits_for_pages_of_another_prompt():
    store = LatentStore(8, 2, 4, 3, torch.float32)
    sockets = socket.socketpair()
    sockets[1].settimeout(PATIENCE)
    link = NvshmemLink(sockets[0], None, store.page_layer_bytes, "peer")
    link._putting, came = threading.Lock(), []
    link._bindings = SimpleNamespace(putmem_signal_on_stream=lambda *put: None)
    place, other = Destination(0, (3,), 2), write_of(store, 0, pages=(4,), page=0, lease="b")
    key = other.lease_id, other.generation
    link._places = {("a", 1): place, key: place}

    def waits():
        came.append(read_header(SocketStream(sockets[1]), bytearray(HEADER_BYTES), 1).kind)

    link.stream = SimpleNamespace(cuda_stream=5, wait_event=lambda _: None, synchronize=waits)
    link._post([other, Drained("a", 1)])
    assert came == [Kind.DRAINED]
    assert list(link._places) == [key]
    for end in sockets:
        end.close()

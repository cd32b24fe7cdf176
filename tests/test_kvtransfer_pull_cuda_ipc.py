"""Pulls between devices: the reader copies from the owner's pool, and the owner is asked after."""

from __future__ import annotations

import logging
import threading
from collections import Counter

import msgspec
import pytest
import torch
from cuda_ipc_rig import FakeDevice, device_store
from pull_rig import DEVICE, FORMAT, PATIENCE, SIZE, chain, contents, pair

from pdmesh.kvtransfer.device_memory import DeviceError
from pdmesh.kvtransfer.pull_cuda_ipc import CudaIpcPageReader, CudaIpcPageServer
from pdmesh.kvtransfer.pull_reader import ReadOrder, ReadStopped, Stop
from pdmesh.wire.errors import ConfigError, TransferFailed


def store_of(pages=4, page_size=SIZE):
    return device_store(pages, FORMAT.num_layers, page_size, 8)


class Lending:
    """A store that is lent at an address, and a device for each side."""

    def __init__(self):
        self.store, self.owner, self.mine = store_of(), FakeDevice(), FakeDevice()
        for page in range(4):
            self.store.tensor[page] = contents(bytes([page]))
        self.server = CudaIpcPageServer(self.store, self.owner, None)
        self.address = self.server.start()
        self.target = store_of()
        self.reader = CudaIpcPageReader(self.target, self.mine)

    def order(self, pages, places):
        return ReadOrder("loan", self.address, 0, tuple(pages), tuple(places))

    def begin(self, pages, places, stop=None):
        """Reads on a thread; what came of it."""
        ended: list[Exception | None] = []

        def read():
            try:
                self.reader.read(self.order(pages, places), stop or Stop())
                ended.append(None)
            except TransferFailed as error:
                ended.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        return thread, ended


@pytest.fixture
def lending():
    made = Lending()
    yield made
    made.owner.gate.set()
    made.mine.gate.set()
    made.mine.let_go()
    made.server.close()
    assert made.mine.opened == Counter()


def test_a_reader_copies_the_pages_that_the_loan_names(lending):
    assert lending.reader.reaches(lending.address)
    lending.reader.read(lending.order([2, 0], [1, 3]), Stop())
    assert torch.equal(lending.target.tensor[[1, 3]], lending.store.tensor[[2, 0]])
    assert not lending.target.tensor[[0, 2]].any()


def test_more_pages_than_are_copied_at_a_time_arrive(lending, monkeypatch):
    monkeypatch.setattr("pdmesh.kvtransfer.pull_cuda_ipc._PAGES_AT_A_TIME", 3)
    lending.reader.read(lending.order([0, 1, 2, 3], [3, 2, 1, 0]), Stop())
    assert torch.equal(lending.target.tensor.flip(0), lending.store.tensor)


@pytest.mark.parametrize("side", ["owner", "mine"])
def test_nothing_is_copied_before_both_devices_are_through_with_older_work(lending, side):
    """The owner's may still compute what is lent, the reader's what its pages were before."""
    device = getattr(lending, side)
    device.gate.clear()
    lending.mine.held = True
    thread, ended = lending.begin([2], [1])
    thread.join(0.1)
    assert not lending.mine.works()
    assert not ended
    device.gate.set()
    lending.mine.wait_queued(1)
    lending.mine.let_go()
    thread.join(PATIENCE)
    assert ended == [None]
    assert torch.equal(lending.target.tensor[1], lending.store.tensor[2])


def test_a_read_that_is_stopped_ends_after_the_copies_that_were_begun(lending, monkeypatch):
    monkeypatch.setattr("pdmesh.kvtransfer.pull_cuda_ipc._PAGES_AT_A_TIME", 1)
    lending.mine.held = True
    stop = Stop()
    thread, ended = lending.begin([2, 1], [1, 3], stop)
    lending.mine.wait_queued(1)
    stop.ask()
    thread.join(0.1)
    assert thread.is_alive(), "a copy may still touch the reader's pages"
    lending.mine.let_go()
    thread.join(PATIENCE)
    assert isinstance(ended[0], ReadStopped)
    assert not lending.target.tensor[3].any()


def test_copies_begun_before_a_refused_one_are_waited_for(lending):
    real = lending.mine.add
    lending.mine.held = True

    def add(work):
        real(work)
        raise DeviceError("copy failed")

    lending.mine.add = add
    thread, ended = lending.begin([2, 1], [1, 3])
    lending.mine.wait_queued(1)
    thread.join(0.1)
    assert thread.is_alive(), "a copy may still touch the reader's pages"
    lending.mine.let_go()
    thread.join(PATIENCE)
    assert "copy failed" in str(ended[0])


def test_an_owner_that_cannot_be_mapped_is_asked_once_and_then_left_to_the_next_way(
    lending, caplog
):
    lending.mine.fails.add("open")
    assert lending.reader.reaches(lending.address)
    with caplog.at_level(logging.WARNING), pytest.raises(TransferFailed, match="open failed"):
        lending.reader.read(lending.order([0], [0]), Stop())
    assert not lending.reader.reaches(lending.address)
    assert [record.getMessage() for record in caplog.records] == ["transport_left_out"]


def test_what_is_not_lent_as_the_reader_thinks_is_refused(lending):
    for page in (-1, 4):
        with pytest.raises(TransferFailed, match="outside"):
            lending.reader.read(lending.order([page], [0]), Stop())
    with pytest.raises(TransferFailed, match="2 pages were lent, 1 were asked for"):
        lending.reader.read(lending.order([0, 1], [0]), Stop())
    other = CudaIpcPageReader(store_of(page_size=2 * SIZE), lending.mine)
    with pytest.raises(TransferFailed, match="bytes here"):
        other.read(lending.order([0], [0]), Stop())


def test_an_owner_that_is_gone_or_whose_device_failed_is_a_failed_read(lending):
    lending.owner.fails.add("settle")
    with pytest.raises(TransferFailed, match="lends no pages"):
        lending.reader.read(lending.order([0], [0]), Stop())
    lending.server.close()
    with pytest.raises(TransferFailed, match="cannot be read"):
        lending.reader.read(lending.order([0], [0]), Stop())
    assert not lending.reader.reaches(lending.address)


def test_pages_that_cannot_be_exported_are_not_lent():
    device = FakeDevice()
    device.fails.add("export")
    with pytest.raises(ConfigError, match="cuda_ipc cannot lend the pages: export failed"):
        CudaIpcPageServer(store_of(), device, None).start()


def reuse_pages_during_the_read(mesh, monkeypatch):
    """The loan's time passes after three pages were copied; the owner's pages change."""
    real, number = DEVICE.add, iter(range(99))

    def add(work):
        if next(number) == 3:
            mesh.clock.now += 11.0
            mesh.owner.lender.expire()
            mesh.owner.evict()
            mesh.owner.compute(chain(6, b"q"))
        real(work)

    monkeypatch.setattr("pdmesh.kvtransfer.pull_cuda_ipc._PAGES_AT_A_TIME", 1)
    monkeypatch.setattr(DEVICE, "add", add)


async def test_contents_that_changed_under_a_copy_are_never_used(monkeypatch):
    hashes = chain(6)
    async with pair(transport="cuda_ipc") as mesh:
        mesh.owner.compute(hashes)
        reuse_pages_during_the_read(mesh, monkeypatch)
        assert await mesh.fetch(hashes) == 0
        assert mesh.reader.kv.match(hashes) == 0
        assert dict(mesh.reader.fetcher.failures) == {"invalid": 1}


async def test_without_validation_they_would_be(monkeypatch):
    """Shows that the test above can fail: the same, and an owner that says yes to all."""
    hashes = chain(6)
    async with pair(transport="cuda_ipc") as mesh:
        mesh.owner.compute(hashes)
        reuse_pages_during_the_read(mesh, monkeypatch)
        mesh.way.after["validate"] = lambda answer: msgspec.structs.replace(answer, valid=True)
        assert await mesh.fetch(hashes) == 6
        assert len(mesh.reader.wrong_pages(hashes)) == 3

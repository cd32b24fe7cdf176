"""Pulls within a host: the reader copies from the owner's memory, and the owner is asked after."""

from __future__ import annotations

import mmap
import os
import socket
import threading

import msgspec
import pytest
import torch
from pull_rig import FORMAT, PATIENCE, SIZE, chain, contents, pair

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer import pull_shm
from pdmesh.kvtransfer.pull_reader import ReadOrder, ReadStopped, Stop
from pdmesh.kvtransfer.pull_shm import ShmPageReader, ShmPageServer
from pdmesh.kvtransfer.shm import host_and_user, socket_name
from pdmesh.wire.errors import ConfigError, TransferFailed


def store_of(pages=4, page_size=SIZE, shared=True):
    return LatentStore(pages, FORMAT.num_layers, page_size, 8, torch.float32, shared=shared)


@pytest.fixture
def lending():
    """A store that is lent at an address."""
    store = store_of()
    for page in range(4):
        store.tensor[page] = contents(bytes([page]))
    server = ShmPageServer(store, None)
    address = server.start()
    yield store, address
    server.close()


def order(address, pages, places):
    return ReadOrder("loan", address, 0, tuple(pages), tuple(places))


def test_a_reader_copies_the_pages_that_the_loan_names(lending):
    store, address = lending
    mine = store_of()
    reader = ShmPageReader(mine)
    assert reader.reaches(address)
    reader.read(order(address, [2, 0], [1, 3]), Stop())
    assert torch.equal(mine.tensor[[1, 3]], store.tensor[[2, 0]])
    assert not mine.tensor[[0, 2]].any()


def test_the_memory_that_is_lent_cannot_be_written(lending):
    _, address = lending
    fd = ShmPageReader(store_of())._memory(address, Stop())
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        with pytest.raises(OSError, match="descriptor"):
            os.write(fd, b"x")
    finally:
        os.close(fd)


def reuse_pages_during_the_read(mesh, monkeypatch):
    """The loan's time passes while page 3 is copied; the owner's pages get other contents."""
    real, number = pull_shm._fill, iter(range(99))

    def fill(store, place, source):
        if next(number) == 3:
            mesh.clock.now += 11.0
            mesh.owner.lender.expire()
            mesh.owner.evict()
            mesh.owner.compute(chain(6, b"q"))
        real(store, place, source)

    monkeypatch.setattr(pull_shm, "_fill", fill)


async def test_contents_that_changed_under_a_copy_are_never_used(monkeypatch):
    hashes = chain(6)
    async with pair(transport="shm") as mesh:
        mesh.owner.compute(hashes)
        reuse_pages_during_the_read(mesh, monkeypatch)
        assert await mesh.fetch(hashes) == 0
        assert mesh.reader.kv.match(hashes) == 0
        assert dict(mesh.reader.fetcher.failures) == {"invalid": 1}


async def test_without_validation_they_would_be(monkeypatch):
    """Shows that the test above can fail: the same, and an owner that says yes to all."""
    hashes = chain(6)
    async with pair(transport="shm") as mesh:
        mesh.owner.compute(hashes)
        reuse_pages_during_the_read(mesh, monkeypatch)
        mesh.way.after["validate"] = lambda answer: msgspec.structs.replace(answer, valid=True)
        assert await mesh.fetch(hashes) == 6
        assert len(mesh.reader.wrong_pages(hashes)) == 3


def test_a_page_outside_of_the_pool_is_refused(lending):
    _, address = lending
    for page in (-1, 4):
        with pytest.raises(TransferFailed, match="outside"):
            ShmPageReader(store_of()).read(order(address, [page], [0]), Stop())


def test_an_owner_with_pages_of_another_size_is_refused(lending):
    _, address = lending
    with pytest.raises(TransferFailed, match="bytes here"):
        ShmPageReader(store_of(page_size=SIZE // 2)).read(order(address, [0], [0]), Stop())


def test_a_stopped_read_copies_no_further_page(lending, monkeypatch):
    _, address = lending
    stop, mine = Stop(), store_of()
    real = pull_shm._fill

    def fill(store, place, source):
        real(store, place, source)
        stop.ask()

    monkeypatch.setattr(pull_shm, "_fill", fill)
    with pytest.raises(ReadStopped):
        ShmPageReader(mine).read(order(address, [1, 2], [0, 1]), stop)
    assert mine.tensor[0].any()
    assert not mine.tensor[1].any()


def silent_owner():
    token = f"test-{os.getpid()}-silent"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(socket_name(token))
    server.listen()
    return server, f"{host_and_user()}:{token}"


def test_a_read_of_a_silent_owner_ends_when_it_is_stopped():
    server, address = silent_owner()
    stop, ended = Stop(), []

    def read():
        try:
            ShmPageReader(store_of()).read(order(address, [0], [0]), stop)
        except TransferFailed as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    with server:
        thread.start()
        sock, _ = server.accept()
        with sock:
            stop.ask()
            thread.join(PATIENCE)
    assert [type(error) for error in ended] == [ReadStopped]


def test_what_answers_without_its_memory_is_no_owner():
    server, address = silent_owner()

    def answer():
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"PDPM" + bytes(20))

    thread = threading.Thread(target=answer)
    with server:
        thread.start()
        with pytest.raises(TransferFailed, match="did not come along"):
            ShmPageReader(store_of()).read(order(address, [0], [0]), Stop())
        thread.join(PATIENCE)


async def test_an_owner_that_ended_is_a_failed_read():
    async with pair(transport="shm") as mesh:
        mesh.owner.compute(chain(6))
        (name, address) = mesh.owner.lender.transports[0]
        assert mesh.reader.reader.reaches(address)
        mesh.owner.exchange._servers[0].close()
        assert await mesh.fetch(chain(6)) == 0
        assert dict(mesh.reader.fetcher.failures) == {"lost": 1}
        assert name == "shm"
        assert not mesh.reader.reader.reaches(address)


def test_other_hosts_and_dead_addresses_are_not_reached(lending):
    _, address = lending
    reader = ShmPageReader(store_of())
    assert not reader.reaches("127.0.0.1:80")
    assert not reader.reaches(f"other-boot:{address}")
    assert not reader.reaches(f"{host_and_user()}:pull-nobody")


def test_pages_that_are_not_shared_are_not_lent():
    with pytest.raises(ConfigError, match="not in shared memory"):
        ShmPageServer(store_of(shared=False), None).start()

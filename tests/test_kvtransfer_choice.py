"""Transports by name: what may be chosen, and what a worker then offers and dials."""

from __future__ import annotations

import pytest
import torch
from cuda_ipc_rig import FakeDevice, device_store
from kvtransfer_rig import FORMAT, Rig

from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer import choice, transports
from pdmesh.kvtransfer.choice import check_transports
from pdmesh.kvtransfer.cuda_ipc import device_memory
from pdmesh.kvtransfer.device_memory import DeviceError
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.kvtransfer.shm import ShmListener
from pdmesh.kvtransfer.tcp import TcpListener
from pdmesh.kvtransfer.transports import make_dialers, make_listeners, make_page_transports
from pdmesh.registry.metrics import WorkerMetrics
from pdmesh.registry.transfer_metrics import TransferMetrics
from pdmesh.wire.errors import ConfigError, Incompatible
from pdmesh.wire.messages import WorkerStatus


def store_of(shared=True):
    return LatentStore(4, 2, 4, 3, torch.float32, shared=shared)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ((), "no transport is left; name at least one of cuda_ipc, shm, tcp, nixl"),
        (("rdma",), "there is no transport 'rdma'; allowed are cuda_ipc, shm, tcp, nixl"),
        (("tcp", "tcp"), "a transport is named twice"),
    ],
)
def test_a_wrong_choice_is_one_sentence(names, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_transports(names)


def test_nixl_without_its_package_is_one_sentence_with_the_fix(monkeypatch):
    monkeypatch.setattr(choice, "NIXL_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install pdmesh\[nixl\].*or leave nixl out"):
        check_transports(("shm", "nixl"))


@pytest.mark.parametrize("names", [("shm",), ("tcp",), ("shm", "tcp"), ("tcp", "shm")])
def test_listeners_dialers_and_lenders_are_those_chosen_in_order(names):
    store = store_of()
    listeners = make_listeners(names, FORMAT, store, "127.0.0.1")
    assert tuple(listener.name for listener in listeners) == names
    dialers = make_dialers(names, store)
    assert tuple(dialer.name for dialer in dialers) == ("loopback", *names)
    readers = {reader.name for _, reader in make_page_transports(names, store, "127.0.0.1")}
    assert readers == set(names)


def test_pages_that_are_not_shared_need_tcp():
    with pytest.raises(ConfigError, match="add tcp"):
        make_listeners(("shm",), FORMAT, store_of(shared=False), "127.0.0.1")
    only = make_listeners(("shm", "tcp"), FORMAT, store_of(shared=False), "127.0.0.1")
    assert [listener.name for listener in only] == ["tcp"]


@pytest.fixture
def devices(monkeypatch):
    """What each store's device is; those of a CPU have none."""
    device = FakeDevice()
    monkeypatch.setattr("pdmesh.kvtransfer.transports.device_memory", lambda store: device)
    return device


def test_pages_on_a_device_are_offered_and_dialled_over_cuda_ipc_first(devices):
    names, store = choice.DEFAULT_TRANSPORTS, device_store(4, 2, 4, 3)
    listeners = make_listeners(names, FORMAT, store, "127.0.0.1")
    assert [listener.name for listener in listeners] == ["cuda_ipc", "tcp"]
    dialers = [dialer.name for dialer in make_dialers(names, store)]
    assert dialers == ["loopback", "cuda_ipc", "shm", "tcp"]
    readers = [reader.name for _, reader in make_page_transports(names, store, "127.0.0.1")]
    assert readers == ["cuda_ipc", "tcp"]


def test_pages_on_a_cpu_leave_cuda_ipc_out_without_a_word(caplog):
    names, store = choice.DEFAULT_TRANSPORTS, store_of()
    listeners = make_listeners(names, FORMAT, store, "127.0.0.1")
    assert [listener.name for listener in listeners] == ["shm", "tcp"]
    assert [dialer.name for dialer in make_dialers(names, store)] == ["loopback", "shm", "tcp"]
    assert caplog.text == ""


def test_cuda_ipc_alone_says_why_it_cannot_be(devices):
    for store, why in ((store_of(), "add --device cuda"), (device_store(4, 2, 4, 3), "export")):
        devices.fails = set() if why != "export" else {"export"}
        for make in (make_dialers, lambda *a: make_listeners(a[0], FORMAT, a[1], "127.0.0.1")):
            with pytest.raises(ConfigError, match=f"cuda_ipc cannot be used: .*{why}.*name tcp"):
                make(("cuda_ipc",), store)


def test_pages_that_cannot_be_shared_go_over_tcp_and_the_log_says_why(devices, monkeypatch, caplog):
    devices.fails.add("export")
    store = device_store(4, 2, 4, 3)
    monkeypatch.setattr(type(store), "on_cpu", False)
    names = choice.DEFAULT_TRANSPORTS
    transports._say_once.cache_clear()
    listeners = make_listeners(names, FORMAT, store, "127.0.0.1")
    assert [listener.name for listener in listeners] == ["tcp"]
    assert [dialer.name for dialer in make_dialers(names, store)] == ["loopback", "shm", "tcp"]
    assert [reader.name for _, reader in make_page_transports(names, store, "::1")] == ["tcp"]
    (record,) = [one for one in caplog.records if one.getMessage() == "transport_left_out"]
    assert record.fields["reason"] == "cuda_ipc cannot be used: export failed"


def test_a_cpu_has_no_memory_to_share_between_devices():
    with pytest.raises(DeviceError, match="in the memory of the CPU; add --device cuda"):
        device_memory(store_of())


def test_a_sender_without_the_receivers_transport_says_which_both_have():
    rig = Rig(ShmListener(FORMAT))
    sender = TransferSender(FORMAT, make_dialers(("tcp",), rig.source), rig.source)
    try:
        with pytest.raises(Incompatible, match="offers shm, prefill has loopback, tcp"):
            sender.open(rig.lease())
    finally:
        rig.receiver.cancel("a")
        sender.close()
        rig.close()


@pytest.mark.parametrize("listener", [ShmListener, TcpListener])
def test_what_was_acknowledged_is_counted_by_transport(listener):
    pool = KvManager(4, 4, lambda _: None, lambda _: None).status()
    status = WorkerStatus(
        worker_id="w",
        instance="i",
        role="prefill",
        state="ready",
        page_format=FORMAT,
        pool=pool,
        queued=0,
        running=0,
    )
    metrics = WorkerMetrics("tiny", "w", lambda: status)
    rig = Rig(listener(FORMAT))
    rig.sender.observe = TransferMetrics(metrics).observe
    try:
        lease = rig.lease()
        transfer = rig.sender.open(lease)
        rig.push_all(transfer)
        rig.finish(transfer)
        aborted = rig.sender.open(rig.lease("b", pages=(0,)))
        aborted.abort("not wanted")
        size = 3 * FORMAT.num_layers * FORMAT.page_layer_bytes
        by = {"transport": listener.name}
        assert metrics.value("pdmesh_transfer_bytes_total", **by) == size
        assert metrics.value("pdmesh_transfers_total", **by) == 1
    finally:
        rig.receiver.cancel("a")
        rig.receiver.cancel("b")
        rig.close()


def test_a_connection_made_ahead_is_the_one_that_is_used():
    rig = Rig(TcpListener(FORMAT))
    try:
        rig.sender.connect(rig.addresses)
        (link,) = rig.sender._links.values()
        transfer = rig.sender.open(rig.lease())
        assert transfer._link is link
        transfer.abort("not wanted")
    finally:
        rig.receiver.cancel("a")
        rig.close()

"""Transfers by NIXL's writes, where its package is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from child_path import python_path
from kvtransfer_rig import FORMAT, PATIENCE, Rig, fin_of

from pdmesh.kvtransfer import choice, nixl
from pdmesh.kvtransfer.nixl import NixlDialer, NixlListener
from pdmesh.kvtransfer.nixl_link import NixlLink
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.wire.codec import encode
from pdmesh.wire.errors import ConfigError, TransferFailed

ROOT = Path(__file__).resolve().parent.parent
needs_nixl = pytest.mark.skipif(nixl.missing() is not None, reason=str(nixl.missing()))


@contextmanager
def nixl_rig():
    drained = threading.Event()
    listener = NixlListener(FORMAT, check_every=1)
    rig = Rig(listener, dialers=[], on_drained=lambda lease_id: drained.set())
    rig.sender._dialers["nixl"] = NixlDialer(rig.source)
    rig.drained = drained
    try:
        yield rig
    finally:
        rig.close()
        assert rig.problems() == []


@needs_nixl
def test_pages_arrive_whole_by_the_librarys_writes():
    with nixl_rig() as rig:
        lease = rig.lease(pages=(3, 1, 5), cached=1)
        transfer = rig.sender.open(lease)
        transfer.push_pages(1, 2, [1, 2])
        transfer.push(3, 0, rig.source.tensor[3, 0].clone())
        rig.push(transfer, 3, 1)
        rig.finish(transfer)
        assert rig.wait().num_writes == 6
        assert rig.arrived(lease, (3, 1, 5))
        assert rig.receiver.cancel("a")


@needs_nixl
def test_a_cancelled_lease_keeps_its_pages_until_no_write_is_under_way(monkeypatch):
    begun, let_go = threading.Event(), threading.Event()
    real = NixlLink.put_now

    def put_now(link, pieces, offsets):
        begun.set()
        assert let_go.wait(PATIENCE)
        real(link, pieces, offsets)

    monkeypatch.setattr(NixlLink, "put_now", put_now)
    with nixl_rig() as rig:
        transfer = rig.sender.open(rig.lease(pages=(3,)))
        transfer.push_pages(0, 1, [0])
        assert begun.wait(PATIENCE)
        assert not rig.receiver.cancel("a")
        assert not rig.drained.wait(0.1)
        assert rig.receiver.phase("a") is Phase.QUARANTINED
        let_go.set()
        assert rig.drained.wait(PATIENCE)
        with pytest.raises(TransferFailed, match="refused"):
            transfer.finish(fin_of(transfer))


@needs_nixl
def test_a_killed_sender_frees_its_pages_when_its_agent_is_gone():
    script = """
import os, sys, torch
from kvtransfer_rig import FORMAT
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.nixl import NixlDialer
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.wire.codec import decode
from pdmesh.wire.messages import Lease
store = LatentStore(2, 2, 4, 3, torch.float32)
store.tensor.fill_(1.0)
transfer = TransferSender(FORMAT, [NixlDialer(store)], store).open(
    decode(bytes.fromhex(sys.argv[1]), Lease)
)
transfer.push_pages(0, 1, [0])
with transfer._changed:
    transfer._changed.wait_for(lambda: transfer._state.in_flight == 0)
print("pushed", flush=True)
sys.stdin.read()
os._exit(0)
"""
    with nixl_rig() as rig:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", script, encode(rig.lease(pages=(4, 5))).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path("tests")},
        )
        assert child.stdin is not None
        assert child.stdout is not None
        lines = iter(child.stdout.readline, b"pushed\n")
        assert all(b"NIXL" in line for line in lines)
        assert bool((rig.target.tensor[4] == 1.0).all())
        child.kill()
        child.wait(PATIENCE)
        with pytest.raises(TransferFailed, match="connection was lost after 2 of 4 writes"):
            rig.wait()
        assert rig.receiver.phase("a") is Phase.FREE
        child.stdin.close()
        child.stdout.close()


def test_without_the_package_it_is_refused_with_a_sentence_and_never_reached(monkeypatch):
    monkeypatch.setattr(choice, "NIXL_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"not installed \(pip install pdmesh\[nixl\]\)"):
        Rig(NixlListener(FORMAT))
    assert not NixlDialer(torch.empty(0)).reaches("127.0.0.1:1")  # type: ignore[arg-type]

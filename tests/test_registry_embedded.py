"""The embedded store, and the guard that ties a child's life to its parent's."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_path import python_path

from pdmesh.registry import embedded
from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.guard import guarded
from pdmesh.registry.layout import pack_group
from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.store import PageCall, Store, StoreUnavailable
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import WorkerRecord

ROOT = Path(__file__).resolve().parent.parent
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is of Linux")


def until_gone(pid: int) -> None:
    """Waits for the end of a process that is no child of ours; only a failure takes long."""
    for _ in range(6000):
        if not alive(pid):
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"process {pid} outlived its parent")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def small():
    store = EmbeddedStore(max_memory_mb=4)
    store.start()
    yield store
    store.stop()


async def execute(url: str, *command):
    store = Store(url, "m")
    try:
        return await store.execute(*command)
    finally:
        await store.close()


async def config(url: str, name: str) -> str:
    answer = await execute(url, "CONFIG", "GET", name)
    pairs = (
        answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
    )
    return pairs[name.encode()].decode()


async def test_it_has_a_cap_on_memory_and_writes_nothing_to_disk(small):
    assert int(await config(small.url, "maxmemory")) == 4 * 1024 * 1024
    assert await config(small.url, "maxmemory-policy") == "noeviction"
    assert await config(small.url, "save") == ""
    assert await config(small.url, "appendonly") == "no"


async def test_it_listens_on_loopback_only_and_asks_for_the_password(small):
    assert await config(small.url, "bind") == "127.0.0.1"
    with pytest.raises(ConfigError, match="login"):
        await execute(f"redis://127.0.0.1:{small.port}", "PING")


async def test_the_password_is_in_no_process_list(small):
    line = Path(f"/proc/{small.pid}/cmdline").read_bytes()
    assert small._password.encode() not in line


async def fill(store: Store, epoch: int) -> None:
    assert await store.one(PageCall("fence", 0, (), (0, epoch))) == [b"OK"]
    for seq in range(1, 100_000):
        marks = [n.to_bytes(7, "big") for n in range(500 * seq, 500 * seq + 500)]
        call = PageCall("publish", 0, (seq,), (0, epoch, seq, pack_group(seq, marks)))
        assert await store.one(call) == [b"OK"]


async def test_a_full_store_refuses_pages_and_keeps_leases(small):
    record = WorkerRecord(
        worker_id="decode-0",
        instance="a",
        role="decode",
        address="127.0.0.1:1",
        page_format=PageFormat("tiny", "w", "float32", 64, 7, 1, 576),
        model="tiny",
        vocab_size=16,
        max_context=64,
        capacity_pages=8,
    )
    lease = WorkerLease(small.url, "m", record)
    await lease.start()
    store = Store(small.url, "m")
    with pytest.raises(StoreUnavailable, match="maxmemory"):
        await fill(store, lease.epoch + 1)
    assert await store.call("renew", "decode-0", lease.epoch, 60_000) == [b"OK"]
    await lease.ready()
    assert (await store.member("decode-0")).state == "ready"
    await store.close()
    await lease.close()


async def test_it_returns_at_the_same_address(small):
    before = small.url
    os.kill(small.pid, signal.SIGKILL)
    while small.alive:
        await asyncio.sleep(0.01)
    small.start()
    assert small.url == before
    assert await execute(small.url, "PING")


def test_a_port_that_is_taken_meanwhile_is_given_up_for_another(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], embedded._free_port()]
        monkeypatch.setattr(embedded, "_free_port", lambda: ports.pop(0))
        store = EmbeddedStore(tmp_path / "store.log")
        store.start(timeout_s=60)
        assert store.port != taken.getsockname()[1]
        store.stop()


def test_a_system_without_the_server_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match=r"riscv64.*--redis URL"):
        EmbeddedStore().start()


@linux_only
def test_the_store_dies_with_a_parent_that_is_killed():
    program = (
        "import time; from pdmesh.registry.embedded import EmbeddedStore; s = EmbeddedStore(); "
        "s.start(); print(s.pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, env=environment
    ) as parent:
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
        until_gone(child)


@linux_only
def test_a_guarded_command_dies_with_a_parent_that_is_killed():
    program = (
        "import subprocess, time; from pdmesh.registry.guard import guarded; "
        "p = subprocess.Popen(guarded(['sleep', '600'])); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, env=environment
    ) as parent:
        child = int(parent.stdout.readline())
        while b"sleep" not in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]:
            time.sleep(0.01)
        parent.kill()
        until_gone(child)


@linux_only
def test_a_guarded_command_whose_parent_has_died_already_does_not_start():
    command = guarded(["echo", "started"])
    command[4] = "1"  # a parent that is not ours: as after the parent's death
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""


def test_a_guarded_command_that_does_not_exist_is_named():
    done = subprocess.run(guarded(["/no/such/server"]), capture_output=True, check=False)
    assert done.returncode == 1
    assert b"cannot start /no/such/server" in done.stderr

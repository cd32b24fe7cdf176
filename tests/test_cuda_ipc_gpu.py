"""Pages between processes of one GPU over CUDA IPC: bits, order, and what a killed process leaves.

The same processes run without a GPU on shared memory that plays one, so that what is left to a
device is the driver itself.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from child_path import python_path
from test_kvtransfer_nvshmem import hand_off

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.cuda_driver import CudaMemory
from pdmesh.kvtransfer.cuda_ipc import device_memory
from pdmesh.kvtransfer.device_memory import Copy, DeviceError

ROOT = Path(__file__).resolve().parent.parent
GPU = pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
DEVICES = pytest.mark.parametrize("device", ["fake", pytest.param("cuda:0", marks=GPU)])
DEVICES_FULL = pytest.mark.parametrize(
    "device",
    [pytest.param("fake", marks=pytest.mark.full), pytest.param("cuda:0", marks=GPU)],
)
"""Of what test_kvtransfer_cuda_ipc.py has in one process."""


class Process:
    """A peer; ``tell`` starts a command, ``answer`` reads what came of it."""

    def __init__(self, device, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "tests" / "cuda_ipc_peer.py"), device],
            env={**os.environ, **environment, "PYTHONPATH": python_path("tests")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, do, **rest):
        self.process.stdin.write(json.dumps({"do": do, **rest}) + "\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, do, **rest):
        self.tell(do, **rest)
        return self.answer()

    def address(self, transport="cuda_ipc"):
        return [pair for pair in self.ask("address") if pair[0] == transport]


@contextmanager
def peers(*devices, **environment):
    made = [Process(device, **environment) for device in devices]
    try:
        for peer in made:
            assert peer.answer() == "ready"
        yield made
    finally:
        for peer in made:
            peer.process.kill()
            peer.process.wait()
            peer.process.stdin.close()
            peer.process.stdout.close()


@DEVICES
def test_hand_offs_arrive_bit_for_bit(device):
    rng = random.Random(device)
    with peers(device, device, device) as (sender, *receivers):
        sender.ask("fill", seed=1)
        addresses = [receiver.address() for receiver in receivers]
        for receiver in receivers:
            receiver.ask("poison")
        for number in range(20 if device == "fake" else 500):
            one, how = number % len(receivers), ("pages", "layers")[number // 2 % 2]
            mine, theirs = hand_off(sender, receivers[one], addresses[one], number, rng, how)
            assert mine == theirs
        for peer in (sender, *receivers):
            assert peer.ask("problems") == []


@DEVICES_FULL
def test_pages_that_are_still_computed_when_they_are_pushed_arrive_as_they_become(device):
    with peers(device, device) as (sender, receiver):
        sender.ask("fill", seed=4)
        to = receiver.address()
        for number in range(8):
            pages, lease = [1, 5, 9, 13], f"lease-{number}"
            receiver.ask("expect", lease_id=lease, pages=pages, first=0)
            receiver.tell("arrived", lease_id=lease)
            mine = sender.ask("computed", pages=pages, lease_id=lease, to=to)
            assert receiver.answer() == "arrived"
            assert receiver.ask("digest", pages=pages) == mine
            assert receiver.ask("cancel", lease_id=lease) is True


@DEVICES_FULL
def test_an_aborted_hand_off_leaves_quarantine_when_the_sender_has_drained(device):
    with peers(device, device) as (sender, receiver):
        sender.ask("fill", seed=2)
        to = receiver.address()
        receiver.ask("expect", lease_id="a", pages=[3, 4], first=0)
        rest = {"to": to, "pages": [7, 8], "first": 0, "how": "layers", "part": "abort"}
        assert sender.ask("send", lease_id="a", **rest) == "aborted"
        assert "stopped on purpose" in receiver.ask("arrived", lease_id="a")
        while receiver.ask("phase", lease_id="a") == "quarantined":
            assert sender.process.poll() is None
        assert receiver.ask("cancel", lease_id="a") is True
        mine, theirs = hand_off(sender, receiver, to, 1, random.Random(5), "pages")
        assert mine == theirs


@DEVICES
def test_nothing_lands_after_the_end_of_a_sender_that_was_killed_in_its_copies(device):
    """The receiver frees the pages, fills them with something else, and looks at them again."""
    with peers(device) as (receiver,):
        to = receiver.address()
        for number in range(3 if device == "fake" else 20):
            lease, pages = f"lease-{number}", list(range(8, 40))
            receiver.ask("expect", lease_id=lease, pages=pages, first=0)
            with peers(device) as (sender,):
                sender.ask("fill", seed=number)
                rest = {"pages": list(range(32)), "first": 0, "how": "layers", "part": "hold"}
                sender.tell("send", lease_id=lease, to=to, **rest)
                if number % 2:
                    assert sender.answer() == "held"
                while receiver.ask("phase", lease_id=lease) == "reserved":
                    assert sender.process.poll() is None
                sender.process.kill()
            assert "the connection was lost" in receiver.ask("arrived", lease_id=lease)
            assert receiver.ask("cancel", lease_id=lease) is True
            receiver.ask("fill", seed=1000 + number)
            before = receiver.ask("digest", pages=pages)
            assert receiver.ask("digest", pages=pages) == before
            assert receiver.ask("problems") == []


@DEVICES_FULL
def test_a_receiver_that_is_killed_costs_the_sender_that_connection_alone(device):
    with peers(device, device, device) as (sender, first, second):
        sender.ask("fill", seed=3)
        to = first.address()
        first.ask("expect", lease_id="b", pages=[3, 4], first=0)
        rest = {"to": to, "pages": [7, 8], "first": 0, "how": "layers", "part": "hold"}
        assert sender.ask("send", lease_id="b", **rest) == "held"
        first.process.kill()
        first.process.wait()
        mine, theirs = hand_off(sender, second, second.address(), 1, random.Random(1), "pages")
        assert mine == theirs


@GPU
def test_memory_of_expandable_segments_is_not_offered():
    code = (
        "import torch\n"
        "from pdmesh.kvcache.store import LatentStore\n"
        "from pdmesh.kvtransfer.cuda_ipc import device_memory\n"
        "store = LatentStore(4, 2, 64, 576, torch.bfloat16, 'cuda')\n"
        "device_memory(store).export(store)\n"
    )
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **environment, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
    )
    assert "leave expandable_segments and cudaMallocAsync out of" in run.stderr


@GPU
@pytest.mark.parametrize("pitch", [1 << 20, (1 << 31) + 512], ids=["by one call", "row by row"])
def test_rows_are_copied_whatever_their_pitch(pitch):
    """A pitch of 2 GiB is more than the driver takes."""
    memory = CudaMemory(0)
    pool = torch.zeros(2 * pitch + (1 << 20), dtype=torch.uint8, device="cuda:0")
    rows = torch.randint(1, 255, (3, 4096), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    lane = memory.lane()
    lane.copy([Copy(pool.data_ptr() + 512, rows.data_ptr(), 4096, 3, pitch, 4096)])
    lane.record().wait()
    lane.close()
    for row in range(3):
        at = row * pitch + 512
        assert torch.equal(pool[at : at + 4096], rows[row])
    assert int(pool.count_nonzero()) == 3 * 4096


@GPU
def test_units_of_a_store_on_a_device_come_in_their_order():
    store = LatentStore(4, 6, 64, 576, torch.bfloat16, "cuda:0")
    store.tensor.copy_(torch.randn(store.tensor.shape))
    for units in ([(1, 2)], [(1, 4), (1, 5), (2, 0)], [(3, 1), (0, 2), (3, 0)]):
        assert store.read_units(units) == [store.read(*unit) for unit in units]


@GPU
def test_a_process_cannot_map_its_own_pool_and_says_so():
    store = LatentStore(4, 2, 64, 576, torch.bfloat16, "cuda")
    memory = device_memory(store)
    with pytest.raises(DeviceError, match="cuIpcOpenMemHandle"):
        memory.open(memory.export(store))


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_pages_go_between_two_devices_of_a_host():
    with peers("cuda:0", "cuda:1") as (sender, receiver):
        sender.ask("fill", seed=1)
        receiver.ask("poison")
        for number in range(100):
            mine, theirs = hand_off(
                sender, receiver, receiver.address(), number, random.Random(number), "layers"
            )
            assert mine == theirs

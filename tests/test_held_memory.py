"""Memory that one process holds and others map: its bits, who may ask, and what ends with whom."""

import asyncio
import ctypes
import os
import socket
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from pdmesh.kvtransfer import held_memory as module
from pdmesh.kvtransfer import weight_holder
from pdmesh.kvtransfer.device_memory import DeviceError, ExportedPool
from pdmesh.kvtransfer.held_memory import ALIGN, DeviceHeld, HostMemory, held_memory
from pdmesh.kvtransfer.weight_holder import MappedWeights, WeightHolder, mapped_weights
from pdmesh.wire.errors import ConfigError, Unavailable
from pdmesh.wire.held_weights import HeldModel, HeldRegion, HeldTensor, HeldWeights

MODEL = HeldModel(weights="w", precision="plain", dtype="float32", mtp=True, device="cpu")


class FakeDevice:
    """A ``Lender`` whose allocations are tensors of this process: an address is that of a byte."""

    uuid = "GPU-0"

    def __init__(self):
        self.allocations = []
        self.opened = Counter()
        self.settled = 0
        self.refuses = ""
        self.fails_at = None

    def allocate(self, size):
        memory = torch.zeros(size, dtype=torch.uint8)
        self.allocations.append(memory)
        return memory

    def lend(self, address, size, what):
        if self.refuses:
            raise DeviceError(f"{what} {self.refuses}")
        for number, memory in enumerate(self.allocations):
            offset = address - memory.data_ptr()
            if offset >= 0 and offset + size <= memory.nbytes:
                return ExportedPool(bytes([number]) * 64, offset, size, self.uuid)
        raise AssertionError("not of this device")

    def open(self, pool):
        if self.fails_at == sum(self.opened.values()):
            raise DeviceError("invalid resource handle")
        address = self.allocations[pool.handle[0]].data_ptr()
        self.opened[address] += 1
        return address + pool.offset

    def close(self, pool, address):
        self.opened[address - pool.offset] -= 1

    def settle(self):
        self.settled += 1


def view(address, size):
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


def tensors():
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(shape, generator=generator) for shape in ((3, 5), (1,), (64, 128), (7, 1))]
    return [*made, made[0].to(torch.float8_e4m3fn), made[2].bfloat16()]


def parts(regions, places, like):
    for (region, start), tensor in zip(places, like, strict=True):
        flat = regions[region][start : start + tensor.nbytes]
        yield flat.view(tensor.dtype).view(tensor.shape)


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


def test_what_is_put_into_memory_of_the_host_is_read_bit_for_bit():
    memory, given = HostMemory(), tensors()
    offered = memory.offer(given)
    regions = memory.map(offered.regions, offered.fd)
    found = list(parts(regions, offered.places, given))
    assert all(map(same_bits, found, given))
    assert all(place % ALIGN == 0 and region == 0 for region, place in offered.places)
    offered.close()
    assert all(map(same_bits, found, given)), "it stays mapped"


def test_nobody_can_write_to_memory_of_the_host_that_is_offered():
    offered = HostMemory().offer(tensors())
    with pytest.raises(PermissionError):
        os.pwrite(offered.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(offered.fd, 0)
    with pytest.raises(PermissionError):
        module.mmap.mmap(offered.fd, 64)
    offered.close()


@pytest.mark.parametrize(
    ("regions", "fd"),
    [
        ((HeldRegion(b"", 1 << 20),), True),
        ((HeldRegion(b"h", 64),), True),
        ((HeldRegion(b"", 64),), False),
        ((), True),
    ],
)
def test_memory_of_the_host_that_is_not_what_was_said_is_refused(regions, fd):
    offered = HostMemory().offer(tensors()[:1])
    with pytest.raises(ConfigError, match="the weights cannot be mapped"):
        HostMemory().map(regions, offered.fd if fd else None)
    offered.close()


def on_device(device, like):
    """Tensors in two allocations of the device, none of them at the begin."""
    first, second = device.allocate(1 << 20), device.allocate(1 << 20)
    placed = []
    for number, tensor in enumerate(like):
        memory, start = (first, second)[number % 2], 512 + 65536 * number
        place = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        placed.append(place)
    return placed


def test_tensors_of_a_device_are_offered_where_they_are_and_each_allocation_is_mapped_once():
    device, given = FakeDevice(), tensors()
    placed = on_device(device, given)
    offered = DeviceHeld(device, view).offer(placed)
    assert (len(offered.regions), offered.fd, device.settled) == (2, None, 1)
    assert offered.kept == tuple(placed), "what is offered must stay allocated"
    reader = DeviceHeld(device, view)
    regions = reader.map(offered.regions, None)
    assert device.opened.total() == 2
    found = list(parts(regions, offered.places, given))
    assert all(map(same_bits, found, given))
    assert [f.data_ptr() for f in found] == [p.data_ptr() for p in placed], "nothing is copied"
    reader.close()
    reader.close()
    assert (device.opened.total(), device.settled) == (0, 2)


def test_a_device_that_refuses_says_so_in_a_sentence_and_keeps_nothing_mapped():
    device = FakeDevice()
    placed = on_device(device, tensors())
    offered = DeviceHeld(device, view).offer(placed)
    device.refuses = "are in memory that CUDA shares with no other process"
    with pytest.raises(ConfigError, match="cannot be shared: the weights are in memory that CUDA"):
        DeviceHeld(device, view).offer(placed)
    device.fails_at = 1
    with pytest.raises(ConfigError, match="another process cannot be mapped: invalid resource"):
        DeviceHeld(device, view).map(offered.regions, None)
    assert device.opened.total() == 0


def test_a_device_without_a_driver_is_refused_in_a_sentence(monkeypatch):
    def none(_):
        raise DeviceError("there is no CUDA driver here (libcuda.so.1)")

    monkeypatch.setattr(module, "CudaMemory", none)
    monkeypatch.setattr(module.torch, "zeros", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="cannot be shared on cuda: there is no CUDA driver"):
        held_memory("cuda")
    assert isinstance(held_memory("cpu"), HostMemory)


# ---- over a socket ----------------------------------------------------------------------------


@contextmanager
def holding(path, memory, given):
    """A holder on a thread of its own; it has ended in the end."""
    offered = memory.offer(given)
    entries = tuple(
        HeldTensor(f"t{n}", "float32", tuple(t.shape), t.stride(), *place)
        for n, (t, place) in enumerate(zip(given, offered.places, strict=True))
    )
    held = HeldWeights(model=MODEL, tensors=entries, regions=offered.regions)
    holder = WeightHolder(path, held, offered)
    thread = threading.Thread(target=holder.run)
    thread.start()
    try:
        yield holder, held, offered
    finally:
        holder.stop()
        thread.join(60)
        assert not thread.is_alive()


def test_who_asks_is_told_what_is_held_and_maps_it(tmp_path):
    given = tensors()
    with (
        holding(tmp_path / "s", HostMemory(), given) as (_, held, offered),
        mapped_weights(tmp_path / "s", "cpu") as one,
        mapped_weights(tmp_path / "s", "cpu") as other,
    ):
        assert one.held == other.held == held
        assert one.device == "cpu"
        for mapped in (one, other):
            assert all(map(same_bits, parts(mapped.map(), offered.places, given), given))
    with mapped_weights(None, "cpu") as none:
        assert none is None


def test_what_a_device_holds_goes_over_the_socket_by_handle(tmp_path):
    device, given = FakeDevice(), tensors()
    placed = on_device(device, given)
    with holding(tmp_path / "s", DeviceHeld(device, view), placed) as (_, _, offered):
        with MappedWeights(tmp_path / "s", DeviceHeld(device, view)) as mapped:
            assert mapped.device == "GPU-0"
            assert all(map(same_bits, parts(mapped.map(), offered.places, given), given))
            assert device.opened.total() == 2
        assert device.opened.total() == 0, "unmapped in the end"


async def test_the_end_of_the_holder_is_heard_of(tmp_path):
    with (
        holding(tmp_path / "s", HostMemory(), tensors()) as (holder, _, _),
        MappedWeights(tmp_path / "s", HostMemory()) as mapped,
    ):
        waiting = asyncio.ensure_future(mapped.gone())
        done, _ = await asyncio.wait({waiting}, timeout=0.01)
        assert not done
        holder.stop()
        await asyncio.wait_for(waiting, 60)
    assert not (tmp_path / "s").exists()


def test_a_process_that_asks_for_nothing_is_told_nothing_and_disturbs_nobody(tmp_path, caplog):
    caplog.set_level("INFO", weight_holder.__name__)
    with holding(tmp_path / "s", HostMemory(), tensors()):
        with socket.socket(socket.AF_UNIX) as looks:
            looks.connect(str(tmp_path / "s"))
        for _ in range(3):
            with MappedWeights(tmp_path / "s", HostMemory()) as mapped:
                assert mapped.held.model == MODEL
    assert [r.message for r in caplog.records].count("weights mapped") == 3


def test_a_socket_that_a_dead_holder_left_is_taken_over_but_no_file_of_others(tmp_path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "s"))
    left.close()
    with pytest.raises(Unavailable, match=r"nobody offers weights at .*: Connection refused"):
        MappedWeights(tmp_path / "s", HostMemory())
    with holding(tmp_path / "s", HostMemory(), tensors()):
        MappedWeights(tmp_path / "s", HostMemory()).close()
    (tmp_path / "f").write_text("kept")
    offered = HostMemory().offer(tensors())
    held = HeldWeights(model=MODEL, tensors=(), regions=offered.regions)
    for place in (tmp_path / "f", tmp_path / "none" / "s", tmp_path / ("x" * 200)):
        with pytest.raises(ConfigError, match="cannot offer weights at .*; give the path of a so"):
            WeightHolder(place, held, offered)
    assert (tmp_path / "f").read_text() == "kept"
    with holding(tmp_path / "s", HostMemory(), tensors()):
        with pytest.raises(ConfigError, match="at .*/s: another process does so already"):
            WeightHolder(tmp_path / "s", held, offered)
        MappedWeights(tmp_path / "s", HostMemory()).close()
    offered.close()


@contextmanager
def saying(path, data):
    """Somebody who says something else at a socket, and ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def answer():
            sock, _ = server.accept()
            with sock:
                sock.recv(1)
                sock.sendall(data)

        thread = threading.Thread(target=answer)
        thread.start()
        yield
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("data", "kind", "sentence"),
    [
        (b"", Unavailable, "nobody offers weights at .*: it ended"),
        (bytes(7) + b"\x09" + b"x", Unavailable, "it ended"),
        (bytes(7) + b"\x01" + b"\xc1", ConfigError, "is not understood: malformed HeldWeights"),
        (b"\xff" * 8, ConfigError, "is not about weights"),
    ],
)
def test_somebody_who_says_something_else_is_refused_in_a_sentence(tmp_path, data, kind, sentence):
    with saying(tmp_path / "s", data), pytest.raises(kind, match=sentence):
        MappedWeights(tmp_path / "s", HostMemory())


def test_another_user_is_neither_told_nor_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_holder, "peer_uid", lambda _: os.getuid() + 1)
    with holding(tmp_path / "s", HostMemory(), tensors()):
        with pytest.raises(ConfigError, match="those of another user"):
            MappedWeights(tmp_path / "s", HostMemory())
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(tmp_path / "s"))
            other.sendall(b"?")
            assert other.recv(1) == b""

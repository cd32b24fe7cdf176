"""Shared memory plays the memory of a GPU: copies end when the test says, in any order."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from kvtransfer_rig import FORMAT, PATIENCE, Rig

from pdmesh.kvcache.store import LatentStore, SharedMemory
from pdmesh.kvtransfer.cuda_ipc import CudaIpcDialer, CudaIpcListener
from pdmesh.kvtransfer.device_memory import DeviceError, ExportedPool

OFFSET = 4096
"""Of a pool in its allocation: others are before it."""
_HANDLE = struct.Struct("<IIQ44x4s")


class Ready:
    """The place of a ``torch.cuda.Event``."""

    def __init__(self, happened: bool = False) -> None:
        self.happened = happened


class DeviceStore(LatentStore):
    """Pages in the memory of a device that is none."""

    def __init__(self, memory: SharedMemory, shape, dtype=torch.float32) -> None:
        flat = torch.frombuffer(memory.view, dtype=dtype, offset=OFFSET, count=int(np.prod(shape)))
        super().__init__(*shape, dtype, memory=flat.reshape(shape))
        self.allocation = memory
        self.ready: Ready | None = None
        """What pushes of these pages have to wait for."""

    def device_pages(self, page_ids, layer, layers):
        ready = () if self.ready is None else (self.ready,)
        return replace(super().device_pages(page_ids, layer, layers), ready=ready)


@dataclass(eq=False)
class Work:
    """Copies that were queued together, or the mark behind them."""

    lane: int
    copies: list = field(default_factory=list)
    after: tuple = ()
    over: bool = False


class FakeDevice:
    """A ``DeviceMemory``. While it is ``held``, what is queued is done by ``finish`` alone."""

    def __init__(self, name: str = "GPU-0", reaches: tuple[str, ...] = ("GPU-0",)) -> None:
        self.name, self._reaches = name, reaches
        self.changed = threading.Condition()
        self.held = False
        self.queued: list[Work] = []
        self.opened: Counter[int] = Counter()
        """Mappings by address."""
        self.opens = 0
        self.fails: set[str] = set()
        """Calls that raise."""
        self.gate = threading.Event()
        """``settle`` returns once it is set."""
        self.gate.set()
        self.settled = 0
        self.lanes = 0
        self._maps: dict[int, tuple[bytes, mmap.mmap]] = {}

    # ---- the seam --------------------------------------------------------------------------

    def holds(self, store) -> bool:
        return isinstance(store, DeviceStore)

    def export(self, store) -> ExportedPool:
        self._may("export")
        if not isinstance(store, DeviceStore):
            raise DeviceError("the pages are in the memory of the CPU; add --device cuda")
        fd = store.allocation.fd
        handle = _HANDLE.pack(os.getpid(), fd, os.fstat(fd).st_ino, b"FAKE")
        return ExportedPool(handle, OFFSET, store.num_pages * store.page_bytes, self.name)

    def open(self, pool) -> int:
        self._may("open")
        if pool.device != self.name and pool.device not in self._reaches:
            raise DeviceError(f"{self.name} cannot reach the memory of {pool.device}")
        for base, (handle, _) in self._maps.items():
            if handle == pool.handle:
                return self._opened(base) + pool.offset
        pid, fd, inode, magic = _HANDLE.unpack(pool.handle)
        try:
            assert magic == b"FAKE"
            with open(f"/proc/{pid}/fd/{fd}", "r+b", buffering=0) as file:
                if os.fstat(file.fileno()).st_ino != inode:
                    raise OSError
                made = mmap.mmap(file.fileno(), 0)
        except OSError:
            raise DeviceError("invalid resource handle") from None
        base = np.frombuffer(made, np.uint8).ctypes.data
        self._maps[base] = (pool.handle, made)
        return self._opened(base) + pool.offset

    def close(self, pool, address) -> None:
        base = address - pool.offset
        with self.changed:
            assert self.opened[base] > 0, "closed more often than opened"
            assert not any(self._inside(base, w) for w in self.queued), "closed under a copy"
            self.opened[base] -= 1
            if not self.opened[base]:
                del self.opened[base], self._maps[base]
            self.changed.notify_all()

    def lane(self):
        self._may("lane")
        self.lanes += 1
        return FakeLane(self, self.lanes)

    def staging(self, size):
        return np.zeros(size, np.uint8)

    def settle(self) -> None:
        self._may("settle")
        assert self.gate.wait(PATIENCE)
        self.settled += 1

    def aside(self):
        return nullcontext()

    # ---- what a test does ------------------------------------------------------------------

    def finish(self, number: int = 0) -> None:
        """Does one of the queued works, the first by default."""
        with self.changed:
            work = self.queued[number]
            done = all(ready.happened for ready in work.after)
            assert done, "begun before its pages are computed"
            self._do(work)

    def finish_all(self, rng=None) -> None:
        """Does all that is queued, in an order drawn from ``rng``."""
        with self.changed:
            waiting = [work for work in self.queued if not work.over]
            for work in rng.sample(waiting, len(waiting)) if rng else waiting:
                self._do(work)

    def let_go(self) -> None:
        """Does what is queued, and from now on everything at once."""
        with self.changed:
            self.held = False
            self.finish_all()

    def wait_queued(self, count: int) -> None:
        """Waits until so many works with copies are queued."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.works()) >= count, PATIENCE)

    def works(self) -> list[Work]:
        return [work for work in self.queued if work.copies]

    # ---- how it is done --------------------------------------------------------------------

    def _may(self, call: str) -> None:
        if call in self.fails:
            raise DeviceError(f"{call} failed")

    def _opened(self, base: int) -> int:
        with self.changed:
            self.opened[base] += 1
            self.opens += 1
        return base

    def _inside(self, base: int, work: Work) -> bool:
        end = base + len(self._maps[base][1])
        return any(base <= one.target < end for one in work.copies if not work.over)

    def add(self, work: Work) -> None:
        with self.changed:
            self.queued.append(work)
            if not self.held:
                self._do(work)
            self.changed.notify_all()

    def _do(self, work: Work) -> None:
        for one in work.copies:
            for row in range(one.rows):
                target = one.target + row * one.target_pitch
                ctypes.memmove(target, one.source + row * one.source_pitch, one.size)
        work.over = True
        self.queued.remove(work)
        self.changed.notify_all()


class FakeLane:
    """A ``Lane``. Its works may end in any order: a mark waits for all that are before it."""

    def __init__(self, device: FakeDevice, number: int) -> None:
        self._device, self._number = device, number
        self._works: list[Work] = []
        self._after: tuple[Ready, ...] = ()

    def follow(self, ready) -> None:
        if ready not in self._after:
            self._after += (ready,)

    def copy(self, copies) -> None:
        self._device._may("copy")
        if copies:
            work = Work(self._number, list(copies), self._after)
            self._works.append(work)
            self._device.add(work)

    def record(self):
        self._works = [work for work in self._works if not work.over]
        return FakeMark(self._device, list(self._works))

    def close(self) -> None:
        assert all(work.over for work in self._works)


class FakeMark:
    """A ``Mark``."""

    def __init__(self, device: FakeDevice, works: list[Work]) -> None:
        self._device, self._works = device, works

    @property
    def done(self) -> bool:
        return all(work.over for work in self._works)

    def wait(self) -> None:
        self._device._may("wait")
        with self._device.changed:
            assert self._device.changed.wait_for(lambda: self.done, PATIENCE), "never copied"
        self._device._may("wait")


class CudaIpcRig(Rig):
    """A ``Rig`` whose pages are in the memory of ``device``, or the target's in ``other``'s."""

    def __init__(self, page_format=FORMAT, check_every=1, device=None, other=None, **options):
        self.device = device or FakeDevice()
        listener = CudaIpcListener(page_format, other or self.device, check_every)
        options.setdefault("dialers", [CudaIpcDialer(self.device)])
        super().__init__(listener, page_format, **options)

    def _store(self, num_pages):
        fmt = self.page_format
        return device_store(num_pages, fmt.num_layers, fmt.page_size, fmt.latent_width)


def device_store(*shape, dtype=torch.float32) -> DeviceStore:
    size = OFFSET + dtype.itemsize * int(np.prod(shape))
    return DeviceStore(SharedMemory(size), shape, dtype)


@contextmanager
def cuda_ipc_rig(**options):
    """A rig that is at rest in the end: nothing under way, nothing mapped."""
    drained = threading.Event()
    rig = CudaIpcRig(on_drained=lambda lease_id: drained.set(), **options)
    rig.drained = drained
    try:
        yield rig
    finally:
        rig.device.gate.set()
        rig.device.let_go()
        links = list(rig.sender._links.values())
        rig.end()
        for link in links:
            link.join(PATIENCE)
        assert rig.device.opened == Counter()

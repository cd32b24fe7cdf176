"""Shared memory plays the memory of a job: pieces land when the test says."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext

import torch
from kvtransfer_rig import FORMAT, PATIENCE, Rig

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.frames import BadFrame
from pdmesh.kvtransfer.nvshmem import NvshmemListener
from pdmesh.kvtransfer.shm_link import PlacedLink
from pdmesh.kvtransfer.stream_server import introduce
from pdmesh.kvtransfer.tcp import connect


class FakeJob:
    """Has the place of an ``NvshmemJob`` of two processes, both in this one."""

    name, rank = "job", 1

    def __init__(self) -> None:
        self.gate = threading.Event()
        """``settle`` returns once it is set."""
        self.gate.set()
        self.settled = 0
        self.held = False
        """What is put lands by ``let_go`` alone."""
        self.asked = threading.Semaphore(0)
        """Times that it was asked what has landed."""
        self.free = [7, 3]
        self._lock = threading.Lock()
        self._landed = dict.fromkeys(self.free, 0)
        self._under_way = []

    def take_counter(self) -> int:
        if not self.free:
            raise BadFrame("no counter is left")
        number = self.free.pop()
        self._landed[number] = 0
        return number

    def give_counter(self, number: int) -> None:
        self.free.append(number)

    def landed(self, number: int) -> int:
        self.asked.release()
        with self._lock:
            return self._landed[number]

    def settle(self) -> None:
        assert self.gate.wait(PATIENCE)
        self.settled += 1

    def aside(self):
        return nullcontext()

    def put(self, number: int, page: torch.Tensor, piece: memoryview) -> None:
        with self._lock:
            self._under_way.append((number, page, piece))
        if not self.held:
            self._land()

    def let_go(self) -> None:
        self.held = False
        self._land()

    def _land(self) -> None:
        with self._lock:
            for number, page, piece in self._under_way:
                page.copy_(torch.frombuffer(piece, dtype=page.dtype).reshape(page.shape))
                self._landed[number] += 1
            self._under_way.clear()


class FakeLink(PlacedLink):
    """The sender's end of ``NvshmemLink``, whose puts are of ``FakeJob``."""

    job: FakeJob
    pool: torch.Tensor
    counter = 0

    def _put(self, write, place):
        first = place.index(write.page)
        ids = place.page_ids[first : first + write.pages]
        for page_id, piece in zip(ids, write.pieces, strict=True):
            layers = self.pool[page_id, write.layer : write.layer + write.layers]
            self.job.put(self.counter, layers, piece)
        return self._crcs(write, place)


class FakeDialer:
    name = "nvshmem"

    def __init__(self, job: FakeJob) -> None:
        self.job = job
        self.pool = None

    def reaches(self, address: str) -> bool:
        return address.split("/")[1:] == [self.job.name, str(self.job.rank)]

    def dial(self, address, page_format, endpoint):
        where = address.split("/")[0]
        sock = connect(where)
        welcome = introduce(sock, where, page_format)
        sock.settimeout(None)
        link = FakeLink(sock, endpoint, page_format.page_layer_bytes, where)
        link.check_every, link.counter = welcome.check_every, welcome.base
        link.num_pages = len(self.pool)
        link.job, link.pool = self.job, self.pool
        link.start()
        return link


class NvshmemRig(Rig):
    """A ``Rig`` whose pages are in the symmetric memory of ``device``, a job."""

    def __init__(self, page_format=FORMAT, check_every=1, **options):
        self.device = FakeJob()
        dialer = FakeDialer(self.device)
        listener = NvshmemListener(self.device, page_format, check_every=check_every)
        super().__init__(listener, page_format, dialers=[dialer], **options)
        dialer.pool = self.target.tensor

    def _store(self, num_pages):
        fmt = self.page_format
        shape = num_pages, fmt.num_layers, fmt.page_size, fmt.latent_width
        return LatentStore(*shape, torch.float32, memory=torch.zeros(shape))


@contextmanager
def nvshmem_rig(**options):
    """A rig that is at rest in the end: every counter has been given back."""
    drained = threading.Event()
    rig = NvshmemRig(on_drained=lambda lease_id: drained.set(), **options)
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
        assert sorted(rig.device.free) == [3, 7]

"""The NVSHMEM transport: within one NVSHMEM job pages go from device to device.

Every worker's pool lies in symmetric memory (``NvshmemJob.store``), so a page of the receiver has
an address that the sender can put to. Each piece is put with a signal: NVSHMEM raises a counter at
the receiver once the piece is there. Control messages and notices of landed blocks go over a TCP
connection with the frames of the other transports; the receiver believes a notice when the counter
says that the pieces of all notices so far have landed, and when its checksums agree. Host and
device agree then: a completion that only the host has seen would not prove that a kernel sees the
data.

A put cannot be called back, and the memory of a peer cannot be unmapped: pages stay in quarantine
until the sender says that it has drained or its process is gone.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
import threading
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.checks import SAMPLED
from pdmesh.kvtransfer.device_memory import SideStream
from pdmesh.kvtransfer.frames import BadFrame, Hello, Welcome
from pdmesh.kvtransfer.nvshmem_link import NvshmemLink, NvshmemReceiverLink
from pdmesh.kvtransfer.stream_link import MAX_QUEUED_BYTES
from pdmesh.kvtransfer.stream_server import introduce
from pdmesh.kvtransfer.tcp import TcpListener, connect, set_options
from pdmesh.kvtransfer.transport import Endpoint, ReceiverEndpoint
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import PageFormat

MAX_SENDERS = 64
"""Connections to one receiver at a time: each has a counter."""


def missing() -> str | None:
    """Why this transport cannot be used here, in a sentence; None if it can."""
    if importlib.util.find_spec("nvshmem") is None:
        return "the package nvshmem4py-cu13 is not installed (pip install pdmesh[gpu])"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return None


def new_job_id() -> bytes:
    """What all processes of a job need to join it; one of them makes it.

    Raises:
        ConfigError: the library is missing.
    """
    return bytes(_core().get_unique_id()._data.tobytes())


class NvshmemJob:
    """This process' place in an NVSHMEM job. Collective: all of the job make one together.

    Args:
        job_id: see ``new_job_id``.
        rank: of this process (its PE).
        size: processes of the job.
        device: whose memory is shared.

    Raises:
        ConfigError: the library is missing.
    """

    def __init__(self, job_id: bytes, rank: int, size: int, device: torch.device) -> None:
        core = _core()
        uid = core.get_unique_id(empty=True)
        flat = uid._data.view(np.uint8).reshape(-1)
        flat[:] = np.frombuffer(job_id, np.uint8)
        torch.cuda.set_device(device)
        cuda = importlib.import_module("cuda.core")
        handle = cuda.Device(device.index or 0)
        handle.set_current()
        core.init(device=handle, uid=uid, rank=rank, nranks=size, initializer_method="uid")
        self.name = job_id.hex()[:32]
        self.rank = rank
        self.size = size
        self.device = device
        self.signals: torch.Tensor = core.tensor((MAX_SENDERS,), dtype=torch.int64)
        """Counters of landed pieces, one a connection to this process."""
        self.signals.zero_()
        torch.cuda.synchronize(device)
        self._side = SideStream(device)
        self._lock = threading.Lock()
        self._free = list(range(MAX_SENDERS))

    def store(
        self, num_pages: int, num_layers: int, page_size: int, width: int, dtype: torch.dtype
    ) -> LatentStore:
        """A pool in symmetric memory. Collective, with the same arguments everywhere."""
        shape = (num_pages, num_layers, page_size, width)
        memory = _core().tensor(shape, dtype=dtype)
        memory.zero_()
        return LatentStore(
            num_pages, num_layers, page_size, width, dtype, self.device, memory=memory
        )

    def take_counter(self) -> int:
        """A counter at zero for one connection.

        Raises:
            BadFrame: none is left.
        """
        with self._lock:
            if not self._free:
                raise BadFrame(f"{MAX_SENDERS} senders are connected already")
            number = self._free.pop(0)
        self.signals[number] = 0
        torch.cuda.synchronize(self.device)
        return number

    def give_counter(self, number: int) -> None:
        """The sender of a counter puts nothing any more."""
        with self._lock:
            self._free.append(number)

    def landed(self, number: int) -> int:
        """Pieces that have landed from one sender."""
        return int(self.signals[number].item())

    def settle(self) -> None:
        """See ``DeviceMemory``."""
        computed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        computed.record(torch.cuda.default_stream(self.device))
        computed.synchronize()

    def aside(self) -> AbstractContextManager[None]:
        """See ``DeviceMemory``."""
        return self._side.entered()

    def close(self) -> None:
        """Leaves the job. Collective."""
        core = _core()
        core.free_tensor(self.signals)
        core.finalize()


class NvshmemListener(TcpListener):
    """Accepts senders of the same job.

    Args:
        job: this process' place in it; the receiver's store has to be the job's.
        page_format, host, port, advertise: as of ``TcpListener``, for the control connection.
        check_every: one unit in so many carries a checksum, and all of a prompt's last page.
    """

    name = "nvshmem"

    def __init__(
        self,
        job: NvshmemJob,
        page_format: PageFormat,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        check_every: int = SAMPLED,
    ) -> None:
        super().__init__(page_format, host, port, advertise)
        self._job = job
        self._check_every = check_every
        self._counters: dict[socket.socket, int] = {}
        self._store_bytes = 0

    def _bind(self, endpoint: ReceiverEndpoint) -> tuple[socket.socket, str]:
        store = endpoint.store
        if not store.symmetric:
            raise ConfigError("the pages are not in symmetric memory, so nvshmem cannot offer them")
        self._store_bytes = store.num_pages * store.page_bytes
        server, address = super()._bind(endpoint)
        return server, f"{address}/{self._job.name}/{self._job.rank}"

    def _welcome(self, sock: socket.socket, hello: Hello) -> Welcome:
        set_options(sock)
        number = self._counters[sock] = self._job.take_counter()
        return Welcome(0, self._check_every, self._store_bytes, base=number)

    def _link(
        self, sock: socket.socket, endpoint: ReceiverEndpoint, peer: str, hello: Hello
    ) -> NvshmemReceiverLink:
        link = NvshmemReceiverLink(sock, endpoint, self._page_format.page_layer_bytes, peer)
        link.check_every = self._check_every
        link.memory, link.counter = self._job, self._counters.pop(sock)
        return link


class NvshmemDialer:
    """Puts pages of ``store`` into those of ``NvshmemListener`` addresses of the same job.

    Args:
        job: this process' place in it.
        store: this process' pool, made by the job; it has the receiver's shape.
        max_queued_bytes: bytes of writes that may wait on one connection before a push blocks.
    """

    name = "nvshmem"

    def __init__(
        self, job: NvshmemJob, store: LatentStore, max_queued_bytes: int = MAX_QUEUED_BYTES
    ) -> None:
        self._job = job
        self._store = store
        self._max_queued_bytes = max_queued_bytes

    def reaches(self, address: str) -> bool:
        """Whether it is of the same job."""
        parts = address.split("/")
        return len(parts) == 3 and parts[1] == self._job.name

    def dial(self, address: str, page_format: PageFormat, endpoint: Endpoint) -> NvshmemLink:
        where, _, rank = address.split("/")
        sock = connect(where)
        try:
            set_options(sock)
            welcome = introduce(sock, where, page_format)
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        unit = page_format.page_layer_bytes
        link = NvshmemLink(sock, endpoint, unit, where, self._max_queued_bytes)
        link.check_every = welcome.check_every
        link.num_pages = welcome.store_bytes // (unit * page_format.num_layers)
        link.pool = self._store.tensor.data_ptr()
        link.signal = self._job.signals.data_ptr() + 8 * welcome.base
        link.rank = int(rank)
        link.stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            self._job.device, priority=-1
        )  # puts of a layer go before the layers behind it
        link.start()
        return link


def _core() -> Any:
    if importlib.util.find_spec("nvshmem") is None:
        raise ConfigError(missing() or "nvshmem cannot be used")
    return importlib.import_module("nvshmem.core")

"""The transports of a worker made from their names, best first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

import torch

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.choice import DEFAULT_TRANSPORTS, check_transports
from pdmesh.kvtransfer.cuda_ipc import CudaIpcDialer, CudaIpcListener, device_memory
from pdmesh.kvtransfer.device_memory import DeviceError, DeviceMemory
from pdmesh.kvtransfer.loopback import LoopbackDialer
from pdmesh.kvtransfer.nixl import NixlDialer, NixlListener
from pdmesh.kvtransfer.pull_cuda_ipc import cuda_ipc_transport
from pdmesh.kvtransfer.pull_exchange import Transport, tcp_transport
from pdmesh.kvtransfer.pull_shm import shm_transport
from pdmesh.kvtransfer.shm import ShmDialer, ShmListener
from pdmesh.kvtransfer.stream_link import MAX_QUEUED_BYTES
from pdmesh.kvtransfer.tcp import TcpDialer, TcpListener
from pdmesh.kvtransfer.transport import Dialer, Listener
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)


def make_listeners(
    names: Sequence[str], page_format: PageFormat, store: LatentStore, host: str
) -> list[Listener]:
    """What a receiver of pages into ``store`` offers at ``host``.

    Raises:
        ConfigError: a name is not allowed, or nothing is left for pages on a device.
    """
    check_transports(names)
    offered: list[Listener] = []
    for name in names:
        if name == "cuda_ipc":
            memory = _shared_device(names, store)
            offered += [] if memory is None else [CudaIpcListener(page_format, memory)]
        elif name == "shm" and store.memory_fd is not None:
            offered.append(ShmListener(page_format))
        elif name == "tcp":
            offered.append(TcpListener(page_format, host))
        elif name == "nixl":
            offered.append(NixlListener(page_format, host))
    if not offered:
        raise ConfigError(
            f"the pages cannot be offered over {', '.join(names)}; add tcp to the transports"
        )
    return offered


def make_dialers(
    names: Sequence[str], store: LatentStore, max_queued_bytes: int = MAX_QUEUED_BYTES
) -> list[Dialer]:
    """What a sender of pages of ``store`` can use; within its own process always loopback.

    Raises:
        ConfigError: a name is not allowed, or cuda_ipc alone cannot be used.
    """
    check_transports(names)
    made: dict[str, Dialer] = {
        "shm": ShmDialer(max_queued_bytes),
        "tcp": TcpDialer(max_queued_bytes),
        "nixl": NixlDialer(store, max_queued_bytes),
    }
    if "cuda_ipc" in names and (memory := _shared_device(names, store)) is not None:
        made["cuda_ipc"] = CudaIpcDialer(memory)
    return [LoopbackDialer(), *(made[name] for name in names if name in made)]


def _shared_device(names: Sequence[str], store: LatentStore) -> DeviceMemory | None:
    """The device that has the pages, for cuda_ipc; None where the others of ``names`` have to do.

    Raises:
        ConfigError: there are no others.
    """
    try:
        memory = device_memory(store)
        memory.export(store)
    except DeviceError as error:
        reason = f"cuda_ipc cannot be used: {error}"
        if len(names) == 1:
            raise ConfigError(f"{reason}; or name tcp besides") from error
        if not store.on_cpu:
            _say_once(reason)
        return None
    return memory


@lru_cache
def _say_once(reason: str) -> None:
    event(log, "transport_left_out", logging.WARNING, transport="cuda_ipc", reason=reason)


def make_page_transports(names: Sequence[str], store: LatentStore, host: str) -> list[Transport]:
    """How cached pages are lent and read, best first. NIXL lends none yet: tcp stands for it.

    Raises:
        ConfigError: a name is not allowed, or cuda_ipc alone cannot be used.
    """
    check_transports(names)
    made: list[Transport] = []
    if "cuda_ipc" in names and (memory := _shared_device(names, store)) is not None:
        made.append(cuda_ipc_transport(store, memory))
    if "shm" in names and store.memory_fd is not None:
        made.append(shm_transport(store))
    if "tcp" in names or "nixl" in names or not made:
        made.append(tcp_transport(store, host))
    return made


def transport_report(device: str | None) -> str:
    """How pages go between workers that compute on ``device`` (the best there is), in a line.

    Raises:
        ConfigError: there is no such device.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cpu":
        return "within this host over shm, to others over tcp"
    try:
        store = LatentStore(1, 1, 64, 576, torch.bfloat16, chosen)
        device_memory(store).export(store)
    except DeviceError as error:
        return f"over tcp, through the CPU's memory: cuda_ipc cannot be used: {error}"
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"there is no {chosen}") from error
    return "within this host over cuda_ipc where devices reach each other, else over tcp"


__all__ = [
    "DEFAULT_TRANSPORTS",
    "make_dialers",
    "make_listeners",
    "make_page_transports",
    "transport_report",
]

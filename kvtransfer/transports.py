"""The transports of a worker made from their names, best first."""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.choice import DEFAULT_TRANSPORTS, check_transports
from pdmesh.kvtransfer.loopback import LoopbackDialer
from pdmesh.kvtransfer.nixl import NixlDialer, NixlListener
from pdmesh.kvtransfer.pull_exchange import Transport, tcp_transport
from pdmesh.kvtransfer.pull_shm import shm_transport
from pdmesh.kvtransfer.shm import ShmDialer, ShmListener
from pdmesh.kvtransfer.stream_link import MAX_QUEUED_BYTES
from pdmesh.kvtransfer.tcp import TcpDialer, TcpListener
from pdmesh.kvtransfer.transport import Dialer, Listener
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import PageFormat


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
        if name == "shm" and store.memory_fd is not None:
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
        ConfigError: a name is not allowed.
    """
    check_transports(names)
    made: dict[str, Dialer] = {
        "shm": ShmDialer(max_queued_bytes),
        "tcp": TcpDialer(max_queued_bytes),
        "nixl": NixlDialer(store, max_queued_bytes),
    }
    return [LoopbackDialer(), *(made[name] for name in names)]


def make_page_transports(names: Sequence[str], store: LatentStore, host: str) -> list[Transport]:
    """How cached pages are lent and read, best first. NIXL lends none yet: tcp stands for it.

    Raises:
        ConfigError: a name is not allowed.
    """
    check_transports(names)
    made: list[Transport] = []
    if "shm" in names and store.memory_fd is not None:
        made.append(shm_transport(store))
    if "tcp" in names or "nixl" in names or not made:
        made.append(tcp_transport(store, host))
    return made


__all__ = ["DEFAULT_TRANSPORTS", "make_dialers", "make_listeners", "make_page_transports"]

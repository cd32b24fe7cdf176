"""The NIXL transport (``pip install pdmesh[nixl]``): one-sided writes, over RDMA where it is.

Control messages and notices of landed blocks go over a TCP connection with the frames of the other
transports; the pages go by writes of the library, straight from the sender's pool into the
receiver's. Each connection has an agent of its own at the receiver, which is destroyed when the
connection ends: no write of its sender can land after that, whatever becomes of the sender. Ways of
UCX that write into another process's memory without its library are left out for that reason (on
one host there is ``shm``).
"""

from __future__ import annotations

import importlib
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import numpy as np

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.checks import SAMPLED
from pdmesh.kvtransfer.choice import NIXL_PACKAGE, missing_nixl
from pdmesh.kvtransfer.frames import Hello, Welcome
from pdmesh.kvtransfer.nixl_link import NixlLink, NixlReceiverLink
from pdmesh.kvtransfer.stream_link import MAX_QUEUED_BYTES
from pdmesh.kvtransfer.stream_server import introduce
from pdmesh.kvtransfer.tcp import TcpListener, connect, set_options
from pdmesh.kvtransfer.transport import Endpoint, ReceiverEndpoint
from pdmesh.wire.errors import ConfigError, TransferFailed
from pdmesh.wire.hashes import PageFormat

_AGENT_SECONDS = 30.0
"""The receiver makes an agent of its own for a connection before it answers."""
_SETTINGS = {"UCX_TLS": "^cma,knem,xpmem", "NIXL_LOG_LEVEL": "WARN"}


def missing() -> str | None:
    """Why this transport cannot be used here, in a sentence; None if it can."""
    return missing_nixl()


def new_agent(name: str) -> Any:
    """An agent of the library with its UCX backend.

    Raises:
        ConfigError: the library is missing or cannot start.
    """
    if reason := missing():
        raise ConfigError(reason)
    for key, value in _SETTINGS.items():
        os.environ.setdefault(key, value)
    if not Path("/sys/class/infiniband").exists():
        # With Debian's libibverbs next to the wheel's a process would crash at its end.
        os.environ.setdefault("UCX_MODULES", "^ib")
    api = importlib.import_module(f"{NIXL_PACKAGE}._api")
    try:
        config = api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
        return api.nixl_agent(f"{name}-{secrets.token_hex(8)}", config)
    except Exception as error:  # noqa: BLE001 - the library has many, without a common base
        raise ConfigError(f"NIXL does not start: {error}") from error


def register(agent: Any, store: LatentStore) -> tuple[Any, int]:
    """Makes a store's memory known to an agent; returns what ends that, and its address."""
    base = store.tensor.data_ptr()
    size = store.num_pages * store.page_bytes
    return agent.register_memory([(base, size, 0, "latents")], "DRAM"), base


class NixlListener(TcpListener):
    """Accepts senders that write with NIXL.

    Args:
        page_format, host, port, advertise: as of ``TcpListener``, for the control connection.
        check_every: one unit in so many carries a checksum, and all of a prompt's last page; 1:
            every unit.
    """

    name = "nixl"

    def __init__(
        self,
        page_format: PageFormat,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        check_every: int = SAMPLED,
    ) -> None:
        super().__init__(page_format, host, port, advertise)
        self._check_every = check_every
        self._store: LatentStore | None = None
        self._agents: dict[socket.socket, tuple[Any, Any]] = {}

    def _bind(self, endpoint: ReceiverEndpoint) -> tuple[socket.socket, str]:
        if not endpoint.store.on_cpu:
            raise ConfigError("pages on a device are not offered over nixl yet")
        if reason := missing():
            raise ConfigError(reason)
        self._store = endpoint.store
        return super()._bind(endpoint)

    def _welcome(self, sock: socket.socket, hello: Hello) -> Welcome:
        store = self._store
        assert store is not None
        set_options(sock)
        agent = new_agent("receiver")
        registered, base = register(agent, store)
        self._agents[sock] = agent, registered
        size = store.num_pages * store.page_bytes
        return Welcome(0, self._check_every, size, base, agent.get_agent_metadata())

    def _link(
        self, sock: socket.socket, endpoint: ReceiverEndpoint, peer: str, hello: Hello
    ) -> NixlReceiverLink:
        link = NixlReceiverLink(sock, endpoint, self._page_format.page_layer_bytes, peer)
        link.check_every = self._check_every
        link.agent, link.registered = self._agents.pop(sock)
        return link


class NixlDialer:
    """Writes from ``store`` to ``NixlListener`` addresses.

    Args:
        store: where the pages that are pushed are; registered once.
        max_queued_bytes: bytes of writes that may wait on one connection before a push blocks.
    """

    name = "nixl"

    def __init__(self, store: LatentStore, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._store = store
        self._max_queued_bytes = max_queued_bytes
        self._agent: Any = None
        self._registered: Any = None

    def reaches(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        return bool(host) and port.isdigit() and missing() is None and self._store.on_cpu

    def dial(self, address: str, page_format: PageFormat, endpoint: Endpoint) -> NixlLink:
        sock = connect(address)
        try:
            set_options(sock)
            sock.settimeout(_AGENT_SECONDS)
            welcome = introduce(sock, address, page_format)
            sock.settimeout(None)
            agent = self._own_agent()
            peer = agent.add_remote_agent(welcome.agent)
        except ConfigError as error:
            sock.close()
            raise TransferFailed(error.message) from error
        except BaseException:
            sock.close()
            raise
        unit = page_format.page_layer_bytes
        link = NixlLink(sock, endpoint, unit, address, self._max_queued_bytes)
        link.check_every = welcome.check_every
        link.num_pages = welcome.store_bytes // (unit * page_format.num_layers)
        link.agent, link.remote, link.base = agent, peer, welcome.base
        link.own = _span(self._store)
        link.start()
        return link

    def _own_agent(self) -> Any:
        if self._agent is None:
            self._agent = new_agent("sender")
            self._registered, _ = register(self._agent, self._store)
        return self._agent


def _span(store: LatentStore) -> range:
    base = store.tensor.data_ptr()
    return range(base, base + int(np.prod(store.tensor.shape)) * store.tensor.element_size() + 1)

"""A sender and a receiver with small stores, and a TCP proxy that can be told to misbehave."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.protocol.receiver import Phase
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.sender import Transfer, TransferSender
from pdmesh.kvtransfer.transport import Dialer, Listener
from pdmesh.wire.errors import TransferFailed
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import Fin, Lease

PATIENCE = 60.0
"""Seconds after which a test gives up on an event; never reached when all is well."""

FORMAT = PageFormat("tiny", "weights", "float32", 4, 2, 0, 3)
SENTINEL = 99.0


def wide_format(width: int) -> PageFormat:
    """A format with larger pages: 4 tokens of ``width`` values, two layers."""
    return PageFormat("tiny", "weights", "float32", 4, 2, 0, width)


class Rig:
    """Source pages with known contents, empty destination pages, and a transfer between them."""

    def __init__(
        self,
        listener: Listener,
        page_format: PageFormat = FORMAT,
        num_pages: int = 8,
        dialers: Sequence[Dialer] | None = None,
        route: Callable[[str], str] = lambda address: address,
        **options: Any,
    ) -> None:
        self.page_format = page_format
        self.source = self._store(num_pages)
        shape = self.source.tensor.shape
        self.source.tensor.copy_(torch.arange(1, 1 + shape.numel()).reshape(shape))
        self.target = self._store(num_pages)
        self.receiver = TransferReceiver(self.target, [listener], **options)
        self.receiver.start()
        self.sender = TransferSender(page_format, dialers, self.source)
        self.addresses = tuple((name, route(where)) for name, where in self.receiver.addresses)

    def _store(self, num_pages: int) -> LatentStore:
        fmt = self.page_format
        return LatentStore(
            num_pages, fmt.num_layers, fmt.page_size, fmt.latent_width, torch.float32, shared=True
        )

    def lease(
        self,
        lease_id: str = "a",
        pages: Sequence[int] = (3, 1, 5),
        cached: int = 0,
        generation: int = 1,
    ) -> Lease:
        """A lease on target ``pages`` for the prompt pages after the ``cached`` ones."""
        self.receiver.expect(lease_id, generation, pages, cached, self.page_format.num_layers)
        return self.lease_message(lease_id, cached, cached + len(pages), generation)

    def lease_message(self, lease_id: str, cached: int, num: int, generation: int = 1) -> Lease:
        return Lease(
            lease_id=lease_id,
            generation=generation,
            instance="decode-1",
            cached_pages=cached,
            num_pages=num,
            transports=self.addresses,
            page_format=self.page_format,
        )

    def push(self, transfer: Transfer, page: int, layer: int) -> None:
        """Pushes a prompt page; the source keeps prompt page p in its page p."""
        transfer.push(page, layer, self.source.read(page, layer))

    def push_all(self, transfer: Transfer) -> None:
        for layer in range(self.page_format.num_layers):
            for page in range(transfer.lease.cached_pages, transfer.lease.num_pages):
                self.push(transfer, page, layer)

    def finish(self, transfer: Transfer, token: int = 7) -> None:
        try:
            transfer.finish(fin_of(transfer, token), timeout=PATIENCE)
        except TransferFailed as error:
            if "no acknowledgement" in str(error):
                raise AssertionError("the failure was never told") from error
            raise

    def wait(self, lease_id: str = "a") -> Fin:
        try:
            return asyncio.run(self.receiver.wait(lease_id, PATIENCE))
        except TransferFailed as error:
            if "arrived within" in str(error):
                raise AssertionError("the failure was never noticed") from error
            raise

    def wait_opened(self, lease_id: str = "a") -> None:
        """Waits until the receiver knows the lease's sender."""
        pause, end = threading.Event(), time.monotonic() + PATIENCE
        while self.receiver.phase(lease_id) is Phase.RESERVED:
            assert time.monotonic() < end, "the lease was never opened"
            pause.wait(0.005)

    def arrived(self, lease: Lease, pages: Sequence[int]) -> bool:
        """Whether target ``pages`` hold the source's pages of the lease."""
        prompt = range(lease.cached_pages, lease.num_pages)
        return torch.equal(self.target.tensor[list(pages)], self.source.tensor[list(prompt)])

    def problems(self) -> list[str]:
        return self.receiver.check_integrity() + self.sender.check_integrity()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def end(self) -> None:
        """Closes both, and sees that nothing is left: no transfer, no page in use."""
        self.close()
        wait_over(self.sender)
        assert self.problems() == []


def wait_over(sender: TransferSender) -> None:
    """Waits until no transfer of ``sender`` is left.

    The last thing that a connection's thread does is to end its transfers: the receiver, and so a
    test, may be through with them before, and a connection that was lost is not among those that
    ``close`` ends.
    """
    pause, end = threading.Event(), time.monotonic() + PATIENCE
    while sender.num_transfers:
        assert time.monotonic() < end, f"{sender.num_transfers} transfers are never over"
        pause.wait(0.005)


def fin_of(transfer: Transfer, token: int = 7) -> Fin:
    return Fin(
        lease_id=transfer.lease.lease_id,
        generation=transfer.lease.generation,
        request_id="request",
        num_writes=transfer.num_writes,
        first_tokens=(token,),
        last_hidden=b"hidden",
    )


class Proxy:
    """Forwards TCP connections to one address; may change, pace, hold or cut what is sent.

    Args:
        change: called with (offset in the stream towards the receiver, bytes); what it returns is
            forwarded.
        bytes_per_second: pace towards the receiver.
    """

    def __init__(
        self,
        change: Callable[[int, bytearray], bytearray] | None = None,
        bytes_per_second: int | None = None,
    ) -> None:
        self.target = ""
        self.change = change
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.stopped = threading.Event()
        self.forwarded = 0
        self._pace = bytes_per_second
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._spawn(self._accept)

    def route(self, address: str) -> str:
        self.target = address
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def hold(self) -> None:
        """Forwards nothing towards the receiver until ``release``."""
        self.open_gate.clear()

    def release(self) -> None:
        self.open_gate.set()

    def cut(self) -> None:
        """Closes every connection, as a lost peer would."""
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stopped.set()
        self.open_gate.set()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for thread in list(self._threads):
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a proxy thread is stuck"
        for sock in self._sockets:
            sock.close()

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            host, _, port = self.target.rpartition(":")
            far = socket.create_connection((host, int(port)), PATIENCE)
            far.settimeout(None)
            self._sockets += [near, far]
            self._spawn(self._forward, near, far, True)
            self._spawn(self._forward, far, near, False)

    def _forward(self, source: socket.socket, sink: socket.socket, towards: bool) -> None:
        offset = 0
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 14)):
                if towards:
                    self.open_gate.wait()
                    if self._pace:
                        self.stopped.wait(len(data) / self._pace)
                    size = len(data)
                    data = self.change(offset, data) if self.change else data
                    offset += size
                    self.forwarded += size
                sink.sendall(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

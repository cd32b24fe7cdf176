"""How the pages of a loan are read: what a transport offers, and the bytes of whole pages.

A transport has a server beside the owner's pages and a reader beside the reader's own. Reading
takes no part in deciding: whether what was read may be used, the owner says afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from pdmesh.kvcache.store import LatentStore, tensor_bytes
from pdmesh.wire.errors import TransferFailed


class WrongBytes(TransferFailed):
    """A page came with a checksum that is not that of its bytes."""


class ReadStopped(TransferFailed):
    """The reader itself ended the read."""


@dataclass(frozen=True)
class ReadOrder:
    """Pages to read.

    Attributes:
        address: of the owner's server for this transport.
        first_page: of the pages, counted from the start of the prefix.
        page_ids: where they are in the owner's store, for transports that read its memory.
        destinations: the reader's own pages for them, as many.
    """

    loan_id: str
    address: str
    first_page: int
    page_ids: tuple[int, ...]
    destinations: tuple[int, ...]


class Stop:
    """Asks a read to end early. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = False
        self._calls: list[Callable[[], None]] = []

    @property
    def asked(self) -> bool:
        return self._asked

    def ask(self) -> None:
        """Idempotent."""
        with self._lock:
            self._asked = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    @contextmanager
    def calling(self, call: Callable[[], None]) -> Iterator[None]:
        """``call`` interrupts what the block waits for as soon as an end is asked for."""
        with self._lock:
            asked = self._asked
            if not asked:
                self._calls.append(call)
        if asked:
            call()
        try:
            yield
        finally:
            with self._lock:
                if call in self._calls:
                    self._calls.remove(call)


class PageReader(Protocol):
    """Reads pages of one transport into the reader's own store."""

    name: str

    def reaches(self, address: str) -> bool:
        """Whether this process can read from ``address`` at all."""
        ...

    def read(self, order: ReadOrder, stop: Stop) -> None:
        """Fills the destinations. Blocks; however it ends, nothing of it can touch them any more.

        Raises:
            TransferFailed: not all pages came, or not whole.
        """
        ...

    def close(self) -> None:
        """Ends what it keeps open; no read is under way."""
        ...


class PageServer(Protocol):
    """Lets pages of loans be read."""

    name: str

    def start(self) -> str:
        """Returns the address that readers are told.

        Raises:
            ConfigError: it cannot be bound.
        """
        ...

    def close(self) -> None:
        """Ends every read under way."""
        ...


class Lent(Protocol):
    """Where a server learns which pages are lent."""

    def lent_page(self, loan_id: str, page: int) -> int | None:
        """The place of a page of the prefix; None if no living loan of this id has it."""
        ...


def page_view(store: LatentStore, page: int) -> memoryview:
    """The bytes of a whole page: a view on the CPU, a copy from another device."""
    return tensor_bytes(store.tensor[page])


def fill_page(store: LatentStore, page: int, read_into: Callable[[memoryview], None]) -> None:
    """Fills a page with what ``read_into`` puts into the bytes it is given."""
    if store.tensor.device.type == "cpu":
        read_into(tensor_bytes(store.tensor[page]))
        return
    staged = torch.empty(store.tensor.shape[1:], dtype=store.tensor.dtype)
    read_into(tensor_bytes(staged))
    store.put_page(page, staged)

"""The memory of the pages: one tensor of latents, page-major, the layers inside a page."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from pdmesh.wire.errors import ConfigError, InternalError


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor: without a copy if it is contiguous and on the CPU."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.cpu().numpy().data


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies bytes of equal length; other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


@dataclass(frozen=True, slots=True)
class DevicePages:
    """``layers`` layers from ``layer`` on of some pages in a device's memory, by their numbers."""

    tensor: torch.Tensor
    """[num_pages, num_layers, page_size, width], contiguous: that of their store."""
    page_ids: tuple[int, ...]
    layer: int
    layers: int
    unit_bytes: int
    """Of one layer of one page."""
    ready: tuple[torch.cuda.Event, ...] = ()
    """They are there once these have happened on the streams that compute them."""

    @property
    def piece_bytes(self) -> int:
        """Of one page."""
        return self.layers * self.unit_bytes

    @property
    def nbytes(self) -> int:
        return len(self.page_ids) * self.piece_bytes

    def unit(self, index: int, layer: int) -> int:
        """Number in the store of a unit, by its page and layer in the block; units follow one
        another in memory."""
        return self.page_ids[index] * self.tensor.shape[1] + self.layer + layer


def taken_units(tensor: torch.Tensor, units: Sequence[int]) -> memoryview:
    """The bytes of units of pages on a device, copied to the host at once.

    Args:
        tensor: [num_pages, num_layers, page_size, width], contiguous.
        units: their numbers, page-major; at least one.
    """
    flat = tensor.flatten(0, 1)
    first, last = units[0], units[-1]
    in_a_row = list(units) == list(range(first, last + 1))
    taken = flat[first : last + 1] if in_a_row else flat[list(units)]
    if not taken.is_cuda:
        return tensor_bytes(taken)
    host = torch.empty(taken.shape, dtype=taken.dtype, pin_memory=True)  # kept by torch for others
    host.copy_(taken)
    return tensor_bytes(host)


class SharedMemory:
    """Memory of this process that others may map through its descriptor.

    It is an anonymous file (memfd): there is no name to remove, also after SIGKILL.
    """

    def __init__(self, size: int) -> None:
        try:
            self.fd = os.memfd_create("pdmesh-latents", os.MFD_CLOEXEC)
        except (AttributeError, OSError) as error:
            raise ConfigError(f"this system gives no shared memory: {error}") from error
        os.ftruncate(self.fd, size)
        self.view = mmap.mmap(self.fd, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                self.view.madvise(mmap.MADV_HUGEPAGE)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class LatentStore:
    """Latents of all pages of one rank.

    A whole page is contiguous, and so is one layer of one page: the unit of a transfer.

    Args:
        shared: on the CPU, put the pages where other processes of this host can map them
            (``memory_fd``). The memory has no name and ends with the last process that has it.
        memory: [num_pages, num_layers, page_size, width], zeros: symmetric memory of a device,
            made by somebody else, to be used for the pages.

    Attributes:
        tensor: [num_pages, num_layers, page_size, width], zeros at first. On the CPU the operating
            system commits memory only as pages are written.
    """

    def __init__(
        self,
        num_pages: int,
        num_layers: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        shared: bool = False,
        memory: torch.Tensor | None = None,
    ) -> None:
        shape = (num_pages, num_layers, page_size, width)
        if min(shape) < 1:
            raise InternalError(f"a latent store of shape {shape} holds nothing")
        self.num_pages = num_pages
        self.num_layers = num_layers
        self._memory: SharedMemory | None = None
        self.symmetric = memory is not None
        """The pages lie at the same place in the memory of every process of a job."""
        if memory is not None:
            self.tensor = memory
        elif shared and torch.device(device).type == "cpu":
            self._memory = SharedMemory(math.prod(shape) * dtype.itemsize)
            self.tensor = torch.frombuffer(self._memory.view, dtype=dtype).reshape(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.page_layer_bytes = page_size * width * self.tensor.element_size()
        """Bytes of one layer of one page."""
        self._bytes = tensor_bytes(self.tensor) if self.tensor.device.type == "cpu" else None

    def read(self, page: int, layer: int) -> memoryview:
        """The bytes of one layer of one page: a view on the CPU, a copy from another device."""
        start = self._offset(page, layer)
        if self._bytes is None:
            return tensor_bytes(self.tensor[page, layer])
        return self._bytes[start : start + self.page_layer_bytes]

    def read_units(self, units: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of several (page, layer): views on the CPU, from a device one copy of all."""
        if self._bytes is not None or not units:
            return [self.read(page, layer) for page, layer in units]
        taken = taken_units(self.tensor, [p * self.num_layers + layer for p, layer in units])
        size = self.page_layer_bytes
        return [taken[start : start + size] for start in range(0, len(taken), size)]

    @property
    def memory_fd(self) -> int | None:
        """File descriptor of the pages' memory, all pages in order; None if it is not shared."""
        return None if self._memory is None else self._memory.fd

    def views(self, page_ids: Sequence[int], layer: int, layers: int) -> tuple[memoryview, ...]:
        """The bytes of ``layers`` layers from ``layer`` on, one view a page (a copy from another
        device)."""
        return tuple(self._view(page, layer, layers) for page in page_ids)

    def device_pages(self, page_ids: Sequence[int], layer: int, layers: int) -> DevicePages:
        """As ``views``, without a copy from the device. Call it after the work that fills them.

        Raises:
            InternalError: a page or a layer does not exist.
        """
        if page_ids:
            self._offset(min(page_ids), layer)
            self._offset(max(page_ids), layer + layers - 1)
        ready: tuple[torch.cuda.Event, ...] = ()
        if self._bytes is None:
            computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            computed.record(torch.cuda.current_stream(self.tensor.device))
            ready = (computed,)
        size = self.page_layer_bytes
        return DevicePages(self.tensor, tuple(page_ids), layer, layers, size, ready)

    def _view(self, page: int, layer: int, layers: int) -> memoryview:
        start = self._offset(page, layer)
        if layers < 1 or layer + layers > self.num_layers:
            raise InternalError(f"a page has {self.num_layers} layers, not {layer + layers}")
        if self._bytes is None:
            return tensor_bytes(self.tensor[page, layer : layer + layers])
        return self._bytes[start : start + layers * self.page_layer_bytes]

    @property
    def on_cpu(self) -> bool:
        """Views are the pages themselves, so they may be written through."""
        return self._bytes is not None

    def write(self, page: int, layer: int, data: bytes | bytearray | memoryview) -> None:
        """Copies ``data`` into one layer of one page.

        Raises:
            InternalError: the length is not that of a page's layer, or the place does not exist.
        """
        start = self._offset(page, layer)
        size = memoryview(data).nbytes
        if size != self.page_layer_bytes:
            raise InternalError(
                f"{size} bytes for a layer of a page, which has {self.page_layer_bytes}"
            )
        if self._bytes is not None:
            self._bytes[start : start + size] = memoryview(data).cast("B")
            return
        staged = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        place = self.tensor[page, layer].reshape(-1).view(torch.uint8)
        place.copy_(staged)

    def write_block(
        self, page_ids: Sequence[int], layer: int, layers: int, pieces: Sequence[memoryview]
    ) -> None:
        """Copies ``pieces``, one a page, into ``layers`` layers from ``layer`` on.

        Raises:
            InternalError: as ``write``.
        """
        size = self.page_layer_bytes
        for page, piece in zip(page_ids, pieces, strict=True):
            if piece.nbytes != layers * size:
                raise InternalError(f"{piece.nbytes} bytes for {layers} layers of {size}")
            if self._bytes is not None:
                copy_bytes(self._view(page, layer, layers), piece)
                continue
            for index in range(layers):
                self.write(page, layer + index, piece[index * size : (index + 1) * size])

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.num_layers * self.page_layer_bytes

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page, all layers and slots, onto another."""
        self.tensor[target].copy_(self.tensor[source])

    def take_page(self, page: int, out: torch.Tensor) -> None:
        """Copies a page into ``out`` [num_layers, page_size, width] on any device."""
        out.copy_(self.tensor[page])

    def put_page(self, page: int, values: torch.Tensor) -> None:
        """Fills a page from ``values`` [num_layers, page_size, width] on any device."""
        self.tensor[page].copy_(values)

    def _offset(self, page: int, layer: int) -> int:
        if not (0 <= page < self.num_pages and 0 <= layer < self.num_layers):
            raise InternalError(
                f"page {page}, layer {layer} is outside of the store"
                f" ({self.num_pages} pages, {self.num_layers} layers)"
            )
        return (page * self.num_layers + layer) * self.page_layer_bytes

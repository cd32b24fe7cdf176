"""The memory of the pages: one tensor of latents, page-major, the layers inside a page."""

from __future__ import annotations

import torch

from pdmesh.wire.errors import InternalError


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor: without a copy if it is contiguous and on the CPU."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.cpu().numpy().data


class LatentStore:
    """Latents of all pages of one rank.

    A whole page is contiguous, and so is one layer of one page: the unit of a transfer.

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
    ) -> None:
        shape = (num_pages, num_layers, page_size, width)
        if min(shape) < 1:
            raise InternalError(f"a latent store of shape {shape} holds nothing")
        self.num_pages = num_pages
        self.num_layers = num_layers
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

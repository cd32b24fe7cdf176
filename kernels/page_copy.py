"""Latents into and out of pages.

A pool is [num_pages, num_layers, page_size, width], page-major, contiguous. A slot's flat row in
layer 0 is page * num_layers * page_size + slot; layer i is i * page_size rows further on.
"""

from torch import Tensor


def flat_rows(pages: Tensor, slots: Tensor, num_layers: int, page_size: int) -> Tensor:
    """The flat rows of layer 0 for pages and slots (int64, broadcast together)."""
    return pages * (num_layers * page_size) + slots


def append_latents(latents: Tensor, layer: int, rows: Tensor, values: Tensor) -> None:
    """Write values [n, width] to the flat layer-0 rows [n] of `layer`, in place."""
    flat = latents.view(-1, latents.shape[3])
    flat.index_copy_(0, rows + layer * latents.shape[2], values.to(latents.dtype))


def gather_latents(latents: Tensor, layer: int, rows: Tensor) -> Tensor:
    """Read the flat layer-0 rows [...] of `layer`: [..., width] in the pool's dtype."""
    flat = latents.view(-1, latents.shape[3])
    picked = flat.index_select(0, (rows + layer * latents.shape[2]).flatten())
    return picked.view(*rows.shape, latents.shape[3])

"""MLA decode by FlashMLA (DeepSeek), from the wheel `sgl-flash-mla`: Hopper, dense latents.

The kernels take a cache whose page stride is any, so a layer of the pool is passed as it lies.
Dense decode stands in the wheel's legacy extension (`use_legacy=True`).

A planner's buffers belong to one batch: the schedule is made from `lengths` on the device at the
first call, and again for each step where they have changed (`Plan`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

PAGE = 64
RANK, WIDTH = 512, 576


@cache
def unavailable() -> str | None:
    """Why FlashMLA cannot be used here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "FlashMLA's dense decode needs compute capability 9.0"
    try:
        import flash_mla
    except (ImportError, OSError) as error:
        return f"flash_mla does not load: {error}"
    if not hasattr(torch.ops, "flash_mla_legacy"):
        return f"flash_mla {getattr(flash_mla, '__version__', '')} has no legacy kernels"
    return None


def supports(heads: int, page_size: int, width: int, dtype: torch.dtype) -> str | None:
    """Why this shape is not FlashMLA's, or None."""
    if page_size != PAGE:
        return f"FlashMLA takes pages of {PAGE} tokens, not {page_size}"
    if width != WIDTH:
        return f"FlashMLA takes latents of {WIDTH} values, not {width}"
    if dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return f"FlashMLA takes bfloat16 or float8_e4m3fn latents, not {dtype}"
    return None


class Plan:
    """The split schedule of a batch and the call.

    A schedule depends on `lengths` and on rows x heads, so one serves all layers of a step.
    `refresh` makes it anew on the device, without a synchronisation, into the same buffers: it may
    stand at the head of a CUDA graph.
    """

    def __init__(self, lengths: Tensor, rows: int, heads: int, *, fp8: bool = False) -> None:
        self._pairs, self._heads, self._fp8 = rows * heads, heads, fp8
        self._meta: Any = None
        self.refresh(lengths)

    def refresh(self, lengths: Tensor) -> None:
        """lengths [n] int32 on the device, no entry of it 0; n is that of the first call."""
        import flash_mla
        from flash_mla.flash_mla_interface import get_mla_decoding_metadata

        tiles, splits = get_mla_decoding_metadata(
            lengths, self._pairs, 1, self._heads, is_fp8_kvcache=self._fp8, use_legacy=True
        )
        if self._meta is None:
            self._meta, _ = flash_mla.get_mla_metadata()
            self._meta.tile_scheduler_metadata, self._meta.num_splits = tiles, splits
        else:
            self._meta.tile_scheduler_metadata.copy_(tiles)
            self._meta.num_splits.copy_(splits)

    def decode(
        self,
        query: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        rows: int,
        scale: float,
        *,
        descale: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """As `kernels.mla_reference.mla_decode`, lengths of at least `rows`.

        The kernel launched before must not let dependents begin early (programmatic dependent
        launch): FlashMLA's is one, and waits for nothing.

        Pages of float8_e4m3fn [.., 576] go with a query in float8_e4m3fn and `descale`, the
        query's and the latents' scale, [1] float32 each; the result is bfloat16.
        """
        import flash_mla

        m, heads, _ = query.shape
        n = lengths.shape[0]
        scales: dict[str, Any] = {}
        if descale is not None:
            scales = {"is_fp8_kvcache": True, "descale_q": descale[0], "descale_k": descale[1]}
        output: Tensor = flash_mla.flash_mla_with_kvcache(
            query.view(n, rows, heads, WIDTH),
            pages.unsqueeze(2),
            page_table,
            lengths,
            RANK,
            self._meta,
            softmax_scale=scale,
            causal=True,
            use_legacy=True,
            **scales,
        )[0]
        return output.view(m, heads, RANK)


def mla_decode(
    query: Tensor, pages: Tensor, page_table: Tensor, lengths: Tensor, rows: int, scale: float
) -> Tensor:
    """As `kernels.mla_reference.mla_decode`, with a schedule made for this call."""
    plan = Plan(lengths, rows, query.shape[1])
    return plan.decode(query, pages, page_table, lengths, rows, scale)

"""MLA decode and MHA-form prefill by FlashInfer (arXiv:2501.01005), its FA3 kernels: Hopper.

Both take strided caches, so a layer of the pool is passed as it lies. `plan` reads lengths on the
host; with `graph=True` it writes into fixed buffers, so that a captured `run` follows a new plan.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from pdmesh.kernels.compiling import Compilation

WORKSPACE_BYTES = 128 << 20
RANK, ROPE = 512, 64


@cache
def unavailable() -> str | None:
    """Why FlashInfer's FA3 kernels cannot be used here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "FlashInfer's FA3 kernels need compute capability 9.0"
    try:
        import flashinfer.mla
        import flashinfer.prefill  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        return f"flashinfer does not load: {error}"
    return None


class Decode:
    """Paged MLA decode of batches of up to `sequences` with `rows` query rows each.

    Args:
        workspace: uint8 on the device, WORKSPACE_BYTES; may be shared by wrappers that run one
            after another.
        graph: fixed buffers of `sequences` and `max_pages` a sequence, for CUDA graphs; every
            plan then has exactly `sequences`.
    """

    def __init__(
        self, workspace: Tensor, sequences: int, max_pages: int, *, graph: bool = False
    ) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        device = workspace.device

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        buffers: tuple[Tensor | None, ...] = (None,) * 4
        if graph:
            buffers = (
                ints(sequences + 1),
                ints(sequences + 1),
                ints(max(1, sequences * max_pages)),
                ints(sequences),
            )
        self._wrapper: Any = BatchMLAPagedAttentionWrapper(
            workspace, graph, *buffers, backend="fa3"
        )

    def plan(
        self, page_table: Tensor, lengths: Tensor, rows: int, heads: int, page: int, scale: float
    ) -> None:
        """Plans a step, for all its layers; `page_table` and `lengths` on the host."""
        pages = (lengths + page - 1) // page
        starts = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32)
        starts[1:] = pages.cumsum(0)
        used = torch.arange(page_table.shape[1]) < pages.unsqueeze(1)
        queries = torch.arange(lengths.shape[0] + 1, dtype=torch.int32) * rows
        self._wrapper.plan(
            queries,
            starts,
            page_table[used],
            lengths,
            heads,
            RANK,
            ROPE,
            page,
            True,
            scale,
            torch.bfloat16,
            torch.bfloat16,
        )

    def run(self, query: Tensor, pages: Tensor, *, out: Tensor | None = None) -> Tensor:
        """query [m, heads, 576] and pages [num_pages, page, 576] bfloat16: [m, heads, 512]."""
        return self._wrapper.run(  # type: ignore[no-any-return]
            query[..., :RANK], query[..., RANK:], pages[..., :RANK], pages[..., RANK:], out=out
        )


def prefill_compilation(widths: tuple[int, int]) -> Compilation:
    """What the first `Prefill.plan` builds, with ninja, for these widths of a key and of a value.

    The module's sources are written now, since nothing locks them.
    """
    from flashinfer.jit import gen_batch_prefill_module

    dtypes = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    # No rotation, no window, no cap on the scores, products in float32.
    module = gen_batch_prefill_module("fa3", *dtypes, *widths, 0, False, False, False)
    return Compilation(
        "flashinfer prefill", lambda: module.is_compiled, partial(module.build, verbose=False)
    )


class Prefill:
    """Ragged causal prefill in MHA form, key width 192 and value width 128."""

    def __init__(self, workspace: Tensor) -> None:
        from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

        self._wrapper: Any = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")

    def plan(
        self,
        query_starts: Tensor,
        key_starts: Tensor,
        heads: int,
        widths: tuple[int, int],
        scale: float,
    ) -> None:
        """Plans a step; `query_starts` and `key_starts` [n + 1] int32 on the host.

        widths: of a key and of a value.
        """
        self._wrapper.plan(
            query_starts,
            key_starts,
            heads,
            heads,
            widths[0],
            head_dim_vo=widths[1],
            causal=True,
            sm_scale=scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """As `kernels.mla_reference.mla_prefill` with what was planned."""
        return self._wrapper.run(query, key, value, out=out)  # type: ignore[no-any-return]

"""Attention of a device by the fastest backend for a step; what is planned once serves all layers.

Each class is called like the definition in `mla_reference` and takes a `plan` besides.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from pdmesh.kernels import flash_mla_backend, flashinfer_backend, hopper_mla


class TritonDecode:
    """Any page size, width and first key; nothing is planned."""

    def plan(self, lengths: Tensor, rows: int, heads: int) -> Any:
        """None."""
        return None

    def __call__(self, *args: Any, plan: Any = None, **keywords: Any) -> Tensor:
        """See `mla_reference.mla_decode`."""
        from pdmesh.kernels.triton.mla_decode import mla_decode

        return mla_decode(*args, **keywords)


class FlashMlaDecode:
    """FlashMLA; Triton where keys do not begin at 0, as in the MTP layer."""

    def plan(self, lengths: Tensor, rows: int, heads: int) -> Any:
        """The schedule of a step: `refresh(lengths)` makes it anew on the device."""
        return flash_mla_backend.Plan(lengths, rows, heads)

    def __call__(
        self,
        query: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        rows: int,
        scale: float,
        *,
        rank: int = flash_mla_backend.RANK,
        first_key: int = 0,
        plan: Any = None,
    ) -> Tensor:
        """See `mla_reference.mla_decode`; a sequence has at least `rows` tokens."""
        if first_key:
            from pdmesh.kernels.triton.mla_decode import mla_decode

            return mla_decode(
                query, pages, page_table, lengths, rows, scale, rank=rank, first_key=first_key
            )
        plan = plan or self.plan(lengths, rows, query.shape[1])
        seen: Tensor = plan.decode(query, pages, page_table, lengths, rows, scale)
        return seen


class HopperDecode:
    """The FP8 kernel of one scale a latent; Triton where keys do not begin at 0."""

    def plan(self, lengths: Tensor, rows: int, heads: int) -> Any:
        """None."""
        return None

    def __call__(
        self, *args: Any, rank: int = hopper_mla.RANK, first_key: int = 0, plan: Any = None
    ) -> Tensor:
        """See `mla_reference.mla_decode`."""
        if first_key:
            from pdmesh.kernels.triton.mla_decode import mla_decode

            return mla_decode(*args, rank=rank, first_key=first_key)
        return hopper_mla.mla_decode(*args)


class TritonPrefill:
    """Any width; nothing is planned."""

    def plan(self, starts: tuple[Tensor, Tensor], heads: int, widths: Any, scale: float) -> Any:
        """The most queries of a sequence; `starts` on the host."""
        return int(starts[0].diff().max())

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        scale: float,
        *,
        plan: Any = None,
    ) -> Tensor:
        """See `mla_reference.mla_prefill`."""
        from pdmesh.kernels.triton.mla_prefill import mla_prefill

        return mla_prefill(query, key, value, query_starts, key_starts, scale, max_queries=plan)


class FlashInferPrefill:
    """FlashInfer's FA3 kernels, for keys of 192 and values of 128.

    A wrapper holds one plan. A step has one for each of its parts, all made before the first is
    computed, so each gets a wrapper of its own, which is used again when the plan has gone.
    """

    def __init__(self, device: torch.device) -> None:
        size = flashinfer_backend.WORKSPACE_BYTES
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self._idle: list[flashinfer_backend.Prefill] = []

    def plan(
        self, starts: tuple[Tensor, Tensor], heads: int, widths: tuple[int, int], scale: float
    ) -> _PrefillPlan:
        """Plans a part of a step; `starts` of queries and keys on the host."""
        wrapper = self._idle.pop() if self._idle else flashinfer_backend.Prefill(self._workspace)
        plan = _PrefillPlan(wrapper)
        weakref.finalize(plan, self._idle.append, wrapper)
        wrapper.plan(*starts, heads, widths, scale)
        return plan

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        scale: float,
        *,
        plan: _PrefillPlan | None = None,
    ) -> Tensor:
        """See `mla_reference.mla_prefill`."""
        if plan is None:
            widths = (key.shape[2], value.shape[2])
            starts = (query_starts.cpu(), key_starts.cpu())
            plan = self.plan(starts, query.shape[1], widths, scale)
        return plan.wrapper.run(query, key, value)


class _PrefillPlan:
    """Lives as long as a step needs its plan."""

    def __init__(self, wrapper: flashinfer_backend.Prefill) -> None:
        self.wrapper = wrapper

"""Counts the choices of experts and numbers them, one expert a program.

Definition: `pdmesh.kernels.routing.place_choices`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from pdmesh.kernels.routing import Places
from pdmesh.kernels.triton.launch import power_of_two

MAX_BLOCK = 4096
"""Choices that a program looks at at once."""


@triton.jit
def place_expert(ids, counts, offsets, places, total, expert, BLOCK: tl.constexpr):
    """Counts one expert's choices among ids [total] and numbers them."""
    seen = tl.zeros((), dtype=tl.int32)
    before = tl.zeros((), dtype=tl.int32)
    for start in range(0, total, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < total
        chosen = tl.load(ids + at, mask=inside, other=-1, cache_modifier=".cg")
        hit = chosen == expert
        place = seen + tl.cumsum(hit.to(tl.int32), axis=0) - 1
        tl.store(places + at, place, mask=hit)
        if expert == 0:
            tl.store(places + at, -1, mask=inside & (chosen < 0))
        seen += tl.sum(hit.to(tl.int32), axis=0)
        before += tl.sum(((chosen >= 0) & (chosen < expert)).to(tl.int32), axis=0)
    tl.store(counts + expert, seen)
    tl.store(offsets + expert, before)


@triton.jit
def place_kernel(ids, counts, offsets, places, total, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    if CHAINED:
        gdc_wait()
    place_expert(ids, counts, offsets, places, total, tl.program_id(0), BLOCK)


def place_choices(ids: Tensor, num_experts: int, *, out: Places | None = None) -> Places:
    """Counts ids [m, k] int32 and numbers them: `pdmesh.kernels.routing.place_choices`."""
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"need contiguous int32, not {ids.dtype} {ids.stride()}")
    if out is None:
        counts = ids.new_empty((num_experts,))
        out = Places(counts, torch.empty_like(counts), torch.empty_like(ids))
    return place(ids, out)


def place(ids: Tensor, out: Places, chained: bool = False, num_warps: int | None = None) -> Places:
    """`place_choices` into `out`; `chained`: see `pdmesh.kernels.triton.gate.gate_topk`."""
    block = min(MAX_BLOCK, max(16, power_of_two(ids.numel())))
    place_kernel[(out.counts.shape[0],)](
        ids,
        out.counts,
        out.offsets,
        out.places,
        ids.numel(),
        BLOCK=block,
        CHAINED=chained,
        num_warps=num_warps or min(8, max(1, block // 256)),
        **({"launch_pdl": True} if chained else {}),
    )
    return out

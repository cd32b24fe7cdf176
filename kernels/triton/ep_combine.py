"""Combine of expert parallelism: experts' outputs back to the rows' homes, and the sum there."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def return_kernel(
    outputs, counts, homes, backs_at, returned_at, max_rows, each,
    RANKS: tl.constexpr, SLOTS: tl.constexpr, HIDDEN: tl.constexpr, PART: tl.constexpr,
    RANKS_P2: tl.constexpr, SLOTS_P2: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Writes outputs bfloat16 to the mapped memory of the rows' homes.

    outputs [SLOTS, max_rows, HIDDEN] and homes [SLOTS, max_rows] if ALIGN is 0, else [rows, HIDDEN]
    and [rows], a slot's from the multiple of ALIGN behind those of the slot before.

    backs_at [RANKS] int64: address of each home's [each, HIDDEN]; 0 where outputs are put instead.
    A home, int32, is home * each + place there. A program signals each home once, at its end.
    """
    PARTS: tl.constexpr = HIDDEN // PART
    slot = tl.arange(0, SLOTS_P2)
    count = tl.load(counts + slot, mask=slot < SLOTS, other=0)
    end = tl.cumsum(count, 0)
    if ALIGN:
        padded = (count + ALIGN - 1) // ALIGN * ALIGN
        starts = tl.cumsum(padded, 0) - padded
    total = tl.sum(count, 0)
    peers = tl.arange(0, RANKS_P2)
    done = tl.zeros([RANKS_P2], tl.int64)
    column = tl.arange(0, PART)
    for item in range(tl.program_id(0), total * PARTS, tl.num_programs(0)):
        row = item // PARTS
        part = item % PARTS
        expert = tl.sum(((end <= row) & (slot < SLOTS)).to(tl.int32), 0)
        place = row - tl.max(tl.where((end <= row) & (slot < SLOTS), end, 0), 0)
        if ALIGN:
            at = (tl.sum(tl.where(slot == expert, starts, 0), 0) + place).to(tl.int64)
        else:
            at = (expert * max_rows + place).to(tl.int64)
        home = tl.load(homes + at)
        peer = home // each
        there = tl.load(backs_at + peer)
        if there != 0:
            value = tl.load(outputs + at * HIDDEN + part * PART + column)
            begin = there + (home % each).to(tl.int64) * (HIDDEN * 2) + part * (PART * 2)
            back = tl.multiple_of(begin.to(tl.pointer_type(tl.bfloat16)), 16)
            tl.store(back + column, value)
            done += (peers == peer).to(tl.int64)
    tl.debug_barrier()
    signal = tl.load(returned_at + peers, mask=peers < RANKS, other=0)
    at = signal.to(tl.pointer_type(tl.int64))
    tl.atomic_add(at, done, mask=(signal != 0) & (done > 0), sem="release", scope="sys")


@triton.jit
def sum_kernel(
    back, ids, weights, plus, out, num_experts,
    TOP: tl.constexpr, HIDDEN: tl.constexpr, PART: tl.constexpr, PLUS: tl.constexpr,
):  # fmt: skip
    """out [n, HIDDEN] = back [n, TOP, HIDDEN] bfloat16 times weights [n, TOP] float32.

    Added in float32 in the order of choices, each product rounded before it is added: launched
    without fusing of products and sums. A choice that is none (its id out of range) adds nothing.
    With PLUS the sum is rounded to out's dtype, and plus [n, HIDDEN] of it added.
    """
    PARTS: tl.constexpr = HIDDEN // PART
    row = tl.program_id(0) // PARTS
    column = (tl.program_id(0) % PARTS) * PART + tl.arange(0, PART)
    here = row.to(tl.int64) * HIDDEN + column
    if PLUS:
        more = tl.load(plus + here).to(tl.float32)
    total = tl.zeros([PART], tl.float32)
    for k in tl.static_range(TOP):
        expert = tl.load(ids + row * TOP + k)
        real = (expert >= 0) & (expert < num_experts)
        at = (row * TOP + k).to(tl.int64) * HIDDEN + column
        value = tl.load(back + at, mask=real & (column >= 0), other=0.0).to(tl.float32)
        weight = tl.load(weights + row * TOP + k, mask=real, other=0.0)
        total = value * weight if k == 0 else total + value * weight
    if PLUS:
        total = total.to(out.dtype.element_ty).to(tl.float32) + more
    tl.store(out + here, total.to(out.dtype.element_ty))

"""Waiting for what peers send, with a bound: one program, so that a wait takes one multiprocessor.

A word is polled with volatile loads and then read once more with acquire at the scope of the
system; what its writer had stored before its release is then seen by the kernels that follow.

Once a rank is noted as lost, by a wait that ran out or by the host, a wait that lacks something
ends as well: its step is void anyhow, and many waits are queued. That word is in the host's memory,
so it is looked at now and then only, and not at all by a wait that finds everything there.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOOK: tl.constexpr = tl.constexpr(256)
"""Polls between two looks at who is lost; some tenths of a millisecond."""


@triton.jit
def _clock(CLOCK: tl.constexpr):
    """Nanoseconds; 0 where there is no clock."""
    now = tl.full([], 0, tl.int64)
    if CLOCK:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    return now


@triton.jit
def _named(lost, rank, inside):
    """How many ranks are noted as lost."""
    return tl.sum(tl.load(lost + rank, mask=inside, other=0, volatile=True), 0)


@triton.jit
def _name(lost, rank, inside, late):
    """Notes who is late, unless somebody is noted: others may be late because of that one."""
    first = _named(lost, rank, inside) == 0
    tl.store(lost + rank, tl.full(late.shape, 1, tl.int32), mask=late & first)


@triton.jit
def wait_rows_kernel(
    tags, arrived, there, seen, units, members, lost, sent_back, ends, bases, counts, used, step,
    tags_at, puts, sink, room, bound, RANKS: tl.constexpr, SLOTS: tl.constexpr,
    RANKS_P2: tl.constexpr, SLOTS_P2: tl.constexpr, ALIGN: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Waits until the rows of a dispatch are here, and lays them out.

    In symmetric memory: tags, arrived [2, RANKS] int64, there [2, RANKS, SLOTS] int32. seen
    [2, RANKS] int64: signals counted so far; units [RANKS] int64: signals a row. members [RANKS]
    int32: whom to wait for. Writes ends [RANKS], bases [RANKS, SLOTS] and counts [SLOTS] int32, see
    `spread_kernel`; adds outputs that will go back to sent_back [RANKS] int64. ALIGN is 0 for the
    masked layout, where an expert has `room` rows; for the contiguous one experts begin at its
    multiples, all have `room` together, and used [1] int32 is what they need. Of lost [RANKS + 1]
    int32 a rank's becomes 1 if it did not send, and the last the rows that there would have to be
    room for if there is not. bound: nanoseconds, or polls without a clock.

    A wait that ends without all rows makes this rank tell nobody anything any more: tags_at
    [2, RANKS] int64, where tags go, become `sink`, and puts [RANKS] int32 zero.
    """
    number = tl.load(step)
    parity = number % 2
    told = (number << 32) >> 32  # a tag has that much of it
    rank = tl.arange(0, RANKS_P2)
    inside = rank < RANKS
    member = tl.load(members + rank, mask=inside, other=0) != 0
    own = parity * RANKS + rank
    before = tl.load(seen + own, mask=inside, other=0)
    unit = tl.load(units + rank, mask=inside, other=0)
    began = _clock(CLOCK)
    polls = tl.full([], 0, tl.int64)
    turns = tl.full([], 0, tl.int32)
    missing = tl.full([], 1, tl.int32)
    while (missing > 0) & (polls < bound):
        tag = tl.load(tags + own, mask=member, other=0, volatile=True)
        come = tl.load(arrived + own, mask=member, other=0, volatile=True)
        ready = (tag >> 32 == told) & (come >= before + (tag & 0xFFFFFFFF) * unit)
        missing = tl.sum((member & (ready == 0)).to(tl.int32), 0)
        if CLOCK:
            polls = _clock(CLOCK) - began
        else:
            polls += 1
        turns += 1
        if turns % LOOK == 0:
            polls = tl.where(_named(lost, rank, inside) > 0, polls + bound, polls)
    tag = tl.atomic_add(tags + own, tl.zeros_like(before), mask=member, sem="acquire", scope="sys")
    come = tl.atomic_add(
        arrived + own, tl.zeros_like(before), mask=member, sem="acquire", scope="sys"
    )
    tl.debug_barrier()
    ready = member & (tag >> 32 == told) & (come >= before + (tag & 0xFFFFFFFF) * unit)
    rows = tl.where(ready, tag & 0xFFFFFFFF, 0)
    tl.store(seen + own, before + rows * unit, mask=ready)
    few = rows.to(tl.int32)
    tl.store(ends + rank, tl.cumsum(few, 0), mask=inside)
    slot = tl.arange(0, SLOTS_P2)
    at = rank[:, None] * SLOTS + slot[None, :]
    real = ready[:, None] & (slot < SLOTS)[None, :]
    each = tl.load(there + parity * RANKS * SLOTS + at, mask=real, other=0)
    base = tl.cumsum(each, 0) - each
    count = tl.sum(each, 0)
    if ALIGN:
        padded = (count + ALIGN - 1) // ALIGN * ALIGN
        begin = tl.cumsum(padded, 0) - padded
        base += begin[None, :]
        need = tl.sum(padded, 0)
        tl.store(used, tl.minimum(need, room))
        count = tl.minimum(count, tl.maximum(room - begin, 0))
    else:
        need = tl.max(count, 0)
        count = tl.minimum(count, room)
    tl.store(bases + at, base, mask=inside[:, None] & (slot < SLOTS)[None, :])
    pairs = tl.sum(each, 1).to(tl.int64)
    tl.store(sent_back + rank, tl.load(sent_back + rank, mask=inside, other=0) + pairs, mask=inside)
    if need > room:
        tl.store(lost + RANKS, need)
    tl.store(counts + slot, count, mask=slot < SLOTS)
    late = member & (ready == 0)
    if tl.sum(late.to(tl.int32), 0) > 0:
        _name(lost, rank, inside, late)
        nowhere = tl.zeros_like(before) + sink
        tl.store(tags_at + rank, nowhere, mask=inside)
        tl.store(tags_at + RANKS + rank, nowhere, mask=inside)
        tl.store(puts + rank, tl.zeros([RANKS_P2], tl.int32), mask=inside)


@triton.jit
def wait_outputs_kernel(
    returned, seen, pairs_to, units, members, lost, bound,
    RANKS: tl.constexpr, RANKS_P2: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Waits until every output that was asked for is back.

    In symmetric memory: returned [RANKS] int64. seen [RANKS] int64; pairs_to, members [RANKS]
    int32; units [RANKS] int64, signals an output; lost and bound as above.
    """
    rank = tl.arange(0, RANKS_P2)
    inside = rank < RANKS
    member = tl.load(members + rank, mask=inside, other=0) != 0
    pairs = tl.load(pairs_to + rank, mask=inside, other=0).to(tl.int64)
    unit = tl.load(units + rank, mask=inside, other=0)
    want = tl.load(seen + rank, mask=inside, other=0) + pairs * unit
    awaited = member & (pairs > 0)
    began = _clock(CLOCK)
    polls = tl.full([], 0, tl.int64)
    turns = tl.full([], 0, tl.int32)
    missing = tl.full([], 1, tl.int32)
    while (missing > 0) & (polls < bound):
        come = tl.load(returned + rank, mask=awaited, other=0, volatile=True)
        missing = tl.sum((awaited & (come < want)).to(tl.int32), 0)
        if CLOCK:
            polls = _clock(CLOCK) - began
        else:
            polls += 1
        turns += 1
        if turns % LOOK == 0:
            polls = tl.where(_named(lost, rank, inside) > 0, polls + bound, polls)
    come = tl.atomic_add(
        returned + rank, tl.zeros_like(want), mask=awaited, sem="acquire", scope="sys"
    )
    late = awaited & (come < want)
    tl.store(seen + rank, want, mask=awaited & (late == 0))
    if tl.sum(late.to(tl.int32), 0) > 0:
        _name(lost, rank, inside, late)

"""Dispatch of expert parallelism: a rank's rows to the ranks of their experts.

Four kernels on the sender's side and the receiver's, see `pdmesh.model.parallel.nvshmem` for the
order they run in and why that order is safe. Where to write is in tables of addresses made once:
of mapped memory of a peer, or of an own outbox that is put to it. Row counts are on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

BITS: tl.constexpr = tl.constexpr(20)
LOW: tl.constexpr = tl.constexpr((1 << 20) - 1)


@triton.jit
def choose_kernel(
    ids, ranks, slots, copies, begins, rank_of, where, counts, step,
    pairs, num_experts, MOST: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """One program an expert: which copy each of its rows goes to, and as which of its rows.

    ids [pairs] int64; ranks, slots [experts, MOST] int32, copies, begins [experts] int32. Writes
    rank_of, where [pairs] int32 (slot << 20 | number) and counts [ranks, SLOTS] int32; begins a new
    step.
    """
    expert = tl.program_id(0)
    if expert == 0:
        tl.store(step, tl.load(step) + 1)
    if expert < num_experts:
        count = tl.load(copies + expert)
        begin = tl.load(begins + expert)
        only_rank = tl.load(ranks + expert * MOST)
        only_slot = tl.load(slots + expert * MOST)
        total = 0
        for start in range(0, pairs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            hit = tl.load(ids + at, mask=at < pairs, other=-1) == expert
            turn = total + tl.cumsum(hit.to(tl.int32), 0) - 1
            if MOST == 1:
                tl.store(rank_of + at, only_rank + tl.zeros_like(at), mask=hit)
                tl.store(where + at, (only_slot << BITS) | turn, mask=hit)
            else:
                copy = (turn + begin) % count
                rank = tl.load(ranks + expert * MOST + copy, mask=hit, other=0)
                slot = tl.load(slots + expert * MOST + copy, mask=hit, other=0)
                tl.store(rank_of + at, rank, mask=hit)
                tl.store(where + at, (slot << BITS) | (turn // count), mask=hit)
            total += tl.sum(hit.to(tl.int32), 0)
        copy = tl.arange(0, COPIES)
        there = copy < count
        first = (copy - begin + count) % count
        rows = tl.maximum(total - first + count - 1, 0) // count
        rank = tl.load(ranks + expert * MOST + copy, mask=there, other=0)
        slot = tl.load(slots + expert * MOST + copy, mask=there, other=0)
        tl.store(counts + rank * SLOTS + slot, rows, mask=there)


@triton.jit
def number_kernel(
    ids, rank_of, target, counts, used, rows_to, pairs_to, sent, counts_at, tags_at, step,
    rows, num_experts, RANKS: tl.constexpr, SLOTS: tl.constexpr, TOP: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS_P2: tl.constexpr, TOP_P2: tl.constexpr,
):  # fmt: skip
    """One program a peer: numbers the rows that go there, and tells it how many it will get.

    target [rows, TOP] int32 becomes (number * RANKS + peer) at a row's first choice of that peer,
    else -1. rows_to, pairs_to [RANKS] int32; sent [2, RANKS] int64 adds both up. The peer gets its
    row of `counts`, then the step and the number of rows in one word.
    """
    peer = tl.program_id(0)
    number = tl.load(step)
    parity = number % 2
    total = tl.full([], 0, tl.int32)
    pairs = tl.full([], 0, tl.int32)
    k = tl.arange(0, TOP_P2)[None, :]
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)[:, None]
        at = row * TOP + k
        inside = (row < rows) & (k < TOP)
        expert = tl.load(ids + at, mask=inside, other=-1)
        real = (expert >= 0) & (expert < num_experts)
        hit = real & (tl.load(rank_of + at, mask=real, other=-1) == peer)
        first = hit & (tl.cumsum(hit.to(tl.int32), 1) == 1)
        goes = tl.sum(first.to(tl.int32), 1)
        place = total + tl.cumsum(goes, 0) - 1
        value = tl.where(first, place[:, None] * RANKS + peer, -1)
        tl.store(target + at, value, mask=hit | ((real == 0) & inside & (peer == 0)))
        total += tl.sum(goes, 0)
        pairs += tl.sum(tl.sum(hit.to(tl.int32), 1), 0)
    tl.store(rows_to + peer, total)
    tl.store(pairs_to + peer, pairs)
    tl.store(sent + peer, tl.load(sent + peer) + total)
    tl.store(sent + RANKS + peer, tl.load(sent + RANKS + peer) + pairs)
    slot = tl.arange(0, SLOTS_P2)
    held = slot < tl.load(used + peer)
    count = tl.load(counts + peer * SLOTS + slot, mask=held, other=0)
    there = tl.load(counts_at + parity * RANKS + peer).to(tl.pointer_type(tl.int32))
    tl.store(there + slot, count, mask=slot < SLOTS)
    tl.debug_barrier()
    tag = tl.load(tags_at + parity * RANKS + peer).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(tag, (number << 32) | total.to(tl.int64), sem="release", scope="sys")


@triton.jit
def send_kernel(
    x, ids, rank_of, where, target, boxes_at, arrivals_at, step, rows, stride, num_experts, notes,
    RANKS: tl.constexpr, TOP: tl.constexpr, HIDDEN: tl.constexpr, RECORD: tl.constexpr,
    PART: tl.constexpr, RANKS_P2: tl.constexpr, TOP_P2: tl.constexpr,
):  # fmt: skip
    """Quantises rows x [rows, HIDDEN] and writes each to the inboxes of its ranks.

    A work item is a part of a row. A program signals each peer once, at its end: its stores, then a
    barrier of its threads, then one release at the scope of the system.
    """
    number = tl.load(step)
    parity = number % 2
    PARTS: tl.constexpr = HIDDEN // PART
    GROUPS: tl.constexpr = PART // 128
    peers = tl.arange(0, RANKS_P2)
    done = tl.zeros([RANKS_P2], tl.int64)
    choice = tl.arange(0, TOP_P2)
    column = tl.arange(0, PART)
    group = tl.arange(0, GROUPS)
    for item in range(tl.program_id(0), rows * PARTS, tl.num_programs(0)):
        row = item // PARTS
        part = item % PARTS
        wide = tl.load(x + row.to(tl.int64) * stride + part * PART + column).to(tl.float32)
        grouped = tl.reshape(wide, [GROUPS, 128])
        amax = tl.maximum(tl.max(tl.abs(grouped), axis=1), 1e-10)
        scale = tl.div_rn(amax, tl.full([GROUPS], 448.0, tl.float32))
        spread = tl.broadcast_to(tl.expand_dims(scale, 1), [GROUPS, 128])
        scaled = tl.div_rn(grouped, spread)
        scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        values = tl.reshape(scaled, [PART]).to(tl.float8e4nv)
        for k in tl.static_range(TOP):
            to = tl.load(target + row * TOP + k)
            if to >= 0:
                peer = to % RANKS
                box = tl.load(boxes_at + parity * RANKS + peer)
                begin = box + notes + (to // RANKS).to(tl.int64) * RECORD
                at = (begin + part * PART).to(tl.pointer_type(tl.float8e4nv))
                tl.store(tl.multiple_of(at, 16) + column, values)
                at = (begin + HIDDEN + part * (GROUPS * 4)).to(tl.pointer_type(tl.float32))
                tl.store(at + group, scale)
                if part == 0:
                    chosen = row * TOP + choice
                    expert = tl.load(ids + chosen, mask=choice < TOP, other=-1)
                    real = (expert >= 0) & (expert < num_experts)
                    rank = tl.load(rank_of + chosen, mask=real, other=-1)
                    word = tl.load(where + chosen, mask=real, other=-1)
                    note = box + (to // RANKS).to(tl.int64) * (4 + 4 * TOP)
                    note = note.to(tl.pointer_type(tl.int32))
                    tl.store(note, row)
                    word = tl.where(rank == peer, word, -1)
                    tl.store(note + 1 + choice, word, mask=choice < TOP)
                done += (peers == peer).to(tl.int64)
    tl.debug_barrier()
    signal = tl.load(arrivals_at + parity * RANKS + peers, mask=peers < RANKS, other=0)
    at = signal.to(tl.pointer_type(tl.int64))
    tl.atomic_add(at, done, mask=(signal != 0) & (done > 0), sem="release", scope="sys")


@triton.jit
def spread_kernel(
    stage, ends, bases, values, scales, homes, step, room, padded_rows, tokens, notes, inbox,
    RANKS: tl.constexpr, SLOTS: tl.constexpr, TOP: tl.constexpr, HIDDEN: tl.constexpr,
    RECORD: tl.constexpr, PART: tl.constexpr, RANKS_P2: tl.constexpr, CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """Rows from the inboxes `stage` [2, RANKS, inbox] to each of their experts.

    ends [RANKS] int32: rows from the ranks up to each. bases [RANKS, SLOTS] int32: where a rank's
    rows begin in an expert's. values [SLOTS, room, HIDDEN] as int32 words, scales [SLOTS,
    HIDDEN / 128, padded_rows] float32, homes [SLOTS, room] int32. CONTIGUOUS: the same without the
    slots, and bases are rows of the whole layout. PART may be HIDDEN, whatever that is.
    """
    parity = tl.load(step) % 2
    PARTS: tl.constexpr = HIDDEN // PART
    GROUPS: tl.constexpr = PART // 128
    WORDS: tl.constexpr = PART // 4
    GROUPS_P2: tl.constexpr = triton.next_power_of_2(PART // 128)
    WORDS_P2: tl.constexpr = triton.next_power_of_2(PART // 4)
    ranks = tl.arange(0, RANKS_P2)
    end = tl.load(ends + ranks, mask=ranks < RANKS, other=2147483647)
    total = tl.load(ends + RANKS - 1)
    word = tl.arange(0, WORDS_P2)
    group = tl.arange(0, GROUPS_P2)
    of_words, of_groups = word < WORDS, group < GROUPS
    for item in range(tl.program_id(0), total * PARTS, tl.num_programs(0)):
        row = item // PARTS
        part = item % PARTS
        source = tl.sum((end <= row).to(tl.int32), 0)
        row -= tl.max(tl.where(end <= row, end, 0), 0)
        box = stage + (parity * RANKS + source).to(tl.int64) * inbox
        note = (box + row.to(tl.int64) * (4 + 4 * TOP)).to(tl.pointer_type(tl.int32))
        begin = box + notes + row.to(tl.int64) * RECORD
        at = (begin + part * PART).to(tl.pointer_type(tl.int32))
        packed = tl.load(tl.multiple_of(at, 16) + word, mask=of_words)
        at = (begin + HIDDEN + part * (GROUPS * 4)).to(tl.pointer_type(tl.float32))
        scale = tl.load(at + group, mask=of_groups)
        home = tl.load(note)
        for k in tl.static_range(TOP):
            goes = tl.load(note + 1 + k)
            if goes >= 0:
                slot = goes >> BITS
                place = tl.load(bases + source * SLOTS + slot) + (goes & LOW)
                if place < room:
                    if CONTIGUOUS:
                        slot -= slot
                    where = (slot * room + place).to(tl.int64)
                    to = values + where * (HIDDEN // 4) + part * WORDS
                    tl.store(to + word, packed, mask=of_words)
                    first = (slot.to(tl.int64) * (HIDDEN // 128) + part * GROUPS) * padded_rows
                    to = scales + first + place
                    tl.store(to + group * padded_rows, scale, mask=of_groups)
                    if part == 0:
                        tl.store(homes + where, (source * tokens + home) * TOP + k)


@triton.jit
def label_kernel(
    counts, row_expert, SLOTS: tl.constexpr, SLOTS_P2: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One program a block of ALIGN rows of the contiguous layout: the slot of each, -1 for none.

    counts [SLOTS] int32; row_expert [programs * ALIGN] int32. A block is one expert's or nobody's.
    """
    slot = tl.arange(0, SLOTS_P2)
    count = tl.load(counts + slot, mask=slot < SLOTS, other=0)
    padded = (count + ALIGN - 1) // ALIGN * ALIGN
    end = tl.cumsum(padded, 0)
    first = tl.program_id(0) * ALIGN
    expert = tl.sum((end <= first).to(tl.int32), 0)
    used = tl.sum(tl.where(slot == expert, end - padded + count, 0), 0)
    row = first + tl.arange(0, ALIGN)
    tl.store(row_expert + row, tl.where(row < used, expert, -1))

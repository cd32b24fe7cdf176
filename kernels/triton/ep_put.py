"""Rows and outputs to peers whose memory is not mapped: NVSHMEM's put with signal, from the device.

Needs NVSHMEM's device library, so this module is imported only where puts are used. The library's
put returns once its source may be written again, and raises the peer's signal after the data.

Of an operation on a signal the library knows two numbers (`nvshmemx_signal_op_t` in its
nvshmem_common_transport.h), which are neither OpenSHMEM's nor those in the docstring of torch's
`putmem_signal_block`. It refuses no other: in mapped memory it adds for any, and beyond a network
takes it for the atomic operation of that number.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch.distributed._symmetric_memory._nvshmem_triton import (
    putmem_signal_block,
    requires_nvshmem,
)

SIGNAL_SET = 9
SIGNAL_ADD = 10
SET: tl.constexpr = tl.constexpr(SIGNAL_SET)
ADD: tl.constexpr = tl.constexpr(SIGNAL_ADD)
ROWS = ["outbox", "outcounts", "stage", "there", "tags", "arrived", "me", "chunks", "ranks"]
ROWS += ["slots", "note", "record", "notes", "inbox"]
OUTPUTS = ["outputs", "back", "returned", "max_rows", "align", "me", "slots", "each", "hidden"]
"""Arguments whose values make no other kernel: the device library takes long to compile in."""


@requires_nvshmem
@triton.jit(do_not_specialize=ROWS)
def put_rows_kernel(
    outbox, outcounts, stage, there, tags, arrived, rows_to, puts, step, me, chunks,
    ranks, slots, note, record, notes, inbox,
):  # fmt: skip
    """Program (peer, chunk): a chunk of the rows packed for a peer, the first also its counts.

    outbox [ranks, inbox] bytes and outcounts [ranks, slots] int32 are what to send; stage
    [2, ranks, inbox], there [2, ranks, slots], tags and arrived [2, ranks] are addresses in the own
    block, which the library turns into the peer's. puts [ranks] int32: which peers are meant.
    """
    peer = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(puts + peer) != 0:
        number = tl.load(step)
        mine = (number % 2) * ranks + me
        rows = tl.load(rows_to + peer)
        if chunk == 0:
            word = (number << 32) | rows.to(tl.int64)
            putmem_signal_block(
                there + mine * (slots * 4), outcounts + peer.to(tl.int64) * (slots * 4),
                (tl.full([], 4, tl.int64) * slots), tags + mine * 8, word, SET, peer,
            )  # fmt: skip
        size = (rows + chunks - 1) // chunks
        first = chunk * size
        here = tl.minimum(rows - first, size).to(tl.int64)
        if here > 0:
            source = outbox + peer.to(tl.int64) * inbox
            target = stage + mine * inbox
            signal = arrived + mine * 8
            at = first.to(tl.int64) * note
            putmem_signal_block(
                target + at, source + at, here * note, signal, here, ADD, peer
            )  # fmt: skip
            at = notes + first.to(tl.int64) * record
            putmem_signal_block(
                target + at, source + at, here * record, signal, here, ADD, peer
            )  # fmt: skip


@requires_nvshmem
@triton.jit(do_not_specialize=OUTPUTS)
def put_outputs_kernel(
    outputs, counts, homes, back, returned, puts, max_rows, align, me, slots, each, hidden,
    SLOTS_P2: tl.constexpr,
):  # fmt: skip
    """One put an output: outputs bfloat16, in symmetric memory, in either layout.

    [slots, max_rows, hidden] if align is 0, else [rows, hidden], see `return_kernel`. back and
    returned are addresses in the own block, as above.
    """
    slot = tl.arange(0, SLOTS_P2)
    count = tl.load(counts + slot, mask=slot < slots, other=0)
    end = tl.cumsum(count, 0)
    total = tl.sum(count, 0)
    block = tl.maximum(align, 1)
    padded = (count + block - 1) // block * block
    begin = tl.where(align > 0, tl.cumsum(padded, 0) - padded, slot * max_rows)
    for row in range(tl.program_id(0), total, tl.num_programs(0)):
        expert = tl.sum(((end <= row) & (slot < slots)).to(tl.int32), 0)
        place = row - tl.max(tl.where((end <= row) & (slot < slots), end, 0), 0)
        at = (tl.sum(tl.where(slot == expert, begin, 0), 0) + place).to(tl.int64)
        home = tl.load(homes + at)
        peer = home // each
        if tl.load(puts + peer) != 0:
            putmem_signal_block(
                back + (home % each).to(tl.int64) * (hidden * 2), outputs + at * (hidden * 2),
                (tl.full([], 2, tl.int64) * hidden), returned + me * 8,
                tl.full([], 1, tl.int64), ADD, peer,
            )  # fmt: skip

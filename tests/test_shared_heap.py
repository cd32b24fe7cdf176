"""Symmetric memory of processes on one host."""

import os
import subprocess
import sys

import pytest

from pdmesh.kernels.shared_heap import SharedHeap

OTHER = """
import sys
import torch
from pdmesh.kernels.shared_heap import SharedHeap
heap = SharedHeap(1, 2, sys.argv[1].encode())
blocks = [heap.allocate(n) for n in (100, 5000)]
for block in blocks:
    assert not block.any()
import ctypes
for block in blocks:
    there = heap.addresses(block)[0]
    ctypes.memset(there, 7, block.numel())
    block.fill_(9)
"""


def test_what_another_process_writes_to_a_peers_block_is_there():
    heap = SharedHeap(0, 2)
    blocks = [heap.allocate(n) for n in (100, 5000)]
    subprocess.run([sys.executable, "-P", "-c", OTHER, heap.job.decode()], check=True)
    for block, size in zip(blocks, (100, 5000), strict=True):
        assert block.tolist() == [7] * size
        own, peer = heap.addresses(block)
        assert own == block.data_ptr()
        assert abs(peer - own) % 4096 == 0
    theirs = SharedHeap(1, 2, heap.job)
    assert [theirs.allocate(n).tolist() for n in (100, 5000)] == [[9] * 100, [9] * 5000]


def test_blocks_of_any_size_do_not_touch_each_other():
    heaps = [SharedHeap(0, 3)]
    heaps += [SharedHeap(rank, 3, heaps[0].job) for rank in (1, 2)]
    blocks = [[heap.allocate(size) for size in (1, 4096, 9000)] for heap in heaps]
    for rank, own in enumerate(blocks):
        for number, block in enumerate(own):
            block.fill_(3 * rank + number + 1)
    for rank, own in enumerate(blocks):
        for number, block in enumerate(own):
            assert bool((block == 3 * rank + number + 1).all())


def test_memory_of_a_process_that_has_ended_cannot_be_joined():
    with pytest.raises(OSError, match="No such file"):
        SharedHeap(1, 2, b"/proc/1/fd/does-not-exist")


def test_nothing_stays_open_once_a_heap_is_gone():
    before = set(os.listdir("/proc/self/fd"))
    heap = SharedHeap(0, 2)
    memory = heap.allocate(64)
    heap.free(memory)
    assert not memory.any()
    del heap, memory
    assert set(os.listdir("/proc/self/fd")) == before

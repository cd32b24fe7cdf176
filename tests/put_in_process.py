"""NVSHMEM's put with signal between ranks of one process, for kernels in Triton's interpreter."""

from __future__ import annotations

import ctypes
import sys
import types

import torch
import triton.language as tl

NAME = "torch.distributed._symmetric_memory._nvshmem_triton"
KERNELS = "pdmesh.kernels.triton.ep_put"


SET, ADD = 9, 10
"""`nvshmemx_signal_op_t` of NVSHMEM 3.4 (device_host_transport/nvshmem_common_transport.h)."""


class Puts:
    """What stands in for the device library; `blocks` are those of `InProcessHeap`.

    In mapped memory the library adds for every operation but SET, and over a network takes another
    number for another atomic operation; here it is an error.
    """

    def __init__(self, blocks: list[list[torch.Tensor]]) -> None:
        self.blocks = blocks
        self.calls = 0

    def there(self, address: int, size: int, pe: int) -> int:
        """The same place in the peer's block."""
        for blocks in self.blocks:
            for block in blocks:
                offset = address - block.data_ptr()
                if offset >= 0 and offset + size <= block.numel():
                    return blocks[pe].data_ptr() + offset
        raise AssertionError("a put to what is no symmetric memory")

    def putmem_signal_block(self, dst, src, size_bytes, signal, sig_val, sig_op, pe):
        """`nvshmemx_putmem_signal_block`: bytes, not elements; a signal is a uint64 of its own.

        The call for a device has one signature: five words of 64 bits, and two of 32.
        """
        assert [x.dtype for x in (dst, src, size_bytes, signal, sig_val)] == [tl.int64] * 5
        assert pe.dtype == tl.int32
        to, source, size, counter, value, how, peer = (
            int(getattr(x, "value", x)) for x in (dst, src, size_bytes, signal, sig_val, sig_op, pe)
        )
        assert size > 0
        assert how in (SET, ADD), f"{how} is no operation on a signal"
        assert counter % 8 == 0, "a signal is aligned to its size"
        assert value > 0
        assert 0 <= peer < len(self.blocks[0]), f"there is no PE {peer}"
        self.there(source, size, peer)  # a network reads from symmetric memory only
        ctypes.memmove(self.there(to, size, peer), source, size)
        word = ctypes.c_int64.from_address(self.there(counter, 8, peer))
        word.value = value if how == SET else word.value + value
        self.calls += 1


def install(monkeypatch, heaps) -> Puts:
    """From here on puts go between these heaps."""
    puts = Puts(heaps[0]._blocks)
    module = types.ModuleType(NAME)
    module.requires_nvshmem = lambda kernel: kernel
    module.putmem_signal_block = puts.putmem_signal_block
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    return puts

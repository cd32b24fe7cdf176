"""NVSHMEM's put with signal between ranks of one process, for kernels in Triton's interpreter."""

from __future__ import annotations

import ctypes
import sys
import types

import torch

NAME = "torch.distributed._symmetric_memory._nvshmem_triton"
KERNELS = "pdmesh.kernels.triton.ep_put"


class Puts:
    """What stands in for the device library; `blocks` are those of `InProcessHeap`."""

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
        to, source, size, counter, value, how, peer = (
            int(getattr(x, "value", x)) for x in (dst, src, size_bytes, signal, sig_val, sig_op, pe)
        )
        assert size > 0
        self.there(source, size, peer)
        ctypes.memmove(self.there(to, size, peer), source, size)
        word = ctypes.c_int64.from_address(self.there(counter, 8, peer))
        word.value = value if how == 0 else word.value + value
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

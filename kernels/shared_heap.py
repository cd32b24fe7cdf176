"""Symmetric memory of processes on one host: for ranks that have no GPU."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor


class SharedHeap:
    """One process' end; see `SymmetricHeap`.

    The memory is an anonymous file of the rank that made it, which others open by its number there:
    it has no name that could stay behind, and ends with the last process that has it.

    Args:
        rank, size: the own number, and how many ranks there are.
        job: the `job` of the rank that made the memory; None: this one does.

    Raises:
        OSError: there is no such memory on this host, or it is another user's.
    """

    def __init__(self, rank: int, size: int, job: bytes | None = None) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self._taken = 0
        self._blocks: dict[int, list[Tensor]] = {}
        if job is None:
            self._fd = os.memfd_create("pdmesh-exchange", os.MFD_CLOEXEC)
            job = f"/proc/{os.getpid()}/fd/{self._fd}".encode()
        else:
            self._fd = os.open(job, os.O_RDWR | os.O_CLOEXEC)
        self.job = job

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def allocate(self, nbytes: int) -> Tensor:
        """See `SymmetricHeap`."""
        grain = mmap.ALLOCATIONGRANULARITY
        each = -(-nbytes // grain) * grain
        end = self._taken + self.size * each
        if os.fstat(self._fd).st_size < end:  # whoever comes first makes room; nobody cuts it
            os.posix_fallocate(self._fd, 0, end)
        view = mmap.mmap(self._fd, self.size * each, offset=self._taken)
        self._taken = end
        whole = torch.frombuffer(view, dtype=torch.uint8)
        blocks = [whole[rank * each :][:nbytes] for rank in range(self.size)]
        own = blocks[self.rank]
        self._blocks[own.data_ptr()] = blocks
        return own

    def free(self, memory: Tensor) -> None:
        """See `SymmetricHeap`: the memory goes once nobody has it."""
        self._blocks.pop(memory.data_ptr(), None)

    def addresses(self, memory: Tensor) -> tuple[int, ...]:
        """See `SymmetricHeap`."""
        return tuple(block.data_ptr() for block in self._blocks[memory.data_ptr()])

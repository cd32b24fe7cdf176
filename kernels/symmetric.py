"""Symmetric memory: every rank of a group has a block of the same size, and an address for each
other rank's block that its own kernels can write to.

Where a peer's memory is not mapped (it is beyond a network), its address is 0; NVSHMEM's puts go
there by the number of its PE and the address of the own block.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Protocol

import torch
from torch import Tensor


class SymmetricHeap(Protocol):
    """One rank's end."""

    @property
    def rank(self) -> int:
        """The own number."""

    @property
    def size(self) -> int:
        """Ranks."""

    @property
    def device(self) -> torch.device:
        """Where the memory is."""

    def allocate(self, nbytes: int) -> Tensor:
        """[nbytes] uint8, zeros. Collective: all ranks call it in the same order, alike."""

    def free(self, memory: Tensor) -> None:
        """Gives a block back. Collective; no rank may write there any more."""

    def addresses(self, memory: Tensor) -> tuple[int, ...]:
        """Each rank's block that was allocated with `memory`; 0 where it is not mapped here."""


class InProcessHeap:
    """Ranks of one process; see `in_process_heaps`."""

    def __init__(self, rank: int, blocks: list[list[Tensor]], size: int, device: str) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._blocks = blocks
        self._taken = 0

    def allocate(self, nbytes: int) -> Tensor:
        """See `SymmetricHeap`.

        Raises:
            ValueError: another rank asked for another size.
        """
        if self._taken == len(self._blocks):
            shape = (self.size, nbytes)
            self._blocks.append(
                list(torch.zeros(shape, dtype=torch.uint8, device=self.device).unbind())
            )
        blocks = self._blocks[self._taken]
        if blocks[0].numel() != nbytes:
            raise ValueError(f"{nbytes} bytes, but another rank took {blocks[0].numel()}")
        self._taken += 1
        return blocks[self.rank]

    def free(self, memory: Tensor) -> None:
        """See `SymmetricHeap`: it goes with the heaps."""

    def addresses(self, memory: Tensor) -> tuple[int, ...]:
        """See `SymmetricHeap`."""
        for blocks in self._blocks:
            if blocks[self.rank].data_ptr() == memory.data_ptr():
                return tuple(block.data_ptr() for block in blocks)
        raise ValueError("this memory is not of this heap")


def in_process_heaps(size: int, device: str = "cpu") -> list[InProcessHeap]:
    """Heaps of ranks that share one process and one device, each for its rank."""
    blocks: list[list[Tensor]] = []
    return [InProcessHeap(rank, blocks, size, device) for rank in range(size)]


def missing() -> str | None:
    """Why NVSHMEM cannot be used here, in a sentence; None if it can."""
    if importlib.util.find_spec("nvshmem") is None:
        return "the package nvshmem4py-cu13 is not installed (pip install pdmesh[gpu])"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return None


class NvshmemHeap:
    """A PE of an NVSHMEM job that this process has joined.

    Args:
        device: the device of the PE.
    """

    def __init__(self, device: torch.device) -> None:
        core = _core()
        self.rank = int(core.my_pe())
        self.size = int(core.n_pes())
        self.device = device
        self._peers: dict[int, list[Tensor]] = {}

    @staticmethod
    def join(job_id: bytes, rank: int, size: int, device: torch.device) -> NvshmemHeap:
        """Joins a job (collective) whose id one rank got from `new_job_id`."""
        core = _core()
        uid = core.get_unique_id(empty=True)
        flat = torch.from_numpy(uid._data.view("uint8").reshape(-1))
        flat.copy_(torch.frombuffer(bytearray(job_id), dtype=torch.uint8))
        torch.cuda.set_device(device)
        handle = importlib.import_module("cuda.core").Device(device.index or 0)
        handle.set_current()
        core.init(device=handle, uid=uid, rank=rank, nranks=size, initializer_method="uid")
        return NvshmemHeap(device)

    def allocate(self, nbytes: int) -> Tensor:
        """See `SymmetricHeap`. Callers meet on the host before a peer writes."""
        memory: Tensor = _core().tensor((nbytes,), dtype=torch.uint8)
        memory.zero_()
        torch.cuda.synchronize(self.device)
        return memory

    def free(self, memory: Tensor) -> None:
        """See `SymmetricHeap`."""
        self._peers.pop(memory.data_ptr(), None)
        torch.cuda.synchronize(self.device)
        _core().free_tensor(memory)

    def addresses(self, memory: Tensor) -> tuple[int, ...]:
        """See `SymmetricHeap`."""
        return tuple(
            memory.data_ptr() if peer == self.rank else self._mapped(memory, peer)
            for peer in range(self.size)
        )

    def _mapped(self, memory: Tensor, peer: int) -> int:
        core = _core()
        try:
            there: Tensor = core.get_peer_tensor(memory, peer)
        except (core.NvshmemError, core.NvshmemInvalid):
            return 0
        self._peers.setdefault(memory.data_ptr(), []).append(there)
        return there.data_ptr()


def new_job_id() -> bytes:
    """What all processes of a job need to join it; one of them makes it."""
    return bytes(_core().get_unique_id()._data.tobytes())


def _core() -> Any:
    return importlib.import_module("nvshmem.core")

"""Memory with weights in it that one process holds and others map.

On the CPU that is one anonymous file, sealed once it is filled: whoever has its descriptor can read
it, and nobody write it. On a CUDA device it is the allocations that the tensors lie in anyway, by
the driver's handles; those know no read-only mapping, so that nobody writes there is a promise of
the model, not of the device.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.kvcache.store import tensor_bytes
from pdmesh.kvtransfer.cuda_driver import CudaMemory
from pdmesh.kvtransfer.device_memory import DeviceError, ExportedPool
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.held_weights import HeldRegion

ALIGN = 256
"""Tensors begin at multiples of so many bytes, as torch's own do."""
_SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    if hasattr(fcntl, "F_SEAL_WRITE")
    else 0
)


@dataclass(frozen=True)
class Offered:
    """Tensors in memory that others may map.

    Attributes:
        places: number of the region and offset there in bytes, for each tensor.
        regions: the memory.
        fd: the file of a region without a handle; None where there is none.
        kept: what has to stay as long as it is offered.
    """

    places: tuple[tuple[int, int], ...]
    regions: tuple[HeldRegion, ...]
    fd: int | None
    kept: Sequence[Tensor] = ()

    def close(self) -> None:
        """Offers it no more; what is mapped on a CPU stays mapped."""
        if self.fd is not None:
            os.close(self.fd)


class HeldMemory(Protocol):
    """The memory of one device, as this process offers or maps it."""

    @property
    def device(self) -> str:
        """A name of it that is the same in every process of the host."""

    def offer(self, tensors: Sequence[Tensor]) -> Offered:
        """Lets others map contiguous tensors.

        Raises:
            ConfigError: they cannot be.
        """

    def map(self, regions: Sequence[HeldRegion], fd: int | None) -> list[Tensor]:
        """The regions of another process, [bytes] uint8 each, to be read only.

        Raises:
            ConfigError: they cannot be mapped here.
        """

    def close(self) -> None:
        """Maps nothing any more. No tensor of it may be used from now on, nor in what is queued."""


class HostMemory:
    """Of the host: an anonymous file (memfd), whose pages all processes read in one place."""

    device = "cpu"

    def offer(self, tensors: Sequence[Tensor]) -> Offered:
        """See `HeldMemory`; the tensors are copied and need not stay."""
        places: list[tuple[int, int]] = []
        end = 0
        for tensor in tensors:
            start = -(-end // ALIGN) * ALIGN
            places.append((0, start))
            end = start + tensor.nbytes
        try:
            fd = os.memfd_create("pdmesh-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError) as error:
            raise ConfigError(f"this system gives no shared memory: {error}") from error
        try:
            os.ftruncate(fd, end)
            for tensor, (_, start) in zip(tensors, places, strict=True):
                _write(fd, tensor_bytes(tensor), start)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"{end} bytes of weights cannot be put into shared memory: {error.strerror}"
            ) from error
        return Offered(tuple(places), (HeldRegion(b"", end),), fd)

    def map(self, regions: Sequence[HeldRegion], fd: int | None) -> list[Tensor]:
        """See `HeldMemory`."""
        try:
            (region,) = regions
            if fd is None or region.handle or os.fstat(fd).st_size < region.size:
                raise OSError("their memory did not come along")
            view = mmap.mmap(fd, region.size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the weights cannot be mapped: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                view.madvise(mmap.MADV_HUGEPAGE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch says that it is read-only
            return [torch.frombuffer(view, dtype=torch.uint8)]

    def close(self) -> None:
        """See `HeldMemory`: the mapping goes with the last tensor."""


class Lender(Protocol):
    """Of a `CudaMemory`, what this needs."""

    uuid: str

    def lend(self, address: int, size: int, what: str) -> ExportedPool:
        """Lets other processes map so many bytes, for as long as they are allocated."""

    def open(self, pool: ExportedPool) -> int:
        """Maps memory of another process; its address here."""

    def close(self, pool: ExportedPool, address: int) -> None:
        """Takes back one ``open``."""

    def settle(self) -> None:
        """Blocks until all that this process has queued to compute so far is done."""


class DeviceHeld:
    """Of a CUDA device: the allocations that the tensors lie in, by their handles.

    Args:
        memory: the device.
        view: makes a tensor [size] uint8 of an address and a size, without a copy.
    """

    def __init__(self, memory: Lender, view: Callable[[int, int], Tensor]) -> None:
        self._memory = memory
        self._view = view
        self._mapped: list[tuple[ExportedPool, int]] = []

    @property
    def device(self) -> str:
        """See `HeldMemory`."""
        return self._memory.uuid

    def offer(self, tensors: Sequence[Tensor]) -> Offered:
        """See `HeldMemory`; nothing is copied, so the tensors are kept."""
        numbers: dict[int, int] = {}
        pools: list[ExportedPool] = []
        sizes: list[int] = []
        places: list[tuple[int, int]] = []
        self._memory.settle()
        for tensor in tensors:
            address, size = tensor.data_ptr(), tensor.nbytes
            try:
                pool = self._memory.lend(address, size, "the weights")
            except DeviceError as error:
                raise ConfigError(f"the weights cannot be shared: {error}") from error
            number = numbers.setdefault(address - pool.offset, len(pools))
            if number == len(pools):
                pools.append(pool)
                sizes.append(0)
            sizes[number] = max(sizes[number], pool.offset + size)
            places.append((number, pool.offset))
        regions = tuple(HeldRegion(p.handle, n) for p, n in zip(pools, sizes, strict=True))
        return Offered(tuple(places), regions, None, tuple(tensors))

    def map(self, regions: Sequence[HeldRegion], fd: int | None) -> list[Tensor]:
        """See `HeldMemory`."""
        views = []
        try:
            for region in regions:
                pool = ExportedPool(region.handle, 0, region.size, self._memory.uuid)
                address = self._memory.open(pool)
                self._mapped.append((pool, address))
                views.append(self._view(address, region.size))
        except DeviceError as error:
            self.close()
            raise ConfigError(
                f"the weights of another process cannot be mapped: {error}"
            ) from error
        return views

    def close(self) -> None:
        """See `HeldMemory`. What the driver refuses to unmap goes with the process."""
        mapped, self._mapped = self._mapped, []
        if mapped:
            with suppress(DeviceError):
                self._memory.settle()
        for pool, address in mapped:
            with suppress(DeviceError):
                self._memory.close(pool, address)


class _Foreign:
    """Memory at an address of a CUDA device, as torch takes it (CUDA array interface, 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def held_memory(device: str) -> HeldMemory:
    """That of a device, "cpu" or "cuda", under which this process knows it.

    Raises:
        ConfigError: there is no driver, or it shares no memory.
    """
    where = torch.device(device)
    if where.type != "cuda":
        return HostMemory()
    ordinal = where.index or 0
    try:
        torch.zeros(1, device=f"cuda:{ordinal}")  # makes the context that the driver's calls enter
        memory = CudaMemory(ordinal)
    except DeviceError as error:
        raise ConfigError(f"weights cannot be shared on {device}: {error}") from error
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"there is no {device}") from error
    return DeviceHeld(
        memory,
        lambda address, size: torch.as_tensor(_Foreign(address, size), device=f"cuda:{ordinal}"),
    )


def sharing_report(device: str | None) -> str:
    """Whether workers on ``device`` (the best there is) can map weights of another process, in a
    line."""
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cpu":
        return "each worker loads its own; --share-weights: one copy in memory of the host"
    try:
        held_memory(chosen).offer([torch.zeros(1, device=chosen)])
    except ConfigError as error:
        return f"each worker loads its own: {error}"
    return f"each worker loads its own; --share-weights: one copy on {chosen}, over CUDA IPC"


def _write(fd: int, data: memoryview, start: int) -> None:
    data = data.cast("B")
    while data:
        written = os.pwrite(fd, data, start)
        data, start = data[written:], start + written

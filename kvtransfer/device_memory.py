"""What a transport between processes asks of a device: its memory by handle, and copies in order.

``cuda_driver.CudaMemory`` is the one for CUDA devices. Addresses are those of this process; a copy
may go between any two memories of the device, of another process on it, or of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from pdmesh.kvcache.store import LatentStore


class Copy(NamedTuple):
    """Bytes, or ``rows`` of so many bytes, each so far behind the one before."""

    target: int
    """Address."""
    source: int
    """Address."""
    size: int
    """Bytes of a row."""
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0


class Run(NamedTuple):
    """``length`` pairs of numbers, each pair ``target_step`` and ``source_step`` (1 at least)
    above the one before."""

    target: int
    source: int
    length: int
    target_step: int
    source_step: int


@lru_cache(maxsize=64)
def runs(targets: tuple[int, ...], sources: tuple[int, ...]) -> tuple[Run, ...]:
    """As few runs as a walk over the pairs, in order of their sources, finds; each pair is in one.

    The layers of a prompt that is computed have the same pages, so the last answers are kept.
    """
    found: list[Run] = []
    for source, target in sorted(zip(sources, targets, strict=True)):
        if found:
            run = found[-1]
            steps = run.target_step, run.source_step
            if run.length == 1:
                steps = target - run.target, source - run.source
            due = run.target + run.length * steps[0], run.source + run.length * steps[1]
            if min(steps) > 0 and due == (target, source):
                found[-1] = Run(run.target, run.source, run.length + 1, *steps)
                continue
        found.append(Run(target, source, 1, 1, 1))
    return tuple(found)


def copies(
    target: int,
    source: int,
    size: int,
    pitch: int,
    targets: Sequence[int],
    sources: Sequence[int],
) -> Iterator[Copy]:
    """The copies of ``size`` bytes from each of ``sources`` to that of ``targets``: a run is one.

    Args:
        target, source: addresses of number 0.
        pitch: bytes from one number to the next, on both sides; ``size`` at least.
    """
    for run in runs(tuple(targets), tuple(sources)):
        at = target + run.target * pitch, source + run.source * pitch
        if size == pitch and run.target_step == run.source_step == 1:
            yield Copy(*at, size * run.length)
        else:
            pitches = run.target_step * pitch, run.source_step * pitch
            yield Copy(*at, size, run.length, *pitches)


class SideStream:
    """A stream of a device for a few units now and then, before the kernels of a step.

    It waits for none of what is computed on other streams, and they not for it.
    """

    def __init__(self, device: torch.device | int) -> None:
        self._device = device
        self._made: torch.cuda.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What this thread computes within goes there."""
        if self._made is None:
            self._made = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                self._device, priority=-1
            )
        with torch.cuda.stream(self._made):
            yield


class DeviceError(OSError):
    """The device or its driver refused or failed, in a sentence."""


class ExportedPool(msgspec.Struct, frozen=True, array_like=True):
    """A pool that another process may map."""

    handle: bytes
    """What the driver calls the allocation that the pool lies in."""
    offset: int
    """Of the pool in that allocation, bytes."""
    size: int
    """Of the pool, bytes."""
    device: str
    """Unique name of the device that has it."""


class Mark(Protocol):
    """A point in a lane's work."""

    @property
    def done(self) -> bool:
        """Whether all that was queued before it is in place. Raises DeviceError if it failed."""

    def wait(self) -> None:
        """Blocks until it is done.

        Raises:
            DeviceError: the device failed; what was queued may be under way or not.
        """


class Lane(Protocol):
    """Work that the device does in order, beside all that it computes."""

    def follow(self, ready: torch.cuda.Event) -> None:
        """What is queued from now on begins after ``ready`` too."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Queues copies. Raises DeviceError, and some of them may be queued then."""

    def record(self) -> Mark:
        """Marks what has been queued so far."""

    def close(self) -> None:
        """Nothing is queued any more."""


class DeviceMemory(Protocol):
    """One device, as this process uses it. Thread-safe. All of it may raise DeviceError."""

    def holds(self, store: LatentStore) -> bool:
        """Whether the pages of ``store`` are in its memory."""

    def export(self, store: LatentStore) -> ExportedPool:
        """Lets other processes map the pages of ``store``, for as long as they exist."""

    def open(self, pool: ExportedPool) -> int:
        """Maps a pool of another process; its address here. Opened again, the same once more."""

    def close(self, pool: ExportedPool, address: int) -> None:
        """Takes back one ``open``. No copy to or from the pool may be queued."""

    def lane(self) -> Lane:
        """A new lane."""

    def staging(self, size: int) -> npt.NDArray[np.uint8]:
        """Memory of the host that the device copies to without waiting."""

    def settle(self) -> None:
        """Blocks until all that this process has queued to compute so far is done."""

    def aside(self) -> AbstractContextManager[None]:
        """What this thread computes on the device within goes beside what others compute."""

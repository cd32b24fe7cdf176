"""The memory that ranks of a group on devices exchange rows through."""

from __future__ import annotations

import os

import torch

from pdmesh.kernels.shared_heap import SharedHeap
from pdmesh.kernels.symmetric import NvshmemHeap, SymmetricHeap, missing, new_job_id
from pdmesh.model.parallel.exchange import Channel, Message
from pdmesh.model.parallel.meeting import Meeting
from pdmesh.wire.errors import ConfigError

HEAP_SLACK = 64 << 20
"""Bytes of NVSHMEM's heap besides those that are asked for: its own, and what is lost at ends."""
JOINING_S = 120.0
_SETTINGS = {"NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink multicast stays off: nothing here uses it."""


def join_heap(
    meeting: Meeting, rank: int, size: int, device: torch.device, nbytes: int
) -> SymmetricHeap:
    """Joins the memory of all ranks, which rank 0 makes; all of them call it.

    Args:
        meeting: where the ranks tell each other how to find it.
        nbytes: what each rank will allocate there in all.

    Raises:
        ConfigError: there is no such memory here.
        RankLost: a rank went meanwhile.
    """
    if device.type == "cuda":
        check_nvshmem()
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(heap_bytes(nbytes))
        torch.cuda.set_device(device)
        job = new_job_id() if rank == 0 else b""
        return NvshmemHeap.join(_told(meeting, job), rank, size, device)
    made = SharedHeap(rank, size) if rank == 0 else None
    job = _told(meeting, b"" if made is None else made.job)
    if made is None:
        try:
            made = SharedHeap(rank, size, job)
        except OSError as error:
            raise ConfigError(
                "ranks in FP8 on CPUs exchange rows through shared memory, so they have to be on "
                f"one host, of one user: {error}"
            ) from error
    return made


def check_nvshmem() -> None:
    """Whether ranks on GPUs can be had here.

    Raises:
        ConfigError: they cannot.
    """
    problem = missing()
    if problem is not None:
        raise ConfigError(f"ranks on GPUs exchange rows through NVSHMEM: {problem}")


def heap_bytes(nbytes: int) -> int:
    """The size of NVSHMEM's heap for so much: all of it is taken at once."""
    grain = 2 << 20
    return -(-(nbytes + HEAP_SLACK) // grain) * grain


def _told(meeting: Meeting, job: bytes) -> bytes:
    """What rank 0 says."""
    own: Message = (torch.frombuffer(bytearray(job), dtype=torch.uint8),) if job else ()
    told = meeting.gather(Channel("job", 0, -1, -1), own, JOINING_S)
    return bytes(told[0][0].tolist())

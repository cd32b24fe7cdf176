"""How ranks on devices become a group: one job of symmetric memory, and graphs captured by all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdmesh.kernels.symmetric import SymmetricHeap
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.rank import DeviceRank
from pdmesh.model.device.spread import Exchange
from pdmesh.model.parallel.device_heap import join_heap
from pdmesh.model.parallel.exchange import Channel
from pdmesh.model.parallel.host_lane import HostLane
from pdmesh.model.parallel.meeting import Meeting
from pdmesh.model.parallel.nvshmem import NvshmemExperts
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

WAIT_S = 30.0
"""How long a device waits for another rank in a step; that a process has died is known before."""
PREPARING_S = 600.0
"""How long ranks wait for each other before the first step: they compile kernels."""

Prepare = Callable[[DeviceRank, Callable[[], None]], None]
"""Captures a rank's graphs; to be given what has to be called between computing and recording."""


@dataclass(frozen=True)
class Asked:
    """What a rank brings.

    Attributes:
        model: with the experts that it holds under `placement`.
        exchange: how rows are exchanged.
        most_copies: of an expert, under any placement to come.
    """

    model: DeviceModel
    placement: Placement
    exchange: Exchange
    most_copies: int


def greet(meeting: Meeting, within_s: float) -> None:
    """Waits until all ranks are there and new. Each says so; one of an earlier group, which has not
    noticed yet that it is over, does not.

    Raises:
        RankLost: a rank did not come within `within_s` seconds.
    """
    meeting.gather(Channel("new", 0, -1, -1), (), within_s, forming=True)


def form_rank(
    meeting: Meeting, asked: Asked, gone: Callable[[int], bool], prepare: Prepare
) -> DeviceRank:
    """This rank, ready for its first step; all ranks call it.

    Args:
        meeting: where all ranks have greeted each other.
        gone: whether a rank is known to be lost.
        prepare: called before the first step.

    Raises:
        ConfigError: ranks cannot reach each other's memory.
        RankLost: a rank went meanwhile.
    """
    device, exchange = asked.model.device, asked.exchange
    heap = join_heap(meeting, meeting.rank, meeting.size, device, exchange.symmetric)
    ends = _ends(heap, asked)
    for lane in ends.lanes:
        if isinstance(lane, HostLane):
            lane.gone = gone
    rank = DeviceRank(asked.model, ends, asked.placement)
    meeting.gather(Channel("met", 0, 0, -1), (), PREPARING_S)

    def between() -> None:
        """What comes is recorded: from there on ranks are in step."""
        settled(rank)
        ends.wait_for(WAIT_S)

    prepare(rank, between)
    settled(rank)
    rank.take_load()
    meeting.gather(Channel("met", 0, 1, -1), (), PREPARING_S)
    ends.wait_for(WAIT_S)
    event(log, "ranks_formed", rank=meeting.rank, size=meeting.size, device=device)
    return rank


def settled(rank: DeviceRank) -> None:
    """Waits for this thread's work on the device: only then is it known who came.

    Raises:
        RankLost: a rank did not.
    """
    if rank.model.device.type == "cuda":
        torch.cuda.current_stream(rank.model.device).synchronize()
    rank.exchange.check()


def _ends(heap: SymmetricHeap, asked: Asked) -> NvshmemExperts:
    placement, exchange, device = asked.placement, asked.exchange, asked.model.device
    tables = [ReplicaTable.build(placement, n, device) for n in range(len(placement.layers))]
    lanes, host = exchange.lanes, device.type == "cpu"
    try:
        return NvshmemExperts(
            heap, tables, exchange.size, None, lanes, PREPARING_S, asked.most_copies, host
        )
    except ValueError as error:
        raise ConfigError(
            f"the GPUs of these ranks cannot write to each other's memory: {error}; ranks in fp8 "
            "have to be on one host, on GPUs that are connected"
        ) from error

"""What ranks of separate processes do about the load of their experts, every so many steps."""

from __future__ import annotations

import logging

from torch import Tensor

from pdmesh.model.parallel.assembly import Agreed
from pdmesh.model.parallel.exchange import Channel
from pdmesh.model.parallel.meeting import LOAD, Meeting
from pdmesh.model.parallel.plans import Plan, Plans
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

LOAD_STEPS = 64
"""Steps of all ranks after which a rank sends its load."""


def tell_load(meeting: Meeting, plans: Plans, agreed: Agreed, size: int, load: Tensor) -> None:
    """Tells the leader what this rank's rows asked for, [MoE layers, experts] int64; the leader
    looks at the plan, while all `size` ranks are there."""
    leader = agreed.members[0]
    meeting.post(leader, Channel(LOAD, agreed.step, -1, -1), (load,))
    if leader != meeting.rank or len(agreed.members) != size:
        return
    made: list[Plan] = []
    with meeting.changed:
        plans.lead(agreed.plan, made.append)
        meeting.changed.notify_all()
    for plan in made:
        event(log, "experts_planned", plan=plan.number)
        meeting.tell([rank for rank in agreed.members if rank != leader], plan)

"""What one rank of separate processes holds: its shard, and the experts of plans to come."""

from __future__ import annotations

import logging

import torch

from pdmesh.model.parallel.building import Held, RankBuilder
from pdmesh.model.parallel.meeting import Meeting
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.plans import Plans
from pdmesh.model.parallel.rank import Rank
from pdmesh.model.parallel.team import Team
from pdmesh.model.parallel.timeline import TimedTransport, Timeline
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)


class Holding:
    """The experts that a rank takes are read beside the steps, on a thread that calls `run`; only
    those of a rank that is lost are read in a step, by all who are left.

    Args:
        builder: cuts the shard.
        plans: which the rank knows; those that it has not read yet count as unknown.
        meeting: whose lock guards the plans, and the transport of the shard.
        team: who shares the heads.
        timeline: records the shard's waits for other ranks.
    """

    def __init__(
        self,
        builder: RankBuilder,
        plans: Plans,
        meeting: Meeting,
        team: Team,
        timeline: Timeline | None = None,
    ) -> None:
        plans.deferred = True
        self._builder = builder
        self._plans = plans
        self._meeting = meeting
        self._transport = meeting if timeline is None else TimedTransport(meeting, timeline)
        self._team = team
        self._ahead: dict[int, Held] = {}
        self._built: tuple[tuple[int, ...], int, Placement, Rank] | None = None
        self.plan = 0
        """The placement of experts that the last step used."""

    def read_first(self) -> None:
        """Reads the experts of the first placement."""
        self._ahead[0] = self._builder.hold(self._meeting.rank, self._plans.placement(0))

    def rank_among(self, members: tuple[int, ...], plan: int) -> Rank:
        """This rank's shard while these work together by this plan."""
        built = self._built
        if built is not None and built[:2] == (members, plan):
            return built[3]
        with self._meeting.changed:
            placement = self._plans.placement(plan)
            ahead = [held for number, held in self._ahead.items() if number == plan]
            self._ahead = {n: held for n, held in self._ahead.items() if n > plan}
        gone = set(range(placement.num_ranks)) - set(members)
        placement = placement.without(gone) if gone else placement
        old = None if built is None else (built[3], built[2])
        alone = not self._team.whole(members)
        rank = self._builder.build(members, placement, self._transport, old, ahead, alone)
        if built is not None:
            event(log, "experts_placed", members=",".join(map(str, members)), plan=plan)
        self._built, self.plan = (members, plan, placement, rank), plan
        return rank

    @torch.inference_mode()
    def run(self) -> None:
        """Reads what newer plans take, until the group is left."""
        changed = self._meeting.changed
        while True:
            with changed:
                changed.wait_for(lambda: self._meeting.closed or self._plans.waiting is not None)
                number = self._plans.waiting
                if self._meeting.closed or number is None:
                    return
                placement, built = self._plans.placement(number), self._built
                held = list(self._ahead.values())
            if built is not None:
                held.append(Held(built[2], built[3].experts))
            try:
                ready = self._builder.hold(self._meeting.rank, placement, held)
            except Exception:
                log.exception("the experts of plan %d cannot be read; steps go on without", number)
                return
            with changed:
                self._ahead[number] = ready
                self._plans.prepared(number)

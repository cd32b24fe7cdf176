"""One rank of an expert-parallel group whose ranks are processes: a model to call, in lock-step.

``Member`` stands for a whole ``DeepseekV3`` in the code of a worker. Each call is one step of all
ranks (see ``assembly``): a thread walks through its schedule and exchanges rows with the others,
also while this worker has nothing to compute, because its experts are theirs too. A rank that is
lost ends the step; those left hold its experts from then on and compute the step again. The call
returns the same bits, later.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from pdmesh.model.batch import Batch, Form
from pdmesh.model.computing import StandIn
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.expert_source import ExpertSource
from pdmesh.model.parallel.assembly import Agreed
from pdmesh.model.parallel.balancer import BalanceRule
from pdmesh.model.parallel.building import RankBuilder
from pdmesh.model.parallel.calls import Call, Calls
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.holding import Holding
from pdmesh.model.parallel.meeting import Meeting, Place
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.plans import Plans
from pdmesh.model.parallel.rebalancing import LOAD_STEPS, tell_load
from pdmesh.model.parallel.schedule import choose_mode, plan_schedule
from pdmesh.model.parallel.step import RankBatch, begin, first_rows, mtp_rows, walk
from pdmesh.model.parallel.team import Rows, Team
from pdmesh.model.parallel.timeline import Timeline
from pdmesh.model.parallel.virtual import Settings
from pdmesh.wire.errors import Unavailable, WorkerLost
from pdmesh.wire.logs import event
from pdmesh.wire.messages import RankStatus

log = logging.getLogger(__name__)


class Member(StandIn[DeepseekV3]):
    """See the module. ``start`` connects; ``close`` leaves the group.

    Args:
        model: the whole one, or one without routed experts; shards are cut from it.
        place: where this rank stands.
        placement: of the experts at first; by default one copy each, in order.
        rule: when to place them anew; None: never.
        settings: how the ranks compute; the same on all of them.
        digest: of what else has to be the same everywhere, such as the page format.
        source: where routed experts are read from; by default the model, which has them all.
        tp: consecutive ranks that share a batch; the first of them is called, the others follow.
        timeline: records this rank's stages, and its waits for other ranks.

    Raises:
        ConfigError: the group does not fit the model.
    """

    def __init__(
        self,
        model: DeepseekV3,
        place: Place,
        placement: Placement | None = None,
        settings: Settings = Settings(),  # noqa: B008 - it is immutable
        digest: str = "",
        rule: BalanceRule | None = None,
        source: ExpertSource | None = None,
        tp: int = 1,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(model)
        self.place = place
        self.settings = settings
        self.steps = 0
        """Steps that this rank has taken part in."""
        self.repeated = 0
        """Of them, those that ended with the loss of a rank."""
        groups = Groups(len(place.addresses), tp, ranks_per_host=len(place.addresses))
        self._builder = RankBuilder(model, groups, settings.arithmetic, settings.wire, source)
        first = self._builder.placement(placement)
        self._plans = Plans(place.rank, groups.ep, first, rule)
        self._meeting = Meeting(place, self._plans, digest)
        self._team = Team(groups, self._meeting, self._meeting.losses)
        self._timeline = timeline
        self._holding = Holding(self._builder, self._plans, self._meeting, self._team, timeline)
        self._calls = Calls(self._meeting.changed)
        self._thread = threading.Thread(target=self._run, name="ep-steps", daemon=True)
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # or whoever gives up a wait would cancel it

    # ---- as a model -----------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        latents: Tensor,
        form: Form,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `DeepseekV3.forward`.

        Raises:
            Unavailable: the group has been left.
            ValueError: this rank follows another, which is the one to call.
        """
        return self._call(Call("forward", batch, latents, form, on_layer=on_layer))

    def mtp_forward(
        self, batch: Batch, previous_hidden: Tensor, latents: Tensor, form: Form
    ) -> Tensor:
        """As `DeepseekV3.mtp_forward`.

        Raises:
            Unavailable: the group has been left.
        """
        return self._call(Call("mtp", batch, latents, form, previous_hidden))

    def _call(self, call: Call) -> Tensor:
        if not self._team.leads:
            raise ValueError(f"rank {self.place.rank} follows rank {self._team.ranks[0]}")
        return self._calls.run(call)

    # ---- the group ------------------------------------------------------------------------

    def start(self, within_s: float = 60.0) -> None:
        """Connects to the other ranks, and takes part from then on.

        Raises:
            ConfigError: as ``Meeting.start``.
        """
        self._holding.read_first()
        self._meeting.start(within_s)
        self._thread.start()
        threading.Thread(target=self._holding.run, name="ep-experts", daemon=True).start()

    def keep_heads(self) -> None:
        """Before `start`: frees the heads of the model that this rank, a follower, lacks."""
        assert not self._team.leads
        self._builder.keep_heads(self.place.rank)

    def close(self) -> None:
        """Leaves the group; calls that wait fail. Idempotent."""
        self._meeting.close()
        if self._thread.is_alive():
            self._thread.join(10)

    @property
    def plan(self) -> int:
        """The placement of experts that the last step used."""
        return self._holding.plan

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that compute together now."""
        return self._meeting.members

    def status(self) -> RankStatus:
        """What there is to say of this rank now. On any thread."""
        return RankStatus(
            rank=self.place.rank,
            size=len(self.place.addresses),
            members=self.members,
            steps=self.steps,
            repeated=self.repeated,
            sent_bytes=self._meeting.sent_bytes,
            plan=self.plan,
            heads=tuple(self._team.ranks) if self._team.whole(self.members) else (),
        )

    async def ended(self) -> None:
        """Waits until the steps have ended; they do by ``close``, or by a mistake.

        Raises:
            Exception: the mistake.
        """
        await asyncio.wrap_future(self._ended)

    # ---- steps (their thread) -------------------------------------------------------------

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while True:
                agreed = self._meeting.agree(self._calls.wish)
                if agreed is None:
                    self._fail_all(Unavailable("this rank has left its expert-parallel group"))
                    self._ended.set_result(None)
                    return
                if agreed.kind != "idle":
                    self._step(agreed, self._calls.of(agreed.kind))
        except BaseException as error:
            log.exception("the steps of this rank have ended")
            self._fail_all(error)
            self._meeting.close()
            self._ended.set_exception(error)

    def _step(self, agreed: Agreed, call: Call | None) -> None:
        """Computes it; a call that did not come to its end stays for the next step."""
        self.steps += 1
        try:
            result = self._compute(agreed, call)
        except WorkerLost as lost:
            self.repeated += 1
            self._meeting.owe()
            if call is not None:
                self._team.failed(_rows(call))
            event(log, "step_ended_early", logging.WARNING, step=agreed.step, reason=lost)
            return
        except Exception as error:  # noqa: BLE001 - it is raised where the call was made
            self._meeting.owe()
            if call is not None:
                self._team.failed(_rows(call))
                call.error = error
            elif self._team.leads or not isinstance(error, ValueError):
                raise  # else it is about the leader's rows, and the leader's call fails by it
        else:
            if call is not None:
                call.result = result
        if call is not None:
            self._calls.done(call)

    def _compute(self, agreed: Agreed, call: Call | None) -> Tensor | None:
        rank = self._holding.rank_among(agreed.members, agreed.plan)
        model, count = self._model, len(self._model.layers)
        main = agreed.kind == "forward"
        numbers = range(count) if main else range(count, count + 1)
        mode = choose_mode(self.settings.mode, agreed.most_rows, self.settings.threshold)
        schedule = plan_schedule([(n, self._builder.routed(n)) for n in numbers], mode)
        item: RankBatch | None = None
        first: Tensor | None = None
        rows = None if call is None else _rows(call)
        if call is not None:
            model.check_pool(call.latents)
        rows = self._team.share(agreed.step, agreed.members, rows)
        if rows is not None:
            tell = None if call is None else _once(call)
            item = RankBatch(rows.batch, (rows.latents,), rows.form, tell)
            if rows.previous is None:
                first = first_rows(model, item)
            else:
                first = mtp_rows(model, item, rows.previous)
        work = begin(model, agreed.step, mode, item, first, first_key=0 if main else 1)
        result = walk(rank, schedule, work, self._timeline, self.place.rank)
        if rows is not None and self._team.whole(agreed.members):
            self._team.computed(rows, numbers)
        if self.steps % LOAD_STEPS == 0 and rank.load is not None:
            size = len(self.place.addresses)
            tell_load(self._meeting, self._plans, agreed, size, rank.load.take())
        return None if call is None else result

    def _fail_all(self, error: BaseException) -> None:
        with self._meeting.changed:
            self._meeting.closed = True
        self._calls.fail_all(error)


def _rows(call: Call) -> Rows:
    return Rows(call.batch, call.latents, call.form, call.previous)


def _once(call: Call) -> Callable[[int], None] | None:
    tell = call.on_layer
    if tell is None:
        return None

    def told(layer: int) -> None:
        if layer > call.pushed:
            call.pushed = layer
            tell(layer)

    return told

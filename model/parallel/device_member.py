"""One rank of a group on devices whose ranks are processes: a model to call, in lock-step.

`DeviceMember` stands for a whole `DeviceModel` in the code of a worker, as `Member` does for a
`DeepseekV3`. Ranks agree on each step over connections (see ``assembly``); rows go from memory to
memory. The memory is one job's of all ranks, which cannot be made smaller: when a rank is lost, all
others end their steps, their workers leave the mesh, and the group forms anew once all have been
started again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from pdmesh.model.batch import Batch, Form
from pdmesh.model.computing import StandIn
from pdmesh.model.device.ahead import Ahead, Reader
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.rank import DeviceRank
from pdmesh.model.device.spread import Exchange
from pdmesh.model.parallel.assembly import Agreed
from pdmesh.model.parallel.balancer import BalanceRule
from pdmesh.model.parallel.calls import Call, Calls
from pdmesh.model.parallel.device_forming import Asked, Prepare, form_rank, greet, settled
from pdmesh.model.parallel.exchange import RankLost
from pdmesh.model.parallel.meeting import Meeting, Place
from pdmesh.model.parallel.microbatch import split_rows
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.plans import Plans
from pdmesh.model.parallel.rebalancing import LOAD_STEPS, tell_load
from pdmesh.model.parallel.schedule import Mode, choose_mode
from pdmesh.wire.errors import PdmeshError, Unavailable
from pdmesh.wire.logs import event
from pdmesh.wire.messages import RankStatus

log = logging.getLogger(__name__)

EXIT_UNFORMED = 75
"""Exit status of a worker whose group did not form (EX_TEMPFAIL of sysexits.h)."""
COUNT_STEPS = 64
"""Steps on a device after which sent bytes are read from it."""


class DeviceMember(StandIn[DeviceModel]):
    """See the module. ``start`` connects; ``close`` leaves the group.

    Args:
        model: with the experts of this rank.
        place: where this rank stands.
        placement: of the experts.
        exchange: how rows are exchanged.
        digest: of what else has to be the same everywhere.
        prepare: called once the group is there, before the first step, on all ranks alike.
        rule: when to place experts anew; None: never.
        reader: reads the experts that other placements take; there has to be one for a rule.
    """

    def __init__(
        self,
        model: DeviceModel,
        place: Place,
        placement: Placement,
        exchange: Exchange,
        digest: str,
        prepare: Prepare = lambda rank, between: None,
        rule: BalanceRule | None = None,
        reader: Reader | None = None,
    ) -> None:
        super().__init__(model)
        self.place = place
        self.steps = 0
        """Steps that this rank has taken part in."""
        self._placement = placement
        self._exchange = exchange
        self._prepare = prepare
        self._plans = Plans(place.rank, len(place.addresses), placement, rule)
        self._plans.deferred = True
        self._rule = rule
        self._ahead = Ahead(reader)
        self._plan = 0
        self._meeting = Meeting(place, self._plans, digest)
        self._calls = Calls(self._meeting.changed)
        self._rank: DeviceRank | None = None
        self._ready = False
        self._sent_bytes = 0
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
        """As `DeviceModel.forward`. More rows than an exchange takes are several steps.

        Raises:
            Unavailable: the group has been left.
        """
        self._model.check(batch, latents)
        parts = self._parts(batch)
        calls = [Call("forward", part, latents, form) for part in parts]
        calls[-1].on_layer = on_layer
        return _joined([self._calls.run(call) for call in calls])

    def mtp_forward(
        self, batch: Batch, previous_hidden: Tensor, latents: Tensor, form: Form
    ) -> Tensor:
        """As `DeviceModel.mtp_forward`; as `forward`."""
        self._model.check_mtp(batch, latents)
        parts = self._parts(batch)
        before = torch.split(previous_hidden, [part.num_rows for part in parts])
        calls = [
            Call("mtp", part, latents, form, rows) for part, rows in zip(parts, before, strict=True)
        ]
        return _joined([self._calls.run(call) for call in calls])

    def _parts(self, batch: Batch) -> list[Batch]:
        """In steps of as many rows as an exchange takes; cutting one reads it from the device."""
        most = self._exchange.size.tokens
        return [batch] if batch.num_rows <= most else split_rows(batch, most)

    # ---- the group ------------------------------------------------------------------------

    def start(self, within_s: float = 60.0) -> None:
        """Connects to the other ranks, makes the exchange with them, and takes part from then on.

        Raises:
            ConfigError: as ``Meeting.start``, or the ranks cannot share memory.
            RankLost: a rank went before the first step, or did not come.
        """
        self._meeting.start(within_s)
        try:
            self._join(within_s)
        except BaseException:
            self._meeting.close()
            raise
        self._ready = True
        self._thread.start()
        threading.Thread(target=self._read, name="ep-experts", daemon=True).start()

    def _join(self, within_s: float) -> None:
        greet(self._meeting, within_s)
        threading.Thread(target=self._watch, name="ep-watch", daemon=True).start()
        asked = Asked(self._model, self._placement, self._exchange, self._most_copies)
        with torch.inference_mode():
            self._rank = form_rank(self._meeting, asked, self._gone, self._prepare)

    @property
    def _most_copies(self) -> int:
        """Of an expert, under any plan."""
        experts = self.config.n_routed_experts
        return 1 if self._rule is None else self._rule.num_physical - experts + 1

    def close(self) -> None:
        """Leaves the group; calls that wait fail. Idempotent."""
        self._meeting.close()
        self._calls.fail_all(Unavailable("this rank has left its expert-parallel group"))
        if self._thread.is_alive():
            self._thread.join(10)

    def status(self) -> RankStatus:
        """What there is to say of this rank now. On any thread."""
        return RankStatus(
            rank=self.place.rank,
            size=len(self.place.addresses),
            members=self._meeting.members,
            steps=self.steps,
            repeated=0,
            sent_bytes=self._sent_bytes,
            plan=self._plan,
        )

    async def ended(self) -> None:
        """Waits until the steps have ended; they do by ``close``, a lost rank, or a mistake.

        Raises:
            RankLost: a rank is lost, and the group with it.
            Exception: the mistake.
        """
        await asyncio.wrap_future(self._ended)

    def _gone(self, rank: int) -> bool:
        return self._meeting.closed or rank in self._meeting.gone

    def _lost(self) -> RankLost | None:
        """The rank that has gone since the group was formed."""
        gone = self._meeting.gone
        what = "its connection has ended, and what it had to send"
        return RankLost(gone[0], what) if gone else None

    # ---- threads --------------------------------------------------------------------------

    def _watch(self) -> None:
        """Ends the group once a rank is gone, whatever the steps' thread waits for: and what the
        device waits for, also where it is this rank that leaves."""
        changed = self._meeting.changed
        with changed:
            changed.wait_for(lambda: self._meeting.closed or self._lost() is not None)
            lost = None if self._meeting.closed else self._lost()
        if self._rank is not None:
            self._rank.exchange.lose(self.place.rank if lost is None else lost.rank)
        if lost is None:
            return
        if not self._ready and self._model.device.type == "cuda":
            # NVSHMEM's start has no bound, and kernels that are compiled wait long.
            event(log, "ranks_not_formed", logging.ERROR, rank=self.place.rank, reason=lost)
            os._exit(EXIT_UNFORMED)
        self._end(lost)

    def _end(self, error: BaseException | None) -> None:
        """The steps are over. Calls go on waiting until ``close``: their answers end with the
        worker, which then is gone, and go on elsewhere, instead of failing here one by one."""
        with self._meeting.changed:
            if self._ended.done():
                return
            if error is None:
                self._ended.set_result(None)
            else:
                event(log, "ranks_ended", logging.ERROR, rank=self.place.rank, reason=error)
                self._ended.set_exception(error)

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            if self._model.device.type == "cuda":
                torch.cuda.set_device(self._model.device)
            while agreed := self._meeting.agree(self._calls.wish):
                if len(agreed.members) < len(self.place.addresses):
                    raise self._lost() or RankLost(-1, "its word for the next step")
                if agreed.kind != "idle":
                    self._step(agreed)
            self._end(None)
        except BaseException as error:  # noqa: BLE001 - it ends the worker
            if not isinstance(error, PdmeshError):
                log.exception("the steps of this rank have ended")
            left = self._meeting.closed and isinstance(error, RankLost)
            self._end(None if left else error)

    def _step(self, agreed: Agreed) -> None:
        assert self._rank is not None
        self.steps += 1
        if agreed.plan != self._plan:
            self._place(agreed.plan)
        call = self._calls.of(agreed.kind)
        mode = choose_mode("auto", agreed.most_rows, self._exchange.threshold)
        result = _computed(self._rank, agreed.kind == "mtp", mode, call)
        settled(self._rank)
        if self._model.device.type == "cpu" or self.steps % COUNT_STEPS == 1:
            self._sent_bytes = self._rank.exchange.sent.all
        if call is not None:
            call.result = result
            self._calls.done(call)
        if self._rule is not None and self.steps % LOAD_STEPS == 0:
            load = self._rank.take_load()
            tell_load(self._meeting, self._plans, agreed, len(self.place.addresses), load)

    def _place(self, number: int) -> None:
        """Puts a plan in use, as all ranks do before this step."""
        assert self._rank is not None
        with self._meeting.changed:
            placement = self._plans.placement(number)
        self._rank.place(placement, self._ahead.expert)
        self._ahead.drop()
        self._plan = number
        event(log, "experts_placed", rank=self.place.rank, plan=number)

    def _read(self) -> None:
        """Reads what newer plans take, until the group is left."""
        changed, rank = self._meeting.changed, self._rank
        assert rank is not None
        while True:
            with changed:
                changed.wait_for(lambda: self._meeting.closed or self._plans.waiting is not None)
                number = self._plans.waiting
                if self._meeting.closed or number is None:
                    return
                placement = self._plans.placement(number)
            try:
                self._ahead.read(rank.moves(placement))
            except Exception:
                log.exception("the experts of plan %d cannot be read; steps go on without", number)
                return
            with changed:
                self._plans.prepared(number)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _computed(rank: DeviceRank, mtp: bool, mode: Mode, call: Call | None) -> Tensor:
    if call is None:
        return rank.mtp_forward(mode) if mtp else rank.forward(mode)
    if mtp:
        return rank.mtp_forward(mode, call.batch, call.previous, call.latents, call.form)
    return rank.forward(mode, call.batch, call.latents, call.form, call.on_layer)

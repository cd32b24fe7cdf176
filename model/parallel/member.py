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
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from pdmesh.model.batch import Batch, Form
from pdmesh.model.config import ModelConfig
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.parallel.assembly import Agreed, Assembly, Begin, Kind
from pdmesh.model.parallel.balancer import BalanceRule
from pdmesh.model.parallel.building import RankBuilder
from pdmesh.model.parallel.exchange import Channel, Message, RankLost
from pdmesh.model.parallel.frames import Hello
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.links import Events, Links
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.plans import Plan, Plans
from pdmesh.model.parallel.rank import Rank
from pdmesh.model.parallel.schedule import choose_mode, plan_schedule
from pdmesh.model.parallel.step import RankBatch, begin, first_rows, mtp_rows, walk
from pdmesh.model.parallel.virtual import Settings
from pdmesh.wire.errors import ConfigError, Unavailable, WorkerLost
from pdmesh.wire.logs import event
from pdmesh.wire.messages import RankStatus

log = logging.getLogger(__name__)

LOAD = "load"
"""Channel of the rows that experts were asked for, sent to the leader."""
LOAD_STEPS = 64
"""Steps of all ranks after which a rank sends them."""


@dataclass(frozen=True)
class Place:
    """Where one rank stands.

    Attributes:
        rank: its number.
        addresses: "host:port" of every rank's listener, in order.
        group: name of the group, the same on all ranks.
        silence_s: seconds without a sign of life after which a rank is lost.
        step_s: seconds that the others may take to begin a step, and each exchange of it.
    """

    rank: int
    addresses: tuple[str, ...]
    group: str
    silence_s: float = 10.0
    step_s: float = 60.0


@dataclass
class _Call:
    kind: Kind
    batch: Batch
    latents: Tensor
    form: Form
    previous: Tensor | None = None
    on_layer: Callable[[int], None] | None = None
    result: Tensor | None = None
    error: BaseException | None = None
    pushed: int = -1
    """The last layer that ``on_layer`` was told of: a step computed again tells it once only."""


class Member:
    """See the module. ``start`` connects; ``close`` leaves the group.

    Args:
        model: the whole one; shards are cut from it.
        place: where this rank stands.
        placement: of the experts at first; by default one copy each, in order.
        rule: when to place them anew; None: never.
        settings: how the ranks compute; the same on all of them.
        digest: of what else has to be the same everywhere, such as the page format.

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
    ) -> None:
        self.place = place
        self.settings = settings
        self.steps = 0
        """Steps that this rank has taken part in."""
        self.repeated = 0
        """Of them, those that ended with the loss of a rank."""
        self._model = model
        groups = Groups(len(place.addresses))
        self._builder = RankBuilder(model, groups, settings.arithmetic, settings.wire)
        first = self._builder.placement(placement)
        self._plans = Plans(place.rank, groups.ep, first, rule)
        self.plan = 0
        """The placement of experts that the last step used."""
        self._assembly = Assembly(place.rank)
        self._changed = threading.Condition()
        self._messages: dict[tuple[int, Channel], Message] = {}
        self._at: dict[int, int] = {}
        """The step that a rank has sent a message of since its last word."""
        self._calls: list[_Call] = []
        self._closed = False
        self._owes = False
        """The last step failed here: the others have to hear that this rank has left it."""
        self._built: tuple[tuple[int, ...], int, Placement, Rank] | None = None
        hello = Hello(place.group, groups.ep, place.rank, digest)
        events = Events(self._connected, self._word, self._learn, self._message, self._lost)
        self._links = Links(hello, place.addresses, events, place.silence_s)
        self._thread = threading.Thread(target=self._run, name="ep-steps", daemon=True)
        self._ended: Future[None] = Future()

    # ---- as a model -----------------------------------------------------------------------

    @property
    def config(self) -> ModelConfig:
        """As `DeepseekV3.config`."""
        return self._model.config

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
        """
        return self._call(_Call("forward", batch, latents, form, on_layer=on_layer))

    def mtp_forward(
        self, batch: Batch, previous_hidden: Tensor, latents: Tensor, form: Form
    ) -> Tensor:
        """As `DeepseekV3.mtp_forward`.

        Raises:
            Unavailable: the group has been left.
        """
        return self._call(_Call("mtp", batch, latents, form, previous_hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """As `DeepseekV3.logits`; computed here alone."""
        return self._model.logits(hidden)

    def mtp_logits(self, hidden: Tensor) -> Tensor:
        """As `DeepseekV3.mtp_logits`; computed here alone."""
        return self._model.mtp_logits(hidden)

    def _call(self, call: _Call) -> Tensor:
        with self._changed:
            if self._closed:
                raise Unavailable("this rank has left its expert-parallel group")
            self._calls.append(call)
            self._changed.notify_all()
            self._changed.wait_for(lambda: call.result is not None or call.error is not None)
        if call.error is not None:
            raise call.error
        assert call.result is not None
        return call.result

    # ---- the group ------------------------------------------------------------------------

    def start(self, within_s: float = 60.0) -> None:
        """Connects to all ranks, and takes part from then on.

        Raises:
            ConfigError: the own address cannot be listened at, a rank is of another group or
                model, or not all ranks are there within ``within_s`` seconds.
        """
        self._links.start()
        deadline = time.monotonic() + within_s
        everyone = set(range(len(self.place.addresses))) - {self.place.rank}
        with self._changed:
            while missing := everyone - self._present():
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left, 0.5))
                if set(self._links.refusals) & missing:
                    break
            else:
                self._assembly.form(everyone)
        if missing:
            why = self._links.refusals
            named = ", ".join(f"{r} ({why[r]})" if r in why else str(r) for r in sorted(missing))
            self.close()
            raise ConfigError(
                f"rank {self.place.rank} of group {self.place.group!r} lacks rank {named}"
            )
        self._thread.start()

    def join(self) -> None:
        """As ``start`` with whoever is there: the others take this rank in when they can."""
        self._links.start()
        self._thread.start()

    def close(self) -> None:
        """Leaves the group; calls that wait fail. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._links.close()
        if self._thread.is_alive():
            self._thread.join(10)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that compute together now."""
        with self._changed:
            return tuple(sorted(self._assembly.members))

    def status(self) -> RankStatus:
        """What there is to say of this rank now. On any thread."""
        return RankStatus(
            rank=self.place.rank,
            size=len(self.place.addresses),
            members=self.members,
            steps=self.steps,
            repeated=self.repeated,
            sent_bytes=self._links.sent_bytes,
            plan=self.plan,
        )

    async def ended(self) -> None:
        """Waits until the steps have ended; they do by ``close``, or by a mistake.

        Raises:
            Exception: the mistake.
        """
        await asyncio.wrap_future(self._ended)

    def _present(self) -> set[int]:
        return set(self._assembly.present)

    # ---- what the network tells (its threads) ---------------------------------------------

    def _connected(self, rank: int) -> None:
        with self._changed:
            self._assembly.connected(rank)
            told = self._plans.told
            self._changed.notify_all()
        for plan in told:
            self._links.tell([rank], plan)

    def _lost(self, rank: int, why: str) -> None:
        with self._changed:
            self._assembly.lost(rank)
            self._messages = {k: m for k, m in self._messages.items() if k[0] != rank}
            self._at.pop(rank, None)
            self._changed.notify_all()

    def _word(self, rank: int, header: bytes) -> None:
        try:
            word = msgspec.msgpack.decode(header, type=Begin)
        except msgspec.DecodeError:
            self._links.drop(rank)
            return
        with self._changed:
            self._at.pop(rank, None)
            gone = self._assembly.hear(rank, word)
            self._changed.notify_all()
        for other in gone:
            self._links.drop(other)

    def _learn(self, rank: int, header: bytes) -> None:
        try:
            plan = msgspec.msgpack.decode(header, type=Plan)
            with self._changed:
                self._plans.learn(plan)
        except (msgspec.DecodeError, ConfigError) as error:
            event(log, "plan_refused", logging.WARNING, rank=rank, error=error)

    def _message(self, rank: int, channel: Channel, message: Message) -> None:
        with self._changed:
            if channel.kind == LOAD:
                self._plans.count(*message)
                return
            self._messages[rank, channel] = message
            self._at[rank] = channel.step
            self._changed.notify_all()

    # ---- the transport of one step --------------------------------------------------------

    @property
    def rank(self) -> int:
        """See `Transport`."""
        return self.place.rank

    def post(self, to: int, channel: Channel, message: Message) -> None:
        """See `Transport`."""
        if to == self.place.rank:
            self._message(to, channel, message)
        else:
            self._links.post(to, channel, message)

    def take(self, source: int, channel: Channel) -> Message:
        """See `Transport`."""
        key = (source, channel)

        def over() -> bool:
            return key in self._messages or self._closed or self._left(source, channel.step)

        with self._changed:
            there = self._changed.wait_for(over, self.place.step_s)
            message = self._messages.pop(key, None)
        if message is not None:
            return message
        if not there:
            self._links.drop(source)
        raise RankLost(source, str(channel))

    def _left(self, source: int, step: int) -> bool:
        """Whether a rank sends nothing more for a step, or is in another one."""
        if source == self.place.rank:
            return False
        return self._assembly.left(source) or self._at.get(source, step) != step

    # ---- steps (their thread) -------------------------------------------------------------

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while True:
                agreed, call = self._agree()
                if agreed is None:
                    self._ended.set_result(None)
                    return
                if agreed.kind == "idle":
                    continue
                self._step(agreed, call if call is not None and call.kind == agreed.kind else None)
        except BaseException as error:
            log.exception("the steps of this rank have ended")
            self._fail_all(error)
            self._links.close()
            self._ended.set_exception(error)

    def _agree(self) -> tuple[Agreed | None, _Call | None]:
        """Waits for something to do, then for the others; None once the group is left."""
        assembly = self._assembly
        while True:
            word: Begin | None = None
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or bool(self._calls) or assembly.wanted or self._owes
                )
                if self._closed:
                    self._fail_all(Unavailable("this rank has left its expert-parallel group"))
                    return None, None
                call = self._calls[0] if self._calls else None
                if not assembly.said:
                    rows = 0 if call is None else call.batch.num_rows
                    kind: Kind = "idle" if call is None else call.kind
                    word = assembly.begin(kind, rows, self._plans.numbers)
                    self._owes = False
            if word is not None:
                others = [r for r in word.members if r != self.place.rank]
                self._links.say(others, word)
            agreed, late = self._heard_all()
            if agreed is not None:
                return agreed, call
            for rank in late:
                event(log, "rank_late", logging.WARNING, rank=rank, seconds=self.place.step_s)
                self._links.drop(rank)

    def _heard_all(self) -> tuple[Agreed | None, tuple[int, ...]]:
        """The step if all have said their word; else who is late. Neither: begin again."""
        assembly, found = self._assembly, None

        def over() -> bool:
            nonlocal found
            if self._closed or not assembly.said:
                return True
            found = assembly.agree()
            return found is not None or not assembly.said

        with self._changed:
            if not self._changed.wait_for(over, self.place.step_s):
                return None, assembly.missing()
            if found is not None:
                step = found.step
                self._messages = {k: m for k, m in self._messages.items() if k[1].step == step}
            return found, ()

    def _step(self, agreed: Agreed, call: _Call | None) -> None:
        """Computes it; a call that did not come to its end stays for the next step."""
        self.steps += 1
        try:
            result = self._compute(agreed, call)
        except WorkerLost as lost:
            self.repeated += 1
            self._owes = True
            event(log, "step_ended_early", logging.WARNING, step=agreed.step, reason=lost)
            return
        except Exception as error:  # noqa: BLE001 - it is raised where the call was made
            self._owes = True
            if call is None:
                raise
            call.error = error
        else:
            if call is not None:
                call.result = result
        if call is not None:
            with self._changed:
                self._calls.remove(call)
                self._changed.notify_all()

    def _compute(self, agreed: Agreed, call: _Call | None) -> Tensor | None:
        rank = self._rank_among(agreed.members, agreed.plan)
        model, count = self._model, len(self._model.layers)
        main = agreed.kind == "forward"
        numbers = range(count) if main else range(count, count + 1)
        mode = choose_mode(self.settings.mode, agreed.most_rows, self.settings.threshold)
        schedule = plan_schedule([(n, self._builder.routed(n)) for n in numbers], mode)
        item: RankBatch | None = None
        rows: Tensor | None = None
        if call is not None:
            item = RankBatch(call.batch, (call.latents,), call.form, _once(call))
            if call.previous is None:
                rows = first_rows(model, item)
            else:
                rows = mtp_rows(model, item, call.previous)
        work = begin(model, agreed.step, mode, item, rows, first_key=0 if main else 1)
        result = walk(rank, schedule, work)
        if self.steps % LOAD_STEPS == 0:
            self._balance(agreed, rank)
        return None if call is None else result

    def _balance(self, agreed: Agreed, rank: Rank) -> None:
        """Tells the leader what this rank's rows asked for; the leader looks at the plan."""
        leader = agreed.members[0]
        if rank.load is None:
            return
        self.post(leader, Channel(LOAD, agreed.step, -1, -1), (rank.load.take(),))
        if leader == self.place.rank and len(agreed.members) == len(self.place.addresses):
            others = [r for r in agreed.members if r != leader]
            made: list[Plan] = []
            with self._changed:
                self._plans.lead(agreed.plan, made.append)
            for plan in made:
                event(log, "experts_planned", plan=plan.number)
                self._links.tell(others, plan)

    def _rank_among(self, members: tuple[int, ...], plan: int) -> Rank:
        """This rank's shard while these work together by this plan."""
        built = self._built
        if built is not None and built[:2] == (members, plan):
            return built[3]
        with self._changed:
            placement = self._plans.placement(plan)
        gone = set(range(placement.num_ranks)) - set(members)
        placement = placement.without(gone) if gone else placement
        old = None if built is None else (built[3], built[2])
        rank = self._builder.build(members, placement, self, old)
        if built is not None:
            event(log, "experts_placed", members=",".join(map(str, members)), plan=plan)
        self._built, self.plan = (members, plan, placement, rank), plan
        return rank

    def _fail_all(self, error: BaseException) -> None:
        with self._changed:
            self._closed = True
            for call in self._calls:
                call.error = error
            self._calls.clear()
            self._changed.notify_all()


def _once(call: _Call) -> Callable[[int], None] | None:
    tell = call.on_layer
    if tell is None:
        return None

    def told(layer: int) -> None:
        if layer > call.pushed:
            call.pushed = layer
            tell(layer)

    return told

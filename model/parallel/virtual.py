"""All ranks of an expert-parallel group in one process, in lock-step.

Every rank has its own batch, its own shard of the weights, its own pages and its own ends of
communication; rows go from one to another as messages only. After each stage of the schedule the
next one begins on all ranks, so a run is deterministic, and EP128 needs no more than one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.parallel.building import RankBuilder
from pdmesh.model.parallel.exchange import RankLost, WireBytes
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.mailbox import Mailboxes
from pdmesh.model.parallel.payload import WireFormat
from pdmesh.model.parallel.placement import Move, Placement
from pdmesh.model.parallel.rank import Rank, Work
from pdmesh.model.parallel.schedule import Item, Mode, choose_mode, plan_schedule
from pdmesh.model.parallel.step import RankBatch, begin, first_rows, mtp_rows
from pdmesh.model.parallel.timeline import Timeline
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import Arithmetic


@dataclass(frozen=True)
class Settings:
    """How ranks compute together.

    Attributes:
        arithmetic: of tensor parallelism: "exact" gathers heads, "fast" adds partial sums.
        wire: how rows travel.
        mode: how rows on the wire are overlapped; "auto" decides by `threshold`.
        threshold: rows of the largest batch from which on "auto" takes microbatches; to be measured
            where it matters (64 is 32 requests of two rows, from Perplexity's article).
    """

    arithmetic: Arithmetic = "exact"
    wire: WireFormat = WireFormat()
    mode: Mode | Literal["auto"] = "no_overlap"
    threshold: int = 64


class VirtualRanks:
    """The ranks of `groups` over the weights of `model`.

    Args:
        model: where shards are taken from; the ranks hold views or copies of their parts.
        groups: EP, DP and TP.
        placement: of the experts, the MTP layer's last; by default one copy each, in order.
        settings: how they compute.
        timeline: records each stage of each rank.

    Raises:
        ConfigError: the groups do not fit the model, or the placement does not fit the groups.
    """

    def __init__(
        self,
        model: DeepseekV3,
        groups: Groups,
        placement: Placement | None = None,
        settings: Settings = Settings(),  # noqa: B008 - it is immutable
        timeline: Timeline | None = None,
    ) -> None:
        self.groups = groups
        self.settings = settings
        self.members = tuple(range(groups.ep))
        self._model = model
        self._timeline = timeline
        self._mailboxes = Mailboxes()
        self._builder = RankBuilder(model, groups, settings.arithmetic, settings.wire)
        self.placement = self._builder.placement(placement)
        self._ranks: dict[int, Rank] = {}
        self._build()
        self._steps = 0
        self._failing: dict[int, int] = {}

    def _build(self, before: Placement | None = None) -> None:
        """Makes the ranks anew, from what they held under the placement `before`."""
        ranks = {}
        for rank in self.members:
            old = None if before is None else (self._ranks[rank], before)
            args = (self.members, self.placement, self._mailboxes.end(rank), old)
            ranks[rank] = self._builder.build(*args)
        self._ranks = ranks

    def forward(self, inputs: Sequence[RankBatch | None]) -> list[Tensor | None]:
        """One step of all ranks.

        Args:
            inputs: for each DP group what it computes, or None for nothing at all.

        Returns:
            For each DP group [T, hidden] before the final norm, as `DeepseekV3.forward` gives it.

        Raises:
            RankLost: a rank failed; nothing was computed, what is in the pages of this step's
                positions does not count.
            ValueError: not one input a DP group, or one for a group that has lost a rank.
        """
        rows = [None if item is None else first_rows(self._model, item) for item in inputs]
        layers = [(n, self._builder.routed(n)) for n in range(len(self._model.layers))]
        return self._run(inputs, rows, layers, first_key=0)

    def mtp_forward(
        self, inputs: Sequence[RankBatch | None], previous: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The MTP layer; previous [T, hidden] of each DP group, as in `DeepseekV3.mtp_forward`."""
        if self._model.mtp is None:
            raise ValueError("this model has no MTP layer")
        rows = [
            None if item is None or hidden is None else mtp_rows(self._model, item, hidden)
            for item, hidden in zip(inputs, previous, strict=True)
        ]
        number = len(self._model.layers)
        return self._run(inputs, rows, [(number, self._builder.routed(number))], first_key=1)

    def rebalance(self, placement: Placement) -> list[Move]:
        """Use another placement from the next step on; each rank loads the experts that it lacks.

        Returns:
            What had to be loaded.

        Raises:
            ConfigError: it does not fit the ranks that are left.
        """
        placement = self._builder.placement(placement)
        used = {r for slots in placement.layers for r, held in enumerate(slots) if held}
        if gone := sorted(used - set(self.members)):
            raise ConfigError(f"the placement uses rank {gone[0]}, which is lost")
        before, self.placement = self.placement, placement
        moves = placement.moves_from(before)
        self._build(before)
        return moves

    def fail(self, rank: int, before: int = 0) -> None:
        """From item `before` of the next step's schedule on, `rank` does nothing any more."""
        self._failing[rank] = before

    def exclude(self, rank: int, placement: Placement) -> list[Move]:
        """Go on without a lost rank: its DP group gets no batch, `placement` gives it no expert."""
        self.members = tuple(r for r in self.members if r != rank)
        self._failing.pop(rank, None)
        self._ranks.pop(rank, None)
        return self.rebalance(placement)

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks that have failed and have not been left behind by `exclude`."""
        return tuple(sorted(r for r, before in self._failing.items() if before == 0))

    def take_load(self) -> Tensor:
        """Rows for each logical expert [MoE layers, experts] of all ranks since the last call."""
        counts = [rank.load.take() for rank in self._ranks.values() if rank.load is not None]
        return torch.stack(counts).sum(dim=0)

    def sent(self, rank: int) -> tuple[WireBytes, WireBytes | None]:
        """Bytes that `rank` sent since its experts were placed: of the all-to-all, and of TP."""
        ends = self._ranks[rank]
        tp = ends.tensor_parallel
        return ends.expert_parallel.sent, None if tp is None else tp.sent

    def mode_for(self, inputs: Sequence[RankBatch | None]) -> Mode:
        """How a step of `inputs` is overlapped."""
        most = max((i.batch.num_rows for i in inputs if i is not None), default=0)
        return choose_mode(self.settings.mode, most, self.settings.threshold)

    @torch.inference_mode()
    def _run(
        self,
        inputs: Sequence[RankBatch | None],
        rows: Sequence[Tensor | None],
        layers: Sequence[tuple[int, bool]],
        first_key: int,
    ) -> list[Tensor | None]:
        self._check(inputs)
        self._steps += 1
        mode = self.mode_for(inputs)
        works = {}
        for rank in self.members:
            at = self.groups.coordinates(rank)
            both = (inputs[at.dp], rows[at.dp])
            works[rank] = begin(self._model, self._steps, mode, *both, at.tp, first_key)
        self._mailboxes.waiting.clear()
        schedule = plan_schedule(layers, mode)
        dead = {rank for rank, before in self._failing.items() if before < len(schedule)}
        try:
            for number, item in enumerate(schedule):
                self._advance(number, item, works)
        finally:
            self._failing.update(dict.fromkeys(dead, 0))
        if dead:
            raise RankLost(min(dead), f"the end of step {self._steps}")
        return [
            None if item is None else works[self.groups.tp_group(dp)[0]].result()
            for dp, item in enumerate(inputs)
        ]

    def _advance(self, number: int, item: Item, works: dict[int, Work]) -> None:
        """One item on all ranks that are alive, from one wait to the next."""
        running = {
            rank: self._ranks[rank].run(item, work)
            for rank, work in works.items()
            if number < self._failing.get(rank, number + 1)
        }
        while running:
            for rank, steps in list(running.items()):
                began = 0.0 if self._timeline is None else self._timeline.now()
                try:
                    next(steps)
                except StopIteration:
                    del running[rank]
                if self._timeline is not None:
                    self._timeline.add(rank, item, began)

    def _check(self, inputs: Sequence[RankBatch | None]) -> None:
        if len(inputs) != self.groups.dp:
            raise ValueError(f"{len(inputs)} inputs for {self.groups.dp} DP groups")
        for dp, item in enumerate(inputs):
            if item is None:
                continue
            if len(item.latents) != self.groups.tp:
                raise ValueError(
                    f"{len(item.latents)} pools for the {self.groups.tp} TP ranks of DP group {dp}"
                )
            lost = sorted(set(self.groups.tp_group(dp)) - set(self.members))
            if lost:
                raise ValueError(
                    f"DP group {dp} has lost rank {lost[0]}: its sequences have to go elsewhere"
                )

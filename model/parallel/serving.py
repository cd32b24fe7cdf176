"""The model that a worker computes with: the whole one, its rank of a group, or a group in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdmesh.model.computing import ComputingModel
from pdmesh.model.config import ModelConfig
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.device.ahead import expert_reader
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.spread import Spread, spread_over
from pdmesh.model.expert_source import ExpertSource, StoredExperts
from pdmesh.model.moe import Moe
from pdmesh.model.parallel.balancer import BalanceRule
from pdmesh.model.parallel.device_forming import Prepare
from pdmesh.model.parallel.device_heap import check_nvshmem
from pdmesh.model.parallel.device_member import DeviceMember
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.meeting import Place
from pdmesh.model.parallel.member import Member
from pdmesh.model.parallel.plans import first_placement
from pdmesh.model.parallel.spread import SpreadModel
from pdmesh.model.parallel.virtual import Settings, VirtualRanks
from pdmesh.model.random_weights import RandomExperts, served_config
from pdmesh.model.served import Placing
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.logs import event
from pdmesh.wire.messages import RankStatus
from pdmesh.wire.random_weights import RandomWeights

log = logging.getLogger(__name__)

RankMember = Member | DeviceMember
"""A worker's rank among those of other processes."""


@dataclass(frozen=True)
class Ranks:
    """A worker's place among the ranks of its pool.

    Attributes:
        rank: its number.
        addresses: "host:port" of every rank, in order; empty: the worker computes alone.
        group: name of the group.
        silence_s: seconds without a sign of life after which a rank is lost.
        redundant: copies of experts besides the first one of each, in every layer.
        rebalance: place experts anew when the load has changed.
        virtual: ranks in the worker's own process; 1: it is one.
        tp: consecutive ranks that share a batch's attention heads.
        path: the checkpoint that experts are read from, where the model was loaded without them.
        microbatch_rows: rows of the largest batch from which on ranks compute in two microbatches.
        most_rows: of a step. Only ranks in FP8 need to know, and cut larger ones.
        random: weights that are made; experts are made too, then, not read.
    """

    rank: int
    addresses: Sequence[str]
    group: str
    silence_s: float
    redundant: int = 0
    rebalance: bool = True
    virtual: int = 1
    tp: int = 1
    path: Path | None = None
    microbatch_rows: int = 64
    most_rows: int = 0
    random: RandomWeights | None = None

    def spread(self, config: ModelConfig, mtp: bool) -> Spread | None:
        """This rank's part of a model in FP8; None where the worker computes alone.

        Raises:
            ConfigError: ranks in FP8 cannot be such.
        """
        count = len(self.addresses)
        if self.virtual > 1:
            raise ConfigError(
                "virtual ranks compute in plain precision, not in fp8; add --precision plain"
            )
        if count < 2:
            return None
        check_rank(self)
        if self.tp > 1:
            raise ConfigError(
                "ranks in fp8 have all attention heads; leave tp at 1, or add --precision plain"
            )
        shape = (count, self.redundant, self.most_rows, self.microbatch_rows)
        return spread_over(config, mtp, self.rank, *shape)

    @property
    def follows(self) -> bool:
        """Whether this rank has no request of its own, and computes with the one that leads it."""
        return self.rank % self.tp != 0


def planned_spread(
    ranks: Ranks, placing: Placing, path: Path, mtp: bool, random: RandomWeights | None
) -> Spread | None:
    """A worker's part of a model in FP8, before anything is loaded; None where it has none.

    Raises:
        ConfigError: ranks in FP8 cannot be such, or not on this machine.
    """
    if placing.chosen != "fp8":
        return None
    spread = ranks.spread(served_config(path, random), mtp)
    if spread is not None and placing.device.startswith("cuda"):
        check_nvshmem()
    return spread


def check_rank(ranks: Ranks) -> None:
    """Whether there is such a rank.

    Raises:
        ConfigError: there is not.
    """
    if not 0 <= ranks.rank < len(ranks.addresses):
        raise ConfigError(
            f"there is no rank {ranks.rank} among {len(ranks.addresses)} ranks; "
            f"it must be 0 to {len(ranks.addresses) - 1}"
        )


async def join_ranks(
    model: DeepseekV3 | DeviceModel,
    fmt: PageFormat,
    ranks: Ranks,
    within_s: float = 120.0,
    prepare: Prepare = lambda rank, between: None,
) -> tuple[ComputingModel, RankMember | None]:
    """What the worker calls, and its rank among other processes; returns once all are there.

    Args:
        prepare: what a rank in FP8 does before its first step, as in `DeviceMember`.

    Raises:
        ConfigError: the group does not fit the model, a rank belongs to another group or model, or
            nobody else came within ``within_s`` seconds.
        RankLost: a rank in FP8 went before the first step.
    """
    if isinstance(model, DeviceModel):
        return await _on_devices(model, fmt, ranks, within_s, prepare)
    if ranks.virtual > 1:
        return _virtual(model, fmt, ranks), None
    if len(ranks.addresses) < 2:
        return model, None
    check_rank(ranks)
    settings = Settings(fmt.arithmetic, mode="auto", threshold=ranks.microbatch_rows)
    experts = model.config.n_routed_experts
    layers = sum(isinstance(block.mlp, Moe) for block in model.blocks())
    placement = first_placement(layers, experts, len(ranks.addresses), ranks.redundant)
    rule = BalanceRule(experts + ranks.redundant) if ranks.rebalance else None
    place, digest = _place(ranks), _digest(fmt, ranks)
    source: ExpertSource | None = None
    if ranks.path is not None and ranks.random is not None:
        source = RandomExperts(ranks.random.seed, model)
    elif ranks.path is not None:
        source = StoredExperts(ranks.path, model)
    member = Member(model, place, placement, settings, digest, rule, source, ranks.tp)
    if ranks.follows:
        member.keep_heads()
    await asyncio.to_thread(member.start, within_s)
    return member, member


async def _on_devices(
    model: DeviceModel, fmt: PageFormat, ranks: Ranks, within_s: float, prepare: Prepare
) -> tuple[ComputingModel, DeviceMember | None]:
    spread = ranks.spread(model.config, fmt.mtp_layers > 0)
    if spread is None:
        return model, None
    digest = f"{_digest(fmt, ranks)} {ranks.most_rows} {ranks.rebalance}"
    rule = reader = None
    if ranks.rebalance and ranks.path is not None:
        rule = BalanceRule(model.config.n_routed_experts + ranks.redundant)
        reader = expert_reader(ranks.path, model.config, fmt.mtp_layers > 0, ranks.random)
    member = DeviceMember(
        model, _place(ranks), spread.placement, spread.exchange, digest, prepare, rule, reader
    )
    await asyncio.to_thread(member.start, within_s)
    return member, member


def _place(ranks: Ranks) -> Place:
    return Place(ranks.rank, tuple(ranks.addresses), ranks.group, ranks.silence_s)


def _digest(fmt: PageFormat, ranks: Ranks) -> str:
    return f"{fmt.fingerprint().hex()} {ranks.redundant} {ranks.tp} {ranks.microbatch_rows}"


def _virtual(model: DeepseekV3, fmt: PageFormat, ranks: Ranks) -> SpreadModel:
    if len(ranks.addresses) > 1:
        raise ConfigError(
            f"{ranks.virtual} virtual ranks are all of their group; a worker that has them shares "
            "its experts with no other worker"
        )
    settings = Settings(fmt.arithmetic, mode="microbatch")
    return SpreadModel(model, VirtualRanks(model, Groups(ranks.virtual), settings=settings))


async def follow(
    model: DeepseekV3 | DeviceModel, fmt: PageFormat, ranks: Ranks, worker_id: str
) -> None:
    """A worker that has no request of its own: computes with its leader until it is cancelled.

    Raises:
        ConfigError: as `join_ranks`.
        Exception: what ended its steps.
    """
    _, member = await join_ranks(model, fmt, ranks)
    assert member is not None
    leader = ranks.rank - ranks.rank % ranks.tp
    event(log, "following", worker=worker_id, rank=ranks.rank, leader=leader)
    try:
        await member.ended()
    finally:
        await asyncio.to_thread(member.close)


def rank_status(called: ComputingModel) -> RankStatus | None:
    """What there is to say of the ranks behind what a worker calls; None if there is only one."""
    if isinstance(called, Member | DeviceMember | SpreadModel):
        return called.status()
    return None


async def computing(run: Callable[[], Awaitable[None]], member: RankMember | None) -> None:
    """A worker's loop, which ends when its rank's steps do: without them it can compute nothing.

    Raises:
        Exception: what ended either.
    """
    if member is None:
        await run()
        return
    parts = {asyncio.ensure_future(run()), asyncio.ensure_future(member.ended())}
    try:
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            part.result()
    finally:
        for part in parts:
            part.cancel()
        await asyncio.wait(parts)

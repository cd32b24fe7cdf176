"""What both kinds of workers do before they serve: ranks, memory, and the model, in this order."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.device.bound import MemoryBound, starting
from pdmesh.model.device.memory import GB
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.spread import Spread
from pdmesh.model.fitting import fit_steps, least_pages
from pdmesh.model.parallel.serving import Ranks, planned_spread
from pdmesh.model.planning import plan_pages
from pdmesh.model.served import Placing, load_served_model
from pdmesh.model.shared_weights import SharedWeights
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.logs import event
from pdmesh.wire.worker_config import WorkerConfig

log = logging.getLogger(__name__)

TURN_S = 5e-4
"""Python's threads take turns this often where several want one. The default, 5 ms, is how long a
step's thread may stand still while messages go out, and messages while kernels are launched."""


class Loading(Protocol):
    """Told of a load that has begun."""

    def progress(self, name: str, done: int, total: int, /) -> None:
        """As `Progress`."""

    def loaded(self) -> None:
        """The model is in memory."""


def settle_threads(compute: int) -> None:
    """For the whole process: `compute` threads of torch on a CPU, short turns for Python's own."""
    torch.set_num_threads(compute)
    sys.setswitchinterval(TURN_S)


@dataclass(frozen=True)
class Started:
    """What a worker has before it serves.

    Attributes:
        model, fmt: of `load_served_model`.
        ranks: the group that it is to join.
        spread: its part of a model in FP8, if it is a rank of one.
        pages: of its pool.
        rows: of its largest step.
        reason: why that has not more rows; empty where nobody wanted more.
        memory: what was planned of a CUDA device, and what is taken; else None.
    """

    model: DeepseekV3 | DeviceModel
    fmt: PageFormat
    ranks: Ranks
    spread: Spread | None
    pages: int
    rows: int
    reason: str
    memory: MemoryBound | None = None


def start_model(
    config: WorkerConfig,
    role: str,
    rows: Sequence[int],
    sequences: int,
    loading: Callable[[], Loading],
    shared: SharedWeights | None = None,
) -> Started:
    """Plans the worker's memory, then loads or maps its model, or loads its part of one.

    Args:
        role: "prefill" or "decode"; a group's ranks are of one role.
        rows: of the largest step: the first that leaves enough pages is taken, or the last.
        sequences: of the largest batch.
        loading: called when the load begins.
        shared: weights that another process holds.

    Raises:
        ConfigError: the model cannot be served, not so, or not here.
    """
    path, alone = config.model_path, len(config.ep_ranks) < 2
    if shared is not None and not (alone and config.virtual_ranks < 2):
        raise ConfigError(
            "workers that share experts hold different weights, and can map none of others; let "
            "them load their own"
        )
    placing = Placing(config.device, config.precision, config.latents)
    ranks = Ranks(
        config.ep_rank,
        config.ep_ranks,
        f"{config.mesh}/{role}",
        2 * config.lease_ttl_s,
        config.redundant_experts,
        config.rebalance,
        config.virtual_ranks,
        config.tp,
        None if alone else path,
        config.microbatch_rows,
        rows[0],
        config.random,
    )
    spread = planned_spread(ranks, placing, path, config.mtp, config.random)
    fitted = fit_steps(
        rows,
        lambda: least_pages(path, config.random, config.page_size, config.pages),
        lambda most: plan_pages(
            path,
            placing,
            mtp=config.mtp,
            page_size=config.page_size,
            share=config.memory_share,
            pages=config.pages,
            rows=most,
            sequences=sequences,
            role=role,
            dtype=config.dtype,
            random=config.random,
            ranks=max(1, len(config.ep_ranks)),
            redundant=config.redundant_experts,
            threshold=config.microbatch_rows,
            weights="own" if shared is None else "held",
        ),
    )
    memory = None
    if fitted.plan is not None:
        event(log, "memory planned", worker=config.worker_id, plan=fitted.plan.describe())
        device = torch.device(config.device)
        if device.type == "cuda":
            memory = MemoryBound(fitted.plan, device, role, placing.chosen == "fp8")
    if fitted.rows != rows[0]:
        ranks = replace(ranks, most_rows=fitted.rows)
        spread = planned_spread(ranks, placing, path, config.mtp, config.random)
    begun = loading()
    with starting(memory):
        model, fmt = load_served_model(
            path,
            config.model_name,
            dtype=config.dtype,
            placing=placing,
            mtp=config.mtp,
            page_size=config.page_size,
            arithmetic=config.arithmetic,
            progress=begun.progress,
            experts=alone,
            spread=spread,
            random=config.random,
            shared=shared,
        )
    begun.loaded()
    if shared is not None:
        gigabytes = f"{shared.held.nbytes / GB:.3f}"
        event(log, "weights shared", worker=config.worker_id, gb=gigabytes)
    return Started(model, fmt, ranks, spread, fitted.pages, fitted.rows, fitted.reason, memory)

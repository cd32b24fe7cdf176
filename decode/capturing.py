"""Which decode steps a worker captures before it takes any work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from pdmesh.decode.config import AUTO, DecodeConfig, most_drafts
from pdmesh.model.device.compiling import compiling, of_steps
from pdmesh.model.device.graphs import cuda_capture, half_of
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.padding import graph_sizes
from pdmesh.model.device.rank import DeviceRank
from pdmesh.model.parallel.device_forming import PREPARING_S
from pdmesh.model.parallel.schedule import Mode


def captured_rows(draft_tokens: int, mtp: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows a sequence of the main model's graphs, and of the MTP layer's.

    A step has a row more than drafts; as many MTP rows may be pending. Further drafts take the MTP
    layer again, with a row each. Where drafts are chosen step by step, every number is captured.
    """
    most = most_drafts(draft_tokens) if mtp else 0
    rows = tuple(range(1, most + 2)) if draft_tokens == AUTO and mtp else (most + 1,)
    if most == 0:
        return rows, ()
    return rows, tuple(sorted({*rows, *((1,) if most > 1 else ())}))


def capture(model: DeviceModel, pool: Tensor, config: DecodeConfig) -> None:
    """Captures the worker's graphs, where the device has such."""
    if model.device.type != "cuda":
        return
    rows, mtp_rows = captured_rows(config.draft_tokens, model.weights.mtp is not None)
    with compiling(of_steps(model, _step_rows({*rows, *mtp_rows}, config.max_batch))):
        model.capture(pool, rows, config.max_batch, mtp_rows)
    torch.cuda.empty_cache()  # computing beforehand took it for a stream that no step is on


def capture_rank(
    pool: Tensor,
    config: DecodeConfig,
    modes: Sequence[Mode],
    rank: DeviceRank,
    between: Callable[[], None],
) -> None:
    """Captures the graphs of a worker that is a rank, as all of its group do at the same time.

    Args:
        modes: schedules that steps may have.
        between: called after computing, before anything is recorded.
    """
    if rank.model.device.type != "cuda":
        return
    rows, mtp_rows = captured_rows(config.draft_tokens, rank.model.weights.mtp is not None)
    record = cuda_capture(torch.cuda.graph_pool_handle(), between)

    def recorder(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        rank.exchange.wait_for(PREPARING_S)
        return record(compute)

    counts = _step_rows({*rows, *mtp_rows}, config.max_batch, halved="microbatch" in modes)
    with compiling(of_steps(rank.model, counts)):
        rank.capture(pool, rows, config.max_batch, mtp_rows, modes, recorder)
    torch.cuda.empty_cache()  # as above
    rank.exchange.wait_for(PREPARING_S)


def _step_rows(rows: Collection[int], most: int, halved: bool = False) -> list[int]:
    """Rows of the steps that are captured, those first that are captured first.

    Args:
        rows: of a sequence.
        most: sequences of the largest step.
        halved: whether each may be computed in two halves too.
    """
    sizes = list(reversed(graph_sizes(most)))
    if halved:
        sizes += [part for size in sizes if size > 1 for part in (half_of(size), size // 2)]
    return list(dict.fromkeys(size * count for count in sorted(rows) for size in sizes))

"""What one rank needs to walk through the schedule of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pdmesh.kernels.linear import linear
from pdmesh.model.batch import Batch, Form
from pdmesh.model.context import StepContext
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.parallel.microbatch import split_batch
from pdmesh.model.parallel.rank import Flow, Rank, Work
from pdmesh.model.parallel.schedule import WHOLE, Item, Mode
from pdmesh.model.parallel.timeline import Timeline


@dataclass(frozen=True)
class RankBatch:
    """What one DP group computes in a step.

    Attributes:
        batch: its rows.
        latents: the pool of each TP rank of the group; they may be one and the same.
        form: as in `DeepseekV3.forward`.
        on_layer: called with i once layer i's latents are in the pages of all of the group's ranks.
    """

    batch: Batch
    latents: tuple[Tensor, ...]
    form: Form = "absorbed"
    on_layer: Callable[[int], None] | None = None


def first_rows(model: DeepseekV3, item: RankBatch) -> Tensor:
    """What goes into the first layer: embeddings [T, hidden]."""
    model.check_pool(item.latents[0])
    return F.embedding(item.batch.tokens, model.embed_tokens)


def mtp_rows(model: DeepseekV3, item: RankBatch, previous: Tensor) -> Tensor:
    """What goes into the MTP layer [T, hidden]; previous as in `DeepseekV3.mtp_forward`.

    Raises:
        ValueError: the model has no MTP layer, or a row is at position 0.
    """
    model.check_mtp(item.batch)
    assert model.mtp is not None
    joined = model.mtp.joined(first_rows(model, item), previous)
    return linear(joined, model.mtp.eh_proj.weight)


def begin(
    model: DeepseekV3,
    number: int,
    mode: Mode,
    item: RankBatch | None,
    rows: Tensor | None,
    tp: int = 0,
    first_key: int = 0,
) -> Work:
    """One rank's part of a pass.

    Args:
        model: whose rotary table is used.
        number: of the pass, the same on all ranks.
        mode: of the schedule.
        item: the batch of the rank's DP group; None for no row.
        rows: [T, hidden] that go into the first layer of the schedule.
        tp: which of the group's TP ranks this is.
        first_key: 0, or 1 for the MTP layer.
    """
    if item is None or rows is None:
        none = model.embed_tokens[:0]
        halves = (Flow(0, none, None), Flow(1, none, None))
        return Work(number, Flow(WHOLE, none, None), halves)

    def step(batch: Batch) -> StepContext:
        pool = item.latents[tp]
        return StepContext.build(batch, pool, model.rope_table(), item.form, first_key)

    whole = Flow(WHOLE, rows, step(item.batch))
    parts = split_batch(item.batch) if mode == "microbatch" else None
    if parts is None:
        halves = (Flow(0, rows, whole.step), Flow(1, rows[:0], None))
    else:
        cut = parts[0].num_rows
        halves = (Flow(0, rows[:cut], step(parts[0])), Flow(1, rows[cut:], step(parts[1])))
    last = tp == len(item.latents) - 1
    return Work(number, whole, halves, item.on_layer if last else None)


def walk(
    rank: Rank,
    schedule: Sequence[Item],
    work: Work,
    timeline: Timeline | None = None,
    number: int = 0,
) -> Tensor:
    """Run a whole schedule on a rank whose transport waits by itself: [T, hidden].

    Stages are put on `timeline` as those of rank `number`, their waits for others included.

    Raises:
        RankLost: another rank did not send what this one needs.
    """
    for item in schedule:
        began = 0.0 if timeline is None else timeline.now()
        for _ in rank.run(item, work):
            pass
        if timeline is not None:
            timeline.add(number, item, began)
    return work.result()

"""The order of a layer's five stages over one or two microbatches, as a plain list.

1. input norm, query and latent projections, latents into the pages, absorbing the key projection;
2. attention, value projection, o_proj, post norm, router;
3. dispatch send, shared experts;
4. dispatch receive, routed experts, combine send;
5. combine receive.

Nothing in 1 to 3 of one microbatch needs the other's results, so while rows of one are on the wire
the other computes. Layers without routed experts run on the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

Mode = Literal["no_overlap", "dispatch_overlap", "microbatch"]
"""no_overlap: shared experts before dispatch, nothing computes while rows travel;
dispatch_overlap: shared experts between dispatch's two halves; microbatch: two halves of the batch
besides, three stages apart."""

WHOLE = -1
"""The microbatch number of a stage that is run on the whole batch."""
APART = 3
"""Stages between the two microbatches."""


class Stage(IntEnum):
    """One of the five, or a layer without routed experts as a whole.

    SHARED_FIRST is stage 3 with the shared experts before dispatch send.
    """

    DENSE = 0
    PROJECT = 1
    ATTEND = 2
    SEND = 3
    EXPERTS = 4
    RECEIVE = 5
    SHARED_FIRST = 6


@dataclass(frozen=True)
class Item:
    """Run `stage` of layer `layer` on microbatch `microbatch` (WHOLE, 0 or 1)."""

    microbatch: int
    layer: int
    stage: Stage


FIVE = (Stage.PROJECT, Stage.ATTEND, Stage.SEND, Stage.EXPERTS, Stage.RECEIVE)


def choose_mode(mode: Mode | Literal["auto"], num_tokens: int, threshold: int) -> Mode:
    """`mode`, or for "auto" microbatches from `threshold` tokens on and dispatch overlap below.

    All ranks of a step must come to the same answer: hand every one of them the same number.
    """
    if mode != "auto":
        return mode
    return "microbatch" if num_tokens >= threshold else "dispatch_overlap"


def plan_schedule(layers: Sequence[tuple[int, bool]], mode: Mode) -> tuple[Item, ...]:
    """What to run, in order.

    Args:
        layers: number of each layer and whether it has routed experts, in order.
        mode: how rows on the wire are overlapped.

    Returns:
        Items; each layer's stages come in order for a microbatch, and a microbatch's layers too.
    """
    items: list[Item] = []
    run: list[int] = []
    for layer, routed in layers:
        if routed:
            run.append(layer)
            continue
        items += _routed(run, mode)
        run = []
        items.append(Item(WHOLE, layer, Stage.DENSE))
    return tuple(items + _routed(run, mode))


def _routed(layers: Sequence[int], mode: Mode) -> list[Item]:
    """Consecutive layers with routed experts."""
    if mode != "microbatch":
        return [Item(WHOLE, layer, _stage(stage, mode)) for layer in layers for stage in FIVE]
    steps = [(layer, stage) for layer in layers for stage in FIVE]
    items = []
    for at in range(len(steps) + APART if steps else 0):
        # The one behind goes first: between the halves of every dispatch and combine of one
        # microbatch then stands a computing stage of the other.
        if at >= APART:
            items.append(Item(1, *steps[at - APART]))
        if at < len(steps):
            items.append(Item(0, *steps[at]))
    return items


def _stage(stage: Stage, mode: Mode) -> Stage:
    return Stage.SHARED_FIRST if stage == Stage.SEND and mode == "no_overlap" else stage

"""How large steps may be: as large as is wanted, if enough pages fit beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdmesh.model.device.memory import MemoryPlan
from pdmesh.model.random_weights import served_config
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.random_weights import RandomWeights


@dataclass(frozen=True)
class Fitted:
    """What a worker has room for.

    Attributes:
        rows: of the largest step.
        pages: of its pool.
        plan: what that comes from; None where nothing was counted.
        reason: why steps of more rows were not taken; empty where nobody wanted more.
    """

    rows: int
    pages: int
    plan: MemoryPlan | None
    reason: str = ""


def fit_steps(
    choices: Sequence[int],
    least_pages: Callable[[], int],
    plan: Callable[[int], tuple[int, MemoryPlan | None]],
) -> Fitted:
    """The first of several sizes of a step that leaves enough pages; the last one if it fits.

    Args:
        choices: rows of the largest step, best first.
        least_pages: how many pages are enough; asked only where there is a choice.
        plan: pages beside steps of so many rows, and what they come from, as `plan_pages`.

    Raises:
        ConfigError: the last one does not fit either.
    """
    reason = ""
    for rows in choices[:-1]:
        try:
            pages, planned = plan(rows)
        except ConfigError:
            reason = reason or f"the model does not fit beside steps of {rows} rows"
            continue
        if pages >= least_pages():
            return Fitted(rows, pages, planned, reason)
        reason = reason or (
            f"steps of {rows} rows would leave {pages} pages, and a prompt as long as the model's "
            f"context takes {least_pages()}"
        )
    return Fitted(choices[-1], *plan(choices[-1]), reason)


def least_pages(path: Path, random: RandomWeights | None, page_size: int, pages: int) -> int:
    """Pages that larger steps must leave: those that were asked for, or a prompt of the model's
    whole context.

    Args:
        path, random: of the model.
        page_size: tokens of a page.
        pages: as many as were asked for; 0: as there is room for.
    """
    return pages or -(-served_config(path, random).max_position_embeddings // page_size)

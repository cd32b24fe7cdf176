"""Who gives pages up so that another can go on. Pure.

A sequence takes pages only from lower-ranked ones, so the highest-ranked never loses any. As one
alone always fits, it comes to its end, and then the next is the highest: no deadlock, no livelock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pdmesh.decode.queue import Rank

T = TypeVar("T")


def choose_victims(
    missing: int,
    asker: Rank,
    others: Sequence[T],
    rank: Callable[[T], Rank],
    releasable: Callable[[Sequence[T]], int],
) -> list[T] | None:
    """The lowest-ranked sequences, as few as will do, that make room for ``asker``.

    Args:
        missing: pages that ``asker`` needs and that nobody can promise now, at least 1.
        asker: rank of the sequence that needs them.
        others: sequences whose pages can be set aside.
        rank: of one of them.
        releasable: pages that become free if those given to it are all set aside; never fewer for
            more of them.

    Returns:
        None where all that rank below ``asker`` do not have enough: it has to wait.
    """
    below = sorted((s for s in others if rank(s) > asker), key=rank, reverse=True)
    for count in range(1, len(below) + 1):
        if releasable(below[:count]) >= missing:
            return below[:count]
    return None

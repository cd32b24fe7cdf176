"""Reservations in two pools: who takes pages where, in which order, and how many at once.

The rule: a request first gets all of its pages at the decode worker, by count and at once, and only
then pages at the prefill worker, which it gives back when the transfer is over. It may wait for the
first while it has nothing, and for the second while it has the first. This states the order that
the gateway and the workers keep; it runs none of their code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from model_checking.explorer import Move

WAITING, COMPUTED, OVER = range(3)


@dataclass(frozen=True)
class Rules:
    """Two mistakes, both of which deadlock."""

    decode_first: bool = True
    """Off: the prefill worker takes pages as soon as it hears of a request."""
    at_once: bool = True
    """Off: pages are taken one by one as they are needed."""


@dataclass(frozen=True)
class ReserveModel:
    """``requests`` that each need ``pages`` in pools of ``decode`` and ``prefill`` pages."""

    requests: int = 2
    pages: int = 2
    decode: int = 3
    prefill: int = 3
    rules: Rules = Rules()

    def initial(self) -> Any:
        return ((0, 0, WAITING),) * self.requests

    def settled(self, world: Any) -> bool:
        return all(stage == OVER for _, _, stage in world)

    def best(self, world: Any) -> bool:
        """Every request has ended by itself: there is no other end here."""
        return self.settled(world)

    def broken(self, world: Any) -> str:
        in_decode, in_prefill = (sum(one[pool] for one in world) for pool in (0, 1))
        if in_decode > self.decode or in_prefill > self.prefill:
            return "I7: more pages are promised than there are"
        if self.rules.decode_first and any(p and d < self.pages for d, p, _ in world):
            return "I8: prefill pages are held without all decode pages"
        return ""

    def moves(self, world: Any) -> Iterator[Move]:
        step = self.pages if self.rules.at_once else 1
        for number, (d, p, stage) in enumerate(world):
            name = "ABC"[number]

            def after(*one: int, number: int = number) -> Any:
                return (*world[:number], one, *world[number + 1 :])

            if stage == COMPUTED:
                yield Move(f"{name} ends at decode", after(0, 0, OVER))
            elif stage == WAITING and d == p == self.pages:
                yield Move(f"{name} is computed and copied", after(d, 0, COMPUTED))
            elif stage == WAITING:
                if d < self.pages and sum(one[0] for one in world) + step <= self.decode:
                    yield Move(f"{name} takes {step} at decode", after(d + step, p, stage))
                allowed = d == self.pages or not self.rules.decode_first
                room = sum(one[1] for one in world) + step <= self.prefill
                if p < self.pages and allowed and room:
                    yield Move(f"{name} takes {step} at prefill", after(d, p + step, stage))

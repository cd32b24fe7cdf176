"""Breadth-first search over every interleaving of a model, for safety and for liveness.

A model hands out hashable worlds. Safety: no reachable world is broken. Liveness: from every
reachable world some continuation without further faults ends in a settled world. The search is
breadth-first, so a counterexample is a shortest one.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

World = Hashable


@dataclass(frozen=True)
class Move:
    """One event of a world: what happens, what comes of it, and whether it is a fault."""

    label: str
    world: World
    fault: bool = False
    broken: str = ""
    """Which invariant the event itself breaks, in words."""


class Model(Protocol):
    """Something to explore."""

    def initial(self) -> World: ...

    def moves(self, world: World) -> Iterator[Move]: ...

    def broken(self, world: World) -> str:
        """The invariant that does not hold here, in words; empty if all hold."""

    def settled(self, world: World) -> bool:
        """Everything has come to its end: nothing in use, every request answered or refused."""

    def best(self, world: World) -> bool:
        """Of settled worlds, one in which all went well; some run has to get there."""


@dataclass(frozen=True)
class Result:
    """What a search found."""

    num_worlds: int
    num_moves: int
    depth: int
    seconds: float
    problem: str = ""
    events: tuple[str, ...] = ()
    """A shortest way to the problem."""

    def __str__(self) -> str:
        said = (
            f"{self.num_worlds:,} states, {self.num_moves:,} steps, depth {self.depth},"
            f" {self.seconds:.1f} s"
        )
        if not self.problem:
            return said
        steps = "\n".join(f"  {number:2}. {event}" for number, event in enumerate(self.events, 1))
        return f"{said}\n{self.problem}, after:\n{steps}"


class TooManyWorlds(Exception):
    """The bound on worlds was reached before the search was complete."""


class _Search:
    def __init__(self, model: Model, most: int) -> None:
        self.model = model
        self.most = most
        self.number: dict[World, int] = {}
        self.parent = array("q")
        self.sources = array("I")
        self.targets = array("I")
        self.settled = array("I")
        self.best_seen = False
        self.num_moves = 0
        self.depth = 0
        self.problem: tuple[int, str, str] | None = None

    def run(self) -> None:
        level = [self.model.initial()]
        self._add(level[0], -1)
        while level and self.problem is None:
            following: list[World] = []
            for world in level:
                if self._expand(world, following):
                    return
            self.depth += bool(following)
            level = following

    def _add(self, world: World, parent: int) -> int:
        number = len(self.number)
        if number >= self.most:
            raise TooManyWorlds(f"more than {self.most:,} states")
        self.number[world] = number
        self.parent.append(parent)
        return number

    def _expand(self, world: World, following: list[World]) -> bool:
        here = self.number[world]
        if broken := self.model.broken(world):
            self.problem = (here, broken, "")
            return True
        if self.model.settled(world):
            self.settled.append(here)
            self.best_seen = self.best_seen or self.model.best(world)
        for move in self.model.moves(world):
            self.num_moves += 1
            if move.broken:
                self.problem = (here, move.broken, move.label)
                return True
            there = self.number.get(move.world)
            if there is None:
                there = self._add(move.world, here)
                following.append(move.world)
            if not move.fault and there != here:
                self.sources.append(here)
                self.targets.append(there)
        return False

    def stuck(self) -> int | None:
        """The first world from which nothing settled can be reached without faults."""
        good = np.zeros(len(self.number), dtype=bool)
        good[np.asarray(self.settled, dtype=np.int64)] = True
        sources = np.frombuffer(self.sources, dtype=np.uint32) if self.sources else None
        targets = np.frombuffer(self.targets, dtype=np.uint32) if self.targets else None
        while sources is not None and targets is not None:
            reached = good[targets]
            before = int(good.sum())
            good[sources[reached]] = True
            if int(good.sum()) == before:
                break
            keep = ~good[sources]
            sources, targets = sources[keep], targets[keep]
        bad = np.flatnonzero(~good)
        return int(bad[0]) if len(bad) else None

    def path(self, number: int, last: str = "") -> tuple[str, ...]:
        """The events that lead to a world, found again by walking from the start."""
        chain = [number]
        while self.parent[chain[-1]] >= 0:
            chain.append(self.parent[chain[-1]])
        chain.reverse()
        world = self.model.initial()
        events: list[str] = []
        for wanted in chain[1:]:
            for move in self.model.moves(world):
                if self.number.get(move.world) == wanted:
                    events.append(move.label)
                    world = move.world
                    break
        return (*events, last) if last else tuple(events)


def explore(model: Model, most: int = 3_000_000) -> Result:
    """Searches all worlds of ``model``, at most ``most`` of them.

    Raises:
        TooManyWorlds: there are more.
    """
    began = time.perf_counter()
    search = _Search(model, most)
    search.run()
    problem, events = "", ()
    if search.problem is not None:
        where, problem, last = search.problem
        events = search.path(where, last)
    elif (stuck := search.stuck()) is not None:
        problem, events = "nothing that can still happen comes to an end", search.path(stuck)
    elif not search.best_seen:
        problem, events = "no run ends well; one that ends", search.path(search.settled[0])
    return Result(
        len(search.number),
        search.num_moves,
        search.depth,
        time.perf_counter() - began,
        problem,
        events,
    )


class Machine:
    """A pure step function over small numbers: states are interned, steps remembered."""

    def __init__(self, step: Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]) -> None:
        self._step = step
        self._numbers: dict[Any, int] = {}
        self.states: list[Any] = []
        self._steps: dict[tuple[int, Any], tuple[int, tuple[Any, ...]]] = {}

    def __contains__(self, state: Any) -> bool:
        return state in self._numbers

    def number(self, state: Any) -> int:
        number = self._numbers.get(state)
        if number is None:
            number = len(self.states)
            self._numbers[state] = number
            self.states.append(state)
        return number

    def step(self, number: int, event: Any) -> tuple[int, tuple[Any, ...]]:
        """The number of the state after ``event``, and the effects."""
        key = (number, event)
        known = self._steps.get(key)
        if known is None:
            state, effects = self._step(self.states[number], event)
            known = self._steps[key] = (self.number(state), effects)
        return known

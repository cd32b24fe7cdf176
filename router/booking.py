"""What this router has at workers: counted from the moment it chooses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from pdmesh.router.policy import Route
from pdmesh.wire.messages import Role


class Loads(Protocol):
    """Where it is counted."""

    def add(self, instance: str, role: Role, requests: int, tokens: int) -> None: ...


class Seat:
    """This router's load of one answer at the decode worker that generates it."""

    def __init__(self, view: Loads, instance: str) -> None:
        self._view = view
        self._instance = instance

    def move(self, instance: str) -> None:
        """From now on another worker has the load."""
        self._view.add(self._instance, "decode", -1, 0)
        self._instance = instance
        self._view.add(instance, "decode", 1, 0)

    def give_back(self) -> None:
        """Called once."""
        self._view.add(self._instance, "decode", -1, 0)


class Booking:
    """This router's load of one request at two workers, until it is given back.

    At prefill it is one prompt, at decode one sequence for each answer.
    """

    def __init__(self, view: Loads, route: Route, answers: int) -> None:
        self._view = view
        self._prefill: str | None = route.prefill.instance
        self._decode = route.decode.instance
        self._tokens = route.tokens_to_compute
        self._answers = answers
        view.add(route.prefill.instance, "prefill", 1, self._tokens)
        view.add(self._decode, "decode", answers, 0)

    def prefilled(self) -> None:
        """Gives back the prefill worker's part; once is enough."""
        if self._prefill is not None:
            self._view.add(self._prefill, "prefill", -1, -self._tokens)
            self._prefill = None

    @contextmanager
    def answer(self) -> Iterator[Seat]:
        """One of the answers at decode, given back on leaving."""
        self._answers -= 1
        seat = Seat(self._view, self._decode)
        try:
            yield seat
        finally:
            seat.give_back()

    def give_back(self) -> None:
        """Gives back what is left; called once."""
        self.prefilled()
        if self._answers:
            self._view.add(self._decode, "decode", -self._answers, 0)

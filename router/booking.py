"""What this router has at workers: counted from the moment it chooses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from pdmesh.router.expected import Arrivals
from pdmesh.router.policy import Route
from pdmesh.wire.messages import Role


class Loads(Protocol):
    """Where it is counted."""

    def add(self, instance: str, role: Role, requests: int, tokens: int) -> None: ...

    def sent(self, instance: str) -> int: ...


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

    At prefill it is one prompt, at decode one sequence for each answer. ``arrivals`` are the pages
    that the two are about to own.
    """

    def __init__(self, view: Loads, route: Route, answers: int, arrivals: Arrivals) -> None:
        self._view = view
        self._arrivals = arrivals
        self._worker = route.prefill.instance
        self._prefill: str | None = self._worker
        self._decode = route.decode.instance
        self._tokens = route.tokens_to_compute
        self._answers = answers
        view.add(route.prefill.instance, "prefill", 1, self._tokens)
        view.add(self._decode, "decode", answers, 0)
        seen = route.chosen[0].candidate if route.chosen else None
        self._idle = seen is not None and not (seen.own_requests or seen.other_requests)
        self._sent = view.sent(route.prefill.instance)

    @property
    def alone(self) -> bool:
        """Whether the prefill worker has had no other request since, as far as is known here."""
        return self._idle and self._view.sent(self._worker) == self._sent

    def prefilled(self) -> None:
        """The prompt is computed: gives back the prefill worker's part."""
        self._leave_prefill()
        self._arrivals.computed()

    def failed(self) -> None:
        """The attempt came to nothing, or its client has left."""
        self._arrivals.failed()

    def _leave_prefill(self) -> None:
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
        self._leave_prefill()
        if self._answers:
            self._view.add(self._decode, "decode", -self._answers, 0)

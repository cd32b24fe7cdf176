"""Calls of a worker that stands for the whole model, and wait for the steps of its rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pdmesh.model.batch import Batch, Form
from pdmesh.model.parallel.assembly import Kind
from pdmesh.wire.errors import Unavailable


@dataclass
class Call:
    """One pass over the rows of this rank; `result` or `error` is set when it is over."""

    kind: Kind
    batch: Batch
    latents: Tensor
    form: Form
    previous: Tensor | None = None
    on_layer: Callable[[int], None] | None = None
    result: Tensor | None = None
    error: BaseException | None = None
    pushed: int = -1
    """The last layer that ``on_layer`` was told of: a step computed again tells it once only."""


class Calls:
    """Those that wait, in order.

    Args:
        changed: guards them, and is notified of every change.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._waiting: list[Call] = []
        self._over: BaseException | None = None

    def run(self, call: Call) -> Tensor:
        """Has a call computed; returns when it is.

        Raises:
            Unavailable: the group has been left.
            BaseException: what the call failed by.
        """
        with self._changed:
            if self._over is not None:
                raise Unavailable("this rank has left its expert-parallel group")
            self._waiting.append(call)
            self._changed.notify_all()
            self._changed.wait_for(lambda: call.result is not None or call.error is not None)
        if call.error is not None:
            raise call.error
        assert call.result is not None
        return call.result

    def wish(self) -> tuple[Kind, int]:
        """What this rank wants now, and its rows; with `changed` held."""
        if not self._waiting:
            return "idle", 0
        return self._waiting[0].kind, self._waiting[0].batch.num_rows

    def of(self, kind: Kind) -> Call | None:
        """The call that a step of this kind is for, if there is one."""
        with self._changed:
            first = self._waiting[0] if self._waiting else None
            return first if first is not None and first.kind == kind else None

    def done(self, call: Call) -> None:
        """It has its result, or its error."""
        with self._changed:
            self._waiting.remove(call)
            self._changed.notify_all()

    def fail_all(self, error: BaseException) -> None:
        """No call is computed any more."""
        with self._changed:
            self._over = error
            for call in self._waiting:
                call.error = error
            self._waiting.clear()
            self._changed.notify_all()

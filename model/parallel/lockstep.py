"""Code that runs one model, run on every DP group of a virtual group of ranks at once.

Each group's code gets a model of its own to call and a thread of its own. The threads take turns in
nothing: once every thread waits in a call or has ended, the ranks compute all waiting calls of one
kind as one step, in which the other groups have no row. So a run does not depend on how threads are
scheduled, and a group that computes more steps than others is served by all experts in each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from torch import Tensor

from pdmesh.model.batch import Batch, Form
from pdmesh.model.computing import StandIn
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.parallel.step import RankBatch
from pdmesh.model.parallel.virtual import VirtualRanks

_T = TypeVar("_T")


@dataclass
class _Call:
    kind: Literal["forward", "mtp"]
    batch: RankBatch
    previous: Tensor | None
    result: Tensor | BaseException | None = None


class Lockstep:
    """Runs the DP groups of `ranks`.

    Args:
        ranks: who computes.
        model: the whole one, for logits.
        between: called before each step, to place experts anew or to leave a lost rank behind.
    """

    def __init__(
        self,
        ranks: VirtualRanks,
        model: DeepseekV3,
        between: Callable[[], None] | None = None,
    ) -> None:
        self._ranks = ranks
        self._between = between
        self._whole = model
        self._changed = threading.Condition()
        self._waiting: dict[int, _Call] = {}
        self._running: set[int] = set()

    @property
    def tp(self) -> int:
        """TP ranks a group."""
        return self._ranks.groups.tp

    def model(self, dp: int) -> GroupModel:
        """What the code of DP group `dp` calls."""
        return GroupModel(self, dp, self._whole)

    def run(self, work: Sequence[Callable[[], _T] | None]) -> list[_T | None]:
        """Run each group's code to its end; None for a group without.

        Raises:
            RankLost: to the code of every group that waits, and from here if the code lets it pass.
        """
        outcomes = [_Outcome(code) for code in work if code is not None]
        at = [dp for dp, code in enumerate(work) if code is not None]
        self._running = set(at)
        threads = []
        for dp, outcome in zip(at, outcomes, strict=True):
            thread = threading.Thread(target=self._thread, args=(dp, outcome), daemon=True)
            thread.start()
            threads.append(thread)
        while self._step():
            pass
        for thread in threads:
            thread.join()
        found: list[_T | None] = [None] * len(work)
        for dp, outcome in zip(at, outcomes, strict=True):
            found[dp] = outcome.value()
        return found

    def call(self, dp: int, call: _Call) -> Tensor:
        """Wait until the ranks have computed this."""
        with self._changed:
            self._waiting[dp] = call
            self._changed.notify_all()
            self._changed.wait_for(lambda: call.result is not None)
        if isinstance(call.result, BaseException):
            raise call.result
        assert call.result is not None
        return call.result

    def _thread(self, dp: int, outcome: _Outcome[_T]) -> None:
        try:
            outcome.run()
        finally:
            with self._changed:
                self._running.discard(dp)
                self._changed.notify_all()

    def _step(self) -> bool:
        """Compute what waits once nobody is still on the way; False once all have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._running <= set(self._waiting))
            if not self._waiting:
                return False
            kind = "forward" if any(c.kind == "forward" for c in self._waiting.values()) else "mtp"
            calls = {dp: call for dp, call in self._waiting.items() if call.kind == kind}
        groups = range(self._ranks.groups.dp)
        inputs = [calls[dp].batch if dp in calls else None for dp in groups]
        results: Sequence[Tensor | BaseException | None]
        try:
            if self._between is not None:
                self._between()
            if kind == "forward":
                results = self._ranks.forward(inputs)
            else:
                previous = [calls[dp].previous if dp in calls else None for dp in groups]
                results = self._ranks.mtp_forward(inputs, previous)
        except Exception as error:  # noqa: BLE001 - it is raised where the call was made
            results = [error for _ in groups]
        with self._changed:
            for dp, call in calls.items():
                call.result = results[dp]
                del self._waiting[dp]
            self._changed.notify_all()
        return True


class GroupModel(StandIn[DeepseekV3]):
    """Stands for a `DeepseekV3` in the code of one DP group; its TP ranks share one pool."""

    def __init__(self, lockstep: Lockstep, dp: int, model: DeepseekV3) -> None:
        super().__init__(model)
        self._lockstep = lockstep
        self._dp = dp
        self.new_latents = model.new_latents

    def forward(
        self,
        batch: Batch,
        latents: Tensor,
        form: Form,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `DeepseekV3.forward`."""
        return self._call("forward", batch, latents, form, None, on_layer)

    def mtp_forward(
        self, batch: Batch, previous_hidden: Tensor, latents: Tensor, form: Form
    ) -> Tensor:
        """As `DeepseekV3.mtp_forward`."""
        return self._call("mtp", batch, latents, form, previous_hidden)

    def _call(
        self,
        kind: Literal["forward", "mtp"],
        batch: Batch,
        latents: Tensor,
        form: Form,
        previous: Tensor | None,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        pools = (latents,) * self._lockstep.tp
        item = RankBatch(batch, pools, form, on_layer)
        return self._lockstep.call(self._dp, _Call(kind, item, previous))


class _Outcome(Generic[_T]):
    """What a thread's code returned or raised."""

    def __init__(self, code: Callable[[], _T]) -> None:
        self._code = code
        self._value: _T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._code()
        except BaseException as error:  # noqa: BLE001 - it is raised again by `value`
            self._error = error

    def value(self) -> _T | None:
        if self._error is not None:
            raise self._error
        return self._value

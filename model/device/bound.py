"""What a worker takes of a device, held against what was planned for it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType

import torch

from pdmesh.model.device.memory import GB, KEPT, MemoryPlan
from pdmesh.wire.errors import ConfigError, InternalError, PdmeshError
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

SMALLER = {
    "prefill": "a smaller --chunk-tokens",
    "decode": "a smaller --max-batch, fewer --draft-tokens",
}
"""What makes the steps of a role take less."""


@dataclass(frozen=True)
class Figures:
    """Bytes.

    Attributes:
        planned: what the worker may use.
        allocated, reserved: what its tensors take, and what torch holds for them.
        peak: the most that was allocated so far.
        used, total: what all processes take of the device, libraries' memory included, and its
            size.
    """

    planned: int
    allocated: int
    reserved: int
    peak: int
    used: int
    total: int


class MemoryBound:
    """One worker's memory on a CUDA device.

    Args:
        plan: what it may use.
        device: where.
        role: "prefill" or "decode".
        enforced: torch is to take no more than `limit`: it then gives pieces back that nobody uses,
            and a worker that needs more fails itself, not its neighbour. Where the steps are
            counted tensor by tensor, that is in FP8.
    """

    def __init__(
        self, plan: MemoryPlan, device: torch.device, role: str, enforced: bool = True
    ) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.plan = plan
        self._device = torch.device("cuda", index)
        self._role = role
        if enforced:
            part = limit(plan) / torch.cuda.mem_get_info(self._device)[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, part), self._device)

    def figures(self) -> Figures:
        """What there is now."""
        free, total = torch.cuda.mem_get_info(self._device)
        return Figures(
            self.plan.budget,
            torch.cuda.memory_allocated(self._device),
            torch.cuda.memory_reserved(self._device),
            torch.cuda.max_memory_allocated(self._device),
            total - free,
            total,
        )

    def report(self, worker: str) -> None:
        """After the last step before the first request: says in the log what was planned and what
        is taken."""
        found = self.figures()
        numbers = {f"{name}_gb": f"{value / GB:.1f}" for name, value in asdict(found).items()}
        over = found.peak > found.planned or found.reserved > limit(self.plan)
        name = "device memory beyond the plan" if over else "device memory"
        event(log, name, logging.WARNING if over else logging.INFO, worker=worker, **numbers)

    def watching(self, inner: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Around a step: enters `inner`, and says what to do where memory does not suffice.

        Raises:
            InternalError: it did not. What the step held is free again.
        """
        return _Watching(self, inner)

    def why(self, what: str) -> str:
        """The sentence for memory that did not suffice for `what`."""
        return describe(self.plan, self.figures(), self._role, what)


class _Watching(AbstractContextManager[None]):
    def __init__(self, bound: MemoryBound, inner: AbstractContextManager[None]) -> None:
        self._bound = bound
        self._inner = inner

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.__exit__(kind, error, trace)
        if error is not None and is_out_of_memory(error):
            why = self._bound.why("a step")
            traceback.clear_frames(trace)  # they hold the step's tensors, which a retry needs
            raise InternalError(why) from None


def starting(bound: MemoryBound | None) -> AbstractContextManager[None]:
    """Around what a worker does before it serves.

    Raises:
        ConfigError: the device has not enough memory for it; one sentence with the fix.
    """
    return _explained(bound, "the start of this worker", ConfigError)


def serving(bound: MemoryBound | None) -> AbstractContextManager[None]:
    """Around all that a worker does from then on: a rank's steps, which `watching` is not around,
    end the worker.

    Raises:
        InternalError: the device has not enough memory for one; the same sentence.
    """
    return _explained(bound, "a step", InternalError)


@contextmanager
def _explained(bound: MemoryBound | None, what: str, kind: type[PdmeshError]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if bound is None or not is_out_of_memory(error):
            raise
        raise kind(bound.why(what)) from error


def limit(plan: MemoryPlan) -> int:
    """Bytes that torch may take: the budget, and half of what is kept back, for fragments. The
    driver and libraries, which torch does not see, have the other half."""
    return int(plan.budget * (1 + KEPT / 2))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left: torch's error, or a library's."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def describe(plan: MemoryPlan, found: Figures, role: str, what: str) -> str:
    """Pure: why memory did not suffice for `what`, and what to change."""
    free = found.total - found.used
    if free < limit(plan) - found.reserved:
        fix = "end what else takes memory there, or give this worker less: fewer --pages"
    else:
        fix = f"ask for fewer --pages, {SMALLER[role]}"
    return (
        f"device memory did not suffice for {what}: planned {plan.describe()}; its tensors take "
        f"{found.allocated / GB:.1f} GB, torch holds {found.reserved / GB:.1f}, and "
        f"{free / GB:.1f} of the device's {found.total / GB:.1f} GB are free; {fix}"
    )

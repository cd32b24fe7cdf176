"""Timing on a GPU: CUDA graphs, medians, cold weights, clocks as they are; candidates.

An operation is timed in a graph over several sets of weights and inputs that together exceed the L2
cache, as the layers of a model do.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = tuple[Any, ...]


def capture(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`function` once outside (compilers, handles), then in a graph; what it made stays alive."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.kept = function()  # type: ignore[attr-defined]
    return graph


def replay_times(graph: torch.cuda.CUDAGraph, repeats: int = 15) -> list[float]:
    """Microseconds of each replay between two events, after three that do not count."""
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats + 3)
    ]
    for begin, end in pairs:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairs[3:]]


def timed(calls: Sequence[Callable[[], Any]], rounds: int = 1, repeats: int = 15) -> float:
    """Median microseconds of one call; all run one after another, `rounds` times, in a graph."""

    def all_of_them() -> list[Any]:
        return [call() for _ in range(rounds) for call in calls]

    graph = capture(all_of_them)
    taken = statistics.median(replay_times(graph, repeats)) / (rounds * len(calls))
    del graph
    return taken


def error(output: Any, expected: Any) -> float:
    """The largest relative error (Frobenius) of any tensor; a NaN gives infinity."""
    worst = 0.0
    for got, want in zip(_floats(output), _floats(expected), strict=True):
        scale = want.norm().clamp_min(1e-30)
        distance = float((got - want).norm() / scale)
        worst = max(worst, distance if distance == distance else float("inf"))
    return worst


def _floats(value: Any) -> list[Tensor]:
    """Tensors of a result as float32: `Rows` by what they stand for."""
    if hasattr(value, "values") and hasattr(value, "scales"):
        k = value.values.shape[-1]
        return [value.values.float() * value.scales.repeat_interleave(128, dim=-1)[..., :k]]
    if isinstance(value, Tensor):
        return [value.float()]
    return [tensor for one in value for tensor in _floats(one)]


def poison(expected: Any) -> None:
    """Fills memory that the next results may be given with NaNs."""
    made = [torch.full_like(tensor, float("nan")) for tensor in _floats(expected)]
    made += [tensor.to(torch.bfloat16) for tensor in made]
    del made


@dataclass
class Candidate:
    """An implementation of an operation.

    Attributes:
        name: of it in tables.
        run: takes the operation's arguments.
        own: it is this project's.
    """

    name: str
    run: Callable[..., Any]
    own: bool = False


@dataclass
class Measured:
    """What became of a candidate: its time, error, or why it could not be used."""

    name: str
    own: bool
    microseconds: float = float("inf")
    error: float = float("inf")
    why_not: str = ""
    run: Callable[..., Any] | None = None

    def row(self) -> dict[str, Any]:
        known = self.microseconds != float("inf")
        return {
            "name": self.name,
            "own": self.own,
            "us": round(self.microseconds, 2) if known else None,
            "error": self.error if self.error != float("inf") else None,
            "why_not": self.why_not,
        }


def pick(
    candidates: Sequence[Candidate],
    calls: Sequence[Call],
    reference: Callable[..., Any],
    *,
    tolerance: float,
    look: Callable[[Any, Call], Any] = lambda result, call: result,
    fresh: Callable[[Call], Call] = lambda call: call,
    rounds: int = 1,
) -> tuple[Measured | None, list[Measured]]:
    """Every candidate checked by the reference and timed; the fastest correct one, and all.

    Args:
        candidates: tried in order; one that raises is left out with its reason.
        calls: arguments, one for each set of weights and inputs.
        reference: the definition, given the same arguments.
        tolerance: largest relative error of a correct one.
        look: what of a result is compared (a result's undefined rows are not).
        fresh: a copy of what an operation changes in place, for the comparison.
        rounds: how many times a graph goes over the calls.
    """
    first = fresh(calls[0])
    expected = look(reference(*fresh(first)), first)
    found = []
    for candidate in candidates:
        measured = Measured(candidate.name, candidate.own, run=candidate.run)
        found.append(measured)
        try:
            poison(expected)
            measured.error = error(look(candidate.run(*fresh(first)), first), expected)
            if measured.error > tolerance:
                measured.why_not = f"wrong: error {measured.error:.2g} > {tolerance:g}"
                continue
            jobs = [lambda call=call, run=candidate.run: run(*call) for call in calls]
            measured.microseconds = timed(jobs, rounds)
        except Exception as failure:  # noqa: BLE001 - a library's own errors are of any type
            measured.why_not = f"{type(failure).__name__}: {str(failure).splitlines()[:1]}"[:200]
            torch.cuda.synchronize()
    usable = [m for m in found if m.microseconds != float("inf")]
    return min(usable, key=lambda m: m.microseconds, default=None), found


@dataclass
class Clocks:
    """The card's clocks, power and temperature while measuring; they are read, never set."""

    samples: list[tuple[float, ...]] = field(default_factory=list)
    QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu"

    def __enter__(self) -> Clocks:
        command = ["nvidia-smi", f"--query-gpu={self.QUERY}", "--format=csv,noheader,nounits"]
        self._process = subprocess.Popen(
            [*command, "-lms", "200"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self.samples.append(tuple(float(part) for part in line.split(",")))
            except ValueError:
                continue

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def summary(self, begin: int = 0) -> dict[str, Any]:
        """Of each, from the `begin`-th sample on: lowest, median, highest."""
        samples = self.samples[begin:]
        return (
            {
                name: [min(column), statistics.median(column), max(column)]
                for name, column in zip(
                    self.QUERY.split(","), zip(*samples, strict=True), strict=True
                )
            }
            if samples
            else {}
        )


def kernel_gaps(graph: torch.cuda.CUDAGraph, replays: int = 3) -> dict[str, float] | None:
    """Under the profiler, median of some replays: span and time in which some kernel ran (us).

    None where the profiler sees no kernels, or does not work.
    """
    try:
        found = [one for one in (_profiled(graph) for _ in range(replays)) if one is not None]
    except Exception as failure:  # noqa: BLE001 - the times are what matters, and they are there
        print(f"  no profile: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
        return None
    if not found:
        return None
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def _profiled(graph: torch.cuda.CUDAGraph) -> dict[str, float] | None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA") and event.time_range.end > event.time_range.start
    )
    if not spans:
        return None
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return {"span": reached - spans[0][0], "busy": busy, "kernels": float(len(spans))}


def rested(graph: torch.cuda.CUDAGraph, replays: int = 9, pause_s: float = 0.15) -> float:
    """Median microseconds of replays with pauses, in which the power limit is never reached."""
    times = []
    for _ in range(replays):
        time.sleep(pause_s)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def sustained(
    graph: torch.cuda.CUDAGraph, clocks: Clocks, seconds: float = 2.0
) -> tuple[float, dict[str, Any]]:
    """Median microseconds of a replay in the second half of `seconds` of nothing else.

    And the clocks in that half: a card may lower them for its power limit.
    """
    estimate = statistics.median(replay_times(graph, 3))
    each = max(5, int(0.1 * seconds * 1e6 / estimate))
    times: list[float] = []
    for part in range(10):
        if part == 5:
            begin = len(clocks.samples)
        taken = replay_times(graph, each)
        times += taken if part >= 5 else []
    return statistics.median(times), clocks.summary(begin)

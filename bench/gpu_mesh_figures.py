"""What ``gpu_mesh.py`` makes of the answers it gets: pure."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / ".pythonpath")]

import meshes  # noqa: E402 - the path is set above


@dataclass(frozen=True)
class Point:
    """What was measured with so many requests open at a time. Times in milliseconds.

    Attributes:
        answers, tokens: that came, of answers that were not finished too.
        seconds: that it took.
        layers: the hand-off's exposed time over a layer's time in prefill, medians.
        host: part of the decode steps' time outside of model and sampler; None: not known.
        batch: sequences of a decode step, the mean.
        distinct: different token ids among all that came.
        cut: the time was over before all answers were there.
        failed: requests that ended with an error, and the last error.
    """

    at_once: int
    answers: int
    tokens: int
    seconds: float
    tokens_per_s: float
    ttft_ms: float
    ttft_p99_ms: float
    itl_ms: float
    itl_p99_ms: float
    prefill_ms: float
    hand_off_ms: float
    hand_off_p99_ms: float
    layers: float
    host: float | None = None
    batch: float | None = None
    distinct: int = 0
    cut: bool = False
    failed: int = 0
    error: str = ""


def gaps(times: Sequence[float]) -> list[float]:
    """Seconds between tokens: those that came at the same time share the time before."""
    found: list[float] = []
    before = 0
    for index in range(1, len(times) + 1):
        if index < len(times) and times[index] == times[index - 1]:
            continue
        if before:
            each = (times[index - 1] - times[before - 1]) / (index - before)
            found += [each] * (index - before)
        before = index
    return found


def p99(values: Sequence[float]) -> float:
    """The 99th percentile; 0 where there is nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def summed(
    at_once: int,
    answers: Sequence[meshes.Answer],
    seconds: float,
    layers: int,
    expected: int,
    errors: Sequence[str] = (),
) -> Point:
    """What answers, finished or not, say together.

    Args:
        answers: of all requests that were sent.
        seconds: that it took.
        layers: of the model.
        expected: requests that were to be sent.
        errors: of those that failed.
    """
    failed, error = len(errors), errors[-1] if errors else ""
    begun = [answer for answer in answers if answer.token_ids]
    timed = [answer.timing for answer in begun if answer.timing is not None]
    between = [gap * 1e3 for answer in begun for gap in gaps(answer.token_times)]
    first = [answer.first_token_s * 1e3 for answer in begun]
    exposed = [timing.transfer_ms for timing in timed]
    prefill = median([timing.prefill_ms for timing in timed])
    tokens = sum(len(answer.token_ids) for answer in begun)
    return Point(
        at_once=at_once,
        answers=len(timed),
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        ttft_ms=median(first),
        ttft_p99_ms=p99(first),
        itl_ms=median(between),
        itl_p99_ms=p99(between),
        prefill_ms=prefill,
        hand_off_ms=median(exposed),
        hand_off_p99_ms=p99(exposed),
        layers=median(exposed) * layers / prefill if prefill else 0.0,
        distinct=len({token for answer in begun for token in answer.token_ids}),
        cut=len(timed) + failed < expected,
        failed=failed,
        error=error,
    )


def worth_it(left_s: float, at_once: int, before: Point | None) -> bool:
    """Whether there is time for a measurement: for half of it, if it takes a request as long as
    with fewer at once."""
    if before is None or not before.answers:
        return left_s > 5.0
    waves = before.seconds * before.at_once / max(1, before.answers)
    return left_s > max(5.0, waves / 2)


HEADER = (
    "at once | answers | tokens/s | TTFT ms, p99 | ITL ms, p99 | prefill ms | hand-off ms, p99 "
    "| in layers | host | batch"
)


def row(point: Point) -> str:
    """One line of the table."""
    host = "-" if point.host is None else f"{100 * point.host:.1f} %"
    batch = "-" if point.batch is None else f"{point.batch:.1f}"
    cells = (
        str(point.at_once),
        f"{point.answers}{' (cut)' if point.cut else ''}"
        f"{f' ({point.failed} failed)' if point.failed else ''}",
        f"{point.tokens_per_s:.1f}",
        f"{point.ttft_ms:.1f}, {point.ttft_p99_ms:.1f}",
        f"{point.itl_ms:.2f}, {point.itl_p99_ms:.2f}",
        f"{point.prefill_ms:.1f}",
        f"{point.hand_off_ms:.2f}, {point.hand_off_p99_ms:.2f}",
        f"{point.layers:.2f}",
        host,
        batch,
    )
    widths = [len(name) for name in HEADER.split(" | ")]
    return " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))

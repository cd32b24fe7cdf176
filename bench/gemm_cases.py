"""Shapes, random data, float64 results and graph timings for bench/gpu_gemm.py."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pdmesh.kernels.quantised import BlockWeight, Rows, new_scales

SHAPES = {
    "qkv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "o_proj": (7168, 16384),
    "shared up": (4096, 7168),
    "shared down": (7168, 2048),
}
"""DeepSeek-V3's products of every token: (n, k)."""
RANK, NOPE, ROPE, VALUE = 512, 128, 64, 128
BYTES_PER_S, FP8_PER_S = 4.3e12, 1300e12
"""What one H200 was measured to reach: a copy, and an FP8 product of 8192^3."""
ROTATED_BYTES = 320 << 20
"""Operands are rotated until so much lies between two uses of one: several times the L2 cache."""

Call = Callable[[], Any]


def weight(generator: torch.Generator, *shape: int) -> BlockWeight:
    """Random e4m3 bits without NaN and scales about 0.02 / 448 apart by a factor of up to four."""
    *batch, n, k = shape
    device = generator.device
    values = torch.randn(shape, generator=generator, device=device).mul_(100).clamp_(-448, 448)
    blocks = (*batch, -(-n // 128), -(-k // 128))
    scales = torch.rand(blocks, generator=generator, device=device) * 3e-4 + 1e-4
    return BlockWeight(values.to(torch.float8_e4m3fn), scales)


def rows(generator: torch.Generator, *shape: int) -> Rows:
    *batch, m, k = shape
    device = generator.device
    values = torch.randn(shape, generator=generator, device=device).mul_(100).clamp_(-448, 448)
    scales = new_scales(*batch, m, -(-k // 128), device=device)
    scales.copy_(torch.rand(scales.shape, generator=generator, device=device) * 1e-2 + 1e-3)
    return Rows(values.to(torch.float8_e4m3fn), scales)


def exact_weight(w: BlockWeight) -> torch.Tensor:
    """float64 [..., n, k]."""
    spread = w.scales.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return w.values.double() * spread[..., : w.values.shape[-2], : w.values.shape[-1]]


def exact_rows(x: Rows) -> torch.Tensor:
    k = x.values.shape[-1]
    return x.values.double() * x.scales.double().repeat_interleave(128, -1)[..., :k]


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over the norm; NaN if anything is."""
    return float((got.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def poison(like: torch.Tensor) -> None:
    """Fills memory that the next results may be given with NaNs."""
    made = [torch.full_like(like, torch.nan, dtype=t) for t in (torch.float32, torch.bfloat16)]
    made.append(torch.full_like(like, torch.nan, dtype=torch.float32).to(torch.float8_e4m3fn))
    del made


def copies(nbytes: float) -> int:
    return max(2, min(40, int(ROTATED_BYTES // nbytes) + 1))


def microseconds(calls: list[Call], replays: int = 9) -> float:
    """Median time of one call: each once a replay of a CUDA graph, twice over.

    What the calls give is kept, so that no two write to the same memory: it is cold, too.
    """
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        kept = [call() for call in calls * 2]
    times = []
    for number in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(end) * 1e3 / (2 * len(calls)))
    del kept
    return statistics.median(times)


def dense_limit(m: int, n: int, k: int) -> float:
    """us: bytes once, or products, whichever takes longer."""
    return max((n * k + m * k + 2 * m * n) / BYTES_PER_S, 2 * m * n * k / FP8_PER_S) * 1e6


def absorb_limit(m: int, heads: int) -> float:
    values = heads * (RANK * NOPE + 2 * m * (NOPE + ROPE) + 2 * m * (RANK + ROPE))
    return values / BYTES_PER_S * 1e6


def project_limit(m: int, heads: int) -> float:
    return heads * (RANK * VALUE + 2 * m * RANK + m * (VALUE + 4)) / BYTES_PER_S * 1e6


def children(work: Callable[[int, Sequence[Any]], None], tasks: Sequence[Any]) -> list[Any]:
    """Forked processes that run `work(number, its share of the tasks)`; see `ended`.

    Must be called before CUDA is used here.
    """
    context = multiprocessing.get_context("fork")
    workers = max(1, min(14, (os.cpu_count() or 2) - 2, len(tasks)))
    jobs = []
    for number in range(workers):
        job = context.Process(target=work, args=(number, tasks[number::workers]), daemon=True)
        job.start()
        jobs.append(job)
    return jobs


def ended(jobs: list[Any], seconds: float) -> int:
    """Ends those that take longer than so many seconds; how many did not end well."""
    deadline = time.monotonic() + seconds
    for job in jobs:
        job.join(max(0.0, deadline - time.monotonic()))
        if job.is_alive():
            job.kill()
            job.join(10)
    return sum(job.exitcode != 0 for job in jobs)

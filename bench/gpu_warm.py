"""Compiles DeepGEMM's kernels for many shapes at once, in processes, before anything is timed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

Job = tuple[int, int, int, int]
"""Experts (0: a plain product), rows, n, k."""


def layer_jobs(tokens: Sequence[int], experts: Sequence[tuple[int, int]]) -> list[Job]:
    """Products of a layer for these numbers of tokens, and of (experts, rows) routed ones."""
    shapes = [(2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048)]
    jobs = [(0, m, n, k) for m in tokens for n, k in shapes]
    jobs += [(e, m, n, k) for e, m in experts for n, k in ((4096, 7168), (7168, 2048))]
    return jobs


def _work(jobs: Sequence[Job]) -> None:
    import torch

    from pdmesh.kernels import deep_gemm_backend
    from pdmesh.kernels.quantised import BlockWeight, Rows, new_scales

    for experts, m, n, k in jobs:
        lead = (experts,) if experts else ()
        rows = Rows(
            torch.zeros((*lead, m, k), dtype=torch.float8_e4m3fn, device="cuda"),
            new_scales(*lead, m, k // 128, device="cuda").fill_(1.0),
        )
        weight = BlockWeight(
            torch.zeros((*lead, n, k), dtype=torch.float8_e4m3fn, device="cuda"),
            torch.ones((*lead, -(-n // 128), k // 128), device="cuda"),
        )
        if experts:
            counts = torch.full((experts,), m, dtype=torch.int32, device="cuda")
            deep_gemm_backend.masked_grouped_gemm(rows, weight, counts, m)
        else:
            deep_gemm_backend.fp8_gemm(rows, weight)
    torch.cuda.synchronize()


def compile_products(jobs: Sequence[Job], processes: int = 10, limit_s: float = 90.0) -> None:
    """Fills DeepGEMM's cache; a process that takes too long is ended."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_work, args=(jobs[number::processes],))
        for number in range(min(processes, len(jobs)))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(limit_s)
        if worker.is_alive():
            worker.kill()

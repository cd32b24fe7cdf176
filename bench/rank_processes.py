"""Ranks of a benchmark as processes of this machine, each on a core of its own."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
from collections.abc import Callable
from typing import Any

import torch


def take_core(rank: int) -> None:
    """In the process of a rank, before it computes: one core, one thread."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # at the end ranks lose each other


def found_by(work: Callable[..., None], ranks: int, *told: Any) -> list[Any]:
    """What every rank found.

    Args:
        work: the process of a rank: `work(rank, *told, out)`, which sends what it found to `out`.
    """
    context = mp.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, *told, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join(20)
        return found
    finally:
        for process in processes:
            process.kill()

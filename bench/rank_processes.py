"""Ranks of a benchmark as processes of this machine, each on a core of its own."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
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

    Raises:
        SystemExit: a rank ended without it; the others, which may wait for it, are ended.
    """
    context = mp.get_context("spawn")
    pipes: list[Any] = []
    processes: list[Any] = []
    try:
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, *told, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        found: dict[int, Any] = {}
        while missing := [pipe for rank, pipe in enumerate(pipes) if rank not in found]:
            for pipe in wait(missing):
                rank = pipes.index(pipe)
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    processes[rank].join(20)
                    raise SystemExit(_ended(rank, processes[rank].exitcode)) from None
        for process in processes:
            process.join(20)
        return [found[rank] for rank in range(ranks)]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Around all that a rank does: its process ends with the block, without what libraries do at
    an end, which waits for other ranks. An error is said as at any end; the status is then 1, or
    what `command_line` has for what this machine lacks."""
    code = 1
    try:
        try:
            yield
            code = 0
        except BaseException as error:  # noqa: BLE001 - whatever it is, others wait for this rank
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as end:  # of the hook
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


@contextmanager
def together(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Around reading what one of several ranks prints: as soon as one fails, all are ended.

    Raises:
        SystemExit: one failed; it is named.
    """
    over = threading.Event()
    failed: list[str] = []

    def watch() -> None:
        while not over.wait(0.1):
            for rank, process in enumerate(processes):
                if process.poll():
                    failed.append(_ended(rank, process.returncode))
                    for other in processes:
                        other.kill()
                    return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
        for rank, process in enumerate(processes):  # those that end with the first
            if process.wait(20) and not failed:
                failed.append(_ended(rank, process.returncode))
    finally:
        over.set()
        watching.join()
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    if failed:
        raise SystemExit(failed[0])


def _ended(rank: int, code: int | None) -> str:
    return f"rank {rank} ended with {code} and without its figures; what it said is above"

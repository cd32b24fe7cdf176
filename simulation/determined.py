"""Clocks, ids and log lines of a run: all from the loop and the seed."""

from __future__ import annotations

import gc
import logging
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from pdmesh.simulation.loop import VirtualLoop, current_process
from pdmesh.wire.logs import quote


class Trace(logging.Handler):
    """Every event of every process, one line each, in order."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(logging.INFO)
        self._loop = loop
        self.lines: list[str] = []

    def __call__(self, name: str, **fields: object) -> None:
        process = current_process()
        pairs = "".join(f" {key}={quote(value)}" for key, value in fields.items())
        self.lines.append(f"{self._loop.time():.6f} {process or '-'} {name}{pairs}")

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", None)
        self(record.getMessage(), **(fields if isinstance(fields, dict) else {}))


@contextmanager
def determined(loop: VirtualLoop, rng: random.Random, trace: Trace) -> Iterator[None]:
    """Within the block time is the loop's, what is random comes from ``rng``, and logs go to
    ``trace`` only. Cycles are not collected: nothing depends on when that would happen."""
    logger = logging.getLogger("pdmesh")
    before = logger.level, logger.propagate
    logger.addHandler(trace)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    collecting = gc.isenabled()
    gc.disable()

    def token_hex(size: int = 32) -> str:
        return rng.getrandbits(8 * size).to_bytes(size, "big").hex()

    replaced: list[tuple[ModuleType, str, object]] = [
        (time, "monotonic", loop.time),
        (time, "perf_counter", loop.time),
        (secrets, "token_hex", token_hex),
        (secrets, "randbelow", rng.randrange),
        # What a log line is never asked for here costs more than the line.
        (logging, "_srcfile", None),
        (logging, "logThreads", False),
        (logging, "logProcesses", False),
        (logging, "logMultiprocessing", False),
    ]
    originals = [getattr(module, name) for module, name, _ in replaced]
    for module, name, ours in replaced:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for (module, name, _), original in zip(replaced, originals, strict=True):
            setattr(module, name, original)
        if collecting:
            gc.enable()
        logger.removeHandler(trace)
        logger.setLevel(before[0])
        logger.propagate = before[1]

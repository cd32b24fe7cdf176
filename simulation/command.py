"""``pdmesh simulate``: runs seeds, says how they went, and shows the trace of one that failed."""

from __future__ import annotations

import argparse
import sys
import time

from pdmesh.simulation.run import Outcome, simulate
from pdmesh.wire.errors import ConfigError

_TAIL = 40
"""Lines of the trace shown of a run that failed."""
_EVERY_S = 2.0


def seeds_of(text: str) -> range:
    """ "7" or "0..99", both ends included. Raises ConfigError."""
    first, dots, last = text.partition("..")
    try:
        low = int(first)
        high = int(last) if dots else low
    except ValueError as error:
        raise ConfigError(f"--seeds is {text!r}; give a range such as 0..99") from error
    if high < low or low < 0:
        raise ConfigError(f"--seeds is {text!r}; the first seed must be the smaller one")
    return range(low, high + 1)


def run(arguments: argparse.Namespace) -> int:
    """0 if all seeds are well, 1 if one is not."""
    if arguments.requests < 0:
        raise ConfigError(f"--requests is {arguments.requests}; it counts from 0")
    seeds = seeds_of(arguments.seeds if arguments.seeds is not None else str(arguments.seed))
    failed: list[int] = []
    several, told = len(seeds) > 1, time.monotonic()
    for seed in seeds:
        outcome = simulate(seed, arguments.requests)
        if arguments.trace:
            sys.stdout.write("".join(f"{line}\n" for line in outcome.trace))
        if outcome.problems:
            failed.append(seed)
            print(outcome.summary)
            _explain(outcome, with_trace=not arguments.trace)
        elif not several:
            print(outcome.summary)
        if several and time.monotonic() - told >= _EVERY_S:
            told = time.monotonic()
            print(f"{seed - seeds[0] + 1} of {len(seeds)} seeds, {len(failed)} failed", flush=True)
    if several:
        print(f"{len(seeds)} seeds, {len(failed)} failed{_names(failed)}")
    return 1 if failed else 0


def _names(failed: list[int]) -> str:
    return f": {', '.join(map(str, failed))}" if failed else ""


def _explain(outcome: Outcome, with_trace: bool) -> None:
    if with_trace:
        print(f"the last {_TAIL} lines of the trace:")
        print("\n".join(f"  {line}" for line in outcome.trace[-_TAIL:]))
    print("what is wrong:")
    print("\n".join(f"  {line}" for line in outcome.problems))
    print(outcome.again, flush=True)

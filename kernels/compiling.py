"""What compilers do without a device, so that it can be done beside other work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Compilation:
    """A library that a first use compiles, to be compiled before. No device is used.

    Attributes:
        name: for the log.
        done: whether the library is there.
        run: compiles it unless it is there, in any thread; a first use meanwhile waits for it.
            Raises what a first use would, which tries again after a failure.
    """

    name: str
    done: Callable[[], bool]
    run: Callable[[], object]

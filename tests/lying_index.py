"""An index that lies while its file is there.

Routers of a staged mesh ask it where the environment names its file.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence
from pathlib import Path

from pdmesh.registry.index import PrefixIndex

VARIABLE = "PDMESH_LIES"
"""Names the file."""
_SLOTS = range(8)
"""At least as many as there are workers."""


class LyingIndex(PrefixIndex):
    """Tells the truth, nothing, or that anybody owns anything; says in ``<file>.told`` that it did
    lie.

    Args:
        file: without it only the truth is told.
        rng: chooses the lies.
    """

    def __init__(self, file: Path, rng: random.Random) -> None:
        super().__init__()
        self._file = file
        self._rng = rng

    def match(self, hashes: Sequence[bytes]) -> dict[int, int]:
        true, rng = super().match(hashes), self._rng
        if not hashes or not self._file.exists():
            return true
        kind = rng.randrange(5)
        if kind == 0:
            found = {}
        elif kind == 1:
            found = dict.fromkeys(_SLOTS, len(hashes))
        elif kind == 2:
            found = {slot: rng.randint(1, len(hashes)) for slot in _SLOTS if rng.random() < 0.5}
        elif kind == 3:  # only those that own nothing
            found = {slot: len(hashes) for slot in _SLOTS if slot not in true}
        else:
            found = true
        if found != true:
            self._file.with_suffix(".told").touch()
        return found


def in_this_process() -> None:
    """Routers that this process starts ask a lying index, where the environment names its file."""
    named = os.environ.get(VARIABLE)
    if not named:
        return
    import pdmesh.router.server as server

    index = functools.partial(LyingIndex, Path(named), random.Random(17))
    server.RegistryView = functools.partial(server.RegistryView, index=index)

"""Tries grammars out before workers get them: the few that never end are killed, not waited for."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from pathlib import Path

from pdmesh.text import grammar_child
from pdmesh.text.grammar import unusable
from pdmesh.wire.errors import InvalidRequest

KEPT = 256
"""Grammars that are known to be good, or not to be."""
START_S = 60.0
"""Seconds for the child to start, which is no fault of a grammar."""


class GrammarTrial:
    """Compiles grammars with the checkpoint's tokenizer, one at a time, in a child process.

    Two short regular expressions can be enough to keep a compiler busy for hours (the intersection
    of automata grows as their product), and a thread cannot be stopped; a process can. The child
    starts with the first grammar.

    Args:
        model_path: checkpoint directory.
        limit_s: seconds for one grammar.
    """

    def __init__(self, model_path: Path, limit_s: float = 5.0) -> None:
        self._tokenizer = model_path / "tokenizer.json"
        self._limit_s = limit_s
        self._known: OrderedDict[str, InvalidRequest | None] = OrderedDict()
        self._lock = asyncio.Lock()
        self._child: Process | None = None

    async def check(self, grammar: str) -> None:
        """Raises InvalidRequest unless the grammar can be compiled and allows some text."""
        async with self._lock:
            if grammar not in self._known:
                self._known[grammar] = await self._try(grammar)
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(grammar)
            error = self._known[grammar]
        if error is not None:
            raise InvalidRequest(error.message)

    async def close(self) -> None:
        """Ends the child."""
        child, self._child = self._child, None
        if child is not None:
            if child.returncode is None:
                child.kill()
            await child.communicate()

    async def _try(self, grammar: str) -> InvalidRequest | None:
        done = False
        try:
            child = await self._started()
            async with asyncio.timeout(self._limit_s):
                reason = await _ask(child, grammar)
            done = True
            return unusable(reason) if reason else None
        except TimeoutError:
            return unusable(f"it takes more than {self._limit_s:g} s to compile")
        except (OSError, asyncio.IncompleteReadError):  # perhaps not its fault: not remembered
            raise unusable("its compiler ended, perhaps for want of memory") from None
        finally:
            if not done:
                await asyncio.shield(self.close())

    async def _started(self) -> Process:
        if self._child is None:
            try:
                async with asyncio.timeout(START_S):
                    self._child = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-P",
                        grammar_child.__file__,
                        str(self._tokenizer),
                        stdin=PIPE,
                        stdout=PIPE,
                    )
                    assert self._child.stdout is not None
                    await self._child.stdout.readuntil(b"\n")
            except TimeoutError:
                raise unusable(f"its compiler does not start within {START_S:g} s") from None
        return self._child


async def _ask(child: Process, grammar: str) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    data = grammar.encode()
    child.stdin.write(len(data).to_bytes(4, "big") + data)
    await child.stdin.drain()
    return str(json.loads(await child.stdout.readuntil(b"\n")))

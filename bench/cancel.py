"""How fast a cancelled request is gone: from the client's leaving until all its pages are free.

    .venv/bin/python -P bench/cancel.py --help

A mesh of one prefill and one decode worker; one request at a time, with a cold prompt of several
chunks. The client leaves in one of three phases: while the prompt is computed, at the first token
(the last pages are on their way to decode), and while decode generates. Both workers are then asked
again and again for their status until no page is in use, promised or in quarantine on either side.

Milliseconds of a shared machine say little, so each time is also given in units measured in the
same run: the time of one prefill chunk, and of one round trip to a worker (its status). Asking both
workers takes two round trips: that is the resolution, and each time holds one asking at least, and
the way of the cancellation through the router. p99 of fewer than 100 times is the highest.

A client that leaves too late for its phase is counted as missed, not as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import meshes  # noqa: E402 - the path is set above
from cpu_chat import percentile  # noqa: E402

from pdmesh.wire.messages import WorkerStatus  # noqa: E402

Statuses = Callable[..., Awaitable[list[WorkerStatus]]]
PHASES = ("prefill", "hand-off", "decode")
VOCAB = range(300, 4000)
LONG_ANSWER = 200
PATIENCE_S = 30.0


class NotInPhase(Exception):
    """The request went on before the client could leave in the phase wanted."""


@dataclass(frozen=True)
class Units:
    """What times are compared with, in seconds."""

    chunk: float
    round_trip: float


def at_rest(statuses: list[WorkerStatus]) -> bool:
    """Whether no page is anybody's on either side, and nothing is under way."""
    return not any(
        s.pool.used + s.pool.reserved + s.pool.quarantined + s.leases + s.queued + s.running
        for s in statuses
    )


class Cancels:
    """One client of a mesh that leaves again and again."""

    def __init__(self, stub: Any, statuses: Statuses, prompt_tokens: int, seed: int) -> None:
        self._stub = stub
        self._statuses = statuses
        self._tokens = prompt_tokens
        self._random = random.Random(seed)

    def prompt(self) -> list[int]:
        """Cold: no page of it is cached anywhere."""
        return self._random.choices(VOCAB, k=self._tokens)

    async def units(self, chunk_tokens: int, rounds: int = 5) -> Units:
        """Medians over a few uncancelled requests and status calls."""
        chunks = -(-self._tokens // chunk_tokens)
        prefills, trips = [], []
        for _ in range(rounds):
            answer = await meshes.ask(self._stub, self.prompt(), max_tokens=2, ignore_eos=True)
            assert answer.timing is not None
            prefills.append(answer.timing.prefill_ms / 1e3 / chunks)
            await self.rest()
            for name in ("prefill-0", "decode-0"):
                began = time.perf_counter()
                await self._statuses(name)
                trips.append(time.perf_counter() - began)
        return Units(statistics.median(prefills), statistics.median(trips))

    async def rest(self) -> float:
        """Waits until the workers are at rest; seconds since the call."""
        began = time.perf_counter()
        while not at_rest(await self._statuses("prefill-0", "decode-0")):
            if time.perf_counter() - began > PATIENCE_S:
                raise SystemExit(f"pages are still in use {PATIENCE_S:.0f} s after a cancel")
        return time.perf_counter() - began

    async def cancel(self, phase: str, units: Units) -> float:
        """Seconds from leaving in a phase to rest.

        Raises:
            NotInPhase: the request was further than that already.
        """
        answer = meshes.Answer()
        late = self._random.randint(8, 40)
        wanted = {"prefill": None, "hand-off": 1, "decode": late}[phase]
        asking = asyncio.ensure_future(
            meshes.ask(
                self._stub,
                self.prompt(),
                into=answer,
                leave_after=wanted,
                max_tokens=LONG_ANSWER,
                ignore_eos=True,
            )
        )
        if wanted is None:
            await self._while_prefilling(units)
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        left = await self.rest()
        reached = len(answer.token_ids)
        in_phase = {"prefill": reached == 0, "hand-off": reached == 1, "decode": reached > 1}
        if reached >= LONG_ANSWER or not in_phase[phase]:
            raise NotInPhase
        return left

    async def _while_prefilling(self, units: Units) -> None:
        """Until the prompt is being computed, and then somewhere within its first chunks."""
        while not (await self._statuses("prefill-0"))[0].running:
            pass
        await asyncio.sleep(self._random.random() * 2 * units.chunk)


def report(phase: str, seconds: list[float], missed: int, units: Units) -> str:
    """A line of the table."""
    cells = [f"{phase:<9}", f"{len(seconds):>4}", f"{missed:>6}"]
    for share in (0.5, 0.99):
        value = percentile(seconds, share)
        cells.append(
            f"{value * 1e3:>7.1f} ms = {value / units.chunk:>5.2f} chunks "
            f"= {value / units.round_trip:>5.1f} trips"
        )
    return "  ".join(cells)


async def measure(mesh: meshes.Mesh, arguments: argparse.Namespace) -> None:
    async with meshes.chat_stub(mesh.address) as stub, mesh.watch() as statuses:
        cancels = Cancels(stub, statuses, arguments.prompt_tokens, arguments.seed)
        units = await cancels.units(arguments.chunk_tokens)
        print(
            f"prompts of {arguments.prompt_tokens} tokens; one chunk of {arguments.chunk_tokens} "
            f"takes {units.chunk * 1e3:.1f} ms, one round trip {units.round_trip * 1e3:.2f} ms"
        )
        print(f"{'cancelled':<9}  {'n':>4}  {'missed':>6}  {'p50':<42}  p99")
        for phase in PHASES:
            seconds: list[float] = []
            missed = 0
            while len(seconds) < arguments.cancels and missed < 10 * arguments.cancels:
                try:
                    seconds.append(await cancels.cancel(phase, units))
                except NotInPhase:
                    missed += 1
            print(report(phase, seconds, missed, units) if seconds else f"{phase}: never hit")


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--cancels", type=int, default=50, help="in each phase (default: 50)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="default: 1024")
    parser.add_argument("--chunk-tokens", type=int, default=128, help="of a step (default: 128)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and moments (default: 0)")
    arguments = parser.parse_args()
    topology = f"[prefill]\nchunk_tokens = {arguments.chunk_tokens}\n[decode]\nworkers = 1\n"
    with meshes.running_mesh(topology=topology) as mesh:
        mesh.workers = 2
        asyncio.run(measure(mesh, arguments))


if __name__ == "__main__":
    main()

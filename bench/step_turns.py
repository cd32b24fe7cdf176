"""How long a decode step waits for its turn at Python, while answers go out to their readers.

    python -P bench/step_turns.py --streams 64 --step-ms 12 --turn-ms 5 0.5

A worker's steps run on a thread of their own, messages to readers on another, and Python lets one
of them run at a time: a thread that wants a turn asks for it after the interpreter's switch
interval (5 ms unless it is set). Here the steps' bookkeeping and the streams are the worker's own,
gRPC is real and its readers are another process; a step is Python for `--python-ms`, then a sleep,
in the place of a device. For each interval, in turns within one run, prints what a step takes
beside its own Python and sleep: mean, median and 90th percentile, in milliseconds, and the part of
all steps' time that it is.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import grpc  # noqa: E402 - the path is set above
import torch  # noqa: E402
from figures import as_json  # noqa: E402

from pdmesh.decode.facts import DecodeStepFacts  # noqa: E402 - the path is set above
from pdmesh.decode.framing import Framer  # noqa: E402
from pdmesh.decode.runner import StepRows  # noqa: E402
from pdmesh.decode.sequence import DecodeSequence  # noqa: E402
from pdmesh.decode.speculate import Accepted  # noqa: E402
from pdmesh.decode.stepping import Stepping  # noqa: E402
from pdmesh.model.sampling_state import SamplingState  # noqa: E402
from pdmesh.model.tree import TokenTree  # noqa: E402
from pdmesh.wire.codec import encode  # noqa: E402
from pdmesh.wire.messages import TokenChunk  # noqa: E402
from pdmesh.wire.sampling import SamplingParams  # noqa: E402

SERVICE, METHOD = "bench.Turns", "Stream"
WARM = 10
"""Steps of a round that are not counted."""


class Device:
    """A runner whose steps are Python for a while and then a wait without it."""

    def __init__(self, python_ms: float, step_ms: float) -> None:
        self._python_s = python_ms / 1e3
        self._step_s = step_ms / 1e3
        self._hidden = torch.zeros(1, 16)

    def step(self, rows: Sequence[object]) -> list[StepRows]:
        began = time.perf_counter()
        busy = time.thread_time()
        while time.thread_time() - busy < self._python_s:
            pass
        spent = time.perf_counter() - began
        time.sleep(self._step_s)
        tree, accepted = TokenTree((5,), (-1,)), Accepted((7,), (0,), 0)
        steps = [StepRows(tree, accepted, [None], self._hidden, False) for _ in rows]
        for one in steps:
            one.model_s = self._step_s + min(spent, self._python_s)
        return steps


def sequence(number: int) -> DecodeSequence:
    """A sequence in the middle of a long answer."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1 << 30)
    request: Any = SimpleNamespace(
        sampling=sampling, request_id=str(number), attempt=1, output_offset=0, tenant=""
    )
    entry: Any = SimpleNamespace(
        ended=None,
        readers=0,
        reservation=SimpleNamespace(page_table=tuple(range(80)), publish=lambda *_: None),
    )
    tokens = [7] * 5000
    state = SamplingState(sampling, tokens[:10])
    return DecodeSequence(entry, request, tokens, 4999, None, state, [b""] * (1 << 20))


async def serve(batch: list[DecodeSequence]) -> tuple[grpc.aio.Server, str]:
    """The answers of all sequences, each to whoever asks for its number."""

    async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        one = batch[int(request)]
        framer = Framer(one.queue)
        while True:
            item, parts = await framer.next()
            if item is None:
                return
            assert isinstance(item, TokenChunk)
            yield encode(item)
            for part in parts:
                one.unread.remove(part)

    server = grpc.aio.server()
    handlers = {METHOD: grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


def read(where: str, count: int) -> None:
    """The readers' process."""

    async def one(channel: grpc.aio.Channel, number: int) -> None:
        async for _ in channel.unary_stream(f"/{SERVICE}/{METHOD}")(str(number).encode()):
            pass

    async def everyone() -> None:
        async with grpc.aio.insecure_channel(where) as channel:
            readers = (one(channel, number) for number in range(count))
            await asyncio.gather(*readers, return_exceptions=True)

    asyncio.run(everyone())


async def measure(options: Any) -> list[dict[str, float]]:
    """One entry for each switch interval."""
    kv: Any = SimpleNamespace(status=lambda: SimpleNamespace(used=0))
    limits: Any = SimpleNamespace(
        page_format=SimpleNamespace(fingerprint=lambda: b"", page_size=64), secret=b""
    )
    batch = [sequence(number) for number in range(options.streams)]
    device: Any = Device(options.python_ms, options.step_ms)

    def failed(entry: object, error: Exception) -> None:
        raise error

    stepping = Stepping(device, kv, limits, ThreadPoolExecutor(1), lambda *_: None, failed)
    facts: list[DecodeStepFacts] = []
    stepping.observe = facts.append
    server, where = await serve(batch)
    context = multiprocessing.get_context("spawn")
    readers = context.Process(target=read, args=(where, options.streams), daemon=True)
    readers.start()
    found: dict[float, list[DecodeStepFacts]] = {turn: [] for turn in options.turn_ms}
    try:
        while any(one.queue.empty() and not one.unread for one in batch):  # until all are read
            await stepping.step(batch)
        for _ in range(options.rounds):
            for turn, kept in found.items():
                sys.setswitchinterval(turn / 1e3)
                facts.clear()
                for _ in range(WARM + options.steps):
                    await stepping.step(batch)
                kept += facts[WARM:]
    finally:
        for one in batch:
            one.queue.put_nowait(None)
        await asyncio.to_thread(readers.join, 10)
        readers.terminate()
        await server.stop(None)
    return [figures(turn, kept) for turn, kept in found.items()]


def figures(turn: float, facts: Sequence[DecodeStepFacts]) -> dict[str, float]:
    beside = sorted((one.duration_s - one.model_s) * 1e3 for one in facts)
    whole = sum(one.duration_s for one in facts) * 1e3
    return {
        "turn_ms": turn,
        "mean_ms": round(statistics.fmean(beside), 2),
        "median_ms": round(statistics.median(beside), 2),
        "p90_ms": round(beside[int(0.9 * len(beside))], 2),
        "part": round(sum(beside) / whole, 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__, "standard output")
    parser.add_argument("--streams", type=int, default=64, help="answers that are read")
    parser.add_argument("--python-ms", type=float, default=0.5, help="of a step, before it waits")
    parser.add_argument("--step-ms", type=float, default=12.0, help="that a step waits")
    parser.add_argument("--turn-ms", type=float, nargs="+", default=[5.0, 0.5], help="intervals")
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--rounds", type=int, default=5, help="of every interval")
    options = parser.parse_args(arguments)
    for found in asyncio.run(measure(options)):
        print(as_json(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

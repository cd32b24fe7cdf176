"""The host's work in a chunk of a prefill worker, without a device: nothing but what Python does.

    python -P bench/prefill_host.py --chunk 1024 --chunks 2 --layers 8

A prefill worker as it is, over a model whose operations take no time: each gives what its
definition gave for the first rows of that shape. Pages are pushed layer by layer over CUDA IPC to
a receiver in another process; the device's memory is a stand-in that copies nothing. Prompts come
one after another. Prints milliseconds in JSON, medians: of a prompt a chunk, of a step on the
compute thread a chunk, in it until the first layer is computed (from then on a device has work,
and the host is ahead of it or not) and in pushes, and from the end of a step to the beginning of
the next one of its prompt, when a device has nothing to do. Kernels are not launched, so launches
are not in it: their number is. `--profile` prints where the time of the compute thread goes.
"""

from __future__ import annotations

import asyncio
import cProfile
import multiprocessing
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import node_dry  # noqa: E402 - the path is set above
import numpy as np  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
from figures import as_json  # noqa: E402
from torch import Tensor  # noqa: E402

from pdmesh.kernels.backends import PLAIN, Backends, Choice  # noqa: E402
from pdmesh.kvcache.manager import KvManager  # noqa: E402
from pdmesh.kvcache.store import LatentStore  # noqa: E402
from pdmesh.kvtransfer.cuda_ipc import CudaIpcDialer, CudaIpcListener  # noqa: E402
from pdmesh.kvtransfer.device_memory import Copy, ExportedPool  # noqa: E402
from pdmesh.kvtransfer.receiver import TransferReceiver  # noqa: E402
from pdmesh.model.config import ModelConfig  # noqa: E402
from pdmesh.model.device.building import build_weights  # noqa: E402
from pdmesh.model.device.full_width import DEEPSEEK_V3  # noqa: E402
from pdmesh.model.device.model import DeviceModel  # noqa: E402
from pdmesh.model.device.sources import RandomSource  # noqa: E402
from pdmesh.prefill.runner import ChunkResult, PrefillRunner, PromptRows  # noqa: E402
from pdmesh.prefill.scheduler import PrefillScheduler  # noqa: E402
from pdmesh.prefill.work import PrefillLimits  # noqa: E402
from pdmesh.prefill.worker import PrefillWorker  # noqa: E402
from pdmesh.wire.hashes import PageFormat  # noqa: E402
from pdmesh.wire.messages import Lease, PrefillRequest  # noqa: E402
from pdmesh.wire.sampling import SamplingParams  # noqa: E402

PAGE = 64
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 8,
    "v_head_dim": 64,
}
"""So narrow that what torch computes beside the operations takes next to nothing."""


class NoDevice:
    """A `DeviceMemory` that holds every store and copies nothing; its own lane and mark."""

    done = True

    def holds(self, store: LatentStore) -> bool:
        return True

    def export(self, store: LatentStore) -> ExportedPool:
        return ExportedPool(b"none", 0, store.num_pages * store.page_bytes, "none")

    def open(self, pool: ExportedPool) -> int:
        return 0

    def lane(self) -> NoDevice:
        return self

    def staging(self, size: int) -> np.ndarray:
        return np.zeros(size, np.uint8)

    def settle(self) -> None:
        pass

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def follow(self, ready: torch.cuda.Event) -> None:
        pass

    def copy(self, copies: Sequence[Copy]) -> None:
        pass

    def record(self) -> NoDevice:
        return self

    def wait(self) -> None:
        pass

    def close(self, *_: object) -> None:
        pass


class Instant:
    """Operations that compute once for rows of a shape.

    Attributes:
        calls: of operations so far.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._made: dict[object, Any] = {}

    def ops(self) -> Backends:
        """All of them."""
        return Backends([Choice(op, "none", "", self._of(op, call)) for op, call in PLAIN.items()])

    def _of(self, op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(first: Any, *rest: Any, **given: Any) -> Any:
            self.calls += 1
            rows = first if isinstance(first, Tensor) else first.values
            weight = rest[0] if rest else None
            weight = getattr(weight, "values", weight)
            key = op, rows.shape, weight.shape if isinstance(weight, Tensor) else None
            if key not in self._made:
                self._made[key] = call(first, *rest, **given)
            return self._made[key]

        return made


class Timed:
    """A runner that notes when its steps begin, have computed a layer, and end."""

    def __init__(self, runner: PrefillRunner, profile: cProfile.Profile | None) -> None:
        self._runner = runner
        self._profile = profile
        self.steps: list[tuple[float, float, float, float]] = []
        """Of each: its beginning, its first layer's, its end, and the sum of its pushes."""

    def step(self, prompts: Sequence[PromptRows]) -> list[ChunkResult]:
        began, first, pushing = time.perf_counter(), 0.0, 0.0

        def timed(push: Callable[[int], None]) -> Callable[[int], None]:
            def pushed(layer: int) -> None:
                nonlocal first, pushing
                at = time.perf_counter()
                first = first or at
                push(layer)
                pushing += time.perf_counter() - at

            return pushed

        for prompt in prompts:
            prompt.push = timed(prompt.push)
        if self._profile is not None:
            self._profile.enable()
        results = self._runner.step(prompts)
        if self._profile is not None:
            self._profile.disable()
        self.steps.append((began, first, time.perf_counter(), pushing))
        return results


def format_of(layers: int, width: int) -> PageFormat:
    return PageFormat("host", "bench", "bfloat16", PAGE, layers, 0, width)


def receive(fmt: PageFormat, pages: int, commands: Connection) -> None:
    """The other process: gives leases and waits until their pages are there."""
    torch.set_num_threads(1)
    shape = fmt.num_layers, fmt.page_size, fmt.latent_width
    store = LatentStore(pages, *shape, torch.bfloat16)
    receiver = TransferReceiver(store, [CudaIpcListener(fmt, NoDevice())])
    receiver.start()
    commands.send(receiver.addresses)
    while (lease := commands.recv()) is not None:
        receiver.expect(lease, 1, range(pages), 0, fmt.num_layers)
        commands.send(None)
        asyncio.run(receiver.wait(lease, 60.0))
        receiver.cancel(lease)
        commands.send(None)
    receiver.close()


async def prompts(
    worker: PrefillWorker, fmt: PageFormat, tokens: int, count: int, peer: Connection
) -> list[float]:
    """Milliseconds of each prompt, from the request to its first token."""
    transports = await asyncio.to_thread(peer.recv)
    running, times = asyncio.ensure_future(worker.run()), []
    for number in range(count):
        lease = Lease(
            lease_id=f"l{number}",
            generation=1,
            instance="d",
            cached_pages=0,
            num_pages=-(-tokens // PAGE),
            transports=tuple(transports),
            page_format=fmt,
        )
        peer.send(lease.lease_id)
        await asyncio.to_thread(peer.recv)
        request = PrefillRequest(
            request_id=f"r{number}",
            attempt=1,
            deadline_ms=600_000,
            token_ids=tuple((number + i) % 250 for i in range(tokens)),
            sampling=SamplingParams(temperature=0.0),
            lease=lease,
        )
        began = time.perf_counter()
        await worker.prefill(request)
        times.append((time.perf_counter() - began) * 1e3)
        await asyncio.to_thread(peer.recv)
        while worker.unfinished:
            await asyncio.sleep(0)
    running.cancel()
    peer.send(None)
    await worker.close(1.0)
    return times


def measure(layers: int, chunk: int, chunks: int, count: int, profiled: bool) -> dict[str, Any]:
    """Medians over `count` prompts, of each chunk but the first ones."""
    dense = min(3, layers - 1)
    sizes = {"num_hidden_layers": layers, "first_k_dense_replace": dense}
    config = ModelConfig.from_hf(DEEPSEEK_V3 | node_dry.TINY | SMALL | sizes)
    instant = Instant()
    weights = build_weights(config, RandomSource(node_dry.CPU), node_dry.CPU, mtp=False)
    model = DeviceModel(config, weights, instant.ops())
    fmt, tokens = format_of(layers, config.latent_width), chunk * chunks
    pages = tokens // PAGE
    store = LatentStore(pages, layers, PAGE, config.latent_width, torch.bfloat16)
    profile = cProfile.Profile() if profiled else None
    runner = Timed(PrefillRunner(model, store, PAGE, mtp=False), profile)
    limits = PrefillLimits(fmt, config.vocab_size, config.max_position_embeddings, b"k" * 32)
    worker = PrefillWorker(
        runner,  # type: ignore[arg-type]
        KvManager(pages, PAGE, lambda _: None, lambda _: None),
        store,
        PrefillScheduler(chunk, PAGE, 8),
        limits,
        dialers=[CudaIpcDialer(NoDevice())],
    )
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    peer = context.Process(target=receive, args=(fmt, pages, theirs), daemon=True)
    peer.start()
    times = asyncio.run(prompts(worker, fmt, tokens, count, mine))
    peer.join()
    steps = runner.steps[2 * chunks :]
    gaps = [
        later[0] - step[2]
        for number, (step, later) in enumerate(zip(steps, steps[1:], strict=False), start=1)
        if number % chunks
    ]
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return {
        "what": "host's work in a prefill chunk",
        "tokens": chunk,
        "layers": layers,
        "prompt_ms_a_chunk": round(statistics.median(times[2:]) / chunks, 3),
        "step_ms": _median(end - began for began, _, end, _ in steps),
        "before_first_layer_ms": _median(first - began for began, first, _, _ in steps),
        "pushes_ms": _median(pushing for *_, pushing in steps),
        "between_steps_ms": _median(gaps) if gaps else None,
        "operations": instant.calls // len(runner.steps),
    }


def _median(seconds: Any) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__, "standard output")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a chunk")
    parser.add_argument("--chunks", type=int, default=2, help="of a prompt")
    parser.add_argument("--layers", type=int, nargs="+", default=[8], help="of the model")
    parser.add_argument("--prompts", type=int, default=40, help="how many are computed")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for layers in options.layers:
        found = measure(layers, options.chunk, options.chunks, options.prompts, options.profile)
        print(as_json(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

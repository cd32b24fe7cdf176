"""Steps of a full-width DeepSeek-V3 with random weights on one GPU: graphs, host overhead, prompts.

    python -P bench/gpu_engine.py --layers 8 --batch 64 128

Prints one line a measurement and writes them to $OUT/gpu_engine.json where OUT is set. A decode
step has two rows a sequence over `--keys` keys; "graph" is the device's time of a replay, "step"
the wall time of `DeviceModel.forward` from the rows' positions to hidden states that the host has
waited for; what is left of the step beside the graph is the host's share. A measurement whose
hidden states are not finite has no figures but an error, and the exit code is then 1.
`unlike_single_launches` are rows of a replay with other bits than the same step has whose
operations wait for each other: some kernel did not wait for another.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
from figures import as_json  # noqa: E402
from torch import Tensor  # noqa: E402

from pdmesh.decode.drafter import SequenceRows  # noqa: E402
from pdmesh.decode.runner import DecodeRunner  # noqa: E402
from pdmesh.kernels.backends import choose_backends  # noqa: E402
from pdmesh.kernels.quantised import Rows  # noqa: E402
from pdmesh.model.batch import Batch, SequenceSlice  # noqa: E402
from pdmesh.model.device.building import build_weights  # noqa: E402
from pdmesh.model.device.full_width import full_width  # noqa: E402
from pdmesh.model.device.model import DeviceModel, shapes_of  # noqa: E402
from pdmesh.model.device.padding import padded  # noqa: E402
from pdmesh.model.device.sources import RandomSource  # noqa: E402
from pdmesh.model.sampling_state import SamplingState  # noqa: E402
from pdmesh.wire.errors import InternalError, PdmeshError  # noqa: E402
from pdmesh.wire.sampling import SamplingParams  # noqa: E402

PAGE = 64


def event_times(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of `count` calls on the device."""
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def wall_times(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of `count` calls until the device has done them."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def shares(call: Callable[[], object], most: int = 16) -> list[tuple[str, int, float]]:
    """What a call does on the device: (kernel, launches, milliseconds in all), longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    rows = [(e.key[:70], e.count, e.self_device_time_total / 1e3) for e in profile.key_averages()]
    return sorted(rows, key=lambda row: -row[2])[:most]


def print_shares(call: Callable[[], object]) -> None:
    """A line for each of the longest kernels of a call; or why there is none."""
    try:
        found = shares(call)
    except Exception as failure:  # noqa: BLE001 - the times are what matters, and they are there
        print(f"    no profile: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
        return
    for name, launches, ms in found:
        print(f"    {ms:8.3f} ms {launches:5} x {name}", flush=True)


def checked(hidden: Tensor, what: str) -> Tensor:
    """The hidden states [m, hidden] themselves.

    Raises:
        InternalError: one of them is not finite.
    """
    wrong = ~torch.isfinite(hidden.float()).all(-1)
    if bool(wrong.any()):
        rows = wrong.nonzero().flatten().tolist()
        raise InternalError(
            f"{what}: {len(rows)} of {len(hidden)} rows are not finite, the first is row {rows[0]}"
        )
    return hidden


def measured(what: str, batch: int, call: Callable[[], dict]) -> dict:
    """What a measurement gives, or its error in place of figures: the others go on."""
    try:
        return call()
    except PdmeshError as error:
        return {"what": what, "batch": batch, "error": str(error)}
    except Exception as error:  # noqa: BLE001 - a library's own errors are of any type
        traceback.print_exc()
        return {"what": what, "batch": batch, "error": f"{type(error).__name__}: {error!s:.300}"}


UNDEFINED = ("permute_masked", "permute_contiguous", "masked_grouped_gemm", "gate_topk")
"""Operations of whose output only a part is defined."""


def one_by_one(model: DeviceModel, call: Callable[[], Tensor]) -> tuple[Tensor, str]:
    """A call without graphs whose operations wait for each other.

    Returns:
        what it gives; the first operation whose output is not finite, or that there is none.
    """
    found: list[str] = []
    calls = 0

    def watched(name: str, operation: Callable) -> Callable:
        def run(*arguments: object, **keywords: object) -> object:
            nonlocal calls
            output = operation(*arguments, **keywords)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            calls += name == "rope_append"
            if name in UNDEFINED or "masked" in name or found:
                return output
            first = output[0] if isinstance(output, tuple) else output
            tensor = first.scales if isinstance(first, Rows) else first
            if not bool(torch.isfinite(tensor.float()).all()):
                found.append(f"{name}, rope_append call {calls} being the last one")
            return output

        if hasattr(operation, "plan"):
            run.plan = operation.plan  # type: ignore[attr-defined]
        return run

    before = {choice.op: getattr(model.ops, choice.op) for choice in model.ops.choices}
    pool, model._pool = model._pool, None
    try:
        for name, operation in before.items():
            setattr(model.ops, name, watched(name, operation))
        given = call()
    finally:
        model._pool = pool
        for name, operation in before.items():
            setattr(model.ops, name, operation)
    return given, found[0] if found else "none, launched one by one"


def decode_batch(count: int, keys: int, rows: int, shift: int = 0) -> Batch:
    """`count` sequences of `keys` keys, the last `rows` of which are computed."""
    pages = -(-(keys + 1) // PAGE)
    slices = [
        SequenceSlice(
            tuple(range(i * pages, (i + 1) * pages)), keys - rows - shift, keys - shift, keys - rows
        )
        for i in range(count)
    ]
    return Batch.build(slices, [[5 + i] * rows for i in range(count)], PAGE, "cuda")


def measure_decode(
    model: DeviceModel, pool: Tensor, count: int, keys: int, rows: int, profiled: bool = False
) -> dict:
    batch = decode_batch(count, keys, rows)
    graphs = model._graphs_for(batch, "absorbed", pool, 0)  # noqa: SLF001
    assert graphs is not None
    model.forward(batch, pool, "absorbed")
    replay, output = graphs._graphs[padded(batch, batch.host_tokens, rows, graphs.sizes, 1).size]  # noqa: SLF001

    def step() -> Tensor:
        return model.forward(decode_batch(count, keys, rows), pool, "absorbed")

    try:
        for number in range(3):
            checked(step(), f"step {number}")
    except InternalError:
        pool.normal_()  # what such a step wrote would be found first
        print(f"NOT FINITE: hidden states; first: {one_by_one(model, step)[1]}", flush=True)
        raise
    alone, _ = one_by_one(model, step)
    unlike = int((alone != step()).any(-1).sum())
    graph = statistics.median(event_times(replay, 10))
    whole = statistics.median(wall_times(step, 10))
    if profiled:
        print_shares(replay)
    checked(output, "the last replay")
    checked(step(), "the last step")
    began = time.perf_counter()
    for _ in range(20):
        decode_batch(count, keys, rows)
    building = (time.perf_counter() - began) / 20 * 1e3
    return {
        "what": "decode",
        "batch": count,
        "rows": rows,
        "keys": keys,
        "graph_ms": round(graph, 3),
        "step_ms": round(whole, 3),
        "host_share": round((whole - graph) / whole, 4),
        "batch_building_ms": round(building, 3),
        "layer_us": round(graph * 1e3 / model.config.num_hidden_layers, 1),
        "unlike_single_launches": unlike,
    }


def measure_runner(model: DeviceModel, pool: Tensor, count: int, keys: int) -> dict:
    """Whole steps of a decode worker: batch, graph, logits, greedy choice; one row a sequence."""
    pages = -(-(keys + 1) // PAGE)
    params = SamplingParams(temperature=0.0)
    sequences = [
        SequenceRows(
            [7] * keys,
            tuple(range(i * pages, (i + 1) * pages)),
            keys - 1,
            SamplingState(params, [7]),
            100,
            None,
        )
        for i in range(count)
    ]
    batch = decode_batch(count, keys, 1)
    graphs = model._graphs_for(batch, "absorbed", pool, 0)
    replay, output = graphs._graphs[padded(batch, batch.host_tokens, 1, graphs.sizes, 1).size]
    checked(model.forward(batch, pool, "absorbed"), "the first step")
    runner = DecodeRunner(model, SimpleNamespace(tensor=pool), PAGE, draft_tokens=0)
    step = lambda: runner.step(sequences)  # noqa: E731
    for _ in range(3):
        step()
    hidden = torch.zeros(count, model.config.hidden_size, dtype=torch.bfloat16, device="cuda")
    graph = statistics.median(event_times(replay, 10))
    head = statistics.median(event_times(lambda: model.logits(hidden).argmax(-1), 10))
    whole = statistics.median(wall_times(step, 10))
    checked(output, "the last step")
    return {
        "what": "decode worker's step",
        "batch": count,
        "rows": 1,
        "graph_ms": round(graph, 3),
        "head_ms": round(head, 3),
        "step_ms": round(whole, 3),
        "host_share": round((whole - graph - head) / whole, 4),
        "tokens_per_s": round(count / whole * 1e3),
    }


def measure_prefill(model: DeviceModel, pool: Tensor, tokens: int, profiled: bool = False) -> dict:
    table = tuple(range(-(-tokens // PAGE)))
    batch = Batch.build([SequenceSlice(table, 0, tokens, 0)], [[7] * tokens], PAGE, "cuda")
    values = torch.randint(0, model.config.vocab_size, (tokens,), device="cuda")
    batch.padded_tokens[:tokens] = values
    call = lambda: model.forward(batch, pool, "mha")  # noqa: E731
    checked(call(), "the first prompt")
    ms = statistics.median(wall_times(call, 5))
    checked(call(), "the last prompt")
    per_second = tokens / ms * 1e3
    if profiled:
        print_shares(call)
    return {
        "what": "prefill",
        "tokens": tokens,
        "ms": round(ms, 2),
        "tokens_per_s_of_these_layers": round(per_second),
        "layer_ms": round(ms / model.config.num_hidden_layers, 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(
        __doc__, "standard output, and to gpu_engine.json in $OUT where that is set"
    )
    parser.add_argument("--layers", type=int, default=6, help="of the model, at full width")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[64, 128], help="sequences of a decode step"
    )
    parser.add_argument("--keys", type=int, default=5000, help="cached tokens of a sequence")
    parser.add_argument("--rows", type=int, default=2, help="new tokens of a sequence in a step")
    parser.add_argument("--prompt", type=int, nargs="*", default=[4096], help="tokens of a prompt")
    parser.add_argument("--experts", type=int, default=256, help="fewer: as one rank has them")
    parser.add_argument("--profile", action="store_true", help="kernels of a replay")
    parser.add_argument("--force", nargs="*", default=[], help="operation=backend")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = full_width(options.layers, options.experts)
    device = torch.device("cuda")
    began = time.perf_counter()
    weights = build_weights(config, RandomSource(device), device, mtp=False)
    forced = dict(item.split("=", 1) for item in options.force)
    model = DeviceModel(config, weights, choose_backends(device, shapes_of(config), forced))
    torch.cuda.synchronize()
    print(
        f"weights {torch.cuda.memory_allocated() / 1e9:.1f} GB, {time.perf_counter() - began:.1f} s"
    )
    print("\n".join(model.ops.describe()))
    pages = max(options.batch) * -(-(options.keys + 1) // PAGE)
    pool = model.new_latents(pages, PAGE)
    pool.normal_()
    model.capture_sizes(pool, {1, options.rows}, sorted(options.batch))
    calls: list[tuple[str, int, Callable[[], dict]]] = []
    for count in options.batch:
        decode = partial(measure_decode, model, pool, count, options.keys, options.rows)
        calls.append(("decode", count, partial(decode, options.profile)))
    for count in options.batch:
        worker = partial(measure_runner, model, pool, count, options.keys)
        calls.append(("decode worker's step", count, worker))
    for tokens in options.prompt:
        prompt = partial(measure_prefill, model, pool, tokens, options.profile)
        calls.append(("prefill", tokens, prompt))
    results = []
    for what, size, call in calls:
        pool.normal_()  # nothing of the measurement before
        results.append(measured(what, size, call))
        print(as_json(results[-1]), flush=True)
        if out := os.environ.get("OUT"):
            Path(out, "gpu_engine.json").write_text(as_json(results, 1) + "\n")
    print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    raise SystemExit(main())

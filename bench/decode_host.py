"""The host's work in a step of a decode worker, without a device: nothing but what Python does.

    python -P bench/decode_host.py --batch 64 --keys 5000 --drafts 0 1

A tiny model on the CPU whose graphs do nothing when they are replayed, as if a device took no time:
what is left of a step is drafts, batch, page tables, copies to the graph's buffers, the choice of
tokens and what they mean for each sequence. Prints a step's milliseconds in JSON, the median and
the least, and the least until the main model's graph begins: from then on a device computes, and
the host's work costs nothing until tokens are chosen. `--profile` prints where the time goes.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import node_dry  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
from figures import as_json  # noqa: E402
from torch import Tensor  # noqa: E402

from pdmesh.decode.capturing import captured_rows  # noqa: E402
from pdmesh.decode.drafter import SequenceRows  # noqa: E402
from pdmesh.decode.runner import DecodeRunner  # noqa: E402
from pdmesh.model.device.building import build_weights  # noqa: E402
from pdmesh.model.device.model import DeviceModel  # noqa: E402
from pdmesh.model.device.sources import RandomSource  # noqa: E402
from pdmesh.model.sampling_state import SamplingState  # noqa: E402
from pdmesh.wire.sampling import SamplingParams  # noqa: E402

PAGE = 64
LEFT = 1000
"""Tokens that an answer may still get: none ends while it is timed."""


class Instant:
    """Records graphs whose replays take no time.

    Attributes:
        replayed: when the last one was.
    """

    replayed = 0.0

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        def replay() -> None:
            self.replayed = time.perf_counter()

        return replay, compute().clone()


def running(model: DeviceModel, count: int, keys: int, drafts: int) -> list[SequenceRows]:
    """Sequences of `keys` tokens over pages of their own."""
    pages = -(-(keys + LEFT) // PAGE)
    hidden = torch.zeros(1, model.config.hidden_size, dtype=model.dtype)
    state = SamplingParams(temperature=0.0)
    return [
        SequenceRows(
            [7] * keys,
            tuple(range(i * pages, (i + 1) * pages)),
            keys - 1,
            SamplingState(state, [7]),
            LEFT,
            hidden if drafts else None,
        )
        for i in range(count)
    ]


def measure(model: DeviceModel, count: int, keys: int, drafts: int, profiled: bool) -> dict:
    """A step's milliseconds; every step gives each sequence a token more."""
    sequences = running(model, count, keys, drafts)
    pages = sum(len(s.page_table) for s in sequences)
    pool = torch.empty(0).new_empty(
        (pages, model.num_latent_layers, PAGE, model.config.latent_width), dtype=model.dtype
    )
    rows, mtp_rows = captured_rows(drafts, model.weights.mtp is not None)
    graphs = Instant()
    model._graphs = ([], [])  # noqa: SLF001
    model.capture_sizes(pool, rows, [count], mtp_rows if drafts else (), graphs)
    runner = DecodeRunner(model, SimpleNamespace(tensor=pool), PAGE, draft_tokens=drafts)
    times, before = [], []
    profile = cProfile.Profile()
    for number in range(60):
        if profiled and number == 10:
            profile.enable()
        began = time.perf_counter()
        results = runner.step(sequences)
        times.append((time.perf_counter() - began) * 1e3)
        before.append((graphs.replayed - began) * 1e3)
        for s, result in zip(sequences, results, strict=True):
            s.tokens = [*s.tokens, *result.accepted.tokens]
            s.computed += len(result.accepted.path)
            s.sampling.advance(result.accepted.tokens)
            s.pending = result.hidden if drafts else None
    if profiled:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return {
        "what": "host's work in a decode step",
        "batch": count,
        "keys": keys,
        "drafts": drafts,
        "step_ms": round(statistics.median(times[10:]), 3),
        "least_ms": round(min(times[10:]), 3),
        "least_before_ms": round(min(before[10:]), 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__, "standard output")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--keys", type=int, default=5000, help="cached tokens of a sequence")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1], help="drafts a step")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    config = node_dry.tiny_config()
    weights = build_weights(config, RandomSource(node_dry.CPU), node_dry.CPU, mtp=True)
    model = DeviceModel(config, weights, node_dry.plain_ops())
    for drafts in options.drafts:
        found = measure(model, options.batch, options.keys, drafts, options.profile)
        print(as_json(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Both forms of prompt attention on one thread: where one overtakes the other, and chunks.

    .venv/bin/python -P bench/prefill_form.py            (--help for the options)

First the shipped model computes C tokens after P cached ones, in MHA form and in absorbed form by
turns; the ratio stands beside that of the operations counted by `pdmesh.model.form` (all linear
work included). Then one layer of the same shape computes a long prompt in MHA form, in chunks and
at once: each chunk projects all earlier latents again.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above

from pdmesh.launch.topology import shipped_model  # noqa: E402 - the path is set above
from pdmesh.model.batch import Batch, Form, SequenceSlice  # noqa: E402
from pdmesh.model.config import ModelConfig  # noqa: E402
from pdmesh.model.deepseek import DeepseekV3  # noqa: E402
from pdmesh.model.form import form_costs, prefill_form  # noqa: E402
from pdmesh.model.weights import load_model  # noqa: E402

PAGE = 64


class Prompt:
    """Random latents of one sequence and the model that continues it."""

    def __init__(self, model: DeepseekV3, longest: int) -> None:
        pages = -(-longest // PAGE)
        self.model = model
        self.table = tuple(range(pages))
        self.latents = model.new_latents(pages, PAGE).normal_()

    @torch.inference_mode()
    def rows(self, start: int, end: int, form: Form) -> None:
        item = SequenceSlice(self.table, start, end, start)
        tokens = [i % self.model.config.vocab_size for i in range(start, end)]
        self.model(Batch.build([item], [tokens], PAGE), self.latents, form)


def alternate(runs: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Seconds of each run in each round; the first, unmeasured round warms up."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, kept in zip(runs, times, strict=True):
            begin = time.perf_counter()
            run()
            if number:
                kept.append(time.perf_counter() - begin)
    return times


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def linear_operations(model: DeepseekV3) -> int:
    """Twice the operations a token and layer of everything but attention and up-projection."""
    config = model.config
    total = 0
    for name, weight in model.named_parameters():
        if not name.startswith("layers.") or weight.dim() < 2:
            continue
        if name.endswith(("k_b_proj", "v_b_proj")):
            continue
        share = config.gate.top_k / config.n_routed_experts if weight.dim() == 3 else 1.0
        total += int(4 * weight.numel() * share)
    return total // config.num_hidden_layers


def crossover(points: Sequence[tuple[int, float]]) -> str:
    """Where the ratio absorbed / MHA first passes one, between two measured lengths."""
    for (a, low), (b, high) in zip(points, points[1:], strict=False):
        if low < 1.0 <= high:
            return f"{a + (b - a) * (1.0 - low) / (high - low):.0f}"
    return f"below {points[0][0]}" if points[0][1] >= 1.0 else f"beyond {points[-1][0]}"


def forms(model: DeepseekV3, cached: Sequence[int], new: Sequence[int], rounds: int) -> None:
    prompt = Prompt(model, max(cached) + max(new))
    linear = linear_operations(model)
    print("cached  new  absorbed/MHA  by operations  rule")
    for before in cached:
        points = []
        for count in new:
            runs = [
                partial(prompt.rows, before, before + count, "mha"),
                partial(prompt.rows, before, before + count, "absorbed"),
            ]
            mha, absorbed = alternate(runs, rounds)
            measured = ratio(absorbed, mha)
            points.append((count, measured))
            costs = [cost + linear * count for cost in form_costs(model.config, before, count)]
            rule = prefill_form(model.config, before, before + count)
            counted = costs[1] / costs[0]
            print(f"{before:6d} {count:4d} {measured:13.2f} {counted:14.2f}  {rule}", flush=True)
        ruled = next((c for c in range(1, 4096) if mha_wins(model.config, before, c)), None)
        print(f"{before:6d} cached: measured crossover {crossover(points)}, rule's {ruled}")


def mha_wins(config: ModelConfig, cached: int, new: int) -> bool:
    return prefill_form(config, cached, cached + new) == "mha"


def chunks(config: ModelConfig, length: int, sizes: Sequence[int], rounds: int) -> None:
    """A prompt in MHA form in chunks, as a multiple of the same prompt at once."""
    small = dataclasses.replace(
        config,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        max_position_embeddings=length,
    )
    prompt = Prompt(DeepseekV3(small).requires_grad_(False).eval(), length)

    def whole(size: int) -> None:
        for start in range(0, length, size):
            prompt.rows(start, min(start + size, length), "mha")

    linear = linear_operations(prompt.model)
    runs = [partial(whole, size) for size in (length, *sizes)]
    times = alternate(runs, rounds)
    at_once = form_costs(small, 0, length)[0] + linear * length
    print(f"{length} tokens, one layer: chunk  time / at once  by operations")
    for size, taken in zip(sizes, times[1:], strict=True):
        starts = range(0, length, size)
        counted = sum(form_costs(small, s, min(size, length - s))[0] for s in starts)
        counted += linear * length
        print(f"{size:30d} {ratio(taken, times[0]):15.2f} {counted / at_once:14.2f}", flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--cached",
        type=numbers,
        default=[128, 512, 2048],
        metavar="P,P,...",
        help="tokens of the prefix",
    )
    parser.add_argument(
        "--new",
        type=numbers,
        default=[8, 16, 32, 64, 128, 192],
        metavar="C,C,...",
        help="tokens behind it",
    )
    parser.add_argument("--rounds", type=int, default=5, help="forms taking turns")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the chunked prompt")
    parser.add_argument(
        "--chunks",
        type=numbers,
        default=[512, 1024, 2048],
        metavar="N,N,...",
        help="tokens of a chunk",
    )
    parser.add_argument("--chunk-rounds", type=int, default=2, help="of the chunked prompt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(shipped_model())
    forms(model, args.cached, args.new, args.rounds)
    chunks(model.config, args.length, args.chunks, args.chunk_rounds)


if __name__ == "__main__":
    main()

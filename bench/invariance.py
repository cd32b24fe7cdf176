"""What bitwise invariance costs: both arithmetic modes beside the same model without any.

    .venv/bin/python -P bench/invariance.py        (--help for sizes and rounds)

"none" is what one writes when results may depend on the batch: rows as they come, keys and values
in one piece, torch's scaled_dot_product_attention, prompts in MHA form and decode in absorbed form.
"fast" has the same forms over pages in fixed splits with rows padded to four; "exact" computes
prompts in absorbed form too. The three take turns in every round; a figure is the median over
rounds of its time divided by that of "none" in the same round. One thread, float32.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
from figures import as_json  # noqa: E402

from pdmesh.kernels import linear as linear_module  # noqa: E402 - the path is set above
from pdmesh.launch.topology import shipped_model  # noqa: E402
from pdmesh.model import mla  # noqa: E402
from pdmesh.model.batch import Batch, Form, SequenceSlice  # noqa: E402
from pdmesh.model.deepseek import DeepseekV3  # noqa: E402
from pdmesh.model.weights import load_model  # noqa: E402

MODES = ("none", "fast", "exact")
PAGE = 64


@dataclass(frozen=True)
class Case:
    """Sequences of which positions start..end-1 are computed in one step."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    prefill: bool

    def form(self, mode: str) -> Form:
        return "mha" if self.prefill and mode != "exact" else "absorbed"


def cases(context: int) -> list[Case]:
    """Prompts of several lengths, and decode steps of two rows (a token and its draft)."""
    prompts = [Case(f"prompt of {n}", ((0, n),), True) for n in (64, 256, context) if n <= context]
    prompts.append(Case("8 prompts of 64", ((0, 64),) * 8, True))
    prompts.append(Case(f"128 after {context - 128} cached", ((context - 128, context),), True))
    steps = [
        Case(f"decode, batch {n}, context {context}", ((context - 2, context),) * n, False)
        for n in (1, 4, 16)
    ]
    return prompts + steps


class Plain:
    """Attention over contiguous keys, with nothing fixed."""

    def __init__(self, slices: Sequence[SequenceSlice]) -> None:
        self._slices = slices

    def _keys(self, latents: Tensor, layer: int, item: SequenceSlice) -> Tensor:
        pages = torch.tensor(item.page_table)
        return latents[pages, layer].flatten(0, 1)[: item.end]

    def absorbed(
        self, query: Tensor, latents: Tensor, layer: int, walk: object, rank: int
    ) -> Tensor:
        parts, first = [], 0
        for item in self._slices:
            count = item.end - item.start
            keys = self._keys(latents, layer, item)
            # All heads read the same keys: heads are rows, as one would write it for speed.
            rows = query[first : first + count].flatten(0, 1)
            mask = None
            if count > 1:
                seen = torch.arange(item.end) <= torch.arange(item.start, item.end)[:, None]
                mask = seen.repeat_interleave(query.shape[1], dim=0)
            attended = F.scaled_dot_product_attention(
                rows[None], keys[None], keys[None, :, :rank], attn_mask=mask, scale=1.0
            )
            parts.append(attended[0].view(count, query.shape[1], rank))
            first += count
        return torch.cat(parts)

    def mha(
        self, query: Tensor, latents: Tensor, layer: int, walk: object, up: tuple[Tensor, Tensor]
    ) -> Tensor:
        heads, _, rank = up[0].shape
        parts, first = [], 0
        for item in self._slices:
            count = item.end - item.start
            keys = self._keys(latents, layer, item)
            projected, values = (
                F.linear(keys[:, :rank], weight.flatten(0, 1)).view(item.end, heads, -1)
                for weight in up
            )
            rotated = keys[:, None, rank:].expand(-1, heads, -1)
            joined = torch.cat([projected, rotated], dim=-1).transpose(0, 1)
            rows = query[first : first + count].transpose(0, 1)
            parts.append(self._causal(rows, joined, values.transpose(0, 1), item))
            first += count
        return torch.cat(parts)

    @staticmethod
    def _causal(rows: Tensor, keys: Tensor, values: Tensor, item: SequenceSlice) -> Tensor:
        """rows [heads, n, d], keys and values [heads, s, d]: [n, heads, v]."""
        whole = item.start == 0
        mask = None
        if not whole:
            mask = torch.arange(item.end) <= torch.arange(item.start, item.end)[:, None]
        attended = F.scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=mask, is_causal=whole, scale=1.0
        )
        return attended[0].transpose(0, 1)


@contextmanager
def without_invariance(slices: Sequence[SequenceSlice]) -> Iterator[None]:
    """Rows as they come and plain attention, while inside."""
    before = linear_module.ROW_MULTIPLE, mla.absorbed_attention, mla.mha_attention
    plain = Plain(slices)
    linear_module.ROW_MULTIPLE = 1
    mla.absorbed_attention, mla.mha_attention = plain.absorbed, plain.mha  # type: ignore[assignment]
    try:
        yield
    finally:
        linear_module.ROW_MULTIPLE, mla.absorbed_attention, mla.mha_attention = before


class Bench:
    """One model over one pool."""

    def __init__(self, model: DeepseekV3, context: int) -> None:
        self._model = model
        self._pages = -(-context // PAGE)
        generator = torch.Generator().manual_seed(0)
        self._latents = model.new_latents(16 * self._pages)
        self._latents.normal_(0.0, 1.0, generator=generator)
        self._tokens = torch.randint(20, model.config.vocab_size, (context,), generator=generator)

    def slices(self, case: Case) -> list[SequenceSlice]:
        tables = [range(i * self._pages, (i + 1) * self._pages) for i in range(len(case.ranges))]
        return [
            SequenceSlice(tuple(table), start, end, start)
            for table, (start, end) in zip(tables, case.ranges, strict=True)
        ]

    def step(self, case: Case, mode: str) -> Tensor:
        """Hidden states of one forward pass, the plan of the batch included."""
        slices = self.slices(case)
        tokens = [self._tokens[start:end].tolist() for start, end in case.ranges]
        if mode != "none":
            batch = Batch.build(slices, tokens, PAGE)
            return self._model(batch, self._latents, case.form(mode))
        with without_invariance(slices):
            batch = Batch.build(slices, tokens, PAGE)
            return self._model(batch, self._latents, case.form(mode))


def seconds(run: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - began) / repeats


@torch.inference_mode()
def measure(bench: Bench, case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step by mode, one for each round; all modes agree within rounding."""
    expected = bench.step(case, "none")
    for mode in MODES[1:]:
        torch.testing.assert_close(bench.step(case, mode), expected, rtol=1e-3, atol=1e-3)
    repeats = max(1, int(0.2 / seconds(lambda: bench.step(case, "fast"), 1)))
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            times[mode].append(seconds(lambda m=mode: bench.step(case, m), repeats))
    return times


def main() -> int:
    parser = command_line.parser(__doc__, "standard output, and to --json FILE")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, modes taking turns (7)")
    parser.add_argument("--context", type=int, default=1024, help="longest context (1024)")
    parser.add_argument("--model", type=Path, help="checkpoint directory (the shipped model)")
    parser.add_argument("--json", type=Path, help="also write all times here")
    options = parser.parse_args()
    if options.context < 256:
        parser.error("--context must be at least 256")
    torch.set_num_threads(1)
    model = load_model(options.model or shipped_model(), torch.float32, torch.device("cpu"))
    bench = Bench(model, options.context)
    results = {}
    print("| step | fast / none | exact / none |\n|---|---|---|")
    for case in cases(options.context):
        print(case.name, file=sys.stderr)
        results[case.name] = times = measure(bench, case, options.rounds)
        cells = []
        for mode in MODES[1:]:
            ratios = [a / b for a, b in zip(times[mode], times["none"], strict=True)]
            spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
            cells.append(f"{statistics.median(ratios):.2f} ({spread})")
        print(f"| {case.name} | {cells[0]} | {cells[1]} |", flush=True)
    if options.json:
        options.json.write_text(as_json(results, 2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""How rows on the wire are overlapped with computing: the modes of `model/parallel/schedule.py`.

    python -P bench/gpu_overlap.py [--batches 4 8 ...] [--json FILE]     (needs a Hopper GPU)

A chain of MoE decode layers as a rank of 128 runs it (full width, two rows and 5,000 latents a
sequence), in a CUDA graph. The wire is emulated: dispatch and combine take the published times of
128 ranks (`reading.PUBLISHED_EP128`) on a stream of their own, in which their bytes are copied once
and one warp then waits until the time is over; transfers take their turn, as on one adapter.
Printed for every batch: microseconds of a layer in each mode, the gain of microbatches over
dispatch_overlap, where it begins, and how much the rule `auto` loses with that threshold.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from bounds import COMBINE_BYTES, DISPATCH_BYTES, TOP_K  # noqa: E402
from figures import as_json  # noqa: E402
from gpu_block import EPS, Block, Rank, State, Weights  # noqa: E402
from gpu_choices import choose, steps  # noqa: E402
from gpu_layer import ORDER, blocks_of, note, usable  # noqa: E402
from gpu_timing import Clocks, capture, replay_times  # noqa: E402
from gpu_warm import compile_products, layer_jobs  # noqa: E402
from reading import PUBLISHED_EP128, auto_loss, crossover, gain, interpolate  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.language.extra.cuda import globaltimer  # noqa: E402

from pdmesh.model.parallel.schedule import WHOLE, Mode, Stage, plan_schedule  # noqa: E402

CHOSEN_AT = (8, 32, 128)
"""Batches at which every step's candidates are measured."""
MODES: tuple[Mode, ...] = ("no_overlap", "dispatch_overlap", "microbatch")


@triton.jit
def mark_kernel(begin) -> None:  # noqa: ANN001 - Triton's own
    tl.store(begin, globaltimer())


@triton.jit
def hold_kernel(begin, nanoseconds) -> None:  # noqa: ANN001 - Triton's own
    start = tl.load(begin)
    now = globaltimer()
    while now - start < nanoseconds:
        now = globaltimer()


class Wire:
    """One adapter: transfers take their turn on a stream of their own."""

    def __init__(self, most_tokens: int) -> None:
        self.stream = torch.cuda.Stream()
        self._begin = torch.zeros(1, dtype=torch.int64, device="cuda")
        size = most_tokens * TOP_K * COMBINE_BYTES
        self._from, self._to = (
            torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda") for _ in range(2)
        )

    def send(self, kind: str, tokens: int) -> torch.cuda.Event:
        """Starts a transfer behind what the current stream has done; its end."""
        each = DISPATCH_BYTES if kind == "dispatch" else COMBINE_BYTES
        count = tokens * TOP_K * each
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            mark_kernel[(1,)](self._begin, num_warps=1)
            self._to[:count].copy_(self._from[:count])
            took = int(1e3 * interpolate(PUBLISHED_EP128[kind], tokens))
            hold_kernel[(1,)](self._begin, took, num_warps=1)
            end = torch.cuda.Event()
            end.record()
        return end


@dataclass
class Flow:
    """A microbatch, or the whole batch, on its way through the layers."""

    blocks: Sequence[Block]
    x: Tensor
    residual: Tensor
    query: Any = None
    rows: Any = None
    normed: Any = None
    weights: Any = None
    shared: Any = None
    done: Any = None
    end: torch.cuda.Event | None = None

    def run(self, stage: Stage, layer: int, wire: Wire) -> None:
        """One stage; the names are those of the schedule."""
        block = self.blocks[layer % len(self.blocks)]
        tokens = block.rank.tokens
        if stage == Stage.PROJECT:
            self.query = block.project(self.x, self.residual)
        elif stage == Stage.ATTEND:
            out = block.attend(self.query)
            self.rows, self.normed = block.run(
                "post_norm", out, self.residual, block.w.post_norm, EPS
            )
            _, self.weights = block.run("gate", self.normed, block.w)
        elif stage == Stage.SEND:
            self.end = wire.send("dispatch", tokens)
            self.shared = block.shared(self.rows)
        elif stage == Stage.SHARED_FIRST:
            self.shared = block.shared(self.rows)
            self.end = wire.send("dispatch", tokens)
        elif stage == Stage.EXPERTS:
            self._arrive()
            self.done = block.experts(block.w.arrived)
            self.end = wire.send("combine", tokens)
        elif stage == Stage.RECEIVE:
            self._arrive()
            flat = self.done.flatten(0, 1)[: block.w.pairs]
            self.x = block.run("combine_sum", flat, block.w.origin, self.weights, self.shared)

    def _arrive(self) -> None:
        assert self.end is not None
        torch.cuda.current_stream().wait_event(self.end)


def flow(rank: Rank, weights: Sequence[Weights], ops: dict[str, Any], seed: int) -> Flow:
    state = State(rank, len(weights), seed)
    sized = [w.sized(rank, seed + n) for n, w in enumerate(weights)]
    blocks = [Block(rank, w, state, n, ops) for n, w in enumerate(sized)]
    return Flow(blocks, state.x, state.residual)


def layer_time(flows: dict[int, Flow], mode: Mode, layers: int, wire: Wire) -> float:
    """Microseconds of a layer in a chain of `layers`."""
    schedule = plan_schedule([(layer, True) for layer in range(layers)], mode)
    begins = {number: one.x for number, one in flows.items()}

    def run() -> None:
        for number, one in flows.items():
            one.x = begins[number]
        for item in schedule:
            flows[item.microbatch].run(item.stage, item.layer, wire)
        torch.cuda.current_stream().wait_stream(wire.stream)

    graph = capture(run)
    return statistics.median(replay_times(graph, 7)) / layers


def nearest(chosen: dict[int, dict[str, Any]], batch: int) -> dict[str, Any]:
    """What was chosen at the largest batch that is not larger, or at the smallest."""
    return chosen[max((n for n in chosen if n <= batch), default=min(chosen))]


def measure(
    batches: Sequence[int],
    layers: int,
    chosen: dict[int, dict[str, Any]],
    save: Callable[[dict[int, dict[str, float]]], None],
) -> dict[int, dict[str, float]]:
    wire = Wire(2 * max(batches))
    weights = [Weights(Rank("EP128", 128, batch=1), 10 + n) for n in range(3)]
    found: dict[int, dict[str, float]] = {}
    for batch in batches:
        halves = (batch - batch // 2, batch // 2)
        parts = {
            number: flow(
                Rank("half", 128, batch=count), weights, nearest(chosen, count), 20 + number
            )
            for number, count in enumerate(halves)
        }
        whole = {WHOLE: flow(Rank("whole", 128, batch=batch), weights, nearest(chosen, batch), 30)}
        found[batch] = {
            mode: layer_time(parts if mode == "microbatch" else whole, mode, layers, wire)
            for mode in MODES
        }
        cells = "  ".join(f"{mode} {took:7.1f}" for mode, took in found[batch].items())
        print(f"  batch {batch:4}  {cells}", flush=True)
        save(found)
        del parts, whole
        torch.cuda.empty_cache()
    return found


def chosen_ops(batch: int, without: Sequence[str]) -> dict[str, Any]:
    """The fastest correct candidate of each step at this batch."""
    rank, table = Rank("chosen", 128, batch=batch), steps(without)
    blocks = blocks_of(rank, 3, {name: usable(step) for name, step in table.items()})
    note(blocks)
    chosen, _ = choose(blocks, table, ORDER, lambda name, best, tried: None)
    print(f"batch {batch}: " + ", ".join(f"{n} {m.name}" for n, m in chosen.items()), flush=True)
    return {name: measured.run for name, measured in chosen.items()}


def main() -> None:
    parser = command_line.parser(__doc__, "standard output, and to --json FILE")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="*",
        default=[4, 8, 16, 32, 64, 128],
        help="sequences of a step",
    )
    parser.add_argument("--layers", type=int, default=9, help="of the timed step")
    parser.add_argument("--warm", action="store_true", help="compile DeepGEMM's kernels first")
    parser.add_argument("--without", nargs="*", default=[], help="parts of candidates' names")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args()
    if args.warm:
        tokens = sorted({b * q for b in args.batches for q in (1, 2)})
        compile_products(layer_jobs(tokens, [(2, 4 * count) for count in tokens]), 12)

    def save(rows: dict[int, dict[str, float]], **more: Any) -> None:
        if args.json:
            args.json.write_text(as_json({"us": rows, **more}, 1) + "\n")

    with torch.inference_mode(), Clocks() as clocks:
        chosen = {n: chosen_ops(n, args.without) for n in CHOSEN_AT}
        rows = measure(args.batches, args.layers, chosen, save)
    gains = gain(rows, "microbatch", "dispatch_overlap")
    begins = crossover(gains)
    print("microbatch beside dispatch_overlap:", {b: f"{g:+.1%}" for b, g in gains.items()})
    print(f"pays from batch {begins} on; auto loses {auto_loss(rows, begins):.1%} at worst")
    save(rows, gain=gains, threshold=begins, clocks=clocks.summary())


if __name__ == "__main__":
    main()

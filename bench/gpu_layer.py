"""One MoE decode layer of full-width DeepSeek-V3 on one GPU, step by step and in a CUDA graph.

    python -P bench/gpu_layer.py [--ranks ep128 ep8] [--latents plain fp8] [--json FILE]

(needs a Hopper GPU)

`ep128` is a rank of 128: batch 128, two rows a sequence, 5,000 latents a sequence, all heads, two
routed experts of 1,024 rows; `ep8` a rank of eight with 32 experts of 64 rows; `tp8` one of eight
ranks that share one sequence's attention, 16 heads each. Dispatch and combine are copies within the
device of what the rank would receive and send; sums over ranks of tensor parallelism are left out.
With `--latents plain fp8` each layer is measured twice, over latents in bfloat16 and packed in 656
bytes, which attention reads in FP8.

Every step's candidates (libraries, this project's kernels) are checked by its definition and timed
in one process on the values it has in the layer, weights cold; the fastest correct one runs in the
layer. Printed beside: the fastest that is not this project's, and the bound of `bounds.py`. The
time of a layer is that of a graph of several layers, each with weights and pages of its own.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

import bounds  # noqa: E402 - the path is set above
import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402
from figures import as_json, rounded, shown, total  # noqa: E402
from gpu_block import Block, Rank, State, Weights  # noqa: E402
from gpu_choices import Step, Table, choose, steps  # noqa: E402
from gpu_libraries import attention_reference  # noqa: E402
from gpu_modes import MODES, whole_layer  # noqa: E402
from gpu_timing import Clocks, Measured, error, timed  # noqa: E402
from gpu_warm import compile_products, layer_jobs  # noqa: E402

RANKS = {
    "ep128": Rank("EP128", 128),
    "ep8": Rank("EP8", 8),
    "tp8": Rank("EP8 TP8", 8, batch=1, heads=16, senders=8),
}
LATENTS = {"plain": "", "fp8": "_fp8"}
"""What a rank's key in the JSON file ends with."""
SETS = {"ep128": 8, "ep8": 4, "tp8": 4}
ATTENTION = ("input_norm", "qkv_a", "q_norm", "q_b", "rope_append", "absorb", "mla", "values")
EXPERTS = ("dispatch", "routed_up", "routed_act", "routed_down", "combine_send", "combine_sum")
SHARED = ("shared_up", "shared_act", "shared_down")
ORDER = (*ATTENTION, "o_proj", "post_norm", "gate", *SHARED, *EXPERTS)
DENSE_ORDER = ["dense_up", "dense_act", "dense_down"]
COPIES = ("dispatch", "combine_send")
AIM: dict[str, float | None] = {"ep128": 900.0, "ep8": 1120.0, "tp8": None}


def usable(step: Step) -> Callable[..., Any]:
    """The first candidate that runs, else the definition: what a layer begins with."""
    functions = [candidate.run for candidate in step.candidates] + [step.reference]

    def run(*arguments: Any) -> Any:
        while True:
            try:
                return functions[0](*arguments)
            except Exception:  # noqa: BLE001 - a library's own errors are of any type
                if len(functions) == 1:
                    raise
                functions.pop(0)

    return run


def print_step(
    bound: dict[str, bounds.Work], name: str, best: Measured, tried: list[Measured]
) -> None:
    limit = bound[name].microseconds(bounds.H200) if name in bound else None
    parts = [
        f"{m.name} {m.microseconds:.1f}" if not m.why_not else f"{m.name}: {m.why_not}"
        for m in tried
    ]
    least = shown(limit, ".1f")
    print(f"  {name:13} {best.microseconds:7.1f} us  bound {least:>6}  {best.name}", end="  ")
    print(f"[{'; '.join(parts)}]", flush=True)


def blocks_of(
    rank: Rank, sets: int, ops: dict[str, Any], *, dense: bool = False, packed: bool = False
) -> list[Block]:
    state = State(rank, sets, packed=packed)
    return [Block(rank, Weights(rank, 10 + n, dense=dense), state, n, ops) for n in range(sets)]


def note(blocks: Sequence[Block], *, dense: bool = False) -> None:
    """One eager pass that keeps every step's arguments."""
    state = blocks[0].state
    for block in blocks:
        block.noted = {}
        residual = state.residual.clone()
        block.dense(state.x, residual) if dense else block(state.x, residual)
    torch.cuda.synchronize()


def layer_error(blocks: Sequence[Block], table: dict[str, Step]) -> float:
    """Of the whole layer beside one of definitions alone."""
    block = blocks[0]
    state = block.state
    got = block(state.x, state.residual.clone())
    plain = Block(block.rank, block.w, state, 0, {n: step.reference for n, step in table.items()})
    plain.ops = dict(plain.ops) | {
        "mla": lambda *arguments: attention_reference(*arguments, first=block.rank.batch)
    }
    return error(got, plain(state.x, state.residual.clone()))


def measure(
    key: str, sets: int, clocks: Clocks, table: dict[str, Step], *, packed: bool = False
) -> dict[str, Any]:
    rank = RANKS[key]
    bound = bounds.moe_layer(
        rank.batch,
        rank.query,
        rank.kv,
        rank.ranks,
        rank.heads,
        senders=rank.senders,
        packed=packed,
    )
    print(
        f"\n{rank.name}: {rank.experts} experts of {rank.rows} rows, batch {rank.batch},"
        f" latents {'packed' if packed else 'in bfloat16'}"
    )
    began = time.perf_counter()
    ops = {name: usable(step) for name, step in table.items()}
    blocks = blocks_of(rank, sets, ops, packed=packed)
    note(blocks)
    print(f"  set up in {time.perf_counter() - began:.1f} s", flush=True)

    def report(name: str, best: Measured | None, tried: list[Measured]) -> None:
        assert best is not None
        print_step(bound, name, best, tried)

    chosen, tried = choose(blocks, table, ORDER, report)
    for block in blocks:
        block.noted = None
        block.ops = {name: measured.run for name, measured in chosen.items()}
    wrong = layer_error(blocks, table)
    whole = whole_layer(blocks, clocks)
    sum_of_steps = sum(chosen[name].microseconds for name in ORDER)
    copies = sum(chosen[name].microseconds for name in COPIES)
    result = {
        "rank": rank.name,
        "latents": "fp8" if packed else "plain",
        "bound_us": bounds.total(bound, bounds.H200),
        "sum_of_steps_us": sum_of_steps,
        "copies_us": copies,
        "public_us": total(public(tried[name]) for name in ORDER),
        "layer": whole,
        "layer_error": wrong,
        "steps": step_rows(bound, chosen, tried),
    }
    print_layer(key, result)
    return result


def print_layer(key: str, result: dict[str, Any]) -> None:
    whole = result["layer"]
    modes = ", ".join(f"{name} {shown(whole[name], '.1f')}" for name in MODES)
    print(
        f"  layer: {modes} us; rested {whole['rested']:.1f},"
        f" sustained {whole['sustained']:.1f} ({whole['best']})"
        f" at {whole['sustained_clocks'].get('clocks.sm')} MHz;"
        f" steps {result['sum_of_steps_us']:.1f}, copies among them {result['copies_us']:.1f},"
        f" public ones {shown(result['public_us'], '.1f')};\n"
        f"  bound {result['bound_us']:.1f}, aim {shown(AIM[key], '.0f')};"
        f" error {result['layer_error']:.2g};"
        f" gaps {shown(whole.get('gap_share'), '.1%')} of {shown(whole.get('span'), '.1f')} us,"
        f" {shown(whole.get('kernels'), '.0f')} kernels",
        flush=True,
    )


def public(tried: Sequence[Measured]) -> float | None:
    """The fastest correct candidate that is not this project's; None if there is none."""
    return min((m.microseconds for m in tried if not m.own and not m.why_not), default=None)


def step_rows(
    bound: dict[str, bounds.Work], chosen: dict[str, Measured], tried: Table
) -> list[dict[str, Any]]:
    return [
        {
            "step": name,
            "us": round(best.microseconds, 2),
            "by": best.name,
            "own": best.own,
            "public_us": rounded(public(tried[name]), 2),
            "bound_us": round(bound[name].microseconds(bounds.H200), 2) if name in bound else None,
            "tried": [m.row() for m in tried[name]],
        }
        for name, best in chosen.items()
    ]


def measure_rest(table: dict[str, Step]) -> dict[str, float]:
    """A dense layer's MLP and the logits, in microseconds: what the projection needs besides."""
    rank = RANKS["ep128"]
    blocks = blocks_of(rank, 2, {name: usable(step) for name, step in table.items()}, dense=True)
    note(blocks, dense=True)
    bound = bounds.dense_layer(rank.batch, rank.query, rank.kv)
    chosen, _ = choose(
        blocks, table, DENSE_ORDER, lambda name, best, tried: print_step(bound, name, best, tried)
    )
    x = blocks[0].state.x
    heads = [
        torch.randn(bounds.VOCABULARY, bounds.HIDDEN, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    ]
    logits = timed([lambda w=w: torch.mm(x, w.t(), out_dtype=torch.float32) for w in heads], 2)
    print(
        f"  head          {logits:7.1f} us  bound {bounds.head(256).microseconds(bounds.H200):.1f}"
    )
    return {name: m.microseconds for name, m in chosen.items()} | {"head": logits}


def main() -> int:
    parser = command_line.parser(__doc__, "standard output, and to --json FILE")
    parser.add_argument(
        "--ranks", nargs="*", choices=RANKS, default=list(RANKS), help="sizes of the group"
    )
    parser.add_argument(
        "--warm", action="store_true", help="compile DeepGEMM's kernels at once first"
    )
    parser.add_argument("--rest", action="store_true", help="also a dense MLP and the logits")
    parser.add_argument("--without", nargs="*", default=[], help="parts of candidates' names")
    parser.add_argument(
        "--latents", nargs="*", choices=LATENTS, default=["plain"], help="in the pages"
    )
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args()
    if args.warm:
        compile_products(
            [
                *layer_jobs([256], [(2, 1024), (32, 64)]),
                (0, 256, 36864, 7168),
                (0, 256, 7168, 18432),
            ]
        )
    found: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}

    def save() -> None:
        if args.json:
            args.json.write_text(as_json(found, 1) + "\n")

    failed: dict[str, str] = {}

    def part(name: str, work: Callable[[], dict[str, Any]]) -> None:
        """A part of the file; what fails is said, and the others go on."""
        try:
            found[name] = work()
        except Exception as failure:  # noqa: BLE001 - a library's own errors are of any type
            traceback.print_exc()
            failed[name] = f"{type(failure).__name__}: {str(failure)[:300]}"
            found["failed"] = failed
        torch.cuda.empty_cache()
        save()

    with torch.inference_mode(), Clocks() as clocks:
        if args.rest:  # first, since whatever is there of the others is of use with it
            part("rest", lambda: measure_rest(steps(args.without)))
        for key in args.ranks:
            for form in args.latents:
                packed = form == "fp8"
                part(
                    key + LATENTS[form],
                    lambda key=key, packed=packed: measure(  # type: ignore[misc]
                        key, SETS[key], clocks, steps(args.without, packed), packed=packed
                    ),
                )
    found["clocks"] = clocks.summary()
    print("\nclocks (lowest, median, highest):", found["clocks"])
    save()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

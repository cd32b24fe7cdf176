"""Products and attention of DeepSeek-V3 against both roofs of the device, into a CSV.

    python -P bench/roofline.py --csv FILE                              (needs a Hopper GPU)

Three families, each shape by the fastest candidate of `gpu_choices.py`, weights cold:

- `grouped`: gate-up and down projection of a rank's routed experts for EP 8 to 128 and batches of
  1 to 128, two rows a sequence, all ranks with the same batch and an even load;
- `dense`: every projection for batches of 1 to 128, and `q_a` and `kv_a` alone beside the fused
  `qkv_a`;
- `mla`: decode attention of 128 sequences of 5,000 latents, 1 to 4 rows each, 16 to 128 heads.

Operations and bytes are counted as in `bounds.py`. `tools/draw_roofline.py` draws the CSV.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

import bounds  # noqa: E402 - the path is set above
import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402
from gpu_block import SCALE, Rank, State, padded_rows, random_weight  # noqa: E402
from gpu_choices import steps  # noqa: E402
from gpu_timing import Clocks, pick  # noqa: E402
from gpu_warm import Job, compile_products  # noqa: E402
from reading import expert_times, knee, time_a_token  # noqa: E402

from pdmesh.kernels.quantised import Rows, quantise_rows  # noqa: E402

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
EXPERT_RANKS = (8, 16, 32, 64, 128)
DENSE = {
    "qkv_a": (2112, 7168),
    "q_a": (1536, 7168),
    "kv_a": (576, 7168),
    "q_b": (24576, 1536),
    "o_proj": (7168, 16384),
    "shared_up": (4096, 7168),
    "shared_down": (7168, 2048),
}
GROUPED = {"routed_up": (4096, 7168), "routed_down": (7168, 2048)}
SHAPE = ("family", "name", "ep", "batch", "rows", "groups", "heads", "query")
FIELDS = (*SHAPE, "us", "by", "tried", "operations", "bytes")
CACHE = 160 << 20
"""Bytes of weights to go around, three times the L2 cache."""

Row = dict[str, Any]


def rank_of(ep: int, batch: int) -> Rank:
    return Rank(f"EP{ep}", ep, batch=batch)


def jobs() -> list[Job]:
    """What DeepGEMM is to compile."""
    dense = [(0, 2 * batch, n, k) for batch in BATCHES for n, k in DENSE.values()]
    ranks = [rank_of(ep, batch) for ep in EXPERT_RANKS for batch in BATCHES]
    return dense + [(r.experts, r.rows, n, k) for r in ranks for n, k in GROUPED.values()]


def rows_like(*shape: int, draw: torch.Generator) -> Rows:
    return quantise_rows(torch.randn(shape, device="cuda", generator=draw, dtype=torch.bfloat16))


WITHOUT: list[str] = []
"""Parts of the names of candidates that are left out."""


def measured(step: str, calls: Sequence[tuple[Any, ...]], repeat: int = 1) -> Row:
    table = steps(WITHOUT)[step]
    best, tried = pick(
        table.candidates,
        calls,
        table.reference,
        tolerance=table.tolerance,
        look=table.look,
        rounds=repeat,
    )
    if best is None:
        return {"us": math.nan, "by": "none", "tried": "; ".join(m.why_not for m in tried)}
    shown = "; ".join(f"{m.name} {m.microseconds:.1f}" for m in tried if not m.why_not)
    return {"us": round(best.microseconds, 2), "by": best.name, "tried": shown}


def grouped() -> Iterator[Row]:
    draw = torch.Generator("cuda").manual_seed(1)
    for ep in EXPERT_RANKS:
        experts = bounds.EXPERTS // ep
        for name, (n, k) in GROUPED.items():
            sets = max(1, min(8, CACHE // (experts * n * k) + 1))
            weights = [random_weight(experts, n, k, generator=draw) for _ in range(sets)]
            for batch in BATCHES:
                rank = rank_of(ep, batch)
                padded = padded_rows(rank.rows)
                counts = torch.zeros(experts, dtype=torch.int32, device="cuda")
                counts[: rank.active] = rank.rows
                calls = [
                    (rows_like(experts, padded, k, draw=draw), w, counts, rank.rows)
                    for w in weights
                ]
                work = bounds.gemm(rank.rows, k, n, rank.active)
                yield {
                    "family": "grouped",
                    "name": name,
                    "ep": ep,
                    "batch": batch,
                    "rows": rank.rows,
                    "groups": rank.active,
                    "operations": work.operations,
                    "bytes": work.bytes,
                } | measured(name, calls)
            del weights
            torch.cuda.empty_cache()


def dense() -> Iterator[Row]:
    draw = torch.Generator("cuda").manual_seed(2)
    for name, (n, k) in DENSE.items():
        sets = max(2, CACHE // (n * k) + 1)
        weights = [random_weight(n, k, generator=draw) for _ in range(sets)]
        for batch in BATCHES:
            rows = 2 * batch
            calls = [(rows_like(rows, k, draw=draw), w) for w in weights]
            work = bounds.gemm(rows, k, n)
            yield {
                "family": "dense",
                "name": name,
                "batch": batch,
                "rows": rows,
                "groups": 1,
                "operations": work.operations,
                "bytes": work.bytes,
            } | measured("qkv_a", calls)


def attention() -> Iterator[Row]:
    state = State(Rank("mla", 128), 1)
    draw = torch.Generator("cuda").manual_seed(3)
    for heads in (16, 32, 64, 128):
        for query in (1, 2, 3, 4):
            rows = torch.randn(
                128 * query,
                heads,
                bounds.LATENT,
                device="cuda",
                generator=draw,
                dtype=torch.bfloat16,
            )
            call = (rows, state.pool[:, 0], state.table, state.lengths, query, SCALE)
            work = bounds.attention(128, query, 5000, heads)
            yield {
                "family": "mla",
                "name": "mla",
                "batch": 128,
                "rows": query * 128,
                "heads": heads,
                "query": query,
                "operations": work.operations,
                "bytes": work.bytes,
            } | measured("mla", [call])


def main() -> None:
    parser = command_line.parser(__doc__, "standard output, and to --csv FILE")
    parser.add_argument("--csv", type=Path, required=True, help="file of the results")
    parser.add_argument("--warm", action="store_true", help="compile DeepGEMM's kernels first")
    parser.add_argument(
        "--only", nargs="*", default=["mla", "dense", "grouped"], help="families to measure"
    )
    parser.add_argument("--without", nargs="*", default=[], help="parts of candidates' names")
    args = parser.parse_args()
    WITHOUT.extend(args.without)
    if args.warm:
        compile_products(jobs(), 14)
    families = {"mla": attention, "dense": dense, "grouped": grouped}
    with torch.inference_mode(), Clocks() as clocks, args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for name in args.only:
            for row in families[name]():
                writer.writerow(row)
                file.flush()
                print(
                    f"{row['name']:12} EP{row.get('ep', '-'):<4} batch {row['batch']:3}"
                    f" heads {row.get('heads', '-'):>3} query {row.get('query', '-')}"
                    f" {row['us']:8.1f} us {row['operations'] / row['us'] / 1e6:7.1f} TFLOP/s"
                    f" {row['bytes'] / row['us'] / 1e6:5.2f} TB/s  {row['tried']}",
                    flush=True,
                )
    with args.csv.open() as file:
        rows = list(csv.DictReader(file))
    for ep, points in expert_times(rows).items():
        print(f"EP{ep}: both products within 10 % of batch 1's up to batch {knee(points):.0f}")
    for heads, times in time_a_token(rows).items():
        shown = ", ".join(f"{query}: {us:.1f}" for query, us in times.items())
        print(f"{heads} heads, us for a row of each sequence by rows a sequence: {shown}")
    print("clocks:", clocks.summary())


if __name__ == "__main__":
    main()

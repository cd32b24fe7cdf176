"""A whole model's decode step from one measured layer: pure arithmetic over tables.

    python -P bench/project.py [--layer FILE] [--overlap FILE] [--communication FILE]

A step is 58 MoE layers and the draft's one, three dense layers, and logits for the model and for
the draft; it gives 1.6 tokens of each of 128 requests (one draft, right six times in ten). The time
of a layer is what `gpu_layer.py` measured over seconds, at the clocks that the power limit leaves,
without its two copies; dispatch and combine come from published measurements. Host work between
steps, sampling, skew between ranks and the load's imbalance are left out, so these are upper limits
of what a mesh reaches with these kernels.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench")]

import bounds  # noqa: E402 - the path is set above
import command_line  # noqa: E402 - the path is set above

DATA = ROOT / "docs" / "data"
ATTENTION = (
    "input_norm qkv_a q_norm q_b rope_append absorb mla values o_proj post_norm".split()  # noqa: SIM905
)
DENSE = ("dense_up", "dense_act", "dense_down")
BATCH = 128
PUBLISHED = {"vLLM, H200, wide EP": 2200.0, "DeepSeek production, H800": 14800 / 8}
"""Tokens a second of a GPU."""


@dataclass(frozen=True)
class Wire:
    """Microseconds of a layer's two transfers."""

    dispatch: float
    combine: float

    @property
    def both(self) -> float:
        return self.dispatch + self.combine


@dataclass(frozen=True)
class Parts:
    """Measured microseconds: a MoE layer without its copies, a dense layer, logits."""

    moe: float
    dense: float
    logits: float


@dataclass(frozen=True)
class Projection:
    """A step and what it comes to."""

    name: str
    layer_us: float
    step_ms: float
    request: float
    gpu: float


def parts_of(measured: Mapping[str, Any], rest: Mapping[str, float]) -> Parts:
    """From a rank's entry of `gpu_layer.py`'s JSON and its `rest`."""
    times = {row["step"]: row["us"] for row in measured["steps"]}
    layer = measured["layer"]["sustained"]
    attention = sum(times[name] for name in ATTENTION)
    return Parts(
        layer - measured["copies_us"], attention + sum(rest[n] for n in DENSE), rest["head"]
    )


def bound_parts(ranks: int, batch: int = BATCH, packed: bool = False) -> Parts:
    """The same as lower bounds on an H200; latents perhaps packed."""
    moe = bounds.total(bounds.moe_layer(batch, 2, 5000, ranks, packed=packed), bounds.H200)
    dense = bounds.total(bounds.dense_layer(batch, 2, 5000, packed=packed), bounds.H200)
    return Parts(moe, dense, bounds.head(2 * batch).microseconds(bounds.H200))


def read_wire(rows: Sequence[Mapping[str, str]], system: str, tokens: int) -> Wire:
    """A row of the communication table.

    Raises:
        LookupError: there is none.
    """
    for row in rows:
        if row["system"] == system and int(row["tokens"]) == tokens:
            return Wire(float(row["dispatch_us"]), float(row["combine_us"]))
    raise LookupError(f"no row of {system} with {tokens} tokens")


def projection(name: str, parts: Parts, moe_us: float, batch: int = BATCH) -> Projection:
    """With `moe_us` for a MoE layer, transfers included."""
    step = bounds.step(moe_us, parts.dense, parts.logits)
    return Projection(name, moe_us, step, *bounds.throughput(batch, step))


def projections(
    name: str, parts: Parts, wire: Wire, split: float | None = None
) -> list[Projection]:
    """One after another, and at best (the longer of both); `split`: microbatches, measured."""
    found = [
        projection(f"{name}, one after another", parts, parts.moe + wire.both),
        projection(f"{name}, all overlapped", parts, max(parts.moe, wire.both)),
    ]
    if split is not None:
        found.insert(1, projection(f"{name}, microbatches as measured", parts, split))
    return found


def memory_gb(latent_bytes: int, batch: int = BATCH, kv: int = 5000) -> float:
    """Of an EP8 rank: weights (FP8; embedding and head bfloat16) and the latents of its batch."""
    expert = 3 * bounds.HIDDEN * bounds.WIDTH
    routed = bounds.EXPERTS * expert * bounds.MOE_LAYERS
    rest = 671.03e9 - routed + bounds.VOCABULARY * bounds.HIDDEN * 2
    return (routed / 8 + rest + batch * kv * 61 * latent_bytes) / 1e9


def table(rows: Sequence[Projection]) -> str:
    lines = [
        "| | layer us | step ms | tokens/s a request | tokens/s a GPU |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.layer_us:,.0f} | {r.step_ms:.1f} | {r.request:.1f} | {r.gpu:,.0f} |"
        for r in rows
    ]
    lines += [f"| {name} | | | | {gpu:,.0f} |" for name, gpu in PUBLISHED.items()]
    return "\n".join(lines)


def all_rows(
    layer: Mapping[str, Any], overlap: Mapping[str, Any] | None, wires: Sequence[Mapping[str, str]]
) -> list[Projection]:
    """Every projection that the measurements allow, each beside its bound."""
    rest, rows = layer["rest"], []
    fabrics = {
        "ep128": (128, "Perplexity EP128 H100", bounds.transfer(256, bounds.INFINIBAND, 120 / 128)),
        "ep8": (8, "DeepEP EP8 H200", bounds.transfer(256, bounds.NVLINK, 7 / 8)),
    }
    for key, (ranks, system, ideal) in fabrics.items():
        if key not in layer:
            continue
        split = None
        if overlap is not None and key == "ep128":
            split = overlap["us"].get("128", {}).get("microbatch")
        wire = read_wire(wires, system, 256)
        rows += projections(f"EP{ranks}", parts_of(layer[key], rest), wire, split)
        rows += projections(f"EP{ranks} bound", bound_parts(ranks), Wire(*ideal))
        if f"{key}_fp8" in layer:
            name, packed = f"EP{ranks}, FP8 latents", parts_of(layer[f"{key}_fp8"], rest)
            rows += projections(name, packed, wire)
            rows += projections(f"{name}, bound", bound_parts(ranks, packed=True), Wire(*ideal))
    return rows


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--layer", type=Path, default=DATA / "h200_layer.json", help="JSON of gpu_layer.py"
    )
    parser.add_argument(
        "--overlap", type=Path, default=DATA / "h200_overlap.json", help="JSON of gpu_overlap.py"
    )
    parser.add_argument(
        "--communication",
        type=Path,
        default=DATA / "communication.csv",
        help="CSV of published transfers",
    )
    args = parser.parse_args()
    overlap = json.loads(args.overlap.read_text()) if args.overlap.exists() else None
    with args.communication.open() as file:
        wires = list(csv.DictReader(file))
    print(table(all_rows(json.loads(args.layer.read_text()), overlap, wires)))
    for name, size in (("bfloat16", 1152), ("656-byte", 656)):
        print(f"EP8, batch {BATCH}, {name} latents: {memory_gb(size):.1f} GB of 141")


if __name__ == "__main__":
    main()
